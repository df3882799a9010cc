"""Parameter gradients in the memory of grad-weight alone: the choice of a user who is short of memory.

A float32 sum of grad-weight takes twice the memory of a bfloat16 gradient. The sum of a part of its rows fits into the
gradient's own memory, with the gradients of a group of rows of logits beside it, as long as the other rows of
grad-weight are not there yet. So the first part of the vocabulary is summed in that memory during the one pass that
makes the log-probabilities, and cast in place; the rest is made after it by slices of the vocabulary. The first part
costs three products, the rest four.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusepatch.loss import linear, products
from fusepatch.loss.chunks import COLUMN_MULTIPLE, largest
from fusepatch.loss.linear import Begun, CoefficientSource, Head, LogProbabilities, Wanted
from fusepatch.loss.rows import Rows, gradient_rows

# More rows per group read and write the sum less often, and leave less of the memory to it. With g rows the first part
# is about H / (2 H + g) of the vocabulary; at H = 4,096 on an H200 one more pass over the sum costs 350 rows' product.
GROUP_ROWS = 2048


@dataclass(frozen=True)
class Storage:
    """grad-weight [V, H], and what lies in its memory while its rows are not there yet.

    ``sums`` is [C, H], for the first C columns of the logits, and ``group`` [R, C], the gradients of R rows of these.
    """

    grad_weight: torch.Tensor
    sums: torch.Tensor
    group: torch.Tensor

    @property
    def columns(self) -> int:
        return self.sums.shape[0]

    def cast_in_place(self, scratch_bytes: float) -> None:
        """Turn the sums into the first C rows of grad-weight."""
        if self.sums.dtype == self.grad_weight.dtype:
            return
        # A narrower row ends before the wide row of the same number: going up, no sum is overwritten before it is read.
        step = max(int(scratch_bytes // (self.grad_weight.shape[1] * self.grad_weight.element_size())), 1)
        for part in products.slices(0, self.columns, step):
            self.grad_weight[part] = self.sums[part].to(self.grad_weight.dtype)


def columns_within(head: Head, group_rows: int) -> int:
    """How many columns' sums, and gradients of ``group_rows`` rows of them, fit the memory of grad-weight."""
    vocabulary, width = head.weight.shape
    per_column = width * head.precision.sums.itemsize + group_rows * head.precision.gradients.itemsize
    fitting = vocabulary * width * head.weight.element_size() // per_column
    return fitting // COLUMN_MULTIPLE * COLUMN_MULTIPLE


def group_rows(head: Head) -> int:
    """Whole chunks of rows whose gradients are added to the sum at a time."""
    return max(round(GROUP_ROWS / head.chunk_rows), 1) * head.chunk_rows


def serves(head: Head, groups: list[tuple[int, int]]) -> bool:
    """Whether there are rows, sums as wide as grad-weight or wider, and its memory has room for a tile of columns."""
    if not groups or head.precision.sums.itemsize < head.weight.element_size():
        return False
    return columns_within(head, largest(groups)) > 0


def allocate(head: Head, group_rows: int) -> Storage:
    columns = columns_within(head, group_rows)
    width = head.weight.shape[1]
    grad_weight = torch.empty(head.weight.shape, dtype=head.weight.dtype, device=head.weight.device)
    memory = grad_weight.view(-1).view(torch.uint8)
    sums_end = columns * width * head.precision.sums.itemsize
    group_end = sums_end + group_rows * columns * head.precision.gradients.itemsize
    sums = memory[:sums_end].view(head.precision.sums).view(columns, width)
    group = memory[sums_end:group_end].view(head.precision.gradients).view(group_rows, columns)
    return Storage(grad_weight, sums, group)


@dataclass(frozen=True)
class FirstPart:
    """Log-probabilities and ``coefficients`` [R] of every row, grad-hidden [B, T, H] if wanted, and what is begun."""

    log_probabilities: LogProbabilities
    coefficients: torch.Tensor
    grad_hidden: torch.Tensor | None
    begun: Begun


def first_columns_pass(
    head: Head,
    rows: Rows,
    wanted: Wanted,
    coefficients: CoefficientSource,
    groups: list[tuple[int, int]],
) -> FirstPart:
    """Everything but the parameters' gradients beyond the first columns, without memory for a sum of grad-weight.

    Not for float16 products, and only where ``serves`` says so.

    Args:
        coefficients: called once per group, with all log-probabilities found so far ([R]) and the group's range.
        groups: ranges of rows that follow each other and cover all.
    """
    precision = head.precision
    grad_hidden = gradient_rows(rows.hidden, rows.plan) if wanted.hidden else None
    bias_sum = torch.zeros(head.vocabulary, dtype=precision.sums, device=rows.targets.device) if wanted.bias else None
    storage = allocate(head, largest(groups))
    columns = storage.columns
    current = linear.begin_pass(head, rows, grad_hidden, largest(groups), precision.gradients)
    outputs = current.outputs
    found = torch.empty_like(outputs.values)
    for start, stop in groups:
        for first, last in current.chunks(start, stop):
            written = current.write(first, last)
            storage.group[first - start : last - start] = written[:, :columns]
            current.add_hidden_gradient(first, written)
        found[start:stop] = coefficients(outputs.values, start, stop)
        scale = found[start:stop] * outputs.multiplier[start:stop]
        scaled = (rows.take(start, stop) * scale.unsqueeze(-1)).to(precision.rows)
        group = storage.group[: stop - start]
        add = products.product_into if start == 0 else products.add_product
        add(storage.sums, group.t(), scaled)
        if bias_sum is not None:
            bias_sum[:columns] += linear.sum_of_scaled_rows(scale, group, precision)
    del current, written
    storage.cast_in_place(head.chunk_bytes)
    total = None
    if grad_hidden is not None:
        total = grad_hidden.total.view(rows.hidden.shape)
        linear.scale_hidden_gradient(head, total, rows.plan.put(found * outputs.multiplier))
    return FirstPart(outputs, found, total, Begun(storage.grad_weight, bias_sum, columns))
