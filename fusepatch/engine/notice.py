"""What the user is told: through logging where they set it up, as one plain line on stderr where not. Telling never
raises."""

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
    """Log or print `text`, if someone reads the output of this process, or from `any_rank` where no other process can
    say it.

    Text that cannot be written is dropped: a full disk, a closed pipe or a log handler that raises ends no run.
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
        # Descriptor 2 was closed at the start. print would use stdout, and descriptor 2 is now whatever was opened
        # since.
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    data = text.encode(encoding, "backslashreplace")
    file = _file_below(stream)
    if file is None:
        stream.write(data.decode(encoding))
        stream.flush()
        return
    stream.flush()
    # Not through the buffer: what a full disk left in it is tried again when the interpreter ends, which then exits
    # with 120.
    while written := file.write(data):  # None where the descriptor does not block and is full
        data = data[written:]


def _file_below(stream: Any) -> Any:
    """The unbuffered file under an ordinary text stream; None for any other object."""
    if type(stream) is not io.TextIOWrapper:
        return None
    file = getattr(stream.buffer, "raw", stream.buffer)
    return file if type(file) is io.FileIO else None


def speaks(environ: Mapping[str, str]) -> bool:
    """Whether this process prints: rank 0 of the training processes does, daemonic workers (a data loader's) do not."""
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
