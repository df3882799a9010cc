"""What the user is told: through logging where they set it up, as one plain line on stderr where not. Telling never raises."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

logger = logging.getLogger("fusepatch")


def tell(level: int, text: str, any_rank: bool = False) -> None:
    """Say `text` once in this process, if this is a process that a person reads, or if no other one can say it.

    What cannot be said is dropped: a full disk, a reader that went away or a handler that raises ends no run.
    """
    with suppress(Exception):
        if not any_rank and not speaks(os.environ):
            return
        if logger.hasHandlers():
            logger.log(level, text)
        else:
            _write(sys.stderr, f"fusepatch: {text}\n")


def _write(stream: Any, text: str) -> None:
    if stream is None:
        # Nothing was open as descriptor 2 at the start. print would take stdout, and the descriptor is whatever was opened since.
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    data = text.encode(encoding, "backslashreplace")
    file = _file_below(stream)
    if file is None:
        stream.write(data.decode(encoding))
        stream.flush()
        return
    stream.flush()
    # Past the buffer: what a full disk left in it would be tried again at the interpreter's end, and make its exit status 120.
    while written := file.write(data):  # None where the descriptor does not block and is full
        data = data[written:]


def _file_below(stream: Any) -> Any:
    """The unbuffered file under an ordinary text stream; None for what someone put in its place."""
    if type(stream) is not io.TextIOWrapper:
        return None
    file = getattr(stream.buffer, "raw", stream.buffer)
    return file if type(file) is io.FileIO else None


def speaks(environ: Mapping[str, str]) -> bool:
    """Whether this process speaks: rank 0 of the training processes, and no daemonic worker (a data loader's)."""
    import multiprocessing

    if multiprocessing.current_process().daemon:
        return False
    return rank(environ) in (None, 0)


def rank(environ: Mapping[str, str]) -> int | None:
    """The rank that a launcher gave this process; None where there is none."""
    return first_number(environ, "RANK", "SLURM_PROCID", "LOCAL_RANK")


def first_number(environ: Mapping[str, str], *names: str) -> int | None:
    """The value of the first of these variables that holds a whole number."""
    return next((int(environ[name]) for name in names if environ.get(name, "").isdecimal()), None)
