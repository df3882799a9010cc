"""Reads rows of hidden states and writes rows of their gradient, without copying what is not needed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fusepatch.loss.chunks import RowPlan
from fusepatch.loss.products import Precision


@dataclass(frozen=True)
class Rows:
    """The plan's rows of ``hidden`` [B, T, H], which may have any strides, and their ``targets``, int64 [R]."""

    hidden: torch.Tensor
    targets: torch.Tensor
    plan: RowPlan
    precision: Precision

    def only(self, plan: RowPlan) -> Rows:
        """Those of a plan whose rows are among these."""
        return replace(self, targets=plan.take(self.plan.put(self.targets)), plan=plan)

    def take(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of the plan, [R, H] in ``precision.rows``: a view where nothing has to move."""
        batch, length, width = self.hidden.shape
        stride = self.hidden.stride()
        flat = batch == 1 or length == 1 or stride[0] == length * stride[1]
        if flat:
            view = self.hidden.as_strided((batch * length, width), (stride[1] if length > 1 else stride[0], stride[2]))
            index = self.plan.index
            rows = view[start:stop] if index is None else view.index_select(0, index[start:stop])
        else:
            positions = self.plan.positions(start, stop, self.hidden.device)
            rows = self.hidden[positions // length, positions % length]
        # Two steps: autocast's rounding happens also where the product then runs in a wider dtype.
        rows = rows.to(self.precision.operand).to(self.precision.rows)
        return rows if rows.stride(1) == 1 or width == 1 else rows.contiguous()


@dataclass(frozen=True)
class GradientRows:
    """Collects rows of a gradient with the shape and dtype of ``hidden``; rows outside the plan are zero."""

    total: torch.Tensor
    plan: RowPlan

    def out(self, start: int, stop: int) -> torch.Tensor:
        """Memory for rows [start, stop) of the plan, to be given to :meth:`put` once written."""
        if self.plan.index is None:
            return self.total[start:stop]
        return self.total.new_empty((stop - start, self.total.shape[1]))

    def put(self, start: int, rows: torch.Tensor) -> None:
        if self.plan.index is not None:
            self.total.index_copy_(0, self.plan.index[start : start + rows.shape[0]], rows)


def gradient_rows(hidden: torch.Tensor, plan: RowPlan) -> GradientRows:
    """Allocate a contiguous gradient for ``hidden`` [B, T, H]."""
    batch, length, width = hidden.shape
    make = torch.empty if plan.index is None else torch.zeros
    return GradientRows(make((batch * length, width), dtype=hidden.dtype, device=hidden.device), plan)
