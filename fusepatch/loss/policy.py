"""A policy: the caller's function of log-probabilities in plain torch, what it sees, and how it is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusepatch.loss.chunks import RowPlan
from fusepatch.loss.linear import Head
from fusepatch.loss.rows import Rows
from fusepatch.loss.separability import PolicyTraits


@dataclass(frozen=True)
class PolicyInputs:
    """What a policy sees: the whole batch, or a run of whole sequences of it.

    ``log_probabilities`` is float32 [B', T]. ``mask`` [B', T] has the caller's dtype, ``advantages`` is [B'],
    ``old_log_probabilities`` and ``reference_log_probabilities`` are float32 [B', T] or None, ``sampling_ratio`` is
    [B', 1] or [B', T] or None. At positions that were not computed the three log-probabilities are 0.
    """

    log_probabilities: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    old_log_probabilities: torch.Tensor | None = None
    reference_log_probabilities: torch.Tensor | None = None
    sampling_ratio: torch.Tensor | None = None

    def sequences(self, first: int, last: int) -> PolicyInputs:
        """The same for sequences [first, last)."""
        cut: dict[str, Any] = {
            name: value if value is None else value[first:last] for name, value in vars(self).items()
        }
        return PolicyInputs(**cut)


# Returns the loss (0-dim) and the metrics. For a run of sequences the loss is that run's share of the whole batch's
# loss: normalise by the whole batch's mask, not by ``inputs.mask``.
Policy = Callable[[PolicyInputs], "tuple[torch.Tensor, Sequence[torch.Tensor]]"]
LossAndMetrics = tuple[torch.Tensor, tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class PolicyCall:
    """A policy, the rows of the batch that it is about, and what it sees but for their log-probabilities."""

    head: Head
    rows: Rows
    inputs: PolicyInputs
    policy: Policy
    traits: PolicyTraits

    @property
    def plan(self) -> RowPlan:
        return self.rows.plan

    def inputs_with(self, values: torch.Tensor) -> PolicyInputs:
        """What the policy sees when the rows have the log-probabilities ``values`` [R]."""
        return replace(self.inputs, log_probabilities=self.plan.put(values.to(torch.float32)))

    def loss(self, inputs: PolicyInputs) -> LossAndMetrics:
        """The loss and the metrics, without grad mode."""
        with torch.no_grad():
            loss, metrics = self.policy(inputs)
        return loss.detach(), tuple(metric.detach() for metric in metrics)

    def loss_and_coefficients(self, inputs: PolicyInputs) -> tuple[LossAndMetrics, torch.Tensor]:
        """Also the coefficients: the derivative of the loss by ``inputs.log_probabilities``, in the same shape."""
        with torch.enable_grad():
            leaf = inputs.log_probabilities.detach().requires_grad_()
            loss, metrics = self.policy(replace(inputs, log_probabilities=leaf))
            coefficients = None
            if loss.requires_grad:
                (coefficients,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        if coefficients is None:
            coefficients = torch.zeros_like(leaf)
        return (loss.detach(), tuple(metric.detach() for metric in metrics)), coefficients.detach()
