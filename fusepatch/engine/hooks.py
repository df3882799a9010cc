"""Post-import hooks: call back when a module has been imported, and never let the callback break that import."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NamedTuple

_lock = threading.RLock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)

_watchers: dict[str, dict[str, _Watcher]] = {}
_with_wrapt: set[str] = set()
"""Modules whose next import wrapt waits for."""


class _Watcher(NamedTuple):
    callback: Callable[[ModuleType, bool], None]
    failed: Callable[[str, str], None]

    def call(self, module: ModuleType, late: bool) -> None:
        try:
            self.callback(module, late)
        except Exception:
            self.failed(module.__name__, traceback.format_exc())


def watch(
    name: str,
    callback: Callable[[ModuleType, bool], None],
    failed: Callable[[str, str], None],
    who: str = "",
) -> None:
    """Call `callback(module, late)` now if the module is loaded (`late`), and right after each import of it from now
    on.

    A hook that raises would make the user's import fail, and their second import succeed unpatched: an exception goes
    to `failed(name, traceback)` instead. Each `who` watches a module once: its last callback counts. Reloading is no
    import.
    """
    watcher = _Watcher(callback, failed)
    with _lock:
        _watchers.setdefault(name, {})[who] = watcher
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
    module = sys.modules.get(name)
    if module is not None:
        watcher.call(module, True)


class _Finder:
    """Hands a watched module to wrapt when it is looked for.

    wrapt serves a hook once, so a module that is imported again must be handed over again. Until then wrapt is not
    needed, and its import takes longer than all of this package's.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in _watchers or name in sys.modules:
            return None
        with _lock:
            if name in _with_wrapt:
                return None
            try:
                import wrapt
            except Exception:  # a fault of this environment, not of the import that is under way
                for watcher in _watchers[name].values():
                    watcher.failed(name, traceback.format_exc())
                return None
            _with_wrapt.add(name)
            wrapt.register_post_import_hook(_imported, name)
        return importlib.util.find_spec(name)  # asked again, so that wrapt's own finder sees this import too


_FINDER = _Finder()


def _imported(module: ModuleType) -> None:
    name = module.__name__
    with _lock:
        _with_wrapt.discard(name)
        watchers = list(_watchers[name].values())
    for watcher in watchers:
        watcher.call(module, False)


def is_loaded(name: str) -> bool:
    """Whether the module has been imported, to the end of its code."""
    module = sys.modules.get(name)
    return module is not None and not is_being_imported(module)


def is_being_imported(module: ModuleType) -> bool:
    """Whether the module's own code is still running."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
