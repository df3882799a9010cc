"""The report file: what the ledger of this process holds, as one JSON file in a directory, rewritten as it grows.

A writer of its own (a thread, a timer) would have to survive forks and interpreters that are killed, so the calling
thread
writes: at every change of an outcome and every new note, at each of the first calls, and then at most once a second or
when a count has doubled. What a killed process leaves behind lacks no call that is older than a second before its last
one.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fusepatch.engine import notice

EACH_UP_TO = 8
"""Each of the first so many calls of a patch is written at once, so that few calls are never too few in the file."""
INTERVAL = 1.0
"""Seconds after a write from which any call is written again."""

_lock = threading.Lock()
_folder = ""
_name = ""
_content: Callable[[], dict[str, Any]] | None = None
_unwritten = False
_written_at = 0.0
_warned = False


def begin(folder: str, content: Callable[[], dict[str, Any]]) -> None:
    """Keep what `content` returns in a file of `folder` from now on; the first `grown` writes it.

    A process keeps its file through any number of activations with the same folder.
    """
    global _folder, _name, _content, _warned
    if folder != _folder:
        _name = ""
    _folder, _content, _warned = folder, content, False


def grown(times: int) -> None:
    """Something has now happened `times` times: write, if that is due. Never raises, never waits for another thread."""
    global _unwritten
    _unwritten = True
    # The doubling bounds what is lost where a process is killed; the interval bounds what a training loop pays.
    if times <= EACH_UP_TO or times & (times - 1) == 0 or time.monotonic() - _written_at >= INTERVAL:
        _write()


def _write() -> None:
    # Whoever holds the lock writes for the others: a thread that waited here, with the engine's lock in its hands, for
    # one that needs that lock to read the outcomes would wait forever.
    global _unwritten, _written_at
    while _unwritten and _lock.acquire(blocking=False):
        try:
            _unwritten = False
            _written_at = time.monotonic()
            _write_now()
        except Exception as error:
            _complain(error)
        finally:
            _lock.release()


def _write_now() -> None:
    global _name
    if _content is None:
        return
    if not _name:
        _name = _new_name()
    text = json.dumps(_content(), indent=1)
    try:
        _replace(text)
    except FileNotFoundError:
        os.makedirs(_folder, exist_ok=True)
        _replace(text)


def _replace(text: str) -> None:
    temporary = os.path.join(_folder, f".{_name}.tmp")
    try:
        with open(temporary, "w", encoding="ascii") as file:
            file.write(text)
        os.replace(temporary, os.path.join(_folder, f"{_name}.json"))
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _new_name() -> str:
    # Containers that share a file system can share a host name and a process id too.
    host = re.sub(r"[^A-Za-z0-9-]+", "-", os.uname().nodename)[:64]
    return f"{host}-{os.getpid()}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.urandom(4).hex()}"


def _complain(error: Exception) -> None:
    global _warned
    if _warned:
        return
    _warned = True
    # A disk's error says all by its text; anything else is a fault of ours.
    where = "" if isinstance(error, OSError) else f"\n{traceback.format_exc()}"
    notice.tell(
        logging.WARNING,
        f"the report of process {os.getpid()} could not be written ({type(error).__name__}: {error}); wanted a "
        f"directory that this process can write to, found FUSEPATCH_REPORT={_folder}. The patches and the training are "
        "not affected, but `status --report` and `check --report` will miss this process or see an old state of it. "
        f"Free space there, or name another directory.{where}",
        any_rank=True,
    )


def _at_exit() -> None:
    global _unwritten
    if _name:  # a forked child in which nothing happened has no file
        _unwritten = True
        _write()


def _in_child() -> None:
    """A forked child is a process of its own: it gets a file when something happens in it."""
    global _lock, _name, _unwritten, _warned, _written_at
    _lock = threading.Lock()
    _name, _unwritten, _warned, _written_at = "", False, False, 0.0


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)
