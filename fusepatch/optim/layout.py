"""How tensors lie in memory: what torch's fused optimizer kernels presume of parameter, gradient and state, and never
check.

A fused kernel walks every tensor from its first element to its last as if it were one dense range, in the same order
for the parameter, its gradient and its state, and takes the parameters of one call for separate memory. On the CPU
nothing
looks: other strides train wrongly, or write into memory outside the parameter. On accelerators the step raises.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that is in this process, which is what a kernel gets; any other tensor itself."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a strided tensor fill one range of memory, each place once, in any order of the
    dimensions."""
    if tensor.is_contiguous():
        return True
    filled = 1
    for stride, size in sorted((stride, size) for stride, size in _significant(tensor)):
        if stride != filled:
            return False
        filled *= size
    return True


def is_alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape and strides; the stride of a dimension of size 1 says nothing."""
    return tensor.shape == other.shape and _significant(tensor) == _significant(other)


def unfit(parameters: Iterable[torch.Tensor]) -> str | None:
    """Why a fused kernel cannot take these parameters in one call, by their memory; None where it can.

    Meta parameters, and those that a lazy module has not made yet, have no memory to look at and are passed over.
    """
    found = [local(parameter) for parameter in parameters if not parameter.is_meta and not _is_lazy(parameter)]
    for tensor in found:
        if not is_dense(tensor):
            return (
                f"a parameter of shape {tuple(tensor.shape)} has strides {tensor.stride()}, which leave gaps or overlap"
            )
    return _overlap(found)


def unlike(parameters: Sequence[torch.Tensor], others: Sequence[torch.Tensor], what: str) -> str | None:
    """How the first of `others` that does not lie as its parameter does differs from it, as words; None where all are
    alike.

    Args:
        parameters: what the kernel updates, each dense.
        others: gradients, or states, one for each parameter.
        what: what they are called in the words.
    """
    return next(filter(None, (_unlike(*pair, what) for pair in zip(parameters, others, strict=True))), None)


def seen(tensors: Sequence[torch.Tensor]) -> tuple[list[Any], ...] | None:
    """Where tensors lie, to be compared as a whole, which costs a tenth of looking at each: steps with a thousand
    parameters ask.

    Dense tensors of which this is the same have the same shape. None where there is a tensor of another class than
    torch's own, or without strides.
    """
    import torch

    kinds: set[Any] = set(map(type, tensors))
    placements = []
    if kinds and all(hasattr(kind, "_local_tensor") for kind in kinds):
        placements = [tensor.placements for tensor in tensors]  # type: ignore[attr-defined]
        tensors = [local(tensor) for tensor in tensors]
        kinds = set(map(type, tensors))
    if not kinds <= {torch.Tensor, torch.nn.Parameter}:
        return None
    try:
        strides = [tensor.stride() for tensor in tensors]
    except RuntimeError:
        return None
    return (
        strides,
        [tensor.numel() for tensor in tensors],
        [tensor.dtype for tensor in tensors],
        [tensor.device for tensor in tensors],
        placements,
    )


def _unlike(parameter: torch.Tensor, other: torch.Tensor, what: str) -> str | None:
    if other.layout is not parameter.layout:
        return f"a {what} is {str(other.layout).removeprefix('torch.')}"
    if other.dtype is not parameter.dtype or other.device != parameter.device:
        return f"a {what} is {_kind(other)}, and its parameter of shape {tuple(parameter.shape)} is {_kind(parameter)}"
    if getattr(other, "placements", None) != getattr(parameter, "placements", None):
        return f"a {what} is placed on the device mesh differently from its parameter"
    mine, its = local(parameter), local(other)
    if not is_alike(mine, its):
        return (
            f"a {what} of shape {tuple(its.shape)} has strides {its.stride()}, and its parameter of shape "
            f"{tuple(mine.shape)} has {mine.stride()}"
        )
    return None


def like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor with the strides of a dense parameter of its shape."""
    import torch

    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
        tensor
    )


def places(parameters: Sequence[torch.Tensor]) -> Any:
    """Where each parameter's memory begins, and how it goes on: changes when a parameter's `data` is exchanged."""
    where = seen(parameters)
    if where is not None:
        return [local(parameter).data_ptr() for parameter in parameters] if where[-1] else [
            parameter.data_ptr() for parameter in parameters
        ], where
    parts = [parameter if _is_lazy(parameter) else local(parameter) for parameter in parameters]
    return [(id(part), 0) if _is_lazy(part) else (part.data_ptr(), part.stride()) for part in parts]


def _overlap(tensors: Iterable[torch.Tensor]) -> str | None:
    ranges = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size(), place)
        for place, tensor in enumerate(tensors)
        if tensor.numel()
    )
    for (device, _, end, one), (next_device, start, _, other) in itertools.pairwise(ranges):
        if device == next_device and start < end:
            return f"parameters {min(one, other)} and {max(one, other)} share memory"
    return None


def _significant(tensor: torch.Tensor) -> list[tuple[int, int]]:
    return [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _is_lazy(parameter: Any) -> bool:
    from torch.nn.parameter import is_lazy

    return bool(is_lazy(parameter))
