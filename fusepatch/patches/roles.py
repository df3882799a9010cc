"""What this process is to whoever started it: a Ray actor of some class, a rank of a launcher, a child, a plain script."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

_in_ray: str | None = None
"""What this process is in Ray, once it is known: Ray takes the actor out again, and the worker's mode back, before the interpreter
ends, when the last report is written."""


def role() -> str:
    """One phrase, such as `Ray actor TrainingWorker` or `torchrun: train.py`. Imports nothing and calls into no library.

    What it depends on comes late (an actor's class when the actor is made), so it is asked anew each time.
    """
    in_ray = _ray_worker()
    if in_ray is not None:
        return in_ray
    return f"{_launcher(os.environ)}{_child()}{_program()}"


def rank(environ: Mapping[str, str]) -> int | None:
    """The rank that a launcher gave this process; None where there is none."""
    return _number(environ, "RANK", "SLURM_PROCID", "LOCAL_RANK")


def world_size(environ: Mapping[str, str]) -> int | None:
    """How many ranks there are, where a launcher says so."""
    return _number(environ, "WORLD_SIZE", "SLURM_NTASKS")


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    return next((int(environ[name]) for name in names if environ.get(name, "").isdigit()), None)


def _ray_worker() -> str | None:
    # Plain attributes only: asking Ray's core for an actor's name in a process that runs a task aborts the process.
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


def _launcher(environ: Mapping[str, str]) -> str:
    # Of accelerate's variables this is one that a Trainer or an Accelerator never sets by itself.
    if "ACCELERATE_DYNAMO_USE_FULLGRAPH" in environ:
        return "accelerate: "
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun: "
    return ""


def _child() -> str:
    processes = sys.modules.get("multiprocessing.process")
    if processes is None or processes.parent_process() is None:
        return ""
    return f"{processes.current_process().name} of "


def _program() -> str:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        return f"-m {spec.name.removesuffix('.__main__')}"
    program = "".join(sys.argv[:1])
    return os.path.basename(program) if program not in ("", "-") else "an interactive interpreter"
