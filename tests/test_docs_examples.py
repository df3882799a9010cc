"""The programs on the pages of the patches print what the pages say."""

from __future__ import annotations

import contextlib
import io
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from fusepatch.patches import PATCHES
from generate.examples import EXAMPLES
from kits.forked import forked
from kits.helpers import fresh


def test_each_program_belongs_to_a_patch() -> None:
    assert set(EXAMPLES) <= {patch.id for patch in PATCHES}


def printed(code: str, folder: Path) -> str:
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "example", "exec"), {"__name__": "__main__"})
    return out.getvalue()


NEEDS_RAY = "ray.worker_setup"
NAMES = [pytest.param(name, marks=pytest.mark.upstream) if name == NEEDS_RAY else name for name in EXAMPLES]


@pytest.mark.parametrize("name", NAMES)
def test_the_program_prints_what_its_page_says(name: str, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    for distribution, wanted in example.versions.items():
        try:
            found = version(distribution)
        except PackageNotFoundError:
            found = "none"
        if found != wanted:
            pytest.skip(f"{distribution} is {found}, the page shows {wanted}")
    if name == NEEDS_RAY:  # a worker is a process of its own, which has to find the program's environment
        assert fresh(example.code, cwd=tmp_path, check=True).stdout == example.before
        assert fresh(f"import fusepatch\n{example.code}", cwd=tmp_path, check=True).stdout == example.after
        return
    import transformers.trainer  # noqa: F401  (once, for every child)

    assert forked(printed, example.code, tmp_path, env={"FUSEPATCH": "0"}) == example.before
    assert forked(printed, example.code, tmp_path, env=example.variables) == example.after
