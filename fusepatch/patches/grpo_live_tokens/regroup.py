"""Rows of like length share a micro-batch: a generation batch sorted inside the windows of its optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def window(slices: int, accumulation: int) -> int | None:
    """How many consecutive micro-batches of a generation batch one optimizer step has; None where steps begin inside of
    slices that share one.

    slices: `steps_per_generation`. accumulation: `gradient_accumulation_steps`.
    """
    if slices % accumulation == 0:
        return accumulation
    return slices if accumulation % slices == 0 else None


def why_not_per_row(batch: Mapping[str, Any], size: int) -> str | None:
    """Why the values of a batch cannot be put in another order together: each must have one entry a row, or be one
    number."""
    import torch

    for name, value in batch.items():
        if value is None or (torch.is_tensor(value) and value.dim() == 0):
            continue
        if not torch.is_tensor(value) or value.shape[0] != size:
            return f"{name} of the batch does not have one entry a row"
    return None


def order(lengths: torch.Tensor, rows_of_a_window: int) -> torch.Tensor:
    """The rows of each window by length, longest first, rows of one length as they come: int64 `[B]`. Rows beyond the
    last whole window stay where they are."""
    import torch

    whole = lengths.shape[0] // rows_of_a_window * rows_of_a_window
    rows = torch.arange(lengths.shape[0], device=lengths.device)
    inside = lengths[:whole].view(-1, rows_of_a_window).argsort(dim=1, descending=True, stable=True)
    first = rows[:whole:rows_of_a_window][:, None]
    return torch.cat([(inside + first).flatten(), rows[whole:]])


def arranged(batch: Mapping[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    """The batch with its rows in another order."""
    import torch

    return {
        name: value[rows.to(value.device)] if torch.is_tensor(value) and value.dim() > 0 else value
        for name, value in batch.items()
    }
