"""fusepatch: version-gated patches for the post-training stack that is already installed.

Importing this package activates it, unless `FUSEPATCH=0` is in the environment or it is fusepatch's own command line that
imports it, which looks before it activates anything, or its pytest plugin, which activates by itself. It imports neither
torch nor any upstream.
"""

from __future__ import annotations

import os as _os
import sys as _sys
from types import FrameType as _FrameType

from fusepatch.activation import activate, deactivate, explain, is_applied, status
from fusepatch.errors import FlagConflictError, FusepatchError, SettingError, StrictError, UnknownPatchError

__version__ = "0.1.0"

__all__ = [
    "FlagConflictError",
    "FusepatchError",
    "SettingError",
    "StrictError",
    "UnknownPatchError",
    "__version__",
    "activate",
    "deactivate",
    "explain",
    "is_applied",
    "status",
]


def _is_command_line() -> bool:
    program = "".join(_sys.argv[:1])
    if program == "-m":  # what runpy leaves there while it imports the package around `__main__`
        return _sys.orig_argv[-len(_sys.argv)].removeprefix("-m") == "fusepatch"
    return _os.path.basename(program) == "fusepatch"


def _is_parent_of(module: str) -> bool:
    """Whether this package is being imported for the sake of one of its modules: importlib's frames name what it was asked for."""
    frame: _FrameType | None = _sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "importlib",
        "_frozen_importlib",
    ):
        if frame.f_locals.get("name") == module:
            return True
        frame = frame.f_back
    return False


if (
    _os.environ.get("FUSEPATCH", "").strip() != "0"
    and not _is_command_line()
    and not _is_parent_of("fusepatch.testing")  # it turns a SettingError into pytest's own kind of error
):
    activate()
