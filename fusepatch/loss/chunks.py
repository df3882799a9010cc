"""Which rows enter, in what pieces, and the buffer that holds one piece's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ROW_MULTIPLE = 128
COLUMN_MULTIPLE = 128
MIB = 1 << 20


def rows_within(budget_bytes: float, bytes_per_row: int) -> int:
    """The largest multiple of 128 rows whose bytes fit the budget, at least 128."""
    return max(int(budget_bytes // max(bytes_per_row, 1)) // ROW_MULTIPLE * ROW_MULTIPLE, ROW_MULTIPLE)


def ranges(start: int, stop: int, limit: int, multiple: int = ROW_MULTIPLE) -> list[tuple[int, int]]:
    """Cut [start, stop) into the fewest pieces of at most ``limit``, even in size, each but the last a multiple.

    Even pieces, because a short last piece would run its matrix products on a part of the device only.
    """
    total = stop - start
    if total <= 0:
        return []
    pieces = -(-total // limit)
    size = min(-(-total // (pieces * multiple)) * multiple, limit)
    return [(first, min(first + size, stop)) for first in range(start, stop, size)]


def largest(pieces: Sequence[tuple[int, int]]) -> int:
    """The length of the longest of these ranges, 0 where there is none."""
    return max((stop - start for start, stop in pieces), default=0)


def whole_sequences(counts: Sequence[int], limit: int) -> list[tuple[int, int]] | None:
    """Cut the rows of a plan into groups of at most ``limit`` between sequences; None where one sequence is longer.

    ``counts`` is the number of rows of each sequence. As few groups as a cut from the front can make, none empty.
    """
    groups: list[tuple[int, int]] = []
    start = stop = 0
    for count in counts:
        if count > limit:
            return None
        if stop + count - start > limit:
            groups.append((start, stop))
            start = stop
        stop += count
    return [*groups, (start, stop)] if stop > start else groups


@dataclass(frozen=True)
class RowPlan:
    """The rows of a [B, T] batch that are computed, in the order of the batch.

    ``index`` is int64 [R], positions in the flattened batch, or None when every row enters (R = B * T). ``counts`` is
    the number of rows of each sequence, known on the host. ``computed`` is bool [B, T], or None when every row enters.
    """

    shape: tuple[int, int]
    counts: tuple[int, ...]
    index: torch.Tensor | None
    computed: torch.Tensor | None

    @property
    def rows(self) -> int:
        return sum(self.counts)

    def sequences(self, start: int, stop: int) -> tuple[int, int]:
        """The range of sequences that rows [start, stop) of the plan belong to."""
        first, last, seen = 0, 0, 0
        for sequence, count in enumerate(self.counts):
            if seen <= start:
                first = sequence
            if seen < stop:
                last = sequence + 1
            seen += count
        return first, last

    def positions(self, start: int, stop: int, device: torch.device) -> torch.Tensor:
        """int64 positions in the flattened batch of rows [start, stop) of the plan."""
        if self.index is None:
            return torch.arange(start, stop, device=device)
        return self.index[start:stop]

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """The entries of a [B, T] tensor at the plan's rows, [R]."""
        flat = values.reshape(-1)
        return flat if self.index is None else flat.index_select(0, self.index)

    def put(self, values: torch.Tensor) -> torch.Tensor:
        """A [B, T] tensor with ``values`` [R] at the plan's rows and zeros elsewhere."""
        if self.index is None:
            return values.view(self.shape)
        flat = values.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_copy_(0, self.index, values).view(self.shape)


def plan_all_rows(shape: tuple[int, int]) -> RowPlan:
    """Every row of a [B, T] batch. No host sync."""
    return RowPlan(shape, (shape[1],) * shape[0], None, None)


def plan_rows(keep: torch.Tensor) -> RowPlan:
    """The rows where ``keep`` (bool [B, T]) is true. One host sync: the counts."""
    shape = (keep.shape[0], keep.shape[1])
    counts: Sequence[int] = keep.sum(dim=1).tolist()
    total = sum(counts)
    if total == keep.numel():
        return plan_all_rows(shape)
    # nonzero() would sync again. The size is known: each kept row is scattered to its rank, the rest to a spare slot.
    flat = keep.reshape(-1)
    rank = flat.cumsum(0) - 1
    index = torch.zeros(total + 1, dtype=torch.int64, device=keep.device)
    index.scatter_(0, torch.where(flat, rank, total), torch.arange(flat.numel(), device=keep.device))
    return RowPlan(shape, tuple(counts), index[:total], keep)


@dataclass(frozen=True)
class LogitBuffer:
    """Memory for the raw head output of up to ``rows`` rows and ``columns`` columns, and for its gradient.

    The gradient is written over the logits where a kernel can narrow in place; otherwise it has memory of its own.
    Rows are padded to a multiple of 64 columns, which keeps every row aligned for the matrix products.
    """

    logit_storage: torch.Tensor
    gradient_storage: torch.Tensor
    narrowed_in_place: bool

    def logits(self, rows: int, columns: int) -> torch.Tensor:
        return self.logit_storage[:rows, :columns]

    def gradients(self, rows: int, columns: int) -> torch.Tensor:
        return self.gradient_storage[:rows, :columns]


def padded_columns(columns: int) -> int:
    """Columns rounded up to a multiple of 64."""
    return -(-columns // 64) * 64


def logit_buffer(
    rows: int,
    columns: int,
    logits: torch.dtype,
    gradients: torch.dtype | None,
    device: torch.device,
    narrow_in_place: bool,
) -> LogitBuffer:
    """Allocate a buffer; ``gradients`` None means that no gradient will be written in it."""
    stride = padded_columns(columns)
    storage = torch.empty((rows, stride), dtype=logits, device=device)
    if gradients is None or gradients == logits:
        return LogitBuffer(storage, storage, False)
    if narrow_in_place and gradients.itemsize < logits.itemsize:
        return LogitBuffer(storage, storage.view(gradients), True)
    return LogitBuffer(storage, torch.empty((rows, stride), dtype=gradients, device=device), False)
