"""The Triton kernels under Triton's interpreter. Run by test_kernels.py in a process of its own, which sets the
variable."""

from __future__ import annotations

import pytest
import torch

from fusepatch.loss import LogitMap, Wanted, choose_backend, kernels
from fusepatch.loss.chunks import logit_buffer
from fusepatch.loss.logit_map import RawLogits
from kits import kernel_layouts
from kits.loss_cases import (
    ALL,
    FROZEN,
    NOTHING,
    Setting,
    assert_equal,
    error,
    log_probabilities_like,
    make_batch,
    reference,
    run,
)
from kits.loss_steps import MAPS, check_infinite_logit, exact, make


@pytest.fixture(params=[16, 2048])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Several blocks to a row, and one."""
    monkeypatch.setattr(kernels, "BLOCK", request.param)
    return int(request.param)


def padded(logits: torch.Tensor, gradients: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The same logits in a buffer whose gradient overlays them; the padding holds NaN."""
    buffer = logit_buffer(*logits.shape, torch.float32, gradients, logits.device, narrow_in_place=True)
    buffer.logit_storage.fill_(float("nan"))
    return buffer.logits(*logits.shape).copy_(logits), buffer.gradients(*logits.shape)


@pytest.mark.parametrize("logit_map", MAPS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 37, 130])
def test_exponentials(logit_map: LogitMap, bias: bool, dtype: torch.dtype, width: int, block: int) -> None:
    rows = 4
    logits, targets, offset = make(rows, width, bias)
    values, normaliser, gradient = exact(logits, targets, offset, logit_map)
    raw, written = padded(logits, dtype)
    found = torch.empty((3, rows))
    gain = 1024.0 if dtype == torch.float16 else 1.0
    kernels.exponentials(RawLogits(raw, targets, offset, logit_map), written, *found, gain)
    torch.testing.assert_close(found[0].double(), values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1].double(), normaliser, rtol=1e-5, atol=1e-5)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close((written.float() * found[2].unsqueeze(1)).double(), gradient, rtol=tolerance, atol=1e-6)


def test_logits_far_apart_between_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    # Later blocks exceed the pivot, so what was written is rescaled; the first block of one row is all minus infinity.
    monkeypatch.setattr(kernels, "BLOCK", 16)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 64, generator=generator)
    logits[0, 16:32] += 100
    logits[0, 48:] += 135
    logits[1, :16] = -float("inf")
    logits[2, :16] += 200
    logits[3, 60] = 500
    targets = torch.tensor([50, 20, 3, 7])
    values, _, gradient = exact(logits, targets, None, LogitMap())
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2)):
        raw, written = padded(logits, dtype)
        found = torch.empty((3, 4))
        kernels.exponentials(RawLogits(raw, targets, None, LogitMap()), written, *found, 1.0)
        torch.testing.assert_close(found[0].double(), values, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(
            (written.float() * found[2].unsqueeze(1)).double(), gradient, rtol=tolerance, atol=1e-6
        )
        kernels.log_sum_exp(RawLogits(logits, targets, None, LogitMap()), found[0], found[1])
        torch.testing.assert_close(found[0].double(), values, rtol=1e-5, atol=1e-4)


def test_a_confident_target_keeps_its_digits() -> None:
    # 1 - p is 1e-6 here: as a difference of float32 numbers it would have one digit left.
    logits = torch.zeros(1, 64)
    logits[0, 5] = 18.0
    _, _, gradient = exact(logits, torch.tensor([5]), None, LogitMap())
    raw, written = padded(logits, torch.bfloat16)
    found = torch.empty((3, 1))
    kernels.exponentials(RawLogits(raw, torch.tensor([5]), None, LogitMap()), written, *found, 1.0)
    torch.testing.assert_close((written.float() * found[2]).double(), gradient, rtol=1e-2, atol=0)


@pytest.mark.parametrize("logit_map", MAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_of_a_slice(logit_map: LogitMap, dtype: torch.dtype, block: int) -> None:
    logits, targets, offset = make(5, 70, True)
    assert offset is not None
    _, normaliser, gradient = exact(logits, targets, offset, logit_map)
    scale = torch.linspace(-1, 1, 5)
    for first, last in ((0, 32), (32, 70)):
        raw, written = padded(logits[:, first:last], dtype)
        given = RawLogits(raw, targets, offset[first:last], logit_map)
        kernels.gradient_of_logits(given, written, normaliser.float(), scale, first)
        expected = gradient[:, first:last] * scale.unsqueeze(1) / logit_map.slope
        tolerance = 1e-4 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(written.double(), expected, rtol=tolerance, atol=1e-5)


def test_scale_rows(block: int) -> None:
    values = torch.randn(3, 40)
    expected = values[:, :33] * torch.tensor([[2.0], [0.0], [-1.0]])
    rest = values[:, 33:].clone()
    kernels.scale_rows(values[:, :33], torch.tensor([2.0, 0.0, -1.0]))
    assert torch.equal(values[:, :33], expected)
    assert torch.equal(values[:, 33:], rest)


@pytest.mark.parametrize("wanted", [ALL, FROZEN, NOTHING])
@pytest.mark.parametrize("prefer", ["speed", "memory"])
def test_driver(wanted: Wanted, prefer: str) -> None:
    batch = make_batch(2, 9, 5, 37)
    old, other = log_probabilities_like(batch, 1), log_probabilities_like(batch, 2)
    setting = Setting(beta=0.04, reference=other, old=old, temperature=0.8)
    found = run(batch, setting, wanted, prefer=prefer, backend="triton")
    assert found.backend.name == "triton"
    assert_equal(found, reference(batch, setting), wanted)


def test_driver_by_groups() -> None:
    batch = make_batch(2, 150, 5, 21)
    setting = Setting(loss_type="luspo", old=log_probabilities_like(batch, 1))
    found = run(batch, setting, backend="triton", chunk_mib=0.01)
    assert found.rows == 300
    assert_equal(found, reference(batch, setting))
    assert error(found.gradients.weight, run(batch, setting, chunk_mib=0.01).gradients.weight) < 1e-5


def test_an_empty_batch() -> None:
    found = run(make_batch(0, 3), Setting(), backend="triton")
    assert found.loss.item() == 0.0


def test_the_interpreter_counts_as_triton() -> None:
    assert choose_backend(torch.device("cpu"), torch.float32, "triton").name == "triton"


def test_driver_within_the_memory_of_the_gradient() -> None:
    batch = make_batch(2, 20, 128, 300, spread=0.2)
    setting = Setting(old=log_probabilities_like(batch, 1))
    found = run(batch, setting, prefer="memory", backend="triton")
    assert_equal(found, reference(batch, setting))


@pytest.mark.parametrize("case", kernel_layouts.VECTORS, ids=str)
def test_launchers_take_any_layout(case: kernel_layouts.Vectors) -> None:
    kernel_layouts.check_vectors(kernels, case, "cpu")


@pytest.mark.parametrize("said", kernel_layouts.REFUSED)
def test_launchers_refuse_what_a_kernel_would_misread(said: str) -> None:
    kernel_layouts.check_refused(kernels, said, "cpu")


@pytest.mark.parametrize("case", kernel_layouts.WHOLE, ids=str)
def test_driver_takes_any_layout(case: kernel_layouts.Whole) -> None:
    kernel_layouts.check_whole(case, "cpu")


@pytest.mark.parametrize("column", [0, 3])
def test_an_infinite_logit_makes_its_row_nan(column: int, block: int) -> None:
    logits = torch.randn(2, 8)
    logits[0, column] = float("inf")
    check_infinite_logit(kernels, logits)


def test_every_launch_is_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.Tensor] = []
    launched: list[tuple[str, torch.Tensor]] = []

    class Guard:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def __enter__(self) -> None:
            entered.append(self.tensor)

        def __exit__(self, *_: object) -> None:
            entered.pop()

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> object:
            def launch(first: torch.Tensor, *rest: object, **settings: object) -> None:
                (tensor,) = entered
                assert tensor is first
                launched.append((self.name, first))

            return launch

    # There is one device here, so what would be current is asked of the guard itself.
    monkeypatch.setattr(torch.cuda, "device_of", Guard)
    names = [name for name in vars(kernels) if name.endswith("_kernel")]
    for name in names:
        monkeypatch.setattr(kernels, name, Kernel(name))
    logits, targets, bias = make(4, 64, True)
    raw, written = padded(logits, torch.float32)
    ones = torch.ones((3, 4))
    given = RawLogits(raw, targets, bias, LogitMap())
    kernels.log_sum_exp(given, ones[0], ones[1])
    kernels.exponentials(given, written, *ones, 1.0)
    kernels.gradient_of_logits(given, written, ones[0], ones[1], 0)
    kernels.scale_rows(raw, ones[0])
    assert sorted(name for name, _ in launched) == sorted(names)
