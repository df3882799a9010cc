"""The generated pages are those that the code would write now."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import fusepatch
from fusepatch import settings
from fusepatch.cli import show
from fusepatch.cli.show import Line
from fusepatch.patches import PATCHES
from generate import pages
from kits.helpers import run

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
COMMAND = [sys.executable, "-m", "docs.generate"]

PROSE = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "tests/README.md")),
    *sorted(DOCS.rglob("*.md")),
]
TABLE_OR_IMAGE = re.compile(r"\||!\[[^]]*\]\(\S+\)$")


@pytest.mark.parametrize("name", sorted(pages.PAGES))
def test_a_generated_page_is_not_stale(name: str) -> None:
    written = (DOCS / name).read_text(encoding="utf-8")
    assert written == pages.PAGES[name](), f"docs/{name} is stale: run `{pages.COMMAND}`"


def test_the_command_writes_every_page(tmp_path: Path) -> None:
    done = run([*COMMAND, tmp_path], cwd=REPOSITORY)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    written = {str(path.relative_to(tmp_path)): path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.md")}
    assert written == {name: page() for name, page in pages.PAGES.items()}


def test_the_command_says_where_it_found_no_folder(tmp_path: Path) -> None:
    done = run([*COMMAND, tmp_path / "docs"], cwd=REPOSITORY)
    assert done.returncode == 2
    assert done.stderr == f"python -m docs.generate: there is no folder {tmp_path / 'docs'}\n"


def test_the_page_of_variables_has_a_section_for_each_and_says_first_who_wins() -> None:
    head, rest = pages.environment_page().split("## The variables\n")
    sections = rest.split("\n### ")[1:]
    assert len(sections) == len(settings.TABLE)
    for variable, section in zip(settings.TABLE, sections, strict=True):
        assert section.startswith(f"`{variable.shown_name}`\n")
        for text in (variable.values, variable.default, " ".join(variable.meaning.split())):
            assert text in section
    order = [
        head.index(f"**{who}**") for who in ("your code", "the environment", "the framework", "the automatic rule")
    ]
    assert order == sorted(order)


def test_no_page_is_left_of_a_patch_that_is_gone() -> None:
    assert {path.stem for path in (DOCS / "patches").iterdir()} == {patch.id for patch in PATCHES}


def test_each_patch_has_a_page_with_every_site_and_variable() -> None:
    index = pages.patches_page()
    for patch in PATCHES:
        assert f"(patches/{patch.id}.md)" in index
        section = pages.patch_page(patch)
        for site in patch.sites:
            assert f"\n  - `{site.module}`: " in section
            assert f"supported `{site.supported}`, tested `{site.upstream.tested}`" in section
        for name in patch.variables:
            variable = settings.find(name)
            assert variable is not None, f"{patch.id} names {name}, which is in no row of the table"
            assert f"`{variable.shown_name}`" in section
        for text in (patch.promise, patch.why, *patch.changes, *patch.limits, patch.fixed_in, patch.remove_when):
            assert text.replace("`", "") in section.replace("`", "")


def test_the_page_of_variables_says_which_patches_read_each() -> None:
    sections = dict(re.findall(r"^### `(\S+)`\n\n.* (Read [^.]+(?:\.[^.]+)*?)\.\n", pages.environment_page(), re.M))
    assert sections["FUSEPATCH_STRICT"] == "Read at start-up"
    scope = sections["FUSEPATCH_OPTIMIZER_SCOPE"]
    assert re.findall(r"\[`(.*?)`\]", scope) == ["optimizer.class", "optimizer.flags"]
    assert set(sections) == {variable.shown_name for variable in settings.TABLE}


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_no_line_that_is_written_by_hand_exceeds_120_columns(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if text.startswith("<!-- Generated"):
        return
    lines = enumerate(text.splitlines(), 1)
    assert [number for number, line in lines if len(line) > 120 and not TABLE_OR_IMAGE.match(line)] == []


@pytest.mark.parametrize(("page", "indent"), [("index.md", ""), ("distributed.md", "  ")])
def test_a_status_that_a_page_shows_is_what_is_printed(page: str, indent: str) -> None:
    (block,) = re.findall(r"```\n(fusepatch [0-9.]+, Python.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.S)
    assert block.startswith(f"fusepatch {fusepatch.__version__}, ")
    shown = "\n".join(
        line
        for line in block.split("\n\n")[-1].splitlines()
        if line.startswith(indent + " " * 20) or re.match(rf"{indent}[✓!-] ", line)
    )
    rows = re.findall(rf"^{indent}(\S) (\S+) +(\S+(?: \S+)?)  +(.+)$", re.sub(r"\n {20,}", " ", shown), re.M)
    lines = [Line(mark.replace("✓", "+"), *rest) for mark, *rest in rows]
    assert show.text(lines, 80, verbose=False, indent=indent) == shown
    ids = [patch.id for patch in PATCHES]
    assert [line.id for line in lines] == [name for name in ids if name in block]
    missing = [name for name in ids if name not in block]
    assert page != "index.md" or not missing, "add their lines to the `status` that docs/index.md shows"
