"""The demo finds what is not as it must be, and its cheapest scenario is as it must be."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from demo import report, scenario
from demo.scenario import PATCHED, PLAIN, Run, Scenario, Value
from kits.helpers import clean_environment

TESTS = Path(__file__).parents[1]

DECLARED = Scenario(
    title="a title",
    told="what is run",
    columns=(PLAIN, PATCHED),
    applied=("a.patch",),
    equal=("loss, *",),
    wanted={"forward": ("theirs", "ours")},
)


def record(outcome: str = "APPLIED", calls: int = 1) -> dict[str, Any]:
    site = {
        "module": "library.module",
        "outcome": outcome,
        "slots": ["f"],
        "reason": {"found": "library 1.0", "wanted": "", "consequence": "", "action": ""},
    }
    return {"id": "a.patch", "outcome": outcome, "calls": calls, "sites": [site], "replaced": [], "fallbacks": []}


def runs(
    plain: Mapping[str, Value] | None = None,
    patched: Mapping[str, Value] | None = None,
    patches: list[dict[str, Any]] | None = None,
) -> list[Run]:
    return [
        Run({"loss, 1": 0.25, "forward": "theirs", **(plain or {})}, None, (), 1.0),
        Run({"loss, 1": 0.25, "forward": "ours", **(patched or {})}, patches or [record()], (), 1.0),
    ]


def test_nothing_is_said_where_all_is_well() -> None:
    assert list(report.problems(DECLARED, runs())) == []


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (runs(patched={"loss, 1": 0.2500001}), "loss, 1 must be the same"),
        (runs(patched={"forward": "theirs"}), "forward must be theirs, ours"),
        (runs(patches=[record("PENDING")]), "must be applied"),
        (runs(patches=[record(calls=0)]), "never used"),
        ([*runs()[:1], Run({}, None, (), 1.0, failure="exit status 1")], "exit status 1"),
        ([runs()[1], runs()[1]], "fusepatch was imported in the run 'plain'"),
    ],
)
def test_each_fault_is_named(found: list[Run], word: str) -> None:
    assert any(word in problem for problem in report.problems(DECLARED, found))


def test_a_row_that_never_came_back_is_a_fault() -> None:
    empty = [Run({}, None, (), 1.0), Run({}, [record()], (), 1.0)]
    found = list(report.problems(DECLARED, empty))
    assert "no row 'loss, *' came back" in found
    assert any(problem.startswith("forward must be") for problem in found)


def test_what_is_printed_fits_80_columns() -> None:
    said = ("applied a.patch; " + "and more words " * 12,)
    found = [runs()[0], runs()[1]._replace(said=said)]
    lines = list(report.render(DECLARED, found, ["loss, 1 must be the same in every column: 0.25, 0.2500001"]))
    assert max(map(len, lines)) <= report.WIDTH
    assert "forward                   theirs                     ours" in lines
    assert any(line.startswith("NOT AS IT MUST BE") for line in lines)


def test_every_scenario_can_be_looked_at_without_its_libraries() -> None:
    code = "import sys; from demo import scenario; n = len(list(scenario.modules())); print(n, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=TESTS, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(dict(scenario.modules()))), "False"]


def test_the_trainer_scenario_is_as_it_must_be() -> None:
    pytest.importorskip("liger_kernel")
    done = subprocess.run(
        [sys.executable, "-m", "demo", "trainer"],
        cwd=TESTS,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 scenarios are as they must be" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= report.WIDTH


def test_a_scenario_that_is_not_there_is_a_usage_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "demo", "nothing"], cwd=TESTS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "there is no scenario nothing" in done.stderr
