"""What is released: the wheel and the source distribution, installed with no more than they declare."""

from __future__ import annotations

import configparser
import importlib.util
import re
import shutil
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

import pytest

import fusepatch
from fusepatch.patches import PATCHES
from kits.environments import interpreter, needs_uv, new_environment, site_packages, uv
from kits.helpers import run

REPOSITORY = Path(__file__).parents[1]
VERSION = fusepatch.__version__
INFO = f"fusepatch-{VERSION}.dist-info"
PATCH = PATCHES[0].id

needs_build = pytest.mark.skipif(
    importlib.util.find_spec("build") is None, reason="build, which the dev extra brings, is not installed"
)
pytestmark = [needs_uv, needs_build]


class Built(NamedTuple):
    """`wheel` is made from the source distribution, `direct` from the tree."""

    sdist: Path
    wheel: Path
    direct: Path


def build(folder: Path, *arguments: str) -> None:
    done = run([sys.executable, "-m", "build", "--installer=uv", "--outdir", folder, *arguments, REPOSITORY])
    if "error sending request" in done.stderr + done.stdout:
        pytest.skip("the package registry cannot be reached")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("dist")
    build(folder)
    build(folder / "direct", "--wheel")
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    (direct,) = (folder / "direct").glob("*.whl")
    return Built(sdist, wheel, direct)


@pytest.fixture(scope="module")
def unpacked(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the unpacked source distribution."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(built.sdist) as archive:
        archive.extractall(folder, filter="data")
    (inside,) = folder.iterdir()
    return inside


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata(wheel: Path) -> Message:
    return Parser().parsestr(contents(wheel)[f"{INFO}/METADATA"].decode())


# The files


def test_both_are_named_after_the_version(built: Built) -> None:
    assert built.sdist.name == f"fusepatch-{VERSION}.tar.gz"
    assert built.wheel.name == built.direct.name == f"fusepatch-{VERSION}-py3-none-any.whl"


def test_the_wheel_from_the_source_distribution_is_the_one_from_the_tree(built: Built) -> None:
    through, direct = contents(built.wheel), contents(built.direct)
    assert sorted(through) == sorted(direct)
    assert [name for name in through if through[name] != direct[name]] == []


def test_the_wheel_has_the_package_and_the_start_up_files_and_nothing_else(built: Built) -> None:
    inside = contents(built.wheel)
    package = REPOSITORY / "fusepatch"
    sources = {
        str(path.relative_to(REPOSITORY)): path
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.parent.name != "startup"
    }
    sources |= {path.name: path for path in (package / "startup").glob("fusepatch*")}
    own = {f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    assert set(inside) == set(sources) | own
    for name, path in sources.items():
        assert inside[name] == path.read_bytes(), name
    assert {"fusepatch/py.typed", "fusepatch.pth", "fusepatch_startup.py"} <= set(inside)
    assert inside[f"{INFO}/licenses/LICENSE"] == (REPOSITORY / "LICENSE").read_bytes()


def test_the_source_distribution_has_what_its_tests_read_and_no_caches(unpacked: Path) -> None:
    names = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*")}
    for wanted in (
        *("tests/conftest.py", "tests/tools/matrix.toml", "docs/conf.py", "docs/patches.md", "tox.ini", ".ci/run"),
        *("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md", "pyproject.toml"),
        *("docs/examples/trl_grpo.py", "docs/examples/verl_sft.sh", ".pre-commit-config.yaml"),
    ):
        assert wanted in names
    assert [name for name in names if re.search(r"__pycache__|\.pyc$|\.egg-info|_cache/|^dist/|\.tox", name)] == []


def test_the_tests_of_the_source_distribution_are_those_of_the_tree(unpacked: Path) -> None:
    for folder in ("tests", "docs"):
        here, there = (
            {path.relative_to(root): path.read_bytes() for path in (root / folder).rglob("*.py")}
            for root in (REPOSITORY, unpacked)
        )
        assert here == there


def test_the_tests_of_the_source_distribution_run(unpacked: Path) -> None:
    done = run([sys.executable, "-m", "pytest", "-q", "tests/test_readme.py", "tests/test_docs.py"], cwd=unpacked)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="the modules of tests import the whole stack")
def test_every_test_of_the_source_distribution_can_be_collected(unpacked: Path) -> None:
    done = run([sys.executable, "-m", "pytest", "--collect-only", "-q"], cwd=unpacked)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert "tests/test_release.py::test_the_version_has_one_source" in done.stdout


# The metadata


def test_the_version_has_one_source(built: Built) -> None:
    assert metadata(built.wheel)["Version"] == VERSION
    numbered = re.findall(
        r"^## \[(\d[^\]]*)\]", (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert numbered[0] == VERSION
    assert "version" not in re.findall(r"^(\w+) =", (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)


def test_the_metadata_says_what_pip_and_a_reader_need(built: Built) -> None:
    said = metadata(built.wheel)
    assert said["Requires-Python"] == ">=3.10"
    required = [line for line in said.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(required) == ["packaging>=22", "wrapt>=1.16"]
    assert said["License-Expression"] == "Apache-2.0"
    assert said.get_all("License-File") == ["LICENSE"]
    assert said["Description-Content-Type"] == "text/markdown"
    assert said.get_payload().strip() == (REPOSITORY / "README.md").read_text(encoding="utf-8").strip()
    classifiers = said.get_all("Classifier", [])
    for minor in range(10, 14):
        assert f"Programming Language :: Python :: 3.{minor}" in classifiers
    assert not [line for line in classifiers if line.startswith("License ::")], "an SPDX expression excludes these"


def test_the_extra_for_the_documentation_names_what_builds_it(built: Built) -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(REPOSITORY / "tox.ini", encoding="utf-8")
    used = {line.partition("==")[0] for line in tox["testenv:docs"]["deps"].split()}
    lines = metadata(built.wheel).get_all("Requires-Dist", [])
    assert {re.split(r"[<>=; ]", line)[0] for line in lines if "extra == 'docs'" in line} == used


def test_pre_commit_runs_the_ruff_of_tox() -> None:
    tox, hooks = ((REPOSITORY / name).read_text(encoding="utf-8") for name in ("tox.ini", ".pre-commit-config.yaml"))
    assert set(re.findall(r"ruff==[\d.]+", hooks)) == set(re.findall(r"ruff==[\d.]+", tox))


# Installed


def installed(python: Path, folder: Path, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit status and both outputs of a command of the environment, in a folder that is no checkout."""
    done = run([python, *arguments], env={"COLUMNS": "200", **(env or {})}, cwd=folder)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("version", ["3.10", "3.13"])
def test_the_wheel_works_with_its_declared_dependencies_alone(version: str, built: Built, tmp_path: Path) -> None:
    python = new_environment(tmp_path / "environment", interpreter(version))
    packages = site_packages(python)
    before = {path.name for path in packages.iterdir()}
    uv("pip", "install", "--quiet", "--python", python, built.wheel)
    assert {path.name for path in packages.iterdir()} - before >= {"fusepatch", "fusepatch.pth", "fusepatch_startup.py"}

    works = (
        "import fusepatch, sys; print(sys.version_info[:2], fusepatch.__version__, fusepatch.status()[0].outcome.name)"
    )
    assert installed(python, tmp_path, "-W", "error", "-c", works) == (
        0,
        f"(3, {version.partition('.')[2]}) {VERSION} ABSENT\n",
    )
    script = python.parent / "fusepatch"
    assert run([script, "--version"], cwd=tmp_path).stdout == f"fusepatch {VERSION}\n"

    status, text = installed(python, tmp_path, "-m", "fusepatch", "status")
    assert status == 0
    for patch in PATCHES:
        assert patch.id in text
    status, text = installed(python, tmp_path, "-m", "fusepatch", "check")
    assert (status, "exit status 3: " in text) == (3, True), text
    status, text = installed(python, tmp_path, "-m", "fusepatch", "env")
    assert (status, "FUSEPATCH_STRICT" in text) == (0, True)
    status, text = installed(python, tmp_path, "-m", "fusepatch", "explain", PATCH)
    assert (status, PATCHES[0].promise.split(",")[0] in text) == (0, True)

    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\nprint(os.environ['FUSEPATCH'], 'fusepatch_startup' in sys.modules, sys.argv[1:])\n"
    )
    started = installed(python, tmp_path, "-W", "error", "-m", "fusepatch", "run", "program.py", "-x")
    assert started == (0, "1 True ['-x']\n")

    entries = (
        "from importlib.metadata import distribution\n"
        "for entry in distribution('fusepatch').entry_points: print(entry.group, entry.name, entry.value)\n"
        "for group in ('console_scripts', 'verl.plugins'):\n"
        "    for entry in distribution('fusepatch').entry_points.select(group=group): entry.load()\n"
    )
    status, text = installed(python, tmp_path, "-c", entries)
    assert status == 0, text
    assert {"console_scripts fusepatch fusepatch.cli:main", "verl.plugins fusepatch fusepatch_startup"} <= set(
        text.splitlines()
    )

    uv("pip", "uninstall", "--quiet", "--python", python, "fusepatch", "wrapt", "packaging")
    assert {path.name for path in packages.iterdir()} - {"__pycache__"} == before
    assert not script.exists()
    after = installed(
        python, tmp_path, "-c", "import sys; print('fusepatch_startup' in sys.modules)", env={"FUSEPATCH": "1"}
    )
    assert after == (0, "False\n")


def test_the_lowest_versions_that_are_declared_are_enough(built: Built, tmp_path: Path) -> None:
    python = new_environment(tmp_path / "environment", interpreter("3.10"))
    uv("pip", "install", "--quiet", "--python", python, "--resolution=lowest", built.wheel)
    floors = "from importlib.metadata import version; print(version('wrapt'), version('packaging'))"
    assert installed(python, tmp_path, "-c", floors) == (0, "1.16.0 22.0\n")
    status, text = installed(python, tmp_path, "-W", "error", "-m", "fusepatch", "status")
    assert (status, PATCH in text) == (0, True), text

    # The import hook and the comparison of versions, with a stand-in for Liger, which cannot be imported without torch.
    package = tmp_path / "liger_kernel" / "transformers"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "monkey_patch.py").write_text(
        "def _apply_liger_kernel_to_instance(model, **kwargs): ...\n"
        "def _apply_liger_kernel(model_type, **kwargs): ...\n"
        "def apply_liger_kernel_to_llama(model=None): ...\n"
    )
    hooked = "import fusepatch, liger_kernel.transformers.monkey_patch; print(fusepatch.status()[0].outcome.name)"
    for version, outcome in (("0.3.0", "GATED"), ("0.8.5.dev20261027042432", "APPLIED")):
        information = tmp_path / f"liger_kernel-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: liger_kernel\nVersion: {version}\n")
        assert installed(python, tmp_path, "-c", hooked) == (0, f"{outcome}\n")
        shutil.rmtree(information)
