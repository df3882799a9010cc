"""The page of upstream's own tests is what the recorded results say, and they say that nothing fails with the patches
only."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import tomllib

from tools.upstream_suites import page, run

FOLDER = Path(__file__).parent / "upstream_suites"
SUITES: list[dict[str, Any]] = tomllib.loads((FOLDER / "suites.toml").read_text(encoding="utf-8"))["suite"]
RESULTS: dict[str, Any] = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))["suites"]


def test_the_page_is_what_the_results_say() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.render(), (
        "docs/upstream-tests.md is stale: run python tests/tools/upstream_suites/page.py"
    )


def test_every_suite_has_a_result() -> None:
    assert set(RESULTS) == {suite["name"] for suite in SUITES}


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite["name"])
def test_the_recorded_result_has_no_problem(suite: dict[str, Any]) -> None:
    result = RESULTS[suite["name"]]
    assert run.problems_of(suite, result) == []
    assert result["with"]["passed"] > 0
    assert {name: result[name] for name in ("version", "tests")} == {name: suite[name] for name in ("version", "tests")}
    assert (result["select"], result["environment"]) == (suite.get("select", ""), suite.get("environment", {}))


def test_no_deselection_is_stale() -> None:
    assert run.stale(RESULTS.values(), complete=True) == []


def test_a_failure_with_the_patches_only_is_a_problem_and_so_is_a_patch_without_a_call() -> None:
    suite = {"name": "x", "minutes": 1, "exercises": ["optimizer.flags"]}
    counts = {"finished": True}
    result = {"only_with": {"test_a": "wrong"}, "without": counts, "with": {"finished": False}, "patches": {}}
    assert run.problems_of(suite, result) == [
        "x: fails with the patches only: test_a: wrong",
        "x: the run with the patches did not finish within 1 minutes",
        "x: no call went through optimizer.flags",
    ]


def test_a_checkout_that_is_given_is_taken_and_one_that_is_missing_is_named(tmp_path: Path) -> None:
    suite = {"name": "x", "upstream": "trl", "version": "1.0", "source": "trl-1.0"}
    with pytest.raises(FileNotFoundError, match=r"^x: --sources was not given; wanted a folder that contains trl-1\.0"):
        run.source_of(suite, None)
    with pytest.raises(FileNotFoundError, match=r"lacks trl-1\.0"):
        run.source_of(suite, tmp_path)
    (tmp_path / "trl-1.0").mkdir()
    for given in (suite, {**suite, "distribution": "trl==1.0"}):
        assert run.source_of(given, tmp_path) == tmp_path / "trl-1.0"


def test_a_source_distribution_is_unpacked_once_and_one_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPSTREAM_OVERLAYS", str(tmp_path / "overlays"))
    (tmp_path / "x.py").write_text("")
    offered = tmp_path / "offered"
    offered.mkdir()
    with tarfile.open(offered / "some_package-1.0.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "x.py", "some_package-1.0/test/x.py")

    def download(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        shutil.copytree(offered, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, int("some-package==1.0" not in command))

    monkeypatch.setattr(run.subprocess, "run", download)
    suite = {"name": "x", "source": "some-package-1.0", "distribution": "some-package==1.0"}
    found = run.source_of(suite, None)
    assert (found / "test" / "x.py").is_file()
    monkeypatch.setattr(run.subprocess, "run", None)
    assert run.source_of(suite, tmp_path) == found
    monkeypatch.setattr(run.subprocess, "run", download)
    with pytest.raises(FileNotFoundError, match=r"x: other==1\.0 could not be downloaded as sources"):
        run.source_of({**suite, "source": "other-1.0", "distribution": "other==1.0"}, None)
