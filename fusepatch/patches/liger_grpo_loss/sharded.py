"""An lm_head that is a DTensor (FSDP2): whole during forward, its gradient sharded again in backward.

Outside of an autograd function, `full_tensor()` sums or drops gradients of the other ranks unless told otherwise;
inside of one it is the mean over ranks that FSDP's own reduction gives.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def is_sharded(tensor: Any) -> bool:
    """Whether this is a DTensor. A module that nobody has imported has no instances."""
    public = sys.modules.get("torch.distributed.tensor")
    private = sys.modules.get("torch.distributed._tensor")
    kinds = [module.DTensor for module in (public, private) if module is not None and hasattr(module, "DTensor")]
    return any(isinstance(tensor, kind) for kind in kinds)


def why_not_gathered(*tensors: Any) -> str | None:
    """Why DTensors among these cannot be gathered here; None where there are none or they can."""
    if any(is_sharded(tensor) for tensor in tensors) and "torch.distributed.tensor" not in sys.modules:
        return "the head is a DTensor, which needs torch 2.5 to be gathered"
    return None


def gather_head(ctx: Any, weight: Any, bias: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The whole weight and bias. What their gradients need to become shards again is kept in `ctx`."""
    ctx.fusepatch_shards = tuple(
        (tensor.device_mesh, tensor.placements) if is_sharded(tensor) else None for tensor in (weight, bias)
    )
    return gather_reference(weight, bias)


def gather_reference(weight: Any, bias: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The whole weight and bias, for a head that gets no gradient."""
    return _whole(weight), None if bias is None else _whole(bias)


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def shard_gradients(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """Gradients of hidden states, weight and bias, the last two in the placements of what they belong to."""
    hidden, *parameters = gradients
    shards = getattr(ctx, "fusepatch_shards", (None, None))
    return (hidden, *(_sharded(gradient, shard) for gradient, shard in zip(parameters, shards, strict=True)))


def _sharded(gradient: Any, shard: Any) -> Any:
    if gradient is None or shard is None:
        return gradient
    from torch.distributed.tensor import DTensor, Partial

    mesh, placements = shard
    partial = DTensor.from_local(gradient, mesh, [Partial("avg")] * mesh.ndim, run_check=False)
    return partial.redistribute(placements=placements)
