"""Write `tox.ini` from `matrix.toml`: one environment per factor, and the fixed ones.

Run it after a change of the matrix: `python tests/tools/generate_tox.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomllib

MATRIX = Path(__file__).with_name("matrix.toml")
TOX_INI = Path(__file__).parents[2] / "tox.ini"

NEWEST = "latest"
"""The factor whose releases the fixed environments use too."""

STACK = ("torch", "triton", "transformers", "trl", "accelerate", "peft", "datasets", "requests", "liger-kernel")
"""What of the newest factor the fixed environments install."""

TEST_TOOLS = ("pytest==9.2.0", "pytest-xdist==3.8.0", "build==1.6.1", "uv==0.13.9")
PYTEST = "pytest -n 2 --dist worksteal"
"""Two processes: most of the time is imports, in processes that the tests start."""

OWN_TOOLS = (
    "pytest==9.2.0",
    "parameterized==0.9.0",
    "expecttest==0.3.0",
    "psutil==7.2.2",
    "sentencepiece==0.2.3",
    "pip==26.3",
    "uv==0.13.9",
)
"""What upstreams' own tests import, and what downloads them."""

LINT_TOOLS = ("ruff==0.17.6", "mypy==2.4.1", "pytest==9.2.0")

DOCS_TOOLS = (
    "sphinx==9.0.4",
    "myst-parser==5.2.0",
    "furo==2025.12.19",
    "sphinx-copybutton==0.5.2",
    "matplotlib==3.11.2",
)

VERL = "verl==0.7.1"
"""The demo's verl: the last release whose bare call of Liger hides its own forward."""
VERL_IMPORTS = ("ray", "tensordict", "hydra-core", "codetiming", "torchdata", "pillow")
"""What verl's engine imports; its own pins contradict the newest stack, so it is installed without dependencies."""

HEAD = """\
# Written by tests/tools/generate_tox.py from tests/tools/matrix.toml; change those and run it again.

[tox]
requires =
  tox>=4.24
  tox-uv>=1.16
env_list = test

[testenv]
base_python = python3.11
package = wheel
wheel_build_env = .pkg
pass_env =
  PIP_*
  SSL_CERT_FILE
  UV_*
# uv does not read pip's configuration: where pip is told of a folder of wheels, uv is told of it too.
set_env =
  HF_HUB_OFFLINE = 1
  OMP_NUM_THREADS = 1
  UV_FIND_LINKS = {env:UV_FIND_LINKS:{env:PIP_FIND_LINKS:}}
  UPSTREAM_OVERLAYS = {work_dir}{/}overlays
"""


def render(matrix: Mapping[str, Any]) -> str:
    """The text of `tox.ini` for a parsed matrix."""
    factors: Mapping[str, Any] = matrix["factor"]
    newest = factors[NEWEST]
    pinned = {_name(line): line for line in (*newest["requirements"], *newest["no_deps"])}
    stack = [pinned[name] for name in STACK]
    sections = [
        HEAD,
        _section(
            "test",
            "the tests on the newest stack, on the CPU",
            [*stack, *TEST_TOOLS],
            [f'{PYTEST} -m "not upstream and not full" {{posargs}}'],
        ),
        _section(
            "full",
            "the whole of what the tests take samples of",
            [*stack, *TEST_TOOLS],
            [f"{PYTEST} -m full {{posargs}}"],
        ),
        _section(
            "fuzz",
            "the patched against the unpatched on sampled cases: `-- --seconds N`",
            [*stack, "pytest==9.2.0"],
            ["python -m fuzz {posargs}"],
            more=["change_dir = tests"],
        ),
        _section(
            "demo",
            "the first minute: real trainers with and without the import, side by side",
            [*stack, *(pinned[name] for name in VERL_IMPORTS), "uv==0.13.9"],
            ["python -m demo {posargs}"],
            no_deps=[VERL],
            more=["change_dir = tests"],
        ),
        _section(
            "own",
            "upstreams' own tests, without and with the patches; `-- --sources DIR` for those that are not downloaded",
            [*stack, *OWN_TOOLS],
            ["python tests/tools/upstream_suites/run.py {posargs}"],
        ),
        _section(
            "lint",
            "ruff and mypy",
            [*stack, *LINT_TOOLS],
            ["ruff check .", "ruff format --check .", "mypy"],
        ),
        _section(
            "docs",
            "the documentation as a site, with every warning an error; the figures must be current",
            [*DOCS_TOOLS],
            [
                "python -m docs.generate.plots --check",
                "sphinx-build -W --keep-going -q -b html docs {posargs:{work_dir}{/}site}",
            ],
        ),
    ]
    sections.append(
        _section(
            "matrix",
            "what becomes of every site, row by row: the chosen set; `-- --all` for the whole matrix",
            ["uv==0.13.9"],
            ["python -m tools.matrix --folder {work_dir}{/}rows --jobs 2 {posargs}"],
            more=["change_dir = tests"],
        )
    )
    sections.append(
        _section(
            "drift",
            "the newest releases and nightlies: what changed against the recorded outcomes",
            ["uv==0.13.9"],
            ["python -m tools.drift --folder {work_dir}{/}newest {posargs}"],
            more=["change_dir = tests"],
        )
    )
    for name, factor in factors.items():
        if factor.get("runs_in", "tests") != "tests":
            continue
        sections.append(
            _section(
                name,
                f"the upstream tests on {', '.join(_upstreams(factor))}",
                [*factor["requirements"], "uv==0.13.9"],
                ["pytest {posargs:tests/upstream}"],
                no_deps=factor["no_deps"],
                more=[f"base_python = python{factor['python']}"],
            )
        )
    return "\n".join(sections)


def _section(
    name: str,
    description: str,
    requirements: Iterable[str],
    commands: Iterable[str],
    no_deps: Iterable[str] = (),
    more: Iterable[str] = (),
) -> str:
    lines = [f"[testenv:{name}]", f"description = {description}", *more, "deps =", *_indented(requirements)]
    without = " ".join(no_deps)
    if without:
        lines += ["commands_pre =", f"  uv pip install --quiet --no-deps {without}"]
    lines += ["commands =", *_indented(commands)]
    return "\n".join(lines) + "\n"


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _upstreams(factor: Mapping[str, Any]) -> list[str]:
    found = [line for line in (*factor["requirements"], *factor["no_deps"]) if _name(line) in _SHOWN]
    return [line.replace("==", " ") for line in found]


_SHOWN = ("transformers", "trl", "liger-kernel", "liger-kernel-nightly", "verl", "trinity-rft")


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    if found is None:
        raise ValueError(f"{MATRIX.name}: {requirement!r} is no requirement")
    return found.group()


def current() -> str:
    """What `tox.ini` must hold now."""
    return render(tomllib.loads(MATRIX.read_text(encoding="utf-8")))


if __name__ == "__main__":
    TOX_INI.write_text(current(), encoding="utf-8")
