"""Post-import hooks: call back when a module has been imported, and never let the callback break that import."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from types import ModuleType

_lock = threading.Lock()
_waiting: set[tuple[str, str]] = set()


def watch(
    name: str,
    callback: Callable[[ModuleType, bool], None],
    failed: Callable[[str, str], None],
    who: str = "",
) -> None:
    """Call `callback(module, late)` now if the module is loaded (`late`), else right after its first import.

    A hook that raises would make the user's import fail, and their second import succeed unpatched: an exception goes
    to `failed(name, traceback)` instead. What `who` already waits for is not registered twice; others may wait for it too.
    """
    import wrapt

    late = sys.modules.get(name) is not None

    def hook(module: ModuleType) -> None:
        with _lock:
            _waiting.discard((name, who))
        try:
            callback(module, late)
        except Exception:
            failed(name, traceback.format_exc())

    with _lock:
        if (name, who) in _waiting and not late:
            return
        _waiting.add((name, who))
    wrapt.register_post_import_hook(hook, name)


def is_being_imported(module: ModuleType) -> bool:
    """Whether the module's own code is still running."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
