"""fusepatch: version-gated patches for the post-training stack that is already installed.

Importing this package activates it, unless `FUSEPATCH=0` is in the environment. It imports neither torch nor any upstream.
"""

from __future__ import annotations

import os as _os

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

if _os.environ.get("FUSEPATCH", "").strip() != "0":
    activate()
