"""The exceptions that fusepatch raises."""

from __future__ import annotations


class FusepatchError(Exception):
    """Base of every exception that fusepatch raises on purpose."""


class SettingError(FusepatchError, ValueError):
    """A `FUSEPATCH_*` value cannot be read, or two values contradict each other."""


class FlagConflictError(FusepatchError, ValueError):
    """Flags from the environment and flags from the user's code cannot both hold in one call."""


class InBackwardError(FusepatchError, RuntimeError):
    """The optimizer cannot run inside backward here, or a gradient arrived in more than one part while it did."""


class LossUnavailableError(FusepatchError, RuntimeError):
    """The loss that was asked for cannot be computed in this call, and no other way would be right."""


class StrictError(FusepatchError, RuntimeError):
    """Something that was asked for could not be done, and `FUSEPATCH_STRICT=1` makes that an error."""


class OptimizerClassError(FusepatchError, RuntimeError):
    """The class that `FUSEPATCH_OPTIMIZER_CLASS` names cannot be imported, takes other arguments, or cannot serve the
    parameters."""


class UnknownPatchError(FusepatchError, KeyError):
    """No patch has this id."""

    def __str__(self) -> str:
        return str(self.args[0])
