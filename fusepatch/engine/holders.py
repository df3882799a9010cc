"""Names in other modules that were bound to a function before it was wrapped."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import ModuleType


def find(originals: Iterable[object], outside: ModuleType) -> Mapping[int, tuple[tuple[ModuleType, str], ...]]:
    """For each object (by id), the modules and names that hold it, apart from `outside`.

    One pass over `vars()` of the loaded modules. `dir` and `getattr` would run lazy modules' code and import thousands
    of modules.
    """
    wanted = {id(original) for original in originals}
    found: dict[int, list[tuple[ModuleType, str]]] = {identity: [] for identity in wanted}
    if not wanted:
        return {}
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module is outside:
            continue
        for name, value in list(vars(module).items()):
            if id(value) in wanted:
                found[id(value)].append((module, name))
    return {identity: tuple(places) for identity, places in found.items()}
