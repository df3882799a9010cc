"""What this process is to whoever started it: a Ray actor of some class, a rank of a launcher, a child, a plain
script."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from fusepatch.engine import notice
from fusepatch.patches import launchers


def role() -> str:
    """One phrase, such as `Ray actor TrainingWorker` or `torchrun: train.py`. Imports nothing and calls into no
    library.

    What it depends on comes late (an actor's class when the actor is made), so it is asked anew each time.
    """
    in_ray = launchers.ray_worker()
    if in_ray is not None:
        return in_ray
    launcher = launchers.launcher(os.environ)
    return f"{f'{launcher}: ' if launcher else ''}{_child()}{_program()}"


def world_size(environ: Mapping[str, str]) -> int | None:
    """How many ranks there are, where a launcher says so."""
    return notice.first_number(environ, "WORLD_SIZE", "SLURM_NTASKS")


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
