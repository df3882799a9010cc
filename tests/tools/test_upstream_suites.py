"""The page of upstream's own tests is what the recorded results say, and they say that nothing fails with the patches
only."""

from __future__ import annotations

import json
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
