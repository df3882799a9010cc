"""Empty modules under the names of packages that need a GPU to install and that a door never runs."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class StandIn(ModuleType):
    """A module whose every attribute is a placeholder that cannot be called to any effect."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__module__": self.__name__})


def stand_in_for(*names: str) -> None:
    """Put a stand-in under each dotted name and its parents, so that imports of it and from it succeed."""
    for name in names:
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            dotted = ".".join(parts[:length])
            module = StandIn(dotted)
            module.__spec__ = ModuleSpec(dotted, None, is_package=True)
            sys.modules.setdefault(dotted, module)
