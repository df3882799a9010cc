"""What the pages name is there: data behind the figures, figures, anchors, patches, variables and commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from fusepatch import settings
from fusepatch.patches import PATCHES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BENCHMARKS = DOCS / "benchmarks.md"
TABLES = DOCS / "benchmark-tables.md"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

NO_PATCHES = {"liger.not_applied", "ray.init"}
"""Words of the form of a patch's name: the one that the guide adds, and a function of Ray."""


def tables(page: str) -> dict[str, list[list[str]]]:
    """Heading to the first table below it, as cells; the line of dashes is left out."""
    found: dict[str, list[list[str]]] = {}
    heading, open_table = "", False
    for line in page.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            open_table = False
        elif open_table or heading not in found:
            open_table = True
            found.setdefault(heading, []).append([cell.strip() for cell in line.strip()[1:-1].split("|")])
    return {heading: [rows[0], *rows[2:]] for heading, rows in found.items()}


def measured_tables() -> dict[str, list[list[str]]]:
    """Heading to table, of both pages that hold what was measured."""
    return {**tables(BENCHMARKS.read_text(encoding="utf-8")), **tables(TABLES.read_text(encoding="utf-8"))}


def test_the_figures_are_drawn_from_cells_of_the_tables() -> None:
    page = measured_tables()
    data: dict[str, list[list[str]]] = json.loads((DOCS / "data" / "benchmarks.json").read_text(encoding="utf-8"))
    for heading, (columns, *rows) in data.items():
        above, *below = page[heading]
        kept = [above.index(column) for column in columns]
        assert rows == [[cells[index] for index in kept] for cells in below], heading


def test_each_figure_is_shown_and_says_in_words_what_it_shows() -> None:
    shown: dict[str, str] = {}
    for page in PAGES:
        for words, target in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).is_file(), (page.name, target)
            shown[(page.parent / target).name] = words
    assert sorted(shown) == sorted(path.name for path in (DOCS / "figures").iterdir())
    for name, words in shown.items():
        assert re.search(r"\d", words), f"{name} has no finding in words, for those who do not see it"


def test_the_numbers_in_the_words_of_a_figure_are_in_the_tables_or_rounded_from_them() -> None:
    text = BENCHMARKS.read_text(encoding="utf-8") + TABLES.read_text(encoding="utf-8")
    cells = " ".join(cell for rows in measured_tables().values() for row in rows for cell in row)
    for words in re.findall(r"!\[([^]]*)\]", text):
        for number in re.findall(r"\d+\.\d\d", words):
            assert number in cells, number


def is_measured(number: str, measured: Iterable[float]) -> bool:
    digits = len(number.partition(".")[2])
    return any(f"{value:.{digits}f}" == number for value in measured)


def numbers(page: dict[str, list[list[str]]]) -> list[float]:
    cells = [cell for rows in page.values() for row in rows for cell in row]
    return [float(number) for cell in cells for number in re.findall(r"\d+\.?\d*", cell)]


@pytest.mark.parametrize("name", ["README.md", "docs/index.md", "docs/comparison.md"])
def test_what_is_said_of_a_measurement_is_a_cell_or_rounded_from_one(name: str) -> None:
    measured = numbers(measured_tables())
    said = re.findall(r"(\d+(?:\.\d+)?) (?:ms|GiB|x faster)\b", (ROOT / name).read_text(encoding="utf-8"))
    assert said
    assert [number for number in said if not is_measured(number, measured)] == []


def test_the_short_table_of_the_loss_is_made_of_cells_of_the_long_ones() -> None:
    measured = numbers(tables(TABLES.read_text(encoding="utf-8")))
    short = tables(BENCHMARKS.read_text(encoding="utf-8"))["The GRPO loss"]
    said = [number for row in short for cell in row for number in re.findall(r"([\d.]+) (?:ms|GiB)", cell)]
    assert len(said) == 28
    assert [number for number in said if not is_measured(number, measured)] == []


def anchors(page: Path) -> set[str]:
    """The names that GitHub and MyST give to the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_each_link_to_a_page_and_to_a_heading_arrives(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        arrived = page.parent / path if path else page
        assert arrived.is_file(), target
        assert not anchor or anchor in anchors(arrived), target


@pytest.mark.parametrize("name", NAMES)
def test_each_patch_and_variable_that_is_named_exists(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    known = {patch.id for patch in PATCHES} | NO_PATCHES
    prefixes = "|".join(sorted({patch.id.partition(".")[0] for patch in PATCHES}))
    for word in re.findall(rf"`((?:{prefixes})\.[a-z_]+)`", text):
        assert word in known, word
    for word in re.findall(r"FUSEPATCH_[A-Z0-9_]+(?![A-Z0-9_*<])", text):
        assert settings.find(word) is not None, word


def test_each_subcommand_that_is_named_exists() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "fusepatch", "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    for page in PAGES:
        for word in re.findall(r"python -m fusepatch ([a-z][a-z-]*)", page.read_text(encoding="utf-8")):
            assert re.search(rf"^ +{word}\b", listed, re.MULTILINE), (page.name, word)
