"""Log-probabilities alone, as a differentiable function."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusepatch.loss import LogitMap, linear_log_probabilities, products
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden": torch.zeros(3)}, r"hidden must be \[N, H\], found shape \(3,\)"),
        ({"weight": torch.zeros(5, 4)}, r"weight must have shape \(5, 3\), found \(5, 4\)"),
        ({"weight": torch.zeros(())}, r"weight must have shape"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, r"targets must have shape \(2,\), found \(3,\)"),
        ({"targets": torch.zeros(2)}, r"targets must be int64 or int32, found torch.float32"),
        ({"bias": torch.zeros(1)}, r"bias must have shape \(5,\), found \(1,\)"),
        ({"bias": torch.zeros(5, device="meta")}, r"bias must be on cpu like the other tensors, found meta"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, torch.Tensor], said: str) -> None:
    fitting = {
        "hidden": torch.zeros(2, 3),
        "weight": torch.zeros(5, 3),
        "targets": torch.zeros(2, dtype=torch.int64),
        "bias": torch.zeros(5),
    }
    with pytest.raises(ValueError, match=said):
        linear_log_probabilities(**{**fitting, **change})


@pytest.mark.parametrize("first", [1.0, 1e-6, 0.0])
def test_float16_products_of_later_groups_stay_finite(first: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # What `choose_precision` gives on CUDA, whose products add up in float32 and round once.
    on_cuda = products.Precision(
        torch.float16, torch.float16, torch.float32, torch.float16, torch.float32, products.FLOAT16_GAIN
    )
    monkeypatch.setattr(products, "choose_precision", lambda hidden: on_cuda)
    monkeypatch.setattr(products, "product_into", lambda out, a, b: out.copy_(a.float() @ b.float()))
    monkeypatch.setattr(products, "add_product", lambda total, a, b: total.add_(a.float() @ b.float()))
    batch = make_batch(1, 600, 8, 21).to(torch.float16)
    weight = batch.weight.clone().requires_grad_()
    outer = torch.ones(600)
    outer[:300] = first
    linear_log_probabilities(batch.hidden[0], weight, batch.targets[0], chunk_mib=0.001).backward(outer)
    exact = batch.weight.double().requires_grad_()
    expected = reference_log_probabilities(replace(batch, weight=exact, bias=None), LogitMap())[0]
    expected.backward(outer.double())
    assert error(weight.grad, exact.grad) < 1e-3
