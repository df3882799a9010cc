"""Passes of a linear head over chunks of rows: log-probabilities, and gradients given or found on the way.

The gradient of a row's log-probability is that row's coefficient times a vector that does not depend on the
coefficient. A factor of a row commutes with the product by the weight, so a pass may run before the coefficients are
known: grad-hidden is scaled at the end, and grad-weight takes the coefficient with the row of hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fusepatch.loss import products
from fusepatch.loss.backend import Backend, choose_backend
from fusepatch.loss.chunks import (
    COLUMN_MULTIPLE,
    MIB,
    LogitBuffer,
    largest,
    logit_buffer,
    padded_columns,
    ranges,
    rows_within,
)
from fusepatch.loss.logit_map import LogitMap, RawLogits
from fusepatch.loss.products import Precision
from fusepatch.loss.rows import GradientRows, Rows, gradient_rows

DEFAULT_CHUNK_MIB = 256.0

# A group of rows shares one product for grad-weight, which reads and writes all of its float32 sum each time. The group
# may take this many chunks' memory.
GROUP_CHUNKS_LEAST = 2
GROUP_CHUNKS_MOST = 4
# A slice of the vocabulary takes this part of a chunk's memory. On an H200, 4,096 columns (128 MiB) for 8,192 rows took
# 55 ms in all, 2,048 took 57, 8,192 took 56. Narrower than 1,024, a product is bound by reading the hidden states.
SLICE_OF_CHUNK = 0.5
SLICE_COLUMNS_LEAST = 1024


@dataclass(frozen=True)
class Head:
    """A linear head and how it is computed.

    ``weight`` is [V, H] and ``bias`` [V] or None, in the caller's dtype. ``chunk_bytes`` limits the logits in memory.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    logit_map: LogitMap
    precision: Precision
    backend: Backend
    chunk_bytes: float

    @property
    def vocabulary(self) -> int:
        return self.weight.shape[0]

    @property
    def bytes_per_row(self) -> int:
        return padded_columns(self.vocabulary) * self.precision.logits.itemsize

    @property
    def chunk_rows(self) -> int:
        return rows_within(self.chunk_bytes, self.bytes_per_row)

    @property
    def group_rows(self) -> int:
        """Rows of a group, whole chunks: the cast of the float32 sum needs as much, and may reuse the memory."""
        spare = self.weight.numel() * self.weight.element_size() - self.chunk_bytes
        group_bytes = max(GROUP_CHUNKS_LEAST * self.chunk_bytes, min(spare, GROUP_CHUNKS_MOST * self.chunk_bytes))
        rows = group_bytes / (padded_columns(self.vocabulary) * self.precision.gradients.itemsize)
        return max(round(rows / self.chunk_rows), 1) * self.chunk_rows

    def groups(self, rows: int) -> list[tuple[int, int]]:
        """The first ``rows`` rows of a plan in groups of about even size."""
        return ranges(0, rows, self.group_rows, self.chunk_rows)

    def even_chunk(self, rows: int) -> int:
        """The rows of the longest chunk when ``rows`` rows are cut into chunks of about even size."""
        return largest(ranges(0, rows, self.chunk_rows))

    def slice_columns(self, rows: int) -> int:
        """Columns of a slice of the vocabulary when ``rows`` rows are held at once."""
        per_column = rows * self.precision.logits.itemsize
        fitting = max(int(self.chunk_bytes * SLICE_OF_CHUNK // per_column), SLICE_COLUMNS_LEAST)
        fitting = min(fitting, int(self.chunk_bytes // per_column)) // COLUMN_MULTIPLE * COLUMN_MULTIPLE
        return min(max(fitting, COLUMN_MULTIPLE), self.vocabulary)

    def operand_weight(self) -> torch.Tensor:
        """The weight as the products take it. A copy only where its dtype is not that of the hidden states."""
        return self.weight if self.precision.widened else self.weight.to(self.precision.operand)

    def buffer(self, rows: int, columns: int, gradients: torch.dtype | None) -> LogitBuffer:
        return logit_buffer(
            rows, columns, self.precision.logits, gradients, self.weight.device, self.backend.name == "triton"
        )


@dataclass(frozen=True)
class LogProbabilities:
    """``values`` [R]: log-probabilities of the plan's rows; ``log_sum_exp`` [R]: their normalisers."""

    values: torch.Tensor
    log_sum_exp: torch.Tensor


@dataclass(frozen=True)
class RowOutputs(LogProbabilities):
    """Also ``multiplier`` [R], by which the gradients written for each row are still to be multiplied."""

    multiplier: torch.Tensor


@dataclass(frozen=True)
class Pass:
    """One walk over rows, chunk by chunk: what it reads, the buffer of one chunk, and where its outputs go.

    ``weight`` is the operand of the products; ``grad_hidden`` is None where it is not wanted.
    """

    head: Head
    rows: Rows
    outputs: RowOutputs
    grad_hidden: GradientRows | None
    weight: torch.Tensor
    buffer: LogitBuffer

    def chunks(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Rows [start, stop) in pieces that fit the buffer."""
        return ranges(start, stop, self.buffer.logit_storage.shape[0])

    def write(self, start: int, stop: int, written: torch.Tensor | None = None) -> torch.Tensor:
        """Write the outputs of rows [start, stop), and their gradients by logits up to the multiplier into ``written``.

        Where ``written`` is None, it is the buffer's. Returns it, [R, V].
        """
        head = self.head
        logits = self.buffer.logits(stop - start, head.vocabulary)
        if written is None:
            written = self.buffer.gradients(stop - start, head.vocabulary)
        products.logits_into(logits, self.rows.take(start, stop), self.weight, head.precision)
        head.backend.steps.exponentials(
            RawLogits(logits, self.rows.targets[start:stop], head.bias, head.logit_map),
            written,
            self.outputs.values[start:stop],
            self.outputs.log_sum_exp[start:stop],
            self.outputs.multiplier[start:stop],
            head.precision.gain,
        )
        return written

    def add_hidden_gradient(self, start: int, written: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        """Make grad-hidden of the rows from ``start`` on out of what was written for them, times ``scale`` if given."""
        if self.grad_hidden is None:
            return
        out = self.grad_hidden.out(start, start + written.shape[0])
        products.hidden_gradient_into(out, written, self.weight, self.head.precision)
        if scale is not None:
            self.head.backend.steps.scale_rows(out, scale * self.head.precision.gain)
        self.grad_hidden.put(start, out)


def begin_pass(
    head: Head, rows: Rows, grad_hidden: GradientRows | None, group_rows: int, gradients: torch.dtype | None
) -> Pass:
    """Allocate the outputs and a buffer for the chunks of ``group_rows`` rows at most, see :func:`logit_buffer`."""
    outputs = torch.empty((3, rows.plan.rows), dtype=head.precision.sums, device=rows.targets.device).unbind(0)
    return Pass(
        head,
        rows,
        RowOutputs(*outputs),
        grad_hidden,
        head.operand_weight() if group_rows else head.weight,
        head.buffer(head.even_chunk(group_rows), head.vocabulary, gradients),
    )


def log_probability_pass(head: Head, rows: Rows) -> LogProbabilities:
    """One product per chunk."""
    total = rows.plan.rows
    values = torch.empty(total, dtype=head.precision.sums, device=rows.targets.device)
    normaliser = torch.empty_like(values)
    if total:
        weight = head.operand_weight()
        buffer = head.buffer(head.even_chunk(total), head.vocabulary, None)
        for start, stop in ranges(0, total, head.chunk_rows):
            logits = buffer.logits(stop - start, head.vocabulary)
            products.logits_into(logits, rows.take(start, stop), weight, head.precision)
            raw = RawLogits(logits, rows.targets[start:stop], head.bias, head.logit_map)
            head.backend.steps.log_sum_exp(raw, values[start:stop], normaliser[start:stop])
    return LogProbabilities(values, normaliser)


def hidden_gradient_pass(head: Head, rows: Rows) -> tuple[RowOutputs, torch.Tensor]:
    """Two products per chunk, log-probabilities and grad-hidden, with no coefficient known. Allocates no [V, H].

    Returns:
        the outputs, and grad-hidden [B, T, H] of the sum of the log-probabilities, each row still to be multiplied by
        ``outputs.multiplier``.
    """
    grad_hidden = gradient_rows(rows.hidden, rows.plan)
    current = begin_pass(head, rows, grad_hidden, rows.plan.rows, head.precision.gradients)
    for start, stop in current.chunks(0, rows.plan.rows):
        current.add_hidden_gradient(start, current.write(start, stop))
    outputs = replace(current.outputs, multiplier=current.outputs.multiplier * head.precision.gain)
    return outputs, grad_hidden.total.view(rows.hidden.shape)


def scale_hidden_gradient(head: Head, grad_hidden: torch.Tensor, scale: torch.Tensor) -> None:
    """Multiply grad-hidden [B, T, H] by ``scale`` [B, T] in place."""
    head.backend.steps.scale_rows(grad_hidden.view(-1, grad_hidden.shape[-1]), scale.reshape(-1))


@dataclass(frozen=True)
class Wanted:
    """Which gradients autograd asks for."""

    hidden: bool
    weight: bool
    bias: bool

    @property
    def any(self) -> bool:
        return self.hidden or self.weight or self.bias

    @property
    def parameters(self) -> bool:
        return self.weight or self.bias


@dataclass(frozen=True)
class Gradients:
    """Gradients in the dtypes and shapes of what they belong to, None where not wanted. grad_hidden is [B, T, H]."""

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


# Gives the coefficients, [stop - start], of rows [start, stop) of the plan; the log-probabilities of all rows up to
# ``stop`` are known by then.
CoefficientSource = Callable[[torch.Tensor, int, int], torch.Tensor]


def coefficient_limit(head: Head, coefficients: torch.Tensor) -> torch.Tensor | None:
    """The largest size of a coefficient, 0-dim, where float16 products need it; else None.

    A coefficient is about one over the number of tokens: rows scaled by it would lose their digits in float16.
    """
    if not head.precision.narrow_range or coefficients.numel() == 0:
        return None
    return coefficients.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)


def grouped_gradient_pass(
    head: Head,
    rows: Rows,
    wanted: Wanted,
    coefficients: CoefficientSource,
    groups: list[tuple[int, int]],
    limit: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Gradients]:
    """One pass with parameter gradients: per group of rows, logits by chunks, then one product for each gradient.

    Args:
        coefficients: called once per group, with all log-probabilities found so far ([R]) and the group's range.
        groups: ranges of rows that follow each other and cover all, from :meth:`Head.groups` for example.
        limit: from :func:`coefficient_limit` over all rows. May be left out for one group, whose own it then is.

    Returns:
        the log-probabilities [R], and the gradients.

    Raises:
        ValueError: several groups of float16 products and no limit: a later group may hold the largest coefficient.
    """
    if head.precision.narrow_range and limit is None and len(groups) > 1:
        raise ValueError(
            "limit must be the largest coefficient of all rows, found None: "
            f"float16 products of {len(groups)} groups are scaled by it"
        )
    precision = head.precision
    device = rows.targets.device
    # With one group there is nothing to add up: the product rounds once, to the dtype of the gradient.
    direct = len(groups) == 1 and head.weight.dtype == precision.gradients and not precision.narrow_range
    grad_hidden = gradient_rows(rows.hidden, rows.plan) if wanted.hidden else None
    weight_sum = None
    bias_sum = torch.zeros(head.vocabulary, dtype=precision.sums, device=device) if wanted.bias else None
    size = largest(groups)
    one_chunk = head.even_chunk(size) == size
    current = begin_pass(head, rows, grad_hidden, size, precision.gradients if one_chunk else None)
    written = group = current.buffer.gradient_storage
    if not one_chunk:
        written = group = torch.empty((size, padded_columns(head.vocabulary)), dtype=precision.gradients, device=device)
    for start, stop in groups:
        written = group[: stop - start, : head.vocabulary]
        for first, last in current.chunks(start, stop):
            current.write(first, last, written[first - start : last - start])
        found = coefficients(current.outputs.values, start, stop)
        scale = found * current.outputs.multiplier[start:stop]
        current.add_hidden_gradient(start, written, scale)
        if limit is None:
            limit = coefficient_limit(head, found)
        if limit is not None:
            # With float16 operands every row of the multiplier is slope / gain, which waits until the end.
            scale = found / limit
        if wanted.weight:
            scaled = (rows.take(start, stop) * scale.unsqueeze(-1)).to(precision.rows)
            if weight_sum is None:
                dtype = head.weight.dtype if direct else precision.sums
                weight_sum = torch.empty(head.weight.shape, dtype=dtype, device=device)
                products.product_into(weight_sum, written.t(), scaled)
            else:
                products.add_product(weight_sum, written.t(), scaled)
            del scaled
        if bias_sum is not None:
            bias_sum += sum_of_scaled_rows(scale, written, precision)
    values = current.outputs.values
    # Free before the cast, which needs memory of the weight's size.
    del current, group, written
    factor = None if limit is None else limit * (head.logit_map.slope / precision.gain)
    return values, Gradients(
        grad_hidden.total.view(rows.hidden.shape) if grad_hidden is not None else None,
        _finished(weight_sum, head.weight, factor) if wanted.weight else None,
        _finished(bias_sum, head.bias, factor) if bias_sum is not None and head.bias is not None else None,
    )


def sum_of_scaled_rows(scale: torch.Tensor, rows: torch.Tensor, precision: Precision) -> torch.Tensor:
    """The sum over ``rows`` [R, V], each times its ``scale`` [R], in ``precision.sums``; [V]."""
    # A product wants both operands in one dtype; what the first rounding loses goes in as a second row.
    rounded = scale.to(precision.gradients)
    lost = (scale - rounded).to(precision.gradients)
    total = torch.empty((2, rows.shape[1]), dtype=precision.sums, device=rows.device)
    products.product_into(total, torch.stack((rounded, lost)), rows)
    return total.sum(0)


def _finished(total: torch.Tensor | None, like: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    if total is None:
        return torch.zeros_like(like)
    if factor is not None:
        total.mul_(factor)
    return total.view(like.shape).to(like.dtype)


@dataclass(frozen=True)
class Begun:
    """grad-weight [V, H] and a sum of grad-bias [V], if wanted, with their first ``columns`` (of the logits) done."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    columns: int


def vocabulary_gradient_pass(
    head: Head,
    rows: Rows,
    wanted: Wanted,
    log_sum_exp: torch.Tensor,
    coefficients: torch.Tensor,
    begun: Begun | None = None,
) -> Gradients:
    """Grad-weight and grad-bias by slices of the vocabulary, all rows at once: two products, no float32 [V, H] sum.

    Args:
        log_sum_exp, coefficients: [R], from a pass before this one and from the policy.
        begun: gradients to be finished in place, instead of new ones.
    """
    precision = head.precision
    count = rows.plan.rows
    device = rows.targets.device
    scale = coefficients * head.logit_map.slope
    factor = None
    limit = coefficient_limit(head, scale)
    if limit is not None:
        scale = scale * (precision.gain / limit)
        factor = limit / precision.gain
    if begun is None:
        grad_weight = torch.empty(head.weight.shape, dtype=head.weight.dtype, device=device) if wanted.weight else None
        grad_bias = torch.zeros(head.vocabulary, dtype=precision.sums, device=device) if wanted.bias else None
        begun = Begun(grad_weight, grad_bias, 0)
    grad_weight, grad_bias = begun.weight, begun.bias
    if count == 0 and grad_weight is not None:
        grad_weight[begun.columns :] = 0
    if count:
        states = rows.take(0, count)
        width = head.slice_columns(count)
        buffer = head.buffer(count, width, precision.gradients)
        ones = torch.ones((1, count), dtype=precision.gradients, device=device)
        for part in products.slices(begun.columns, head.vocabulary, width):
            weight = head.weight[part]
            if not precision.widened:
                weight = weight.to(precision.operand)
            logits = buffer.logits(count, weight.shape[0])
            written = buffer.gradients(count, weight.shape[0])
            products.logits_into(logits, states, weight, precision)
            bias = head.bias[part] if head.bias is not None else None
            raw = RawLogits(logits, rows.targets, bias, head.logit_map)
            head.backend.steps.gradient_of_logits(raw, written, log_sum_exp, scale, part.start)
            if grad_weight is not None:
                _slice_of_weight_gradient(grad_weight[part], written, states, factor)
            if grad_bias is not None:
                products.product_into(grad_bias[part].unsqueeze(0), ones, written)
    return Gradients(
        None,
        grad_weight,
        _finished(grad_bias, head.bias, factor) if wanted.bias and head.bias is not None else None,
    )


def _slice_of_weight_gradient(
    out: torch.Tensor, written: torch.Tensor, states: torch.Tensor, factor: torch.Tensor | None
) -> None:
    if out.dtype == written.dtype and factor is None:
        products.product_into(out, written.t(), states)
        return
    total = torch.empty(out.shape, dtype=torch.promote_types(torch.float32, written.dtype), device=out.device)
    products.product_into(total, written.t(), states)
    out.copy_(total if factor is None else total.mul_(factor))


def make_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    logit_map: LogitMap,
    backend: str,
    chunk_mib: float,
) -> Head:
    """Choose precision and backend for these tensors under the current autocast state."""
    precision = products.choose_precision(hidden)
    return Head(
        weight.detach(),
        bias.detach() if bias is not None else None,
        logit_map,
        precision,
        choose_backend(hidden.device, precision.operand, backend),
        chunk_mib * MIB,
    )
