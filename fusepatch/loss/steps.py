"""The steps between two matrix products, in plain torch: the form for the CPU and wherever Triton cannot run.

``fusepatch.loss.kernels`` has the same functions with the same arguments. ``gradients`` is [R, W] of any floating dtype
and may share memory with the logits, which hold nothing of use afterwards; the row outputs are float32 [R] (float64 for
float64 logits).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusepatch.loss.logit_map import RawLogits


def _accumulation_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _to_logits(logits: RawLogits) -> tuple[Tensor, Tensor | None]:
    """Apply the map; return the logits (in place where the dtype allows) and the slope of the soft cap, if any."""
    raw, _, bias, logit_map = logits
    x = raw.to(_accumulation_dtype(raw))
    if bias is not None:
        x.add_(bias)
    if logit_map.logit_scale != 1.0:
        x.mul_(logit_map.logit_scale)
    slope = None
    cap = logit_map.final_logit_softcapping
    if cap is not None:
        x.div_(cap).tanh_()
        slope = 1.0 - x * x
        x.mul_(cap)
    if logit_map.temperature != 1.0:
        x.mul_(1.0 / logit_map.temperature)
    return x, slope


def _target_columns(targets: Tensor, width: int, first_column: int = 0) -> tuple[Tensor, Tensor]:
    columns = (targets - first_column).unsqueeze(-1)
    known = (columns >= 0) & (columns < width)
    return columns.clamp(0, max(width - 1, 0)), known


def _target_logit(x: Tensor, targets: Tensor) -> Tensor:
    columns, known = _target_columns(targets, x.shape[1])
    return torch.where(known, x.gather(1, columns), 0.0).squeeze(-1)


def _log_sum_exp_into(x: Tensor, normaliser: Tensor) -> None:
    """Infinite logits give NaN, as in the kernels and as in a softmax: torch's own function would give infinity."""
    torch.logsumexp(x, dim=-1, out=normaliser)
    normaliser.add_(normaliser - normaliser)


def log_sum_exp(logits: RawLogits, log_probabilities: Tensor, normaliser: Tensor) -> None:
    """Write the target's log-probability and the log-sum-exp of each row."""
    x, _ = _to_logits(logits)
    _log_sum_exp_into(x, normaliser)
    torch.sub(_target_logit(x, logits.targets), normaliser, out=log_probabilities)


def exponentials(
    logits: RawLogits, gradients: Tensor, log_probabilities: Tensor, normaliser: Tensor, multiplier: Tensor, gain: float
) -> None:
    """Write each row's log-probability, its log-sum-exp, and the gradient of the former up to a factor.

    The gradient of ``log_probabilities[r]`` with respect to the raw head output of row r is
    ``multiplier[r] * gradients[r]``. The factor is kept apart because it commutes with the matrix product that follows,
    so neither the log-sum-exp nor the policy's coefficient has to be known when the row is written. ``gain`` raises
    what is written where float16 would lose small probabilities; 1 for other dtypes.
    """
    x, slope = _to_logits(logits)
    _log_sum_exp_into(x, normaliser)
    torch.sub(_target_logit(x, logits.targets), normaliser, out=log_probabilities)
    _write_gradient(x, slope, gradients, logits.targets, normaliser, multiplier.fill_(gain), 0)
    multiplier.fill_(logits.logit_map.slope / gain)


def gradient_of_logits(
    logits: RawLogits, gradients: Tensor, normaliser: Tensor, scale: Tensor, first_column: int
) -> None:
    """Write ``scale[r] * slope of the soft cap * (onehot - probability)`` for a slice of the vocabulary.

    The logits are the columns from ``first_column`` on, ``normaliser`` the log-sum-exp over the whole vocabulary,
    ``scale`` is float32 [R]. :attr:`LogitMap.slope` is not part of it.
    """
    x, slope = _to_logits(logits)
    _write_gradient(x, slope, gradients, logits.targets, normaliser, scale, first_column)


def _write_gradient(
    x: Tensor,
    slope: Tensor | None,
    gradients: Tensor,
    targets: Tensor,
    normaliser: Tensor,
    scale: Tensor,
    first_column: int,
) -> None:
    probabilities = x.sub_(normaliser.unsqueeze(-1)).exp_()
    columns, known = _target_columns(targets, x.shape[1], first_column)
    x = probabilities.neg_().scatter_add_(1, columns, known.to(x.dtype))
    if slope is not None:
        x.mul_(slope)
    x.mul_(scale.unsqueeze(-1))
    if x.data_ptr() != gradients.data_ptr():
        gradients.copy_(x)


def scale_rows(values: Tensor, scale: Tensor) -> None:
    """``values[r] *= scale[r]`` in place, rounded once; ``values`` is [R, H] with contiguous rows, ``scale`` [R]."""
    values.mul_(scale.unsqueeze(-1))
