"""`python -m fusepatch bench optimizer` on the CPU with a tiny size, and its tables where something is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fusepatch.bench.optimizer import command as optimizer
from fusepatch.bench.optimizer.cases import TOLERANCES, VARIANTS, Size
from fusepatch.bench.optimizer.command import Table, Variant
from kits.benchmarks import refusal
from kits.helpers import Completed, run

REPOSITORY = Path(__file__).parents[2]


def bench(*arguments: str | Path) -> Completed:
    return run([sys.executable, "-m", "fusepatch", "bench", "optimizer", *arguments], cwd=REPOSITORY, timeout=900)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Completed, dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("bench")
    done = bench("--rows", "4", "--json", folder / "all.json", "--markdown", folder / "all.md")
    assert done.returncode == 0, done.stdout + done.stderr
    return done, json.loads((folder / "all.json").read_text()), (folder / "all.md").read_text()


def test_every_variant_is_timed_and_checked(everything: tuple[Completed, dict[str, Any], str]) -> None:
    _, document, _ = everything
    assert [table["dtype"] for table in document["tables"]] == list(TOLERANCES)
    for table in document["tables"]:
        assert [variant["variant"] for variant in table["variants"]] == list(VARIANTS)
        for variant in table["variants"]:
            assert variant["problem"] is None, variant["reason"]
            assert variant["check"]["passed"]
            assert len(variant["milliseconds"]) == len(variant["forward_backward_milliseconds"]) == 3
            assert all(len(repeat) >= 3 for repeat in variant["milliseconds"])
            assert variant["minimum"] <= variant["median"]
            assert variant["times_faster_than_default"] > 0
        errors = {variant["variant"]: variant["check"]["error"] for variant in table["variants"]}
        assert errors["default"] == 0
        assert errors["in-backward"] == errors["fused"], "the same kernel on the same numbers"


def test_the_tables_name_command_machine_and_size(everything: tuple[Completed, dict[str, Any], str]) -> None:
    done, document, markdown = everything
    assert document["command"].startswith("python -m fusepatch bench optimizer --rows 4")
    assert document["parameters"] == Size(**document["size"]).parameters
    for text in (done.stdout, markdown):
        assert f"{document['parameters']:,} parameters" in text
        assert "bfloat16" in text
        assert text.count("passed: ") == 2 * (len(VARIANTS) - 1)
    assert "| in-backward |" in markdown
    assert "the times say little about a GPU's" in done.stdout


def test_the_default_is_there_whatever_was_asked(tmp_path: Path) -> None:
    done = bench(
        "--variants",
        "in-backward",
        "--dtypes",
        "float32",
        "--hidden",
        "256",
        "--rows",
        "2",
        "--json",
        tmp_path / "a.json",
    )
    assert done.returncode == 0, done.stderr
    (table,) = json.loads((tmp_path / "a.json").read_text())["tables"]
    assert [variant["variant"] for variant in table["variants"]] == ["default", "in-backward"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--variants", "paged"], "found paged; wanted some of default, foreach, fused, in-backward"),
        (["--repeats", "2"], "at least 3"),
        (["--size", "0"], "must be at least 1"),
        (["--json", "nowhere/at/all.json"], "there is no folder"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in refusal(capsys, "optimizer", *arguments)


def variant(name: str, milliseconds: float, error: float) -> Variant:
    return Variant(
        name,
        name,
        None,
        repeats=[[milliseconds, milliseconds]],
        alone=[[milliseconds / 2]],
        check={"error": error, "tolerance": 1e-5, "passed": error <= 1e-5},
    )


def test_no_ratio_is_made_with_a_time_whose_check_failed() -> None:
    table = Table(
        "float32", [variant("default", 8.0, 0.0), variant("fused", 4.0, 0.0), variant("in-backward", 2.0, 0.5)]
    )
    ratios = [row[3] for row in optimizer.cells(table)]
    assert ratios == ["", "2.00", "-"]
    assert optimizer.cells(table)[2][-1].startswith("FAILED CHECK: 5.0e-01")
    assert optimizer.cells(table)[1][4] == "2"


def test_a_variant_that_did_not_run_says_why() -> None:
    broken = Variant("fused", "fused", None, problem="error", reason="RuntimeError: no such kernel")
    table = Table("float32", [variant("default", 8.0, 0.0), broken])
    assert optimizer.cells(table)[1] == ["fused", "", "", "", "", "", "", "error: RuntimeError: no such kernel"]
    assert json.loads(optimizer.as_json({}, [table]))["tables"][0]["variants"][1]["median"] is None
