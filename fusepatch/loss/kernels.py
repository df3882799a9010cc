# ruff: noqa: N803 (Triton's compile-time arguments are written in capitals)
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernels over one chunk of logits: log-sum-exp, target logit, and the gradient, written in place.

Import this module only where Triton is wanted: ``fusepatch.loss.backend`` decides that at call time.

One program handles one row and walks along it, so the number of rows is only the grid and nothing is recompiled when
it changes. Row offsets are 64-bit. A row is read and written up to ``padded`` columns: the next multiple of 64 where
the row stride has room for it, so that loads stay vectorised for any vocabulary size, else ``width``. Columns past
``width`` count as logits of minus infinity. The kernels themselves take a vector's stride to be 1 and compare no sizes;
the functions at the end of this module see to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusepatch.loss.arguments import check_targets, check_tensor
from fusepatch.loss.logit_map import RawLogits

# A later block may exceed the running pivot by this much before what was written is rescaled: exp(30) * 2**18 columns
# is far inside the range that float32 and bfloat16 share.
PIVOT_SLACK = tl.constexpr(30.0)


@triton.jit
def _softcapped(x, softcap):
    # libdevice.tanh moved between Triton 3.0 and 3.2; this form is exact at both ends.
    return softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * x / softcap)))


@triton.jit
def _raw_and_logits(
    loaded, bias, inside, logit_scale, softcap, inverse_temperature, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr
):
    raw = loaded.to(tl.float32)
    if HAS_BIAS:
        raw += tl.load(bias, mask=inside, other=0.0).to(tl.float32)
    x = raw * logit_scale
    if HAS_SOFTCAP:
        x = _softcapped(x, softcap)
    return raw, x * inverse_temperature


@triton.jit
def _target_raw_and_logit(
    row,
    target,
    bias,
    width,
    logit_scale,
    softcap,
    inverse_temperature,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    known = (target >= 0) & (target < width)
    loaded = tl.load(row + target, mask=known, other=0.0)
    raw, logit = _raw_and_logits(
        loaded, bias + target, known, logit_scale, softcap, inverse_temperature, HAS_BIAS, HAS_SOFTCAP
    )
    return known, raw, tl.where(known, logit, 0.0)


@triton.jit
def _softcap_slope(raw, logit_scale, softcap):
    ratio = _softcapped(raw * logit_scale, softcap) / softcap
    return 1.0 - ratio * ratio


@triton.jit
def log_sum_exp_kernel(
    logits,  # data
    bias,
    targets,
    log_probabilities,
    log_sum_exp,
    logit_scale,  # scalars
    softcap,
    inverse_temperature,
    width,  # shapes
    padded,
    logits_stride,  # strides
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_row = logits + row * logits_stride
    target = tl.load(targets + row)
    _known, _target_raw, target_logit = _target_raw_and_logit(
        logits_row, target, bias, width, logit_scale, softcap, inverse_temperature, HAS_BIAS, HAS_SOFTCAP
    )

    offsets = tl.arange(0, BLOCK)
    # Finite, so that a block of minus infinities (a masked vocabulary entry) does not make inf - inf.
    pivot = -1.0e30
    total = tl.zeros([BLOCK], dtype=tl.float32)
    following = tl.load(logits_row + offsets, mask=offsets < padded, other=0.0)
    for start in range(0, padded, BLOCK):
        columns = start + offsets
        loaded = following
        # The next block is on its way while this one is reduced.
        following = tl.load(logits_row + columns + BLOCK, mask=columns + BLOCK < padded, other=0.0)
        _raw, x = _raw_and_logits(
            loaded, bias + columns, columns < width, logit_scale, softcap, inverse_temperature, HAS_BIAS, HAS_SOFTCAP
        )
        x = tl.where(columns < width, x, float("-inf"))
        block_maximum = tl.max(x, axis=0)
        if block_maximum > pivot + PIVOT_SLACK:
            total = total * tl.exp(pivot - block_maximum)
            pivot = block_maximum
        total += tl.exp(x - pivot)
    normaliser = pivot + tl.log(tl.sum(total, axis=0))
    tl.store(log_sum_exp + row, normaliser)
    tl.store(log_probabilities + row, target_logit - normaliser)


@triton.jit
def exponentials_kernel(
    logits,  # data
    gradients,
    bias,
    targets,
    log_probabilities,
    log_sum_exp,
    multiplier,
    logit_scale,  # scalars
    softcap,
    inverse_temperature,
    width,  # shapes
    padded,
    logits_stride,  # strides
    gradients_stride,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    OVERLAPPING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_row = logits + row * logits_stride
    gradients_row = gradients + row * gradients_stride
    target = tl.load(targets + row)
    known, target_raw, target_logit = _target_raw_and_logit(
        logits_row, target, bias, width, logit_scale, softcap, inverse_temperature, HAS_BIAS, HAS_SOFTCAP
    )

    offsets = tl.arange(0, BLOCK)
    pivot = -1.0e30
    others = tl.zeros([BLOCK], dtype=tl.float32)
    following = tl.load(logits_row + offsets, mask=offsets < padded, other=0.0)
    for start in range(0, padded, BLOCK):
        columns = start + offsets
        loaded = following
        following = tl.load(logits_row + columns + BLOCK, mask=columns + BLOCK < padded, other=0.0)
        raw, x = _raw_and_logits(
            loaded, bias + columns, columns < width, logit_scale, softcap, inverse_temperature, HAS_BIAS, HAS_SOFTCAP
        )
        x = tl.where(columns < width, x, float("-inf"))
        block_maximum = tl.max(x, axis=0)
        if block_maximum > pivot + PIVOT_SLACK:
            factor = tl.exp(pivot - block_maximum)
            others = others * factor
            tl.debug_barrier()
            for earlier in range(0, start, BLOCK):
                written = tl.load(gradients_row + earlier + offsets).to(tl.float32)
                tl.store(gradients_row + earlier + offsets, (written * factor).to(gradients.dtype.element_ty))
            pivot = block_maximum
        exponential = tl.exp(x - pivot)
        # The target is left out of the sum: 1 - p of a confident token is the sum of the others, not a difference.
        others += tl.where(columns == target, 0.0, exponential)
        if HAS_SOFTCAP:
            exponential *= _softcap_slope(raw, logit_scale, softcap)
        if OVERLAPPING:
            # A narrower gradient row overlays the first half of its logits: no warp may store before all have loaded.
            tl.debug_barrier()
        tl.store(gradients_row + columns, exponential.to(gradients.dtype.element_ty), mask=columns < padded)

    rest = tl.sum(others, axis=0)
    normaliser = rest + tl.where(known, tl.exp(target_logit - pivot), 0.0)
    at_target = -rest
    if HAS_SOFTCAP:
        at_target *= _softcap_slope(target_raw, logit_scale, softcap)
    # The block that covers the target was stored by other threads.
    tl.debug_barrier()
    tl.store(gradients_row + target, at_target.to(gradients.dtype.element_ty), mask=known)
    logarithm = pivot + tl.log(normaliser)
    tl.store(log_sum_exp + row, logarithm)
    tl.store(log_probabilities + row, target_logit - logarithm)
    tl.store(multiplier + row, -logit_scale * inverse_temperature / normaliser)


@triton.jit
def gradients_kernel(
    logits,  # data
    gradients,
    bias,
    targets,
    log_sum_exp,
    scale,
    logit_scale,  # scalars
    softcap,
    inverse_temperature,
    first_column,  # shapes
    width,
    padded,
    logits_stride,  # strides
    gradients_stride,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    OVERLAPPING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_row = logits + row * logits_stride
    gradients_row = gradients + row * gradients_stride
    # A target outside this slice of the vocabulary matches none of its columns.
    target = tl.load(targets + row) - first_column
    normaliser = tl.load(log_sum_exp + row)
    row_scale = tl.load(scale + row)
    offsets = tl.arange(0, BLOCK)
    for start in range(0, padded, BLOCK):
        columns = start + offsets
        loaded = tl.load(logits_row + columns, mask=columns < padded, other=0.0)
        raw, x = _raw_and_logits(
            loaded, bias + columns, columns < width, logit_scale, softcap, inverse_temperature, HAS_BIAS, HAS_SOFTCAP
        )
        probability = tl.exp(x - normaliser)
        gradient = tl.where((columns == target) & (columns < width), 1.0 - probability, -probability) * row_scale
        if HAS_SOFTCAP:
            gradient *= _softcap_slope(raw, logit_scale, softcap)
        if OVERLAPPING:
            tl.debug_barrier()
        tl.store(gradients_row + columns, gradient.to(gradients.dtype.element_ty), mask=columns < padded)


@triton.jit
def scale_rows_kernel(values, scale, width, values_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    values_row = values + row * values_stride
    row_scale = tl.load(scale + row)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        x = tl.load(values_row + columns, mask=inside, other=0.0).to(tl.float32) * row_scale
        tl.store(values_row + columns, x.to(values.dtype.element_ty), mask=inside)


# The fastest of 21 shapes tried on an H200 with 512 rows of 128,256 columns: 1.6 ms for 8,192 rows, where the bytes
# alone take 1.5.
BLOCK = 2048
NUM_WARPS = 4


def _launch_settings(padded: int) -> dict[str, Any]:
    block = min(BLOCK, triton.next_power_of_2(padded))
    # Said aloud because the default of enable_fp_fusion changes in Triton 3.10, and 3.9 warns about it.
    return {"BLOCK": block, "num_warps": max(1, min(NUM_WARPS, block // 256)), "enable_fp_fusion": True}


def _padded_width(width: int, *matrices: Tensor) -> int:
    """The columns that a row is walked along: up to the next multiple of 64 where the row has memory for them."""
    padded = -(-width // 64) * 64
    fits = all(_column_of_first(matrix) + padded <= matrix.stride(0) for matrix in matrices)
    return padded if fits else width


def _column_of_first(matrix: Tensor) -> int:
    """Where in its row of the memory a matrix begins that may be a cut of a wider one."""
    return int(matrix.storage_offset() % max(matrix.stride(0), 1))


def _check_matrix(name: str, values: Tensor, shape: tuple[int, int], device: torch.device) -> None:
    """A kernel walks along a row one value after the other, and rows that it writes may not share memory."""
    check_tensor(name, values, device, shape)
    rows, width = shape
    if (width > 1 and values.stride(1) != 1) or (rows > 1 and values.stride(0) < width):
        raise ValueError(
            f"{name} must have rows that are contiguous and do not overlap, found shape {shape} with strides "
            f"{values.stride()}"
        )


def _check_pair(logits: Tensor, gradients: Tensor) -> None:
    _check_matrix("logits", logits, (logits.shape[0], logits.shape[1]), logits.device)
    _check_matrix("gradients", gradients, (logits.shape[0], logits.shape[1]), logits.device)
    in_place = logits.data_ptr() == gradients.data_ptr() and logits.shape[0] > 1
    if in_place and logits.stride(0) * logits.itemsize != gradients.stride(0) * gradients.itemsize:
        raise ValueError(
            "gradients that share memory with the logits must have rows of the same number of bytes, found strides "
            f"{gradients.stride()} of {gradients.dtype} and {logits.stride()} of {logits.dtype}"
        )


def _read(name: str, values: Tensor, length: int, device: torch.device) -> Tensor:
    """A vector that a kernel reads, one value after the other: a copy where the caller's has another stride."""
    check_tensor(name, values, device, (length,))
    return values.contiguous()


def _check_written(logits: Tensor, **vectors: Tensor) -> None:
    for name, values in vectors.items():
        check_tensor(name, values, logits.device, (logits.shape[0],))
        if not values.is_contiguous():
            raise ValueError(f"{name} must be contiguous, since a kernel writes it; found stride {values.stride()}")


def _launch(
    kernel: Any,
    data: Sequence[Tensor],
    scalars: Sequence[float],
    shapes: Sequence[int],
    strides: Sequence[int],
    **compile_time: bool,
) -> None:
    """One program for each row of the first tensor, on its device: Triton by itself takes whichever device is current.

    The last of ``shapes`` is the number of columns that a program walks along.
    """
    rows = data[0].shape[0]
    if rows:
        with torch.cuda.device_of(data[0]):
            kernel[(rows,)](*data, *scalars, *shapes, *strides, **compile_time, **_launch_settings(shapes[-1]))


def _launch_over_logits(
    kernel: Any,
    logits: RawLogits,
    gradients: Tensor | None,
    vectors: Sequence[Tensor],
    first_column: Sequence[int] = (),
) -> None:
    """``gradients`` is None for a kernel that writes none; ``vectors`` are the kernel's other data."""
    raw, targets, bias, logit_map = logits
    rows, width = raw.shape
    check_targets(targets, (rows,), raw.device)
    offset = _read("bias", bias, width, raw.device) if bias is not None else raw
    matrices, compile_time = [raw], {}
    if gradients is not None:
        matrices.append(gradients)
        compile_time["OVERLAPPING"] = raw.dtype != gradients.dtype and raw.data_ptr() == gradients.data_ptr()
    cap = logit_map.final_logit_softcapping
    _launch(
        kernel,
        (*matrices, offset, targets.contiguous(), *vectors),
        (float(logit_map.logit_scale), float(cap or 1.0), 1.0 / float(logit_map.temperature)),
        (*first_column, width, _padded_width(width, *matrices)),
        [matrix.stride(0) for matrix in matrices],
        HAS_BIAS=bias is not None,
        HAS_SOFTCAP=cap is not None,
        **compile_time,
    )


def log_sum_exp(logits: RawLogits, log_probabilities: Tensor, normaliser: Tensor) -> None:
    """See :func:`fusepatch.loss.steps.log_sum_exp`. Raises ValueError if a shape, a device or a stride does not fit."""
    raw = logits.raw
    _check_matrix("logits", raw, (raw.shape[0], raw.shape[1]), raw.device)
    _check_written(raw, log_probabilities=log_probabilities, normaliser=normaliser)
    _launch_over_logits(log_sum_exp_kernel, logits, None, (log_probabilities, normaliser))


def exponentials(
    logits: RawLogits, gradients: Tensor, log_probabilities: Tensor, normaliser: Tensor, multiplier: Tensor, gain: float
) -> None:
    """See :func:`fusepatch.loss.steps.exponentials`: one read of the logits, one write of the gradients.

    Raises ValueError if a shape, a device or a stride does not fit.
    """
    _check_pair(logits.raw, gradients)
    _check_written(logits.raw, log_probabilities=log_probabilities, normaliser=normaliser, multiplier=multiplier)
    if gradients.dtype == torch.float16:
        # Exponentials relative to a pivot do not fit float16's range; probabilities do, at the price of a second read.
        log_sum_exp(logits, log_probabilities, normaliser)
        gradient_of_logits(logits, gradients, normaliser, multiplier.fill_(gain), 0)
        multiplier.fill_(logits.logit_map.slope / gain)
        return
    _launch_over_logits(exponentials_kernel, logits, gradients, (log_probabilities, normaliser, multiplier))


def gradient_of_logits(
    logits: RawLogits, gradients: Tensor, normaliser: Tensor, scale: Tensor, first_column: int
) -> None:
    """See :func:`fusepatch.loss.steps.gradient_of_logits`.

    Raises ValueError if a shape, a device or a stride does not fit.
    """
    rows, device = logits.raw.shape[0], logits.raw.device
    _check_pair(logits.raw, gradients)
    read = (_read("normaliser", normaliser, rows, device), _read("scale", scale, rows, device))
    _launch_over_logits(gradients_kernel, logits, gradients, read, (first_column,))


def scale_rows(values: Tensor, scale: Tensor) -> None:
    """See :func:`fusepatch.loss.steps.scale_rows`. Raises ValueError if a shape, a device or a stride does not fit."""
    rows, width = values.shape
    _check_matrix("values", values, (rows, width), values.device)
    factors = _read("scale", scale, rows, values.device)
    _launch(scale_rows_kernel, (values, factors), (), (width,), (values.stride(0),))
