"""The marks by which a process shows what started it: a Ray worker, a launcher of ranks."""

from __future__ import annotations

import sys
from collections.abc import Mapping

_in_ray: str | None = None
"""What this process is in Ray, once it is known: Ray takes the actor out again, and the worker's mode back, before the
interpreter ends, when the last report is written."""

_MARKS = {
    # Of accelerate's variables this is one that a Trainer or an Accelerator never sets by itself.
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "accelerate",
    "TORCHELASTIC_RUN_ID": "torchrun",
}


def launcher(environ: Mapping[str, str]) -> str | None:
    """The command that started the ranks of which this process is one, or a child of one; None where none did."""
    return next((name for mark, name in _MARKS.items() if mark in environ), None)


def ray_worker() -> str | None:
    """`Ray actor` with its class, or `Ray worker`, where this process is one. Imports nothing.

    An actor's class is known when the actor is made, so it is asked anew each time. Plain attributes only: asking Ray's
    core for an actor's name in a process that runs a task aborts the process.
    """
    global _in_ray
    module = sys.modules.get("ray._private.worker")
    worker = getattr(module, "global_worker", None)
    if worker is not None and getattr(worker, "mode", None) == getattr(module, "WORKER_MODE", 1):
        actors = [type(actor).__name__ for actor in list(getattr(worker, "actors", {}).values())]
        if actors:
            _in_ray = f"Ray actor {actors[0]}"
        elif _in_ray is None:
            _in_ray = "Ray worker"
    return _in_ray
