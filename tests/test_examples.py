"""The examples for TRL and the Trainer do what their headers say, run as the headers say; the others are in
tests/upstream."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from kits.examples import (
    EXAMPLES,
    NEED_A_GPU,
    ON_THE_CPU,
    header,
    matches,
    printed,
    run_script,
    said,
    save_model,
    save_rows,
)
from kits.helpers import Completed

DOCS = EXAMPLES.parent
ONLY_ON_A_CPU = "    Triton kernels run on NVIDIA GPUs; the tensors are on 'cpu'"


class Inputs(NamedTuple):
    """Folders on the disk."""

    model: Path
    prompts: Path
    text: Path


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    pytest.importorskip("trl")
    folder = tmp_path_factory.mktemp("inputs")
    return Inputs(
        save_model(folder / "model"), save_rows(folder / "prompts", "prompt"), save_rows(folder / "text", "text")
    )


def check_last_lines(name: str, done: Completed) -> None:
    lines = [line for line in printed(done) if line != ONLY_ON_A_CPU]
    wanted = said(name)
    last = lines[-len(wanted) :]
    assert [line for line, pattern in zip(last, wanted, strict=True) if not matches(line, pattern)] == []


def test_grpo(inputs: Inputs, tmp_path: Path) -> None:
    done = run_script(
        "trl_grpo.py",
        tmp_path,
        {"--model_name_or_path": inputs.model, "--dataset_name": inputs.prompts},
        *ON_THE_CPU,
        *[
            "--bf16",
            "false",
            "--num_generations",
            "4",
            "--per_device_train_batch_size",
            "4",
            "--max_completion_length",
            "8",
        ],
        env=NEED_A_GPU,
    )
    assert ONLY_ON_A_CPU in done.stdout
    assert "adds that Triton kernels run on NVIDIA GPUs" in " ".join(header("trl_grpo.py").split())
    check_last_lines("trl_grpo.py", done)


def test_sft(inputs: Inputs, tmp_path: Path) -> None:
    places = {"--model_name_or_path": inputs.model, "--dataset_name": inputs.text}
    done = run_script("trl_sft.py", tmp_path, places, *ON_THE_CPU, "--bf16", "false")
    check_last_lines("trl_sft.py", done)


def test_trainer(inputs: Inputs, tmp_path: Path) -> None:
    places = {"--model": inputs.model, "--dataset": inputs.text}
    done = run_script("trainer_adamw.py", tmp_path, places, *ON_THE_CPU)
    check_last_lines("trainer_adamw.py", done)


def test_the_page_has_every_example() -> None:
    page = (DOCS / "examples.md").read_text(encoding="utf-8")
    for path in EXAMPLES.iterdir():
        assert f"{{literalinclude}} examples/{path.name}\n" in page
