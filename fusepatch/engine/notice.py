"""What the user is told: through logging where they set it up, as one plain line on stderr where not."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

logger = logging.getLogger("fusepatch")


def tell(level: int, text: str, any_rank: bool = False) -> None:
    """Say `text` once in this process, if this is a process that a person reads, or if no other one can say it."""
    if not any_rank and not speaks(os.environ):
        return
    if logger.hasHandlers():
        logger.log(level, text)
    else:
        print(f"fusepatch: {text}", file=sys.stderr, flush=True)


def speaks(environ: Mapping[str, str]) -> bool:
    """Whether this process speaks: rank 0 of the training processes, and no daemonic worker (a data loader's)."""
    import multiprocessing

    if multiprocessing.current_process().daemon:
        return False
    for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        rank = environ.get(name, "")
        if rank.isdigit():
            return int(rank) == 0
    return True
