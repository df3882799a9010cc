"""The inputs of a case, its policy in plain torch, and the float64 reference that every implementation is checked
against."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fusepatch.bench.grpo.cases import Case, Shape

EPSILON = 0.2
"""Clipping range of the importance ratio, on both sides."""
_CHUNK_BYTES = 1 << 30


@dataclass(frozen=True)
class Inputs:
    """hidden [B, T, H] and weight [V, H] are leaves; targets int64 [B, T]; mask, old, reference and ratio float32 [B,
    T]; advantages float32 [B].
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    old: torch.Tensor | None
    reference: torch.Tensor | None
    ratio: torch.Tensor | None

    def leaves(self) -> tuple[torch.Tensor, ...]:
        return tuple(leaf for leaf in (self.hidden, self.weight) if leaf.requires_grad)


def make_inputs(case: Case, shape: Shape, device: torch.device) -> Inputs:
    """The same inputs in every process on this machine.

    The other tokens' logits have standard deviation 1, and the target's is set so that its probability lies between 2
    and 98 %, as those of sampled tokens do: the softmax then has a part in the gradients that a check can see.
    Importance ratios keep a distance from the clipping range's ends, which rounding could otherwise carry them across.
    """
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, shape.dtype)
    size = (shape.batch, shape.length)

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.empty(size, device=device).uniform_(low, high, generator=generator)

    weight = torch.empty((shape.vocabulary, shape.hidden), device=device, dtype=dtype)
    weight.normal_(std=shape.hidden**-0.5, generator=generator)
    hidden = torch.empty((*size, shape.hidden), device=device, dtype=torch.float32).normal_(generator=generator)
    targets = torch.randint(shape.vocabulary, size, device=device, generator=generator)
    rows = weight[targets].float()
    wanted = math.log(shape.vocabulary) + 0.5 + uniform(-4.0, 4.0)
    found = (hidden * rows).sum(-1)
    hidden += ((wanted - found) / rows.square().sum(-1)).unsqueeze(-1) * rows
    hidden = hidden.to(dtype)
    del rows
    valid = torch.linspace(0.1, 1.0, shape.batch) if case.ragged and shape.batch > 1 else torch.tensor([0.55])
    lengths = (valid * shape.length).round().clamp(min=1) if case.ragged else torch.tensor([shape.length])
    mask = (torch.arange(shape.length)[None] < lengths[:, None]).float().expand(size).to(device).contiguous()
    advantages = torch.linspace(0.5, 1.5, shape.batch, device=device)
    advantages[1::4] *= -1
    advantages[2::4] *= -1
    if case.zero_advantages:
        advantages[1::2] = 0
    old = reference = ratio = None
    if case.old or case.beta:
        current = log_probabilities(hidden, weight, targets, dtype).float()
        offset = (
            uniform(0.0, 1.0) if case.level == "token" else torch.arange(shape.batch, device=device)[:, None] / 4 % 1
        )
        moved = torch.where(offset < 0.7, 0.05, torch.where(offset < 0.85, 0.4, -0.4))
        old = current + moved if case.old else None
        reference = current + uniform(-0.2, 0.2) if case.beta else None
        ratio = uniform(0.5, 1.5) if case.sampling_ratio else None
    return Inputs(
        hidden.requires_grad_(),
        weight.requires_grad_(case.trainable),
        targets,
        mask,
        advantages,
        old,
        reference,
        ratio,
    )


def policy_loss(values: torch.Tensor, inputs: Inputs, case: Case) -> torch.Tensor:
    """GRPO with the mean over all valid tokens (DAPO in one process, BNPO) of log-probabilities [B, T].

    Sources: https://arxiv.org/abs/2402.03300 (GRPO), https://arxiv.org/abs/2503.14476 (DAPO),
    https://arxiv.org/abs/2507.18071 (GSPO, the sequence level).
    """
    mask = inputs.mask.to(values.dtype)
    log_ratio = values - (values.detach() if inputs.old is None else inputs.old)
    if case.level == "sequence":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1)).unsqueeze(-1)
    ratio = log_ratio.exp()
    advantages = inputs.advantages.to(values.dtype).unsqueeze(1)
    loss = -torch.min(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages)
    if inputs.ratio is not None:
        loss = loss * inputs.ratio
    if inputs.reference is not None:
        difference = inputs.reference - values
        loss = loss + case.beta * (difference.exp() - difference - 1)
    return (loss * mask).sum() / mask.sum().clamp(min=1)


def log_probabilities(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """[B, T] in ``dtype``, by chunks of rows; no graph."""
    weight = weight.detach().to(dtype)
    rows = hidden.detach().view(-1, hidden.shape[-1])
    result = torch.empty(rows.shape[0], dtype=dtype, device=rows.device)
    for part in _chunks(rows.shape[0], weight):
        logits = rows[part].to(dtype) @ weight.t()
        logits = logits.to(torch.promote_types(dtype, torch.float32))
        result[part] = logits.gather(1, targets.view(-1)[part, None]).squeeze(1) - logits.logsumexp(1)
    return result.view(targets.shape)


def gradient_rows(inputs: Inputs, case: Case) -> torch.Tensor:
    """Which tokens can carry gradient: bool [B, T]."""
    carrying = inputs.mask != 0
    return carrying & (inputs.advantages != 0).unsqueeze(1) if case.beta == 0 else carrying


@dataclass(frozen=True)
class Errors:
    """Relative errors against float64: of the loss (to the larger of its size and the mean size of the advantages), of
    the gradients by Frobenius norms. ``grad_weight`` is None for a frozen head.
    """

    loss: float
    grad_hidden: float
    grad_weight: float | None

    def within(self, tolerance: float) -> bool:
        # NaN is within nothing.
        found = (self.loss, self.grad_hidden, 0.0 if self.grad_weight is None else self.grad_weight)
        return all(error <= tolerance for error in found)


def errors(loss: torch.Tensor, inputs: Inputs, case: Case) -> Errors:
    """Compare a loss and the gradients in the leaves with those of float64 arithmetic on the same inputs."""
    wanted_loss, wanted_hidden, wanted_weight = _reference(inputs, case)
    scale = torch.maximum(wanted_loss.abs(), inputs.advantages.abs().mean().double())
    return Errors(
        ((loss.double() - wanted_loss).abs() / scale).item(),
        _relative_error(inputs.hidden.grad, wanted_hidden),
        None if wanted_weight is None else _relative_error(inputs.weight.grad, wanted_weight),
    )


def _reference(inputs: Inputs, case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    values = log_probabilities(inputs.hidden, inputs.weight, inputs.targets, torch.float64)
    leaf = values.requires_grad_()
    loss = policy_loss(leaf, inputs, case)
    (coefficients,) = torch.autograd.grad(loss, leaf)
    coefficients = coefficients.view(-1)
    weight = inputs.weight.detach().double()
    hidden = inputs.hidden.detach().view(-1, weight.shape[1])
    grad_hidden = torch.zeros(hidden.shape, dtype=torch.float64, device=hidden.device)
    grad_weight = torch.zeros_like(weight) if case.trainable else None
    targets = inputs.targets.view(-1, 1)
    index = (inputs.mask.view(-1) != 0).nonzero().squeeze(1)
    for part in _chunks(index.shape[0], weight):
        chosen = index[part]
        rows = hidden[chosen].double()
        coefficient = coefficients[chosen].unsqueeze(1)
        grad_logits = torch.softmax(rows @ weight.t(), dim=1).mul_(-coefficient)
        grad_logits.scatter_add_(1, targets[chosen], coefficient)
        grad_hidden[chosen] = grad_logits @ weight
        if grad_weight is not None:
            grad_weight.addmm_(grad_logits.t(), rows)
    return loss.detach(), grad_hidden.view(inputs.hidden.shape), grad_weight


def _relative_error(found: torch.Tensor | None, wanted: torch.Tensor) -> float:
    if found is None:
        return math.inf
    error = torch.zeros((), dtype=torch.float64, device=wanted.device)
    size = torch.zeros_like(error)
    for start in range(0, wanted.shape[0], 8192):
        part = wanted[start : start + 8192]
        error += (found[start : start + 8192].double() - part).square().sum()
        size += part.square().sum()
    return (error / size).sqrt().item()


def _chunks(rows: int, weight: torch.Tensor) -> list[slice]:
    step = max(_CHUNK_BYTES // (weight.shape[0] * weight.element_size()), 1)
    return [slice(start, start + step) for start in range(0, rows, step)]
