"""`python tests/tools/new_patch.py`, in a copy of the checkout; and that nothing of a scaffold is left unfilled in this
one."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest

from fusepatch.patches import PATCHES
from kits.helpers import Completed, run
from tools import new_patch

REPOSITORY = Path(__file__).parents[2]
SCRIPT = Path("tests/tools/new_patch.py")
NAME = "trl.sft_packing"
PATCH = Path("fusepatch/patches/trl_sft_packing.py")
TEST = Path("tests/patches/test_trl_sft_packing.py")
PAGE = Path("docs/patches/trl.sft_packing.md")
REGISTER = Path("fusepatch/patches/__init__.py")


def open_places(root: Path) -> list[str]:
    """Every line of a patch, of its tests and of its page that still says FILL IN."""
    return [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for folder in ("fusepatch/patches", "tests/patches", "docs/patches")
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in (".py", ".md")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if new_patch.OPEN.search(line)
    ]


def test_no_patch_is_left_unfilled() -> None:
    assert open_places(REPOSITORY) == []


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a checkout has of the package, the tests and the pages."""
    root = tmp_path_factory.mktemp("untouched") / "checkout"
    for folder in ("fusepatch", "tests", "docs"):
        shutil.copytree(REPOSITORY / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    return root


@pytest.fixture
def checkout(untouched: Path, tmp_path: Path) -> Path:
    return shutil.copytree(untouched, tmp_path / "checkout")


@pytest.fixture(scope="module")
def scaffolded(untouched: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Completed]:
    """A copy in which `new_patch.py` has run, and what it printed."""
    root = shutil.copytree(untouched, tmp_path_factory.mktemp("scaffolded") / "checkout")
    return root, create(root, NAME)


def create(folder: Path, *names: str) -> Completed:
    root = next(parent for parent in (folder, *folder.parents, REPOSITORY) if (parent / SCRIPT).is_file())
    return run([sys.executable, root / SCRIPT, *names], cwd=folder)


def files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def refused(folder: Path, name: str) -> str:
    done = create(folder, name)
    assert (done.returncode, done.stdout) == (2, "")
    text = " ".join(done.stderr.split())
    assert text.startswith("new_patch.py: ")
    assert "Nothing was written; " in text
    return text


# What it writes


def test_it_writes_three_files_and_changes_the_register_and_the_list(
    scaffolded: tuple[Path, Completed], untouched: Path
) -> None:
    root, done = scaffolded
    assert (done.returncode, done.stderr) == (0, "")
    before, after = files(untouched), files(root)
    assert {name for name in after if before.get(name) != after[name]} == {
        *map(str, (PATCH, TEST, PAGE, REGISTER)),
        "docs/patches.md",
    }
    for path in (PATCH, TEST, PAGE, REGISTER):
        assert str(path) in done.stdout


def test_it_says_what_to_do_next(scaffolded: tuple[Path, Completed]) -> None:
    root, done = scaffolded
    for said in (
        "docs/adding-a-patch.md",
        "tests/tools/matrix.toml",
        "README.md",
        "docs/index.md",
        "CHANGELOG.md",
        f'[expected."{NAME}".trl]',
    ):
        assert said in done.stdout
    assert [line for line in done.stdout.splitlines() if len(line) > 80 and str(root) not in line] == []
    assert "python -m docs.generate" in done.stdout


def test_the_patch_is_known_to_every_command_and_harms_no_process(scaffolded: tuple[Path, Completed]) -> None:
    root, _ = scaffolded
    look = "import fusepatch; from fusepatch.patches import PATCHES; print(*(patch.id for patch in PATCHES))"
    done = run([sys.executable, "-W", "error", "-c", look], cwd=root)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [*(patch.id for patch in PATCHES), NAME]
    shown = run([sys.executable, "-m", "fusepatch", "status"], env={"COLUMNS": "300"}, cwd=root)
    assert shown.returncode == 0, shown.stderr
    (row,) = [line for line in shown.stdout.splitlines() if NAME in line.split()[:2]]
    assert "ABSENT" in row
    assert "trl" in row


def test_everything_that_is_declared_is_open(scaffolded: tuple[Path, Completed]) -> None:
    root, _ = scaffolded
    text = (root / PATCH).read_text(encoding="utf-8")
    declaration = text[text.index("PATCH = Patch(") :]
    for name in (
        *("promise", "why", "upstream", "fixed_in", "remove_when", "variables", "changes", "limits"),
        *("module", "supported", "slots"),
    ):
        (line,) = re.findall(rf"^ +{name}=(?!TRL,).*$", declaration, re.MULTILINE)
        assert new_patch.OPEN.search(line), name
    places = open_places(root)
    assert {place.partition(":")[0] for place in places} == {str(PATCH), str(TEST), str(PAGE)}


def test_the_page_shows_what_is_open_and_is_not_stale(scaffolded: tuple[Path, Completed]) -> None:
    root, _ = scaffolded
    assert "FILL IN: one sentence" in (root / PAGE).read_text(encoding="utf-8")
    assert f"[`{NAME}`](patches/{NAME}.md)" in (root / "docs/patches.md").read_text(encoding="utf-8")
    done = run([sys.executable, "-m", "pytest", "-q", "tests/test_docs.py", "-k", "stale"], cwd=root)
    assert done.returncode == 0, done.stdout


def test_its_test_fails_and_says_what_to_fill(scaffolded: tuple[Path, Completed]) -> None:
    root, _ = scaffolded
    done = run([sys.executable, "-m", "pytest", "-q", TEST], cwd=root)
    assert done.returncode == 1
    assert re.search(r"^4 failed in ", done.stdout, re.MULTILINE), done.stdout
    assert "NotImplementedError: FILL IN: the smallest real call that shows the fault" in done.stdout
    done = run([sys.executable, "-m", "pytest", "-q", "tests/tools/test_new_patch.py", "-k", "left_unfilled"], cwd=root)
    assert done.returncode == 1
    assert f"{PATCH}:1: " in done.stdout


@pytest.mark.skipif(
    importlib.util.find_spec("ruff") is None, reason="ruff, which the dev extra brings, is not installed"
)
def test_it_is_clean_for_ruff(scaffolded: tuple[Path, Completed]) -> None:
    root, _ = scaffolded
    for check in (["check"], ["format", "--check"]):
        done = run([sys.executable, "-m", "ruff", *check, PATCH, TEST, REGISTER], cwd=root)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("mypy") is None, reason="mypy, which the dev extra brings, is not installed"
)
def test_it_is_clean_for_mypy(scaffolded: tuple[Path, Completed]) -> None:
    root, _ = scaffolded
    strictly = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent"]
    done = run([*strictly, PATCH, REGISTER], cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_can_be_done_twice_from_a_folder_below_and_finds_the_library(checkout: Path) -> None:
    names = {
        "liger.first": ("LIGER", "liger_kernel"),
        "aaa.second": ("TRANSFORMERS", "transformers"),
        "liger_kernel.third": ("LIGER", "liger_kernel"),
    }
    for name, (constant, import_name) in names.items():
        done = create(checkout / "docs", name)
        assert done.returncode == 0, done.stderr
        text = (checkout / "fusepatch/patches" / f"{name.replace('.', '_')}.py").read_text()
        assert f"upstream={constant}," in text
        assert f'module="{import_name}.FILL_IN"' in text
        unknown = name == "aaa.second"
        assert ("FILL IN: the library, of those in upstreams.py; none is called aaa" in text) == unknown
        assert ("0. Choose the library. None in fusepatch/patches/upstreams.py" in done.stdout) == unknown
    look = "from fusepatch.patches import PATCHES; print(*(patch.id for patch in PATCHES))"
    ids = run([sys.executable, "-c", look], cwd=checkout).stdout.split()
    assert ids == [*(patch.id for patch in PATCHES), *names]


# What it refuses


@pytest.mark.parametrize(
    "name", ["packing", "Trl.packing", "trl.sft-packing", "trl.sft.packing", "trl.", ".x", "../x.y", "1a.b"]
)
def test_a_malformed_name(name: str, checkout: Path) -> None:
    before = files(checkout)
    text = refused(checkout, name)
    assert f"{name!r} is no name of a patch" in text
    assert "such as trl.sft_packing" in text
    assert files(checkout) == before


@pytest.mark.parametrize("name", ["optimizer.flags", "liger.grpo_loss", "liger_grpo.loss", "liger.merge"])
def test_a_name_that_is_taken_by_a_patch_or_a_file(name: str, checkout: Path) -> None:
    before = files(checkout)
    assert f"{name.replace('.', '_')}" in refused(checkout, name)
    assert files(checkout) == before


def test_a_folder_that_is_no_checkout(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "training"\n')
    text = refused(tmp_path, NAME)
    assert f"{tmp_path.name} lies in no checkout of fusepatch" in text.replace("- ", "-")
    assert "change into a checkout first" in text
    assert [path.name for path in tmp_path.iterdir()] == ["pyproject.toml"]


def test_a_register_of_another_shape(checkout: Path) -> None:
    register = checkout / REGISTER
    register.write_text(register.read_text().replace("PATCHES: tuple", "_ALL: tuple") + "\nPATCHES = _ALL\n")
    before = files(checkout)
    assert "has another shape than this program can add to" in refused(checkout, NAME)
    assert files(checkout) == before


def test_a_page_that_cannot_be_written_is_said(checkout: Path) -> None:
    shutil.rmtree(checkout / "docs")
    done = create(checkout, NAME)
    assert done.returncode == 2
    text = " ".join(done.stderr.split())
    assert "the patch was written, its page was not" in text
    assert "`python -m docs.generate`" in text
    assert "ended with exit status" in text
