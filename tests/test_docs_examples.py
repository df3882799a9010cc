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


def test_each_program_belongs_to_a_patch() -> None:
    assert set(EXAMPLES) <= {patch.id for patch in PATCHES}


def printed(code: str, folder: Path) -> str:
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "example", "exec"), {"__name__": "__main__"})
    return out.getvalue()


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "ray.worker_setup"])
def test_the_program_prints_what_its_page_says(name: str, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    for distribution, wanted in example.versions.items():
        try:
            found = version(distribution)
        except PackageNotFoundError:
            found = "none"
        if found != wanted:
            pytest.skip(f"{distribution} is {found}, the page shows {wanted}")
    import transformers.trainer  # noqa: F401  (once, for every child)

    assert forked(printed, example.code, tmp_path, env={"FUSEPATCH": "0"}) == example.before
    assert forked(printed, example.code, tmp_path, env=example.variables) == example.after
