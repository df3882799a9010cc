"""The torch form of the steps against float64, on strided and reused memory."""

from __future__ import annotations

import pytest
import torch

from fusepatch.loss import LogitMap, steps
from fusepatch.loss.logit_map import RawLogits
from kits.loss_steps import MAPS, check_infinite_logit, exact, make


@pytest.mark.parametrize("logit_map", MAPS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 37), (130, 64)])
@pytest.mark.parametrize("gain", [1.0, 256.0])
def test_exponentials(logit_map: LogitMap, bias: bool, rows: int, width: int, gain: float) -> None:
    logits, targets, offset = make(rows, width, bias)
    values, normaliser, gradient = exact(logits, targets, offset, logit_map)
    found = torch.empty((3, rows))
    steps.exponentials(RawLogits(logits, targets, offset, logit_map), logits, *found, gain)
    torch.testing.assert_close(found[0].double(), values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1].double(), normaliser, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close((logits * found[2].unsqueeze(1)).double(), gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("logit_map", MAPS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_of_a_slice(logit_map: LogitMap, bias: bool, dtype: torch.dtype) -> None:
    logits, targets, offset = make(9, 53, bias)
    _, normaliser, gradient = exact(logits, targets, offset, logit_map)
    scale = torch.linspace(-1, 1, 9)
    for first, last in ((0, 20), (20, 53)):
        part = logits[:, first:last].clone()
        written = torch.empty(part.shape, dtype=dtype)
        part_bias = None if offset is None else offset[first:last]
        steps.gradient_of_logits(
            RawLogits(part, targets, part_bias, logit_map), written, normaliser.float(), scale, first
        )
        expected = gradient[:, first:last] * scale.unsqueeze(1) / logit_map.slope
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(written.double(), expected, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("logit_map", MAPS)
@pytest.mark.parametrize("bias", [True, False])
def test_log_sum_exp(logit_map: LogitMap, bias: bool) -> None:
    logits, targets, offset = make(9, 53, bias)
    values, normaliser, _ = exact(logits, targets, offset, logit_map)
    found = torch.empty((2, 9))
    steps.log_sum_exp(RawLogits(logits, targets, offset, logit_map), found[0], found[1])
    torch.testing.assert_close(found[0].double(), values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1].double(), normaliser, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("column", [0, 3])
def test_an_infinite_logit_makes_its_row_nan(column: int) -> None:
    # The target is column 3. torch.logsumexp would give infinity, and a log-probability of minus infinity.
    logits = torch.randn(2, 8)
    logits[0, column] = float("inf")
    check_infinite_logit(steps, logits)
