"""fusepatch: version-gated patches for the post-training stack that is already installed.

Importing this package activates it, unless `FUSEPATCH=0` is in the environment or the process is fusepatch's own command
line, which looks before it activates anything. It imports neither torch nor any upstream.
"""

from __future__ import annotations

import os as _os
import sys as _sys

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


if _os.environ.get("FUSEPATCH", "").strip() != "0" and not _is_command_line():
    activate()
