"""Which rows of a batch are left out, and what becomes of values that are not finite: decided here and nowhere else.

The rule, the same for a frozen and a trainable head and for both forms of the steps:

1. A row is **left out** where its mask is 0, or its advantage is 0, and the policy's traits say that such a row matters
   to neither loss, metrics nor gradients. Nothing that the batch holds for it is looked at. NaN or infinity in its
   hidden states, its log-probabilities or its sampling ratio changes nothing, where a policy that multiplies by the
   mask makes NaN of them.
2. Every other row **counts**: the policy gets what is there, and a value that is not finite goes where the policy takes
   it. A coefficient that the policy makes NaN, or a row whose probabilities are NaN, gives a gradient of NaN.
3. Where coefficients were found without the log-probabilities (``traits.fixed_coefficients``), a row that counts and
   whose log-probability is not finite has a coefficient of NaN: it is the ratio of that log-probability to itself.

What is given for a whole sequence (an advantage, a sampling ratio [B, 1]) belongs to the rows of it that count.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fusepatch.loss.chunks import RowPlan, plan_all_rows, plan_rows
from fusepatch.loss.policy import PolicyInputs
from fusepatch.loss.separability import PolicyTraits


def rows_that_count(mask: torch.Tensor, advantages: torch.Tensor, traits: PolicyTraits) -> RowPlan:
    """The plan of the rows that are not left out. ``mask`` is [B, T], ``advantages`` [B]; a NaN advantage is not 0."""
    keep = None
    if not traits.masked_rows_matter:
        keep = mask != 0
    if not traits.zero_advantage_rows_matter:
        carrying = (advantages != 0).unsqueeze(1)
        keep = carrying.expand(mask.shape) if keep is None else keep & carrying
    if keep is None or mask.numel() == 0:
        return plan_all_rows((mask.shape[0], mask.shape[1]))
    return plan_rows(keep)


def policy_inputs(
    plan: RowPlan,
    traits: PolicyTraits,
    mask: torch.Tensor,
    advantages: torch.Tensor,
    old_log_probabilities: torch.Tensor | None,
    reference_log_probabilities: torch.Tensor | None,
    sampling_ratio: torch.Tensor | None,
) -> PolicyInputs:
    """What the policy sees, its own log-probabilities not known yet: neutral values at the rows that are left out."""
    return PolicyInputs(
        torch.zeros(plan.shape, dtype=torch.float32, device=mask.device),
        mask,
        advantages.detach(),
        _neutral_log_probabilities(plan, old_log_probabilities),
        _neutral_log_probabilities(plan, reference_log_probabilities),
        _neutral_ratio(plan, sampling_ratio, traits),
    )


def inputs_of_group(
    plan: RowPlan, inputs: PolicyInputs, values: torch.Tensor, start: int, stop: int
) -> tuple[PolicyInputs, torch.Tensor]:
    """What the policy sees of rows [start, stop) alone: their whole sequences, with 0 where a row is not in the group.

    ``values`` [R] are log-probabilities of the plan's rows. Also returns the positions of the group's rows in the
    inputs, each [stop - start], counted in the flattened sequences.
    """
    length = plan.shape[1]
    first, last = plan.sequences(start, stop)
    positions = plan.positions(start, stop, values.device) - first * length
    inside = torch.zeros((last - first) * length, dtype=torch.bool, device=values.device)
    inside = inside.index_fill_(0, positions, True).view(last - first, length)
    own = torch.zeros((last - first) * length, dtype=torch.float32, device=values.device)
    own = own.index_copy_(0, positions, values[start:stop].to(torch.float32)).view(last - first, length)
    inputs = inputs.sequences(first, last)

    def selected(given: torch.Tensor | None) -> torch.Tensor | None:
        return None if given is None else torch.where(inside, given, 0.0)

    inputs = replace(
        inputs,
        log_probabilities=own,
        old_log_probabilities=selected(inputs.old_log_probabilities),
        reference_log_probabilities=selected(inputs.reference_log_probabilities),
    )
    return inputs, positions


def fixed_coefficients_of(coefficients: torch.Tensor, log_probabilities: torch.Tensor) -> torch.Tensor:
    """Coefficients [R] that were found without the log-probabilities [R], NaN where one of these is not finite."""
    # One kernel: 0 times what is not finite is NaN.
    return torch.add(coefficients, log_probabilities.to(coefficients.dtype), alpha=0.0)


def rows_with_gradient(
    plan: RowPlan, traits: PolicyTraits, coefficients: torch.Tensor, log_probabilities: torch.Tensor
) -> RowPlan:
    """Those of the plan's rows whose gradient is not 0: a coefficient other than 0, or probabilities that are NaN.

    Both are [B, T]. One host sync, which costs less than the products of clipped tokens; none with fixed coefficients,
    which nothing clips.
    """
    if traits.fixed_coefficients or not coefficients.numel():
        return plan
    keep = (coefficients != 0) | log_probabilities.isnan()
    return plan_rows(keep if plan.computed is None else keep & plan.computed)


def _neutral_log_probabilities(plan: RowPlan, values: torch.Tensor | None) -> torch.Tensor | None:
    """Old or reference log-probabilities [B, T] in float32, 0 (as the policy's own) at rows that are left out."""
    if values is None:
        return None
    values = values.detach().to(torch.float32)
    # Selected, never multiplied: 0 * inf is NaN.
    return values if plan.computed is None else torch.where(plan.computed, values, 0.0)


def _neutral_ratio(plan: RowPlan, ratio: torch.Tensor | None, traits: PolicyTraits) -> torch.Tensor | None:
    """A sampling ratio [B, T] or [B, 1], 1 at rows that are left out, unless the policy reads those too."""
    if ratio is None:
        return None
    ratio = ratio.detach()
    if plan.computed is None or traits.left_out_ratios_matter:
        return ratio
    counted = plan.computed if ratio.shape == plan.computed.shape else plan.computed.any(dim=1, keepdim=True)
    return torch.where(counted, ratio, 1.0)
