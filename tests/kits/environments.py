"""Virtual environments of their own, made with uv, for what can only be seen of an installed package."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from kits.helpers import run

UV = shutil.which("uv", path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', '')}")
needs_uv = pytest.mark.skipif(UV is None, reason="uv, which the dev extra brings, is not on PATH")
_NO_REGISTRY = re.compile(r"error sending request|dns error|failed to fetch|could not connect", re.IGNORECASE)


def uv(*arguments: str | Path) -> str:
    """What `uv ARGUMENTS` prints; skips the test where a registry is needed that cannot be reached."""
    done = run([str(UV), *arguments])
    if done.returncode != 0 and _NO_REGISTRY.search(done.stderr):
        pytest.skip("the package registry cannot be reached")
    assert done.returncode == 0, done.stderr
    return done.stdout


def interpreter(version: str) -> Path:
    """An interpreter of this minor version, of uv's own search or of pyenv; skips the test where there is none."""
    found = run([str(UV), "python", "find", "--no-python-downloads", version])
    if found.returncode == 0:
        return Path(found.stdout.strip())
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))  # its shims on PATH need not lead anywhere
    for python in sorted((pyenv / "versions").glob(f"{version}.*/bin/python3")):
        return python
    pytest.skip(f"there is no Python {version} here: neither uv nor pyenv knows one")


def new_environment(folder: Path, python: str | Path = sys.executable) -> Path:
    """The interpreter of a new, empty virtual environment in `folder`."""
    uv("venv", "--quiet", "--python", python, folder)
    return folder / "bin" / "python"


def distributions(python: Path) -> set[str]:
    """The installed distributions as `name==version`."""
    return set(uv("pip", "freeze", "--python", python).split("\n")) - {""}


def site_packages(python: Path) -> Path:
    """The folder that an interpreter's packages lie in."""
    return Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).stdout.strip())
