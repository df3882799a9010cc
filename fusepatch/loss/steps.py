"""The steps between two matrix products, in plain torch: the form for the CPU and wherever Triton cannot run.

``fusepatch.loss.kernels`` has the same functions with the same arguments. Shapes: ``logits`` is [R, W], the raw
output of the head in float32 (or lower where the hardware leaves no choice), rows contiguous, row stride at least W;
``gradients`` is [R, W] of any floating dtype and may share memory with ``logits``; ``targets`` is int64 [R]; ``bias`` is
[W] or None; the row outputs are float32 [R] (float64 for float64 logits). ``logits`` holds nothing of use afterwards.
A target outside the vocabulary counts as one whose logit is 0, as Liger-Kernel 0.8 counts it.
"""

from __future__ import annotations

import torch

from fusepatch.loss.logit_map import LogitMap


def _accumulation_dtype(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _to_logits(
    raw: torch.Tensor, bias: torch.Tensor | None, logit_map: LogitMap
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Apply the map; return the logits (in place where the dtype allows) and the slope of the soft cap, if any."""
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


def _target_columns(targets: torch.Tensor, width: int, first_column: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    columns = (targets - first_column).unsqueeze(-1)
    known = (columns >= 0) & (columns < width)
    return columns.clamp(0, max(width - 1, 0)), known


def _target_logit(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    columns, known = _target_columns(targets, x.shape[1])
    return torch.where(known, x.gather(1, columns), 0.0).squeeze(-1)


def _log_sum_exp_into(x: torch.Tensor, normaliser: torch.Tensor) -> None:
    """Infinite logits give NaN, as in the kernels and as in a softmax: torch's own function would give infinity."""
    torch.logsumexp(x, dim=-1, out=normaliser)
    normaliser.add_(normaliser - normaliser)


def log_sum_exp(
    logits: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    logit_map: LogitMap,
    log_probabilities: torch.Tensor,
    normaliser: torch.Tensor,
) -> None:
    """Write the target's log-probability and the log-sum-exp of each row."""
    x, _ = _to_logits(logits, bias, logit_map)
    _log_sum_exp_into(x, normaliser)
    torch.sub(_target_logit(x, targets), normaliser, out=log_probabilities)


def exponentials(
    logits: torch.Tensor,
    gradients: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    logit_map: LogitMap,
    log_probabilities: torch.Tensor,
    normaliser: torch.Tensor,
    multiplier: torch.Tensor,
    gain: float,
) -> None:
    """Write each row's log-probability, its log-sum-exp, and the gradient of the former up to a factor.

    The gradient of ``log_probabilities[r]`` with respect to the raw head output of row r is
    ``multiplier[r] * gradients[r]``. The factor is kept apart because it commutes with the matrix product that follows,
    so neither the log-sum-exp nor the policy's coefficient has to be known when the row is written. ``gain`` raises
    what is written where float16 would lose small probabilities; 1 for other dtypes.
    """
    x, slope = _to_logits(logits, bias, logit_map)
    _log_sum_exp_into(x, normaliser)
    torch.sub(_target_logit(x, targets), normaliser, out=log_probabilities)
    _write_gradient(x, slope, gradients, targets, normaliser, multiplier.fill_(gain), 0)
    multiplier.fill_(logit_map.slope / gain)


def gradient_of_logits(
    logits: torch.Tensor,
    gradients: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    logit_map: LogitMap,
    normaliser: torch.Tensor,
    scale: torch.Tensor,
    first_column: int,
) -> None:
    """Write ``scale[r] * slope of the soft cap * (onehot - probability)`` for a slice of the vocabulary.

    ``logits`` holds the columns from ``first_column`` on, ``normaliser`` the log-sum-exp over the whole vocabulary,
    ``scale`` is float32 [R]. :attr:`LogitMap.slope` is not part of it.
    """
    x, slope = _to_logits(logits, bias, logit_map)
    _write_gradient(x, slope, gradients, targets, normaliser, scale, first_column)


def _write_gradient(
    x: torch.Tensor,
    slope: torch.Tensor | None,
    gradients: torch.Tensor,
    targets: torch.Tensor,
    normaliser: torch.Tensor,
    scale: torch.Tensor,
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


def scale_rows(values: torch.Tensor, scale: torch.Tensor) -> None:
    """``values[r] *= scale[r]`` in place, rounded once; ``values`` is [R, H] with contiguous rows, ``scale`` [R]."""
    values.mul_(scale.unsqueeze(-1))
