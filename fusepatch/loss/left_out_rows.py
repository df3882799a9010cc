"""Which rows of a batch are left out, and what becomes of values that are not finite: decided here and nowhere else.

The rule, the same for a frozen and a trainable head and for both forms of the steps:

1. A row is **left out** where its mask is 0, or its advantage is 0, and the policy's traits say that such a row matters to
   neither loss, metrics nor gradients. Nothing that the batch holds for it is looked at. NaN or infinity in its hidden states, its
   log-probabilities or its sampling ratio changes nothing, where a policy that multiplies by the mask makes NaN of them.
2. Every other row **counts**: the policy gets what is there, and a value that is not finite goes where the policy takes it. A
   coefficient that the policy makes NaN, or a row whose probabilities are NaN, gives a gradient of NaN.
3. Where coefficients were found without the log-probabilities (``traits.fixed_coefficients``), a row that counts and whose
   log-probability is not finite has a coefficient of NaN: it is the ratio of that log-probability to itself.

What is given for a whole sequence (an advantage, a sampling ratio [B, 1]) belongs to the rows of it that count.
"""

from __future__ import annotations

import torch

from fusepatch.loss.chunks import RowPlan, plan_all_rows, plan_rows
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


def neutral_log_probabilities(plan: RowPlan, values: torch.Tensor | None) -> torch.Tensor | None:
    """Old or reference log-probabilities [B, T] in float32, 0 (as the policy's own) at rows that are left out."""
    if values is None:
        return None
    values = values.detach().to(torch.float32)
    # Selected, never multiplied: 0 * inf is NaN.
    return values if plan.computed is None else torch.where(plan.computed, values, 0.0)


def neutral_ratio(plan: RowPlan, ratio: torch.Tensor | None, traits: PolicyTraits) -> torch.Tensor | None:
    """A sampling ratio [B, T] or [B, 1], 1 at rows that are left out, unless the policy reads those too."""
    if ratio is None:
        return None
    ratio = ratio.detach()
    if plan.computed is None or traits.left_out_ratios_matter:
        return ratio
    counted = plan.computed if ratio.shape == plan.computed.shape else plan.computed.any(dim=1, keepdim=True)
    return torch.where(counted, ratio, 1.0)


def fixed_coefficients_of(coefficients: torch.Tensor, log_probabilities: torch.Tensor) -> torch.Tensor:
    """Coefficients [R] that were found without the log-probabilities [R], NaN where one of these is not finite."""
    # One kernel: 0 times what is not finite is NaN.
    return torch.add(coefficients, log_probabilities.to(coefficients.dtype), alpha=0.0)


def rows_with_gradient(plan: RowPlan, coefficients: torch.Tensor, log_probabilities: torch.Tensor) -> RowPlan:
    """Those of the plan's rows whose gradient is not 0: a coefficient other than 0, or probabilities that are NaN. Both [B, T]."""
    keep = (coefficients != 0) | log_probabilities.isnan()
    return plan_rows(keep if plan.computed is None else keep & plan.computed)
