"""The README says what is true: its two commands are the ones that are run, and its table has every patch."""

from __future__ import annotations

import re
from pathlib import Path

from fusepatch.patches import PATCHES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

DEMO = "pip install tox tox-uv && tox -e demo"
TESTS = "pip install tox tox-uv && tox"


def test_one_command_runs_the_demo_and_one_the_tests() -> None:
    commands = [block.strip() for block in re.findall(r"^```\w*\n(.*?)^```$", README, re.DOTALL | re.M)]
    assert [command for command in commands if "tox" in command] == [DEMO, TESTS]


def test_continuous_integration_runs_the_command_of_the_readme() -> None:
    assert f'"{TESTS}"\n' in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_table_has_every_patch_and_no_other() -> None:
    named = re.findall(r"^\| `([^`]+)` \|", README, re.MULTILINE)
    ids = [patch.id for patch in PATCHES]
    assert named == ids, "README.md's table of patches needs one row for each of PATCHES, in that order"


def test_every_page_that_is_linked_is_there() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    missing = [
        f"{page.name} -> {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#]+\.md)", page.read_text(encoding="utf-8"))
        if not target.startswith("http") and not (page.parent / target).exists()
    ]
    assert missing == []
