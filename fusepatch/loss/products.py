"""The matrix products of a linear head and the dtypes that they run in.

Every product is written into memory that the caller gives, in float32 where the operands are half precision and the
hardware can, so that logits and sums are rounded once. On the CPU, which has no such product, half-precision operands
are widened a slice of the vocabulary at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from fusepatch.loss.backend import float32_products_of_half

HALF = (torch.float16, torch.bfloat16)
WIDENED_SLICE = 4096
FLOAT16_GAIN = float(1 << 14)
TILE_ROWS, TILE_COLUMNS = 128, 256
LEAST_WAVES = 8
LARGEST_REST = 0.35


@dataclass(frozen=True)
class Precision:
    """Dtypes of one call.

    operand: what hidden states and weight are rounded to before a product (autocast's dtype where autocast is on, else
        the dtype of the hidden states, as Liger-Kernel 0.8 does).
    rows: the dtype in which rows of hidden states reach the product; wider than ``operand`` where operands are widened.
    logits: the dtype of the raw head output.
    gradients: the dtype of its gradient, the operand of the products that follow.
    sums: the dtype of log-probabilities, log-sum-exp and accumulated gradients.
    gain: what the gradient of the logits is multiplied by while it is in float16, whose smallest normal number is
        larger than a typical probability; 1 elsewhere.
    """

    operand: torch.dtype
    rows: torch.dtype
    logits: torch.dtype
    gradients: torch.dtype
    sums: torch.dtype
    gain: float = 1.0

    @property
    def widened(self) -> bool:
        return self.rows != self.operand

    @property
    def narrow_range(self) -> bool:
        """Whether products run in float16, where a coefficient of one over the number of tokens loses its digits."""
        return self.rows == torch.float16


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that products run in under autocast; None where autocast is off."""
    if hasattr(torch, "get_autocast_dtype"):
        return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    # torch < 2.4
    if device.type == "cuda":
        return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
    return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None


def choose_precision(hidden: torch.Tensor) -> Precision:
    """The dtypes for a call with these hidden states under the current autocast state."""
    operand = hidden.dtype
    autocast = autocast_dtype(hidden.device)
    if autocast is not None and operand != torch.float64:
        operand = autocast
    if operand == torch.float64:
        return Precision(operand, operand, operand, operand, operand)
    if operand not in HALF:
        return Precision(operand, operand, operand, operand, torch.float32)
    if hidden.device.type != "cuda":
        return Precision(operand, torch.float32, torch.float32, torch.float32, torch.float32)
    if not float32_products_of_half(hidden.device):
        return Precision(operand, operand, operand, operand, torch.float32)
    gain = FLOAT16_GAIN if operand == torch.float16 else 1.0
    return Precision(operand, operand, torch.float32, operand, torch.float32, gain)


def slices(start: int, stop: int, limit: int) -> Iterator[slice]:
    for first in range(start, stop, limit):
        yield slice(first, min(first + limit, stop))


def product_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``out = a @ b``. ``out`` may be wider than the operands, which share a dtype."""
    # The out= forms are not autocast: the operands already have the dtype that autocast asks for.
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif out.dtype == torch.float32 and float32_products_of_half(out.device):
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        narrow = torch.empty(out.shape, dtype=a.dtype, device=out.device)
        out.copy_(torch.mm(a, b, out=narrow))


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``total += a @ b`` with ``total`` in float32 or in the operands' dtype."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, out=total)
    elif float32_products_of_half(total.device):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        # No product of half operands adds to float32 here; a slice at a time keeps the narrow copy small.
        for part in slices(0, total.shape[0], WIDENED_SLICE):
            narrow = torch.empty(total[part].shape, dtype=a.dtype, device=total.device)
            total[part] += torch.mm(a[part], b, out=narrow)


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def whole_wave_columns(rows: int, columns: int, multiprocessors: int) -> int:
    """How many columns to compute first, so that the last wave of a product's tiles is not a nearly empty one.

    A product of 512 rows by 128,256 columns takes 15.2 waves of 128 x 256 tiles on 132 multiprocessors, that is 16. As
    14 whole waves and a product for the rest it took 13.6 ms instead of 14.5 (8,192 rows of width 4,096 on an H200),
    and 3 to 7 % less at three other vocabularies with a rest as small.
    """
    tile_rows = -(-rows // TILE_ROWS) * TILE_ROWS
    wave = multiprocessors * TILE_ROWS * TILE_COLUMNS / max(tile_rows, 1)
    waves = int(columns / wave)
    rest = columns / wave - waves
    if waves < LEAST_WAVES or rest > LARGEST_REST:
        return columns
    return int((waves - 1) * wave) // TILE_COLUMNS * TILE_COLUMNS


def logits_into(out: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, precision: Precision) -> None:
    """``out[R, V] = rows[R, H] @ weight[V, H].T``; the weight in any dtype where operands are widened."""
    if not precision.widened:
        columns = weight.shape[0]
        first = columns
        if out.is_cuda:
            first = whole_wave_columns(rows.shape[0], columns, _multiprocessors(out.device))
        product_into(out[:, :first], rows, weight[:first].t())
        if first < columns:
            product_into(out[:, first:], rows, weight[first:].t())
        return
    for part in slices(0, weight.shape[0], WIDENED_SLICE):
        torch.mm(rows, _widened(weight[part], precision).t(), out=out[:, part])


def hidden_gradient_into(
    out: torch.Tensor, gradients: torch.Tensor, weight: torch.Tensor, precision: Precision
) -> None:
    """``out[R, H] = gradients[R, V] @ weight[V, H] / gain``."""
    if precision.widened:
        total = torch.zeros(out.shape, dtype=gradients.dtype, device=out.device)
        for part in slices(0, weight.shape[0], WIDENED_SLICE):
            torch.addmm(total, gradients[:, part], _widened(weight[part], precision), out=total)
        out.copy_(total)
    elif precision.gain != 1.0:
        # The product of raised gradients does not fit float16.
        total = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        product_into(total, gradients, weight)
        torch.mul(total, 1.0 / precision.gain, out=out)
    else:
        product_into(out, gradients, weight)


def _widened(weight: torch.Tensor, precision: Precision) -> torch.Tensor:
    return weight.to(precision.operand).to(precision.rows)
