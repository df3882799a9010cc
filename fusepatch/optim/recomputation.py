"""Weights that are read in backward after their update, where autograd's version counter does not see it.

A checkpointed region that is computed again takes its weights anew. Ordinarily they are updated after that, and it
costs one look at what the region can reach. Where it can reach a weight that is updated already, its operations are
watched one by one, and the one that reads that weight raises. What was saved through hooks (by that region, or an
offloading of activations) is looked at when it is unpacked.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from fusepatch.errors import InBackwardError
from fusepatch.optim import in_backward
from fusepatch.optim.in_backward import InBackward

if TYPE_CHECKING:
    import torch


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which computes a checkpointed region, with a look at what it reads where it runs inside backward.

    Seen are weights that it reaches as or through its arguments, modules (and what their attributes hold), its closure
    and defaults, the globals that it names, the object of a bound method, `functools.partial`, lists, tuples, sets and
    dictionaries.

    Raises:
        InBackwardError: out of the returned function, where it reads a parameter that was updated in this backward.
    """

    def region(*args: Any, **kwargs: Any) -> Any:
        import torch

        early = in_backward.early()
        if not early or torch._C._current_graph_task_id() == -1:
            return function(*args, **kwargs)
        if all(
            attached.updated_in(tensor) is None for tensor in _reached(function, args, kwargs) for attached in early
        ):
            return function(*args, **kwargs)
        with _watch(early):
            return function(*args, **kwargs)

    return region


def _reached(*things: Any) -> Iterator[torch.Tensor]:
    """The tensors that can be reached from these things, each place looked at once."""
    import torch

    stack, seen = [*things], set[int]()
    while stack:
        thing = stack.pop()
        if isinstance(thing, torch.Tensor):
            yield thing
        elif isinstance(
            thing, torch.nn.Module | list | tuple | set | dict | functools.partial | MethodType | FunctionType
        ):
            if id(thing) not in seen:
                seen.add(id(thing))
                stack.extend(_parts(thing))
        elif thing is things[0] and hasattr(thing, "__dict__"):
            stack.extend(vars(thing).values())


def _parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, dict):
        return list(thing.values())
    if isinstance(thing, list | tuple | set):
        return list(thing)
    if isinstance(thing, functools.partial):
        return (thing.func, thing.args, thing.keywords)
    if isinstance(thing, MethodType):
        # What a method of another object than a module reads, that object holds.
        return (thing.__func__, thing.__self__, getattr(thing.__self__, "__dict__", None))
    if isinstance(thing, FunctionType):
        names = _names(thing.__code__)
        named = [value for name, value in thing.__globals__.items() if name in names]
        return (
            *(value for value in named if not isinstance(value, FunctionType)),
            *(cell.cell_contents for cell in thing.__closure__ or () if _is_filled(cell)),
            thing.__defaults__,
            thing.__kwdefaults__,
        )
    # A module. Most of its attributes are numbers and the empty dictionaries of hooks.
    return [v for v in vars(thing).values() if type(v) not in _PLAIN and (type(v) not in _CONTAINERS or v)]


_PLAIN = frozenset({bool, int, float, str, type(None)})
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set})


def _names(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def unpacked(unpack: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """An unpack hook of `torch.autograd.graph.saved_tensors_hooks`, whose results autograd does not compare with what
    was saved.

    Raises:
        InBackwardError: out of the returned function, where the result lies in the memory of an updated parameter.
    """

    def hook(packed: Any) -> Any:
        tensor = unpack(packed)
        for attached in in_backward.early():
            parameter = attached.updated_in(tensor)
            if parameter is not None:
                raise InBackwardError(_too_late("autograd unpacks a saved tensor that lies in", attached, parameter))
        return tensor

    return hook


def _too_late(what: str, attached: InBackward, parameter: torch.Tensor) -> str:
    caller = attached.caller
    return (
        f"{what} {attached.name(parameter)} in backward, but a gradient has already updated that weight "
        f"({caller.asked}). Where several checkpointed regions use the weight, set {caller.without_reentrant}. "
        f"{in_backward.read_detached(caller)}"
    )


def _watch(early: Collection[InBackward]) -> Any:
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            for tensor in tree_leaves((args, kwargs)):
                for attached in early if isinstance(tensor, Tensor) else ():
                    parameter = attached.updated_in(tensor)
                    if parameter is not None:
                        what = f"a recomputed checkpointed region reads (in {func})"
                        raise InBackwardError(_too_late(what, attached, parameter))
            return func(*args, **(kwargs or {}))

    return Watch()  # type: ignore[no-untyped-call]
