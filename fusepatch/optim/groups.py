"""Param groups as a caller hands them to a constructor: looked at without using anything up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple


class Members(NamedTuple):
    """One param group to be. `own` is the caller's dictionary, None where the caller passed bare parameters."""

    own: dict[str, Any] | None
    tensors: tuple[Any, ...]


def materialise(params: Any) -> Any:
    """The same `params` with every iterator in it read into a list, which can then be looked at and still be used.

    torch reads them itself, once; a generator that was looked at before would be an empty parameter list for it. The
    dictionaries of the groups stay the caller's own objects (torch fills them and keeps them), in their order.
    """
    if isinstance(params, Iterator):
        params = list(params)
    if isinstance(params, list | tuple) and params and isinstance(params[0], dict):
        for group in params:
            if isinstance(group, dict) and isinstance(group.get("params"), Iterator):
                group["params"] = list(group["params"])
    return params


def members(params: Any) -> list[Members]:
    """The groups in materialised `params`. What torch will refuse (no iterable, no tensors) has no members here."""
    import torch

    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        return []
    items = list(params)
    if items and isinstance(items[0], dict):
        return [Members(group, _tensors(group.get("params", ()))) for group in items if isinstance(group, dict)]
    return [Members(None, _tensors(items))]


def _tensors(params: Any) -> tuple[Any, ...]:
    import torch

    if isinstance(params, torch.Tensor):
        return (params,)
    if not isinstance(params, Iterable):
        return ()
    bare = (param[1] if isinstance(param, tuple) and len(param) == 2 else param for param in params)
    return tuple(param for param in bare if isinstance(param, torch.Tensor))
