"""Inputs of the loss's steps, and their results in float64."""

from __future__ import annotations

from typing import Any

import torch

from fusepatch.loss import LogitMap
from fusepatch.loss.logit_map import RawLogits

MAPS = [LogitMap(), LogitMap(0.7, 1.3), LogitMap(1.2, 0.5, 4.0)]


def make(rows: int, width: int, bias: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(rows * 1000 + width)
    logits = torch.full((rows, width + 3), float("nan"))
    logits[:, :width] = torch.randn(rows, width, generator=generator) * 4
    targets = torch.randint(-2, width + 2, (rows,), generator=generator)
    return logits[:, :width], targets, torch.randn(width, generator=generator) if bias else None


def exact(
    logits: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None, logit_map: LogitMap
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities, log-sum-exp and the gradient of the former with respect to the raw output, in float64."""
    raw = logits.double().detach().requires_grad_()
    x = (raw if bias is None else raw + bias.double()) * logit_map.logit_scale
    if logit_map.final_logit_softcapping is not None:
        x = logit_map.final_logit_softcapping * torch.tanh(x / logit_map.final_logit_softcapping)
    x = x / logit_map.temperature
    inside = (targets >= 0) & (targets < x.shape[1])
    chosen = x.gather(1, targets.clamp(0, x.shape[1] - 1).unsqueeze(1)).squeeze(1)
    normaliser = x.logsumexp(1)
    values = torch.where(inside, chosen, 0.0) - normaliser
    (gradient,) = torch.autograd.grad(values.sum(), raw)
    return values.detach(), normaliser.detach(), gradient


def check_infinite_logit(form: Any, logits: torch.Tensor) -> None:
    targets = torch.tensor([3, 3])
    found = torch.empty((3, 2))
    form.log_sum_exp(RawLogits(logits.clone(), targets, None, LogitMap()), found[0], found[1])
    assert found[:2].isnan().tolist() == [[True, False]] * 2
    form.exponentials(RawLogits(logits, targets, None, LogitMap()), logits, *found, 1.0)
    assert found[:2].isnan().tolist() == [[True, False]] * 2
    assert (logits * found[2].unsqueeze(1)).isnan().any(dim=1).tolist() == [True, False]
