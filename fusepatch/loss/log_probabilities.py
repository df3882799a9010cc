"""Log-probabilities of given tokens under a linear head, differentiable, never with all logits in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusepatch.loss import linear
from fusepatch.loss.arguments import check_head, check_targets
from fusepatch.loss.chunks import plan_all_rows
from fusepatch.loss.linear import DEFAULT_CHUNK_MIB, Head, Wanted
from fusepatch.loss.logit_map import PLAIN, LogitMap
from fusepatch.loss.rows import Rows


class _LinearLogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        head: Head,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.head = head
        return linear.log_probability_pass(head, _rows(head, hidden, targets)).values.to(torch.float32)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, _, bias, targets = ctx.saved_tensors
        coefficients = grad_outputs[0].to(torch.float32)
        wanted = Wanted(ctx.needs_input_grad[0], ctx.needs_input_grad[1], bias is not None and ctx.needs_input_grad[2])
        _, gradients = linear.grouped_gradient_pass(
            ctx.head,
            _rows(ctx.head, hidden, targets),
            wanted,
            lambda values, start, stop: coefficients[start:stop],
            ctx.head.groups(hidden.shape[0]),
            linear.coefficient_limit(ctx.head, coefficients),
        )
        grad_hidden = gradients.hidden.view(hidden.shape) if gradients.hidden is not None else None
        return grad_hidden, gradients.weight, gradients.bias, None, None


def _rows(head: Head, hidden: torch.Tensor, targets: torch.Tensor) -> Rows:
    return Rows(hidden.detach().unsqueeze(0), targets, plan_all_rows((1, hidden.shape[0])), head.precision)


def linear_log_probabilities(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    logit_map: LogitMap = PLAIN,
    chunk_mib: float = DEFAULT_CHUNK_MIB,
    backend: str = "auto",
) -> torch.Tensor:
    """``log_softmax(logit_map(hidden @ weight.T + bias))[targets]`` by chunks of rows.

    Backward recomputes the logits of each chunk, so the weight has to be whole in backward too (not so under ZeRO-3).

    Args:
        hidden: [N, H], any strides; weight: [V, H]; targets: int64 or int32 [N], outside [0, V) a target counts as one
            whose logit is 0; bias: [V] or None.
        chunk_mib: MiB for the logits of one chunk.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Returns:
        float32 [N], differentiable with respect to hidden, weight and bias.

    Raises:
        ValueError: a shape, a device or the dtype of the targets does not fit.
        BackendUnavailableError: ``backend="triton"`` where Triton cannot run.
    """
    if hidden.dim() != 2:
        raise ValueError(f"hidden must be [N, H], found shape {tuple(hidden.shape)}")
    check_head(hidden.unsqueeze(0), weight, bias)
    check_targets(targets, (hidden.shape[0],), hidden.device)
    head = linear.make_head(hidden, weight, bias, logit_map, backend, chunk_mib)
    apply: Callable[..., torch.Tensor] = _LinearLogProbabilities.apply
    return apply(hidden, weight, bias, targets.to(torch.int64), head)
