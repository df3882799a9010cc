"""fusepatch: version-gated patches for the post-training stack that is already installed.

Importing this package activates it, unless `FUSEPATCH=0` is in the environment or the process is fusepatch's own
command line, which looks before it activates anything. It imports neither torch nor any upstream.
"""

from __future__ import annotations

import os as _os
import sys as _sys

from fusepatch._version import __version__
from fusepatch.activation import activate, deactivate, explain, is_applied, status
from fusepatch.engine.patch import Note, Outcome, PatchRecord, Reason, SiteRecord
from fusepatch.errors import (
    FlagConflictError,
    FusepatchError,
    InBackwardError,
    LossUnavailableError,
    OptimizerClassError,
    SettingError,
    StrictError,
    UnknownPatchError,
)

__all__ = [
    "FlagConflictError",
    "FusepatchError",
    "InBackwardError",
    "LossUnavailableError",
    "Note",
    "OptimizerClassError",
    "Outcome",
    "PatchRecord",
    "Reason",
    "SettingError",
    "SiteRecord",
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
