"""Which module made a call: frameworks and user code are treated differently."""

from __future__ import annotations

import sys
from types import FrameType


def calling_module(skip: tuple[str, ...] = ()) -> str:
    """The dotted name of the nearest module up the stack that is neither ours, functools, nor below a `skip` prefix.

    A module started with `python -m` has the name `__main__`; the name that it was started by is returned instead.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = module_name(frame)
        if not is_below(name, ("fusepatch", "functools", *skip)):
            return name
        frame = frame.f_back
    return "__main__"


def module_name(frame: FrameType) -> str:
    """The name under which the frame's module is known to importers."""
    name = frame.f_globals.get("__name__", "__main__")
    if name == "__main__":
        spec = frame.f_globals.get("__spec__")
        if spec is not None and spec.name:
            return str(spec.name).removesuffix(".__main__")
    return str(name)


def is_below(name: str, packages: tuple[str, ...]) -> bool:
    """Whether the dotted `name` is one of `packages` or inside one (`verlx` is not inside `verl`)."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)
