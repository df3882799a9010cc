"""Log-probabilities alone, as a differentiable function."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusepatch.loss import LogitMap, linear_log_probabilities
from kits.loss_cases import SMALL_CHUNK_MIB, error, make_batch, reference_log_probabilities


@pytest.mark.parametrize("logit_map", [LogitMap(), LogitMap(0.7, 1.5, 3.0)])
@pytest.mark.parametrize(
    "needs", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
)
@pytest.mark.parametrize("chunk_mib", [SMALL_CHUNK_MIB, 256.0])
def test_values_and_gradients(logit_map: LogitMap, needs: tuple[bool, bool, bool], chunk_mib: float) -> None:
    batch = make_batch(1, 300)
    batch.targets[0, :2] = torch.tensor([-100, 53])
    assert batch.bias is not None
    given = [
        value.clone().requires_grad_(need)
        for value, need in zip((batch.hidden, batch.weight, batch.bias), needs, strict=True)
    ]
    found = linear_log_probabilities(
        given[0][0], given[1], batch.targets[0], given[2], logit_map=logit_map, chunk_mib=chunk_mib
    )
    assert found.dtype == torch.float32
    outer = torch.linspace(-1, 1, 300)
    outer[7] = 0.0
    found.backward(outer)

    exact = [value.double().detach().requires_grad_(need) for value, need in zip(given, needs, strict=True)]
    expected = reference_log_probabilities(replace(batch, hidden=exact[0], weight=exact[1], bias=exact[2]), logit_map)[
        0
    ]
    expected.backward(outer.double())
    assert error(found, expected) < 1e-5
    for value, other, need in zip(given, exact, needs, strict=True):
        if need:
            assert error(value.grad, other.grad) < 1e-5
        else:
            assert value.grad is None


def test_strided_hidden_without_bias() -> None:
    hidden = torch.randn(20, 7).t().contiguous().t()
    weight, targets = torch.randn(11, 7), torch.randint(0, 11, (20,))
    expected = torch.log_softmax(hidden.double() @ weight.double().t(), -1).gather(1, targets.unsqueeze(1)).squeeze(1)
    assert error(linear_log_probabilities(hidden, weight, targets), expected) < 1e-6


def test_no_rows() -> None:
    weight = torch.randn(5, 3, requires_grad=True)
    found = linear_log_probabilities(torch.zeros(0, 3), weight, torch.zeros(0, dtype=torch.int64))
    found.sum().backward()
    assert found.shape == (0,)
    assert weight.grad is not None
    assert weight.grad.abs().sum() == 0


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"hidden must be \[N, H\], weight \[V, H\] and targets \[N\], found"):
        linear_log_probabilities(torch.zeros(2, 3), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64))
