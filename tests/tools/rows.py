"""The rows of the matrix: what is installed for each, what is expected there, and how its environment is made.

A row is a factor (an environment of its own) or an overlay (other releases put in front of a factor's own by
PYTHONPATH).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

from kits.helpers import run

DOORS = Path(__file__).parents[1] / "doors"
MATRIX: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("matrix.toml").read_text(encoding="utf-8"))

SETS = ("tests", "matrix", "whole")
"""Where a row runs (`runs_in`): in the tests of its factor too, in the matrix, or in the whole matrix only."""

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "trainer": ("--models", "llama,gemma2"),
    "axolotl_plugin": ("--config", '{"liger_rms_norm": true}'),
}
"""What a door is opened with in a row: models that every release knows, and a user's configuration."""

Key = tuple[str, str, str]
"""A site: patch id, import name of the upstream, defining module."""


@dataclass(frozen=True)
class Row:
    """One combination. `overlay` is empty for a factor's own row."""

    name: str
    python: str
    requirements: tuple[str, ...]
    no_deps: tuple[str, ...]
    overlay: tuple[str, ...]
    factor: str
    doors: tuple[str, ...]
    runs_in: str
    expected: Mapping[Key, str]


def rows(matrix: Mapping[str, Any] = MATRIX) -> Iterator[Row]:
    """Every row: each factor, followed by its overlays."""
    for name, factor in matrix["factor"].items():
        yield row(matrix, name, factor)
        for overlay in matrix["overlay"]:
            if overlay["factor"] == name:
                yield row(matrix, name, factor, overlay)


def row(
    matrix: Mapping[str, Any], name: str, factor: Mapping[str, Any], overlay: Mapping[str, Any] | None = None
) -> Row:
    """The row of a factor, or of an overlay on it."""
    own = factor if overlay is None else overlay
    runs_in = own.get("runs_in", "tests")
    if runs_in not in SETS:
        raise ValueError(f"matrix.toml: runs_in = {runs_in!r} in a row of {name}, wanted one of {', '.join(SETS)}")
    return Row(
        name=name if overlay is None else "+".join((name, *overlay["requirements"])),
        python=factor["python"],
        requirements=tuple(factor["requirements"]),
        no_deps=tuple(factor["no_deps"]),
        overlay=() if overlay is None else tuple(overlay["requirements"]),
        factor=name,
        doors=tuple(own["doors"]),
        runs_in=runs_in,
        expected=expected(matrix, factor, *([overlay] if overlay else [])),
    )


def expected(*tables: Mapping[str, Any]) -> dict[Key, str]:
    """The outcome of each site: what the first table says, and each later one over it."""
    return {
        (patch, upstream, module): outcome
        for table in tables
        for patch, upstreams in table.get("expected", {}).items()
        for upstream, modules in upstreams.items()
        for module, outcome in modules.items()
    }


def outcomes(records: Mapping[str, Any]) -> tuple[dict[Key, str], dict[Key, str]]:
    """The outcome with its flags, and the reason, of each site in the records that a door printed."""
    sites = [(patch, site) for patch, record in records.items() for site in record["sites"]]
    found = {_key(patch, site): " ".join([site["outcome"], *site["flags"]]) for patch, site in sites}
    reasons = {_key(patch, site): site["reason"] for patch, site in sites}
    return found, reasons


def _key(patch: str, site: Mapping[str, Any]) -> Key:
    return patch, site["upstream"], site["module"]


def enter(
    door: str,
    *arguments: str,
    python: str | Path,
    paths: Iterable[str | Path],
    patched: bool,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a door in a fresh process of `python`, with `paths` in front of its packages, and return what it printed.

    Raises AssertionError with the end of its output where it fails.
    """
    env = {**(variables or {}), "PYTHONPATH": os.pathsep.join(map(str, paths))}
    flag = ["--import-fusepatch"] if patched else []
    done = run([python, DOORS / f"{door}.py", *arguments, *flag], env=env)
    assert done.returncode == 0, f"{door} {arguments} {variables}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    last = done.stdout.rstrip().splitlines()[-1]
    seen: dict[str, Any] = json.loads(last[last.index("{") :])  # Trinity-RFT's logger puts its prefix before it
    assert patched == ("fusepatch" in seen), "fusepatch was active where it should not be, or the other way round"
    return seen


def make_environment(row: Row, folder: Path, anew: bool = False) -> Path:
    """The interpreter of a row's environment, made in `folder` unless it is there with these very requirements, or is
    wanted `anew`."""
    python = folder / "bin" / "python"
    written = folder / "requirements.txt"
    wanted = "\n".join([row.python, *row.requirements, "--no-deps", *row.no_deps])
    if not anew and written.is_file() and written.read_text(encoding="utf-8") == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    _uv("venv", "--python", _interpreter(row.python), str(folder))
    _uv("pip", "install", "--python", str(python), *row.requirements)
    if row.no_deps:
        _uv("pip", "install", "--python", str(python), "--no-deps", *row.no_deps)
    written.write_text(wanted, encoding="utf-8")
    return python


def make_overlay(requirements: tuple[str, ...], python: str | Path, root: Path, nightly: bool = False) -> Path:
    """The folder of an overlay below `root`, installed there if it is not yet; pre-releases count where it is a
    `nightly`."""
    folder = root / "+".join(requirements)
    if not folder.is_dir():
        partial = folder.with_name(folder.name + ".partial")
        early = ["--prerelease", "allow"] if nightly else []
        _uv("pip", "install", *early, "--no-deps", "--python", str(python), "--target", str(partial), *requirements)
        partial.rename(folder)
    return folder


def _interpreter(version: str) -> str:
    """What uv is asked for: a Python that pyenv keeps is not on PATH where another one is chosen."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = sorted((root / "versions").glob(f"{version}.*/bin/python"))
    return str(found[-1]) if found else version


def _uv(*arguments: str) -> None:
    subprocess.run(["uv", "--quiet", *arguments], check=True)
