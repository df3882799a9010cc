"""The page about adding a patch is true: its example, put where it says, passes its own tests."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from kits.helpers import run

REPOSITORY = Path(__file__).parents[1]
PAGE = (REPOSITORY / "docs" / "adding-a-patch.md").read_text(encoding="utf-8")
NAME = "liger.not_applied"

pytest.importorskip("transformers.integrations.liger")
pytest.importorskip("liger_kernel")


def block(first_line: str) -> str:
    """The page's block of Python that begins with this line."""
    (found,) = [
        text for text in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.M) if text.startswith(first_line)
    ]
    return str(found)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout in which the page has been followed as far as the tests."""
    root = tmp_path_factory.mktemp("followed") / "checkout"
    for folder in ("fusepatch", "tests", "docs"):
        shutil.copytree(REPOSITORY / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(REPOSITORY / name, root)
    assert f"python tests/tools/new_patch.py {NAME}\n" in PAGE
    made = run([sys.executable, "tests/tools/new_patch.py", NAME], cwd=root)
    assert made.returncode == 0, made.stderr
    (root / "fusepatch/patches/liger_not_applied.py").write_text(block(f'"""`{NAME}`: '))
    (root / "tests/patches/test_liger_not_applied.py").write_text(block(f'"""`{NAME}` on'))
    written = run([sys.executable, "-m", "docs.generate"], cwd=root)
    assert written.returncode == 0, written.stderr
    return root


def test_nothing_is_left_to_fill(checkout: Path) -> None:
    tests = ["tests/tools/test_new_patch.py", "tests/test_docs.py"]
    done = run([sys.executable, "-m", "pytest", "-q", *tests, "-k", "unfilled or stale"], cwd=checkout)
    assert done.returncode == 0, done.stdout


def test_the_tests_of_the_page_pass(checkout: Path) -> None:
    done = run([sys.executable, "-m", "pytest", "-q", "tests/patches/test_liger_not_applied.py"], cwd=checkout)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^5 passed in ", done.stdout, re.MULTILINE), done.stdout
