"""Run a function in a forked child: as isolated as a fresh process from what it patches, without importing again."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable, Mapping
from typing import Any


def forked(function: Callable[..., Any], *args: Any, env: Mapping[str, str] | None = None, timeout: int = 240) -> Any:
    """What `function(*args)` returns in a child with `env` added to its environment; what it raises is raised here.

    fusepatch is switched off first and on again with `env`, unless `env` says `FUSEPATCH=0`. The result is pickled.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(timeout)
        os.close(read_end)
        with os.fdopen(write_end, "wb") as pipe:
            try:
                _switch(env or {})
                outcome = (True, function(*args))
            except BaseException as error:
                error.add_note(traceback.format_exc()) if hasattr(error, "add_note") else None
                outcome = (False, error)
            try:
                pickle.dump(outcome, pipe)
            except Exception as error:
                pickle.dump((False, RuntimeError(f"cannot be pickled: {outcome!r}: {error}")), pipe)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    assert data, f"the child ended with status {status} and said nothing"
    succeeded, value = pickle.loads(data)
    if not succeeded:
        raise value
    return value


def _switch(env: Mapping[str, str]) -> None:
    import fusepatch

    fusepatch.deactivate()
    os.environ.update(env)
    if env.get("FUSEPATCH") != "0":
        fusepatch.activate()
