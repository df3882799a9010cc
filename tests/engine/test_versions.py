from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fusepatch.engine import versions
from fusepatch.engine.patch import Slot, Upstream
from kits.declarations import passing, site

TOYLIB = Upstream("toylib", ("toylib", "toylib-nightly"), "")


def test_a_release_is_found_without_importing_it(library: Callable[..., str]) -> None:
    library(version="1.2.0")
    assert versions.find(TOYLIB) == versions.Found("toylib", "1.2.0")
    assert "toylib" not in sys.modules


def test_a_nightly_has_another_distribution_name(library: Callable[..., str]) -> None:
    library(version="1.2.0.dev20261027042432", distribution="toylib-nightly")
    assert versions.find(TOYLIB) == versions.Found("toylib-nightly", "1.2.0.dev20261027042432")


def test_of_two_distributions_the_one_installed_last_owns_the_files(
    library: Callable[..., str], tmp_path: Path
) -> None:
    library(version="1.2.0")
    library(version="1.3.0.dev1", distribution="toylib-nightly")
    os.utime(tmp_path / "toylib-1.2.0.dist-info", (1, 1))
    assert versions.find(TOYLIB) == versions.Found("toylib-nightly", "1.3.0.dev1")
    os.utime(tmp_path / "toylib_nightly-1.3.0.dev1.dist-info", (0, 0))
    assert versions.find(TOYLIB) == versions.Found("toylib", "1.2.0")


def test_a_copy_without_metadata_is_found_with_what_its_module_says(library: Callable[..., str]) -> None:
    library(version=None)
    assert versions.find(TOYLIB) == versions.Found(None, None)
    import toylib

    toylib.__version__ = "9.9"
    assert versions.find(TOYLIB) == versions.Found(None, "9.9")


def test_what_is_not_there_is_not_found() -> None:
    assert versions.find(Upstream("no_such_library", ("no-such-library",), "")) is None


@pytest.mark.parametrize(
    ("version", "supported", "tested"),
    [
        ("0.9", False, False),
        ("1.0.dev3", True, True),
        ("1.9", True, True),
        ("1.9.dev20261027042432", True, True),
        ("1.9+cpu", True, True),
        ("1.9.post1", True, False),
        ("2.5.0rc1", True, False),
        ("3.0", False, False),
        ("main-branch", True, False),
        (None, True, False),
    ],
)
def test_the_gate(version: str | None, supported: bool, tested: bool) -> None:
    assert versions.gate(site(), version) == versions.Gate(supported=supported, tested=tested)


@pytest.mark.parametrize(
    ("version", "names"),
    [
        ("1.3", ["always", "before"]),
        ("1.4.dev2", ["always"]),
        ("1.4", ["always", "since"]),
        (None, None),
        ("main", None),
    ],
)
def test_a_slot_is_looked_for_in_its_releases(version: str | None, names: list[str] | None) -> None:
    declared = site(
        Slot("always", passing), Slot("before", passing, releases="<1.4"), Slot("since", passing, releases=">=1.4")
    )
    found = [slot.path for slot in versions.in_release(declared, version).slots]
    assert found == (["always", "before", "since"] if names is None else names)
