"""The patches, in the order in which their handlers run. The only place that names upstreams."""

from __future__ import annotations

from fusepatch import settings
from fusepatch.engine.patch import Patch
from fusepatch.errors import UnknownPatchError
from fusepatch.patches import (
    grpo_live_tokens,
    liger_grpo_loss,
    liger_instance_flags,
    liger_sft_loss,
    optimizer_class,
    optimizer_flags,
    optimizer_in_backward,
    ray_worker_setup,
    sdpa_masked_width,
)

PATCHES: tuple[Patch, ...] = (
    liger_instance_flags.PATCH,
    liger_sft_loss.PATCH,
    optimizer_class.PATCH,
    optimizer_flags.PATCH,
    optimizer_in_backward.PATCH,
    liger_grpo_loss.PATCH,
    grpo_live_tokens.PATCH,
    ray_worker_setup.PATCH,
    sdpa_masked_width.PATCH,
)


def find(id: str) -> Patch:
    """The patch with this id.

    Raises:
        UnknownPatchError: no patch has it.
    """
    for patch in PATCHES:
        if patch.id == id:
            return patch
    import difflib  # here, since every training script imports this module

    known = [patch.id for patch in PATCHES]
    nearest = difflib.get_close_matches(id, known, n=1)
    hint = f"; the nearest is {nearest[0]}" if nearest else ""
    raise UnknownPatchError(f"there is no patch {id!r}{hint}. The patches are {', '.join(known)}.")


def readers(variable: str) -> tuple[str, ...]:
    """The ids of the patches that read a variable; none reads one that decides what is activated."""
    return tuple(patch.id for patch in PATCHES if variable in patch.variables)


def is_requested(patch: Patch, read: settings.Settings) -> bool:
    """Whether the patch acts by itself, or the variable that asks for it is set to do so."""
    variable = settings.find(patch.requested_by)
    return variable is None or bool(getattr(read, variable.field))
