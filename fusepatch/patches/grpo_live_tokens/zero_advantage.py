"""Sequences of advantage 0 in one micro-batch: which rows enter the model, and what stands in the places of the
others."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from fusepatch.engine import ledger

if TYPE_CHECKING:
    import torch

NEARLY_ZERO = 3e-3
"""What rounding leaves of the advantages of equal rewards is below this: one unit in the last place of their mean,
divided by TRL's 1e-4 beside a standard deviation of about 0."""


class MicroBatch(NamedTuple):
    """One micro-batch in `compute_loss`.

    shape: (B, T). rows: the rows that enter the model; None for all. fill: log-probabilities that stand where nothing
    was computed, `[B, T]`; None for 0. loss_mask: `[B, T]`.
    """

    shape: tuple[int, int]
    rows: tuple[int, ...] | None
    fill: torch.Tensor | None
    loss_mask: torch.Tensor

    def entropy(self, entropies: torch.Tensor) -> torch.Tensor:
        """Entropies `[B, T]` with the mean of the rows that were computed in the tokens of the others, so that their
        mean over all tokens is the mean over the rows that ran."""
        import torch

        if self.rows is None:
            return entropies
        ran = torch.zeros(self.shape[0], 1, dtype=torch.bool, device=entropies.device)
        ran[list(self.rows)] = True
        counted = self.loss_mask * ran
        mean = (entropies.detach() * counted).sum() / counted.sum().clamp(min=1)
        return torch.where(ran, entropies, mean.to(entropies.dtype))


current: ContextVar[MicroBatch | None] = ContextVar("fusepatch_micro_batch", default=None)


def read(inputs: Mapping[str, Any], drop: bool, patch: str) -> MicroBatch:
    """The micro-batch of `compute_loss`'s inputs. Waits for the device once where sequences are to be dropped."""
    mask = inputs["completion_mask"]
    loss_mask = mask if inputs.get("tool_mask") is None else mask * inputs["tool_mask"]
    rows = _live(inputs, loss_mask, patch) if drop else None
    return MicroBatch(tuple(mask.shape), rows, _fill(inputs, rows), loss_mask)


def _live(inputs: Mapping[str, Any], loss_mask: torch.Tensor, patch: str) -> tuple[int, ...] | None:
    import torch

    advantages = inputs["advantages"]
    length = inputs["prompt_mask"].sum(1) + inputs["completion_mask"].sum(1)
    largest = advantages.detach().abs().reshape(advantages.shape[0], -1).amax(1)
    found = torch.stack([largest.double(), length.double(), loss_mask.sum(1).double()])
    sizes, lengths, tokens = found.tolist()
    for size in sizes:
        if 0 < size < NEARLY_ZERO:
            ledger.fallback(
                patch,
                f"a sequence whose advantage is nearly 0 (below {NEARLY_ZERO:g}) was kept: the mean of equal rewards "
                "such as 0.1 is rounded, which leaves it a gradient; rewards like 0, 0.25, 0.5 and 1 leave exactly 0",
            )
    rows = tuple(row for row, size in enumerate(sizes) if size != 0)
    if len(rows) == len(sizes):
        return None
    if not any(tokens[row] for row in rows):
        # Every rank and micro-batch runs the model once, so that no collective waits for one that does not; the row
        # that runs has tokens in the loss where there is such a row, so that there is an entropy to log.
        shortest = min(range(len(lengths)), key=lambda row: (not tokens[row], lengths[row]))
        rows = tuple(sorted({*rows, shortest}))
    return rows


def _fill(inputs: Mapping[str, Any], rows: tuple[int, ...] | None) -> torch.Tensor | None:
    """A ratio of exp(0 - old) may be infinite, and 0 times that is NaN: in the place of what is not computed stands the
    old value, which makes the ratio 1. RLOO's is the sum of a row."""
    import torch

    old: torch.Tensor | None = inputs.get("old_per_token_logps")
    if old is not None:
        return old.detach()
    sums = inputs.get("old_logps")
    if sums is None or rows is None:
        return None
    mask = inputs["completion_mask"]
    fill = torch.zeros(mask.shape, dtype=sums.dtype, device=sums.device)
    return fill.scatter(1, mask.argmax(1, keepdim=True), sums.detach()[:, None])


def finite_for_liger(inputs: Mapping[str, Any], batch: MicroBatch) -> Mapping[str, Any]:
    """The inputs with an old log-probability of 0 where Liger's loss gets hidden states of 0: their log-probability is
    at most 0, so the ratio is at most 1."""
    import torch

    old = inputs.get("old_per_token_logps")
    if old is None:
        return inputs
    computed = inputs["completion_mask"] != 0
    if batch.rows is not None:
        entered = torch.zeros(batch.shape[0], 1, dtype=torch.bool, device=computed.device)
        entered[list(batch.rows)] = True
        computed = computed & entered
    return {**inputs, "old_per_token_logps": torch.where(computed, old, old.new_zeros(()))}
