"""Which form runs, why, and what is imported for it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusepatch import loss
from fusepatch.loss import BackendUnavailableError, choose_backend, unsupported_device


def test_the_cpu_runs_the_torch_form_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    chosen = choose_backend(torch.device("cpu"), torch.float32)
    assert chosen.name == "torch"
    assert chosen.reasons == ("Triton kernels run on NVIDIA GPUs; the tensors are on 'cpu'",)


def test_triton_on_request_is_an_error_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendUnavailableError, match="requested and cannot run: Triton kernels run on NVIDIA GPUs"):
        choose_backend(torch.device("cpu"), torch.float32, "triton")


def test_rocm_says_cuda_and_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unsupported_device(torch.device("cuda")) is None
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert "ROCm" in str(unsupported_device(torch.device("cuda")))
    assert choose_backend(torch.device("cuda"), torch.float32).name == "torch"


@pytest.mark.parametrize("kind", ["xpu", "mps", "meta"])
def test_other_devices_are_named(kind: str) -> None:
    assert f"'{kind}'" in str(unsupported_device(torch.device(kind)))


def test_the_torch_form_on_request_leaves_nothing_to_say() -> None:
    backend = choose_backend(torch.device("cpu"), torch.float32, "torch")
    assert (backend.name, backend.reasons) == ("torch", ())


def test_an_unknown_request_is_named() -> None:
    with pytest.raises(ValueError, match="'auto', 'triton' or 'torch', found 'cuda'"):
        choose_backend(torch.device("cpu"), torch.float32, "cuda")


def test_importing_the_loss_imports_no_kernels() -> None:
    code = "import sys, fusepatch.loss; assert 'fusepatch.loss.kernels' not in sys.modules, 'kernels were imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_loss_knows_nothing_of_patching() -> None:
    for source in Path(loss.__file__).parent.glob("*.py"):
        assert not re.search(r"fusepatch[. ](import )?(engine|patches|settings)", source.read_text()), source.name
