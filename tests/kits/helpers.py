"""Run things in a fresh process whose environment says nothing to fusepatch."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

Completed = subprocess.CompletedProcess[str]


def clean_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without `FUSEPATCH*` and without what makes output differ, plus `env`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FUSEPATCH", "PYTHON", "VERL_"))
        and name not in ("COLUMNS", "FORCE_COLOR", "RANK", "LOCAL_RANK")
    }
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", **(env or {})}


def run(
    argv: Sequence[str | Path],
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout: float = 300,
) -> Completed:
    """Run a command in a clean environment and capture its text output; the exit status is the caller's to check."""
    return subprocess.run(
        [str(part) for part in argv],
        env=clean_environment(env),
        cwd=cwd,
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
    )


def fresh(
    code: str,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    flags: Sequence[str] = (),
    timeout: float = 300,
    check: bool = False,
) -> Completed:
    """Run `code` (dedented) in a fresh interpreter with a clean environment.

    `flags` go before `-c`. With `check`, an exit status other than 0 fails the test with the process's stderr.
    """
    done = run([sys.executable, *flags, "-c", textwrap.dedent(code)], env=env, cwd=cwd, timeout=timeout)
    if check:
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done
