"""Matrix products into given memory, and how one is cut at whole waves."""

from __future__ import annotations

import pytest
import torch

from fusepatch.loss import products


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        # 15.2 waves on 132 multiprocessors: 14 whole ones first.
        (512, 128_256, 118_272),
        (500, 128_256, 118_272),
        # 13.5 waves: the last one is well used.
        (384, 151_936, 151_936),
        # Few waves are not worth a second product.
        (128, 32_000, 32_000),
        (0, 100, 100),
    ],
)
def test_whole_waves(rows: int, columns: int, expected: int) -> None:
    assert products.whole_wave_columns(rows, columns, 132) == expected


@pytest.mark.parametrize(("rows", "columns"), [(1, 10**6), (129, 500_000), (4096, 40_000), (1000, 77_777)])
@pytest.mark.parametrize("multiprocessors", [1, 20, 108, 132, 148])
def test_cuts_stay_inside_and_aligned(rows: int, columns: int, multiprocessors: int) -> None:
    first = products.whole_wave_columns(rows, columns, multiprocessors)
    assert 0 < first <= columns
    assert first == columns or first % 256 == 0


def test_half_operands_are_widened_on_the_cpu() -> None:
    rows, weight = torch.randn(5, 64).bfloat16(), torch.randn(4100, 64).bfloat16()
    precision = products.choose_precision(rows)
    assert (precision.operand, precision.rows, precision.logits) == (torch.bfloat16, torch.float32, torch.float32)
    out = torch.empty(5, 4100)
    products.logits_into(out, rows.float(), weight, precision)
    torch.testing.assert_close(out.double(), rows.double() @ weight.double().t(), rtol=1e-5, atol=1e-5)
    back = torch.empty(5, 64, dtype=torch.bfloat16)
    products.hidden_gradient_into(back, out, weight, precision)
    assert torch.equal(back, (out.double() @ weight.double()).bfloat16())


def test_autocast_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = torch.zeros(1, 1)
    assert products.choose_precision(hidden).operand == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert products.choose_precision(hidden).operand == torch.bfloat16
        assert products.choose_precision(hidden.double()).operand == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert products.choose_precision(hidden).operand == torch.float32
