"""The patches, in the order in which their handlers run. The only place that names upstreams."""

from __future__ import annotations

from fusepatch.engine.patch import Patch
from fusepatch.patches import (
    liger_grpo_loss,
    liger_instance_flags,
    liger_sft_loss,
    optimizer_class,
    optimizer_flags,
    optimizer_in_backward,
    ray_worker_setup,
)

PATCHES: tuple[Patch, ...] = (
    liger_instance_flags.PATCH,
    liger_sft_loss.PATCH,
    optimizer_class.PATCH,
    optimizer_flags.PATCH,
    optimizer_in_backward.PATCH,
    liger_grpo_loss.PATCH,
    ray_worker_setup.PATCH,
)
