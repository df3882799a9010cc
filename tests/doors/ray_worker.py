"""What the workers of `ray_driver.py` run; Ray puts the driver's folder on their path."""

from __future__ import annotations

import os
import sys
from typing import Any


def look() -> dict[str, Any]:
    """This process before and after its first import of torch: its own variables, and whether the patches are in."""
    from_the_start = "fusepatch" in sys.modules
    import torch

    return {
        "pid": os.getpid(),
        "active from the start": from_the_start,
        "patched": torch.optim.AdamW.__init__.__code__.co_filename.endswith(os.path.join("engine", "install.py")),
        "variables": {name: value for name, value in os.environ.items() if name.startswith("FUSEPATCH")},
        "their hook": os.environ.get("THEIR_HOOK"),
    }


def train() -> dict[str, Any]:
    """Apply Liger to a tiny model, and build its optimizer as verl's workers do."""
    from_the_start = "fusepatch" in sys.modules
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance
    from observe import observe_model, observe_optimizer
    from tiny import tiny_model
    from verl.workers.config.optimizer import FSDPOptimizerConfig, build_optimizer

    model = tiny_model("llama")
    _apply_liger_kernel_to_instance(model=model)
    optimizer = build_optimizer(model.parameters(), FSDPOptimizerConfig(lr=1e-3, total_training_steps=2))
    seen = {
        "pid": os.getpid(),
        "active from the start": from_the_start,
        "liger": observe_model(model)["liger"],
        "optimizer": observe_optimizer(optimizer),
    }
    if "fusepatch" in sys.modules:
        from script import records

        seen["fusepatch"] = records()
    return seen


def leave_a_mark() -> None:
    """A user's own setup hook; the mark says whether fusepatch was there before it."""
    os.environ["THEIR_HOOK"] = "after fusepatch" if "fusepatch" in sys.modules else "alone"
