"""Runs the kernels under Triton's interpreter in a fresh process: the variable counts only before Triton is
imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    tests = Path(__file__).with_name("interpreted_kernels.py")
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-2000:]
    assert " passed" in finished.stdout
    assert " skipped" not in finished.stdout
