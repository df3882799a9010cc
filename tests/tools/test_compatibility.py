"""The page of compatibility, the recorded outcomes and the matrix agree; and what drift calls worse."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from fusepatch.engine.patch import Upstream
from fusepatch.patches import PATCHES
from tools import compatibility, drift, matrix
from tools.rows import Row, rows

RECORDED: dict[str, Any] = json.loads(matrix.OUTCOMES.read_text(encoding="utf-8"))
ROWS = list(rows())
AS_RECORDED = [
    dataclasses.replace(row, expected=matrix.flat(RECORDED["rows"][row.name]["sites"]))
    if row.name in RECORDED["rows"]
    else row
    for row in ROWS
]
"""The rows without what has yet to be recorded: a new patch fails the tests that compare the two, not those of the
tools."""

COMMAND = "tox -e matrix -- --write, then python tests/tools/compatibility.py"


def test_the_page_is_not_stale() -> None:
    written = compatibility.PAGE.read_text(encoding="utf-8")
    assert written == compatibility.current(), f"docs/{compatibility.PAGE.name} is stale: run {COMMAND}"


def test_every_row_of_the_matrix_was_run_or_is_said_not_to_be() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert sorted([*RECORDED["rows"], *RECORDED["not run"]]) == sorted(names), f"run {COMMAND}"
    chosen = {row.name for row in ROWS if row.runs_in != "whole"}
    assert not chosen & set(RECORDED["not run"]), "the chosen set runs everywhere"


@pytest.mark.parametrize("row", [row for row in ROWS if row.name in RECORDED["rows"]], ids=lambda row: row.name)
def test_what_was_recorded_is_what_the_matrix_expects(row: Row) -> None:
    found = matrix.differences(row, RECORDED["rows"][row.name])
    assert not found, "where no such site was found, record it: tox -e matrix -- --patch ID --all --write"


def test_a_row_that_was_not_run_is_not_on_the_page_as_applied() -> None:
    recorded = copy.deepcopy(RECORDED)
    del recorded["rows"]["latest+trl==1.4.0"]
    recorded["not run"] = ["latest+trl==1.4.0"]
    page = compatibility.page(recorded)
    assert "\n| 1.4.0 |" in compatibility.page(RECORDED)
    assert "\n| 1.4.0 |" not in page
    assert "\n- latest with trl 1.4.0\n" in page.split("## Not run")[1]


UPSTREAMS = sorted({site.upstream for patch in PATCHES for site in patch.sites})
(SUITES,) = Path(__file__).parents[1].rglob("results.json")
"""What upstreams' own test suites gave with the patches."""


def recorded(upstream: Upstream) -> Iterator[tuple[str, Version, str]]:
    """The row, the upstream's version and the outcome of each of its sites, where it was installed."""
    for name, row in RECORDED["rows"].items():
        versions = [row["versions"][each] for each in upstream.distributions if each in row["versions"]]
        for sites in row["sites"].values():
            if versions:
                yield from ((name, Version(versions[0]), each) for each in sites.get(upstream.import_name, {}).values())


@pytest.mark.parametrize("upstream", UPSTREAMS, ids=lambda upstream: upstream.import_name)
def test_what_was_recorded_as_tested_is_in_the_tested_range_and_nothing_else(upstream: Upstream) -> None:
    tested = SpecifierSet(upstream.tested)
    for row, version, outcome in recorded(upstream):
        if outcome.startswith("APPLIED"):
            assert (outcome == "APPLIED") == tested.contains(version, prereleases=True), (row, version)


@pytest.mark.parametrize("upstream", UPSTREAMS, ids=lambda upstream: upstream.import_name)
def test_the_ends_of_a_tested_range_were_run(upstream: Upstream) -> None:
    bounds = re.fullmatch(r">=([\d.]+?)(?:\.dev0)?,<([\d.]+)", upstream.tested)
    assert bounds is not None, "the range runs from one release up to, and without, another"
    oldest, after_newest = (tuple(map(int, bound.split("."))) for bound in bounds.groups())
    suites = json.loads(SUITES.read_text(encoding="utf-8"))["suites"].values()
    ran = {version.release for _, version, _ in recorded(upstream)}
    ran -= {version.release for _, version, outcome in recorded(upstream) if outcome == "APPLIED untested"}
    ran |= {
        Version(suite["installed"][name]).release
        for suite in suites
        for name in upstream.distributions
        if name in suite["installed"]
    }
    assert min(ran)[: len(oldest)] == oldest
    *begin, last = max(ran)[: len(after_newest)]
    assert (*begin, last + 1) == after_newest


def test_the_recorded_outcomes_name_no_place_and_no_duration() -> None:
    text = matrix.OUTCOMES.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.])/\w+/|\bseconds\b", text)
    assert matrix.as_json(json.loads(text)) == text


def test_a_row_that_knows_nothing_of_a_new_site_counts_as_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    site = ("a.patch", "torch", "torch.new")
    newer = [dataclasses.replace(row, expected={**row.expected, site: "APPLIED"}) for row in AS_RECORDED]
    monkeypatch.setattr(matrix, "rows", lambda: newer)
    result = copy.deepcopy(RECORDED["rows"]["edge"])
    result["sites"]["a.patch"] = {"torch": {"torch.new": "APPLIED"}}
    merged = json.loads(matrix.merged({"edge": result}, everything=False))
    assert list(merged["rows"]) == ["edge"]
    assert merged["not run"] == [row.name for row in ROWS if row.name != "edge"]
    monkeypatch.setattr(matrix, "rows", lambda: AS_RECORDED)
    assert json.loads(matrix.merged({}, everything=False))["rows"] == RECORDED["rows"]


def test_an_environment_that_cannot_be_made_is_one_error_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise subprocess.CalledProcessError(2, ["uv", "pip", "install", "torch==2.13.0"])

    monkeypatch.setattr(matrix, "make_environment", fail)
    monkeypatch.setattr(sys, "argv", ["matrix", "--rows", "latest", "--folder", str(tmp_path)])
    assert matrix.main() == 2
    assert "`uv pip install torch==2.13.0` ended with exit status 2; its error is above" in capsys.readouterr().err


class TestOnePatch:
    """`--patch ID`: its sites are looked at, and added to what is recorded."""

    SEEN: ClassVar[dict[str, Any]] = {
        "versions": {"trl": "1.12.0"},
        "sites": {"liger.sft_loss": {"trl": {"trl.trainer.sft_trainer": "GATED"}}},
        "reasons": {"liger.sft_loss": {"trl.trainer.sft_trainer": "too old"}},
    }

    def test_nothing_but_the_patch_is_replaced(self) -> None:
        known = RECORDED["rows"]["latest"]
        result = matrix.with_patch(known, "liger.sft_loss", self.SEEN)
        assert result["sites"]["liger.sft_loss"] == self.SEEN["sites"]["liger.sft_loss"]
        assert result["reasons"] == {**known["reasons"], **self.SEEN["reasons"]}
        assert (
            matrix.with_patch(result, "liger.sft_loss", {**known, "sites": {}, "reasons": {}})["reasons"]
            == known["reasons"]
        )
        assert {**result, "sites": known["sites"], "reasons": known["reasons"]} == known

    def test_differences_are_those_of_the_patch(self) -> None:
        row = next(row for row in ROWS if row.name == "latest")
        result = matrix.with_patch(RECORDED["rows"]["latest"], "liger.sft_loss", self.SEEN)
        del result["doors"], result["sites"]["liger.grpo_loss"]
        assert matrix.differences(row, result, "liger.sft_loss") == [
            "latest: liger.sft_loss at trl.trainer.sft_trainer: expected APPLIED, found GATED (too old)"
        ]

    def test_rows_that_are_not_looked_at_yet_are_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        site = ("a.patch", "trl", "trl.new")
        newer = [dataclasses.replace(row, expected={**row.expected, site: "APPLIED"}) for row in AS_RECORDED]
        monkeypatch.setattr(matrix, "rows", lambda: newer)
        assert json.loads(matrix.merged({}, everything=False, only="a.patch"))["rows"] == RECORDED["rows"]

    def test_a_row_without_the_patchs_library_is_known_without_running_it(self) -> None:
        without, with_it = (RECORDED["rows"][name] for name in ("edge", "latest"))
        assert matrix.without_library("ray.worker_setup", without["versions"])
        assert not matrix.without_library("ray.worker_setup", with_it["versions"])
        seen = matrix.not_installed("ray.worker_setup")
        assert matrix.with_patch(without, "ray.worker_setup", seen) == without


class TestDifferences:
    """What the matrix says where a row is not as expected."""

    @pytest.fixture
    def row(self) -> Row:
        return next(row for row in AS_RECORDED if row.name == "latest")

    @pytest.fixture
    def result(self) -> dict[str, Any]:
        return copy.deepcopy(RECORDED["rows"]["latest"])

    def test_an_outcome(self, row: Row, result: dict[str, Any]) -> None:
        result["sites"]["ray.worker_setup"]["ray"]["ray._private.worker"] = "GATED"
        result["reasons"]["ray.worker_setup"] = {"ray._private.worker": "ray 9 is outside"}
        assert matrix.differences(row, result) == [
            "latest: ray.worker_setup at ray._private.worker: expected APPLIED, found GATED (ray 9 is outside)"
        ]

    def test_a_site_that_nobody_expects(self, row: Row, result: dict[str, Any]) -> None:
        result["sites"]["ray.worker_setup"]["ray"]["ray.new"] = "APPLIED"
        assert matrix.differences(row, result) == [
            "latest: ray.worker_setup at ray.new: expected no such site, found APPLIED"
        ]

    def test_a_door(self, row: Row, result: dict[str, Any]) -> None:
        result["doors"]["trainer"] = {"failed": "ImportError", "how": "with fusepatch"}
        result["doors"]["verl_engine"]["ledger"] = {}
        del result["doors"]["trinity_engine"]
        assert matrix.differences(row, result) == [
            "latest: the entry point trainer fails with fusepatch: ImportError",
            "latest: no patch counted a call in the entry point verl_engine",
            "latest: the entry point trinity_engine fails in both runs: it was not run",
        ]

    def test_another_release_than_the_one_that_was_asked_for(self, row: Row, result: dict[str, Any]) -> None:
        result["versions"] |= {"trl": "1.11.0", "python": "3.12.1"}
        assert matrix.differences(row, result) == [
            "latest: trl==1.12.0 is in the matrix, 1.11.0 was imported",
            "latest: Python 3.11 is in the matrix, 3.12.1 ran",
        ]


class TestDrift:
    """The newest releases against what was recorded."""

    @pytest.fixture
    def result(self) -> dict[str, Any]:
        return copy.deepcopy(RECORDED["rows"]["latest"])

    def test_nothing(self, result: dict[str, Any]) -> None:
        assert drift.compare(result, RECORDED["rows"]) == ([], False)

    def test_a_new_release_alone_is_news_and_nothing_worse(self, result: dict[str, Any]) -> None:
        result["versions"]["ray"] = "9.0.0"
        lines, worse = drift.compare(result, RECORDED["rows"])
        assert lines == ["ray 9.0.0 is new; the newest in outcomes.json is 2.60.0"]
        assert not worse

    @pytest.mark.parametrize("outcome", ["GATED", "ABSENT", "DRIFTED", "FAILED", "PENDING", "APPLIED untested"])
    def test_a_site_that_got_worse(self, result: dict[str, Any], outcome: str) -> None:
        result["sites"]["optimizer.class"]["transformers"]["transformers.trainer"] = outcome
        lines, worse = drift.compare(result, RECORDED["rows"])
        assert lines == [
            "optimizer.class at transformers.trainer: "
            f"APPLIED with transformers 5.24.0, {outcome} with transformers 5.24.0"
        ]
        assert worse

    def test_a_release_is_compared_with_the_newest_that_is_no_newer(self, result: dict[str, Any]) -> None:
        result["versions"]["trl"] = "1.99.0"
        lines, worse = drift.compare(result, RECORDED["rows"])
        assert lines == [
            "trl 1.99.0 is new; the newest in outcomes.json is 1.16.0",
            "liger.grpo_loss at trl.trainer.grpo_trainer: ABSENT with trl 1.16.0, APPLIED with trl 1.99.0",
        ]
        assert not worse

    def test_a_site_that_got_better(self, result: dict[str, Any]) -> None:
        result["sites"]["liger.grpo_loss"]["trl"]["trl.losses.fused_linear_ppo"] = "APPLIED"
        lines, worse = drift.compare(result, RECORDED["rows"])
        assert lines == [
            "liger.grpo_loss at trl.losses.fused_linear_ppo: ABSENT with trl 1.12.0, APPLIED with trl 1.12.0 "
            "(trl 1.12.0: there is no module trl.losses.fused_linear_ppo)"
        ]
        assert not worse

    @pytest.mark.parametrize(("how", "expected"), [("with fusepatch", True), ("without fusepatch", False)])
    def test_a_door_that_no_longer_opens(self, result: dict[str, Any], how: str, expected: bool) -> None:
        result["doors"]["trainer"] = {"failed": "ImportError", "how": how}
        lines, worse = drift.compare(result, RECORDED["rows"])
        assert lines == [f"the entry point trainer fails {how}: ImportError"]
        assert worse is expected
