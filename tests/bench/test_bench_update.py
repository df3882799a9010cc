"""`python -m fusepatch bench update` on the CPU with a tiny model and the installed TRL, and its tables where
something is wrong."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusepatch.bench.arguments import BenchError
from fusepatch.bench.update import command, draws
from fusepatch.bench.update.cases import CPU_BATCH, FORMS, SHAPES, WARM_UP, Batch, Case
from fusepatch.bench.update.command import Section, Update
from kits.helpers import Completed, run

REPOSITORY = Path(__file__).parents[2]
SMALL = ("--repeats", "1", "--updates", "2")


def bench(*arguments: str | Path) -> Completed:
    return run([sys.executable, "-m", "fusepatch", "bench", "update", *arguments], cwd=REPOSITORY, timeout=600)


def measured(folder: Path, *arguments: str) -> tuple[Completed, dict[str, Any], str]:
    pytest.importorskip("trl", reason="its trainer is what is measured")
    done = bench(*SMALL, *arguments, "--json", folder / "all.json", "--markdown", folder / "all.md")
    assert done.returncode == 0, done.stdout + done.stderr
    return done, json.loads((folder / "all.json").read_text()), (folder / "all.md").read_text()


@pytest.fixture(scope="module")
def half_dead(tmp_path_factory: pytest.TempPathFactory) -> tuple[Completed, dict[str, Any], str]:
    return measured(tmp_path_factory.mktemp("bench"), "--dead", "0.5", "--forms", "plain,patched")


def drawn(update: int, batch: Batch) -> list[draws.Row]:
    """The rows of an update."""
    numbers = range(update * batch.groups, (update + 1) * batch.groups)
    return [
        draws.row(number, place, batch, SHAPES["tiny"].vocabulary) for number in numbers for place in range(batch.group)
    ]


def test_both_forms_train_on_the_same_rows_to_the_same_norms(half_dead: tuple[Completed, dict[str, Any], str]) -> None:
    _, document, _ = half_dead
    (case,) = document["cases"]
    plain, patched = case["forms"]
    assert (plain["form"], patched["form"]) == ("plain", "patched")
    for form in (plain, patched):
        assert form["problem"] is None, form["reason"]
        assert [len(process) for process in form["milliseconds"]] == [2]
        assert len(form["norms"]) == len(form["tokens"]) == 2
        assert all(0 < norm < 100 for norm in form["norms"])
        assert form["check"]["passed"]
        assert form["times_faster_than_plain"] == plain["median"] / form["median"]
    assert patched["norms"] == pytest.approx(plain["norms"], rel=1e-4)
    assert len(set(plain["norms"])) == 2, "each update has rows of its own"


def test_the_tokens_are_those_of_the_padded_batch(half_dead: tuple[Completed, dict[str, Any], str]) -> None:
    plain = half_dead[1]["cases"][0]["forms"][0]
    for number, (tokens, used) in enumerate(zip(plain["tokens"], plain["used"], strict=True), WARM_UP):
        rows = drawn(number, CPU_BATCH)
        width = max(len(row.prompt) for row in rows) + max(len(row.completion) for row in rows)
        assert tokens == CPU_BATCH.completions * width
        assert used == sum(len(row.prompt) + len(row.completion) for row in rows)


def test_fusepatch_is_active_in_the_patched_processes_only(half_dead: tuple[Completed, dict[str, Any], str]) -> None:
    plain, patched = half_dead[1]["cases"][0]["forms"]
    assert {outcome for outcome, _ in plain["fusepatch"].values()} == {"DISABLED"}
    outcome, calls = patched["fusepatch"]["optimizer.flags"]
    assert outcome == "APPLIED"
    assert calls > 0


def test_command_machine_and_batch_are_in_what_is_written(half_dead: tuple[Completed, dict[str, Any], str]) -> None:
    done, document, markdown = half_dead
    assert document["command"].startswith("python -m fusepatch bench update --repeats 1 --updates 2 --dead 0.5")
    for text in (done.stdout, markdown):
        assert "tiny, full; 1 of 2 groups dead" in text
        assert "8 completions in groups of 4, 2 micro-batches" in text
        assert "1 processes" not in text
    assert document["command"] in markdown
    assert "no CUDA GPU" in done.stdout


@pytest.mark.full
@pytest.mark.parametrize("arguments", [(), ("--fsdp",)], ids=["ddp", "fsdp2"])
def test_two_ranks_have_the_norms_of_one(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "one").mkdir()
    _, one, _ = measured(tmp_path / "one", "--forms", "plain")
    _, two, _ = measured(tmp_path, "--forms", "plain", "--ranks", "2", *arguments)
    (single,), (both,) = one["cases"][0]["forms"], two["cases"][0]["forms"]
    assert both["norms"] == pytest.approx(single["norms"], rel=1e-4)
    assert both["used"] == single["used"]
    assert all(mine <= theirs for mine, theirs in zip(both["tokens"], single["tokens"], strict=True))


@pytest.mark.full
def test_lora_in_every_form_with_all_groups_dead_and_none(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    _, document, _ = measured(tmp_path, "--trained", "lora", "--dead", "0", "1")
    live, dead = document["cases"]
    assert [form["form"] for form in live["forms"]] == list(FORMS)
    assert all(norm > 0 for form in live["forms"] for norm in form["norms"])
    assert all(norm == 0 for form in dead["forms"] for norm in form["norms"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--forms", "trimmed"], "found trimmed; wanted some of plain, patched, drop"),
        (["--shape", "7b"], "invalid choice: '7b'"),
        (["--dead", "1.5"], "must be between 0 and 1"),
        (["--completions", "10"], "--completions 10 cannot be divided by --group, which is 4"),
        (["--json", "nowhere/at/all.json"], "there is no folder"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(arguments: list[str], text: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert text in " ".join(done.stderr.split())
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("change", "ranks", "text"),
    [
        ({}, 3, "--completions 8 cannot be divided by --micro-batches times --ranks, which is 6"),
        ({"group": 1}, 1, "--group 1 leaves no group"),
        ({"longest": 1}, 1, "--longest 1 leaves no room"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, int], ranks: int, text: str) -> None:
    with pytest.raises(BenchError, match=text):
        command._fits(replace(CPU_BATCH, **change), ranks)


def test_a_process_that_fails_is_said_and_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "trl.py").write_text("raise ImportError('no trainer here')\n")
    done = run(
        [sys.executable, "-m", "fusepatch", "bench", "update", *SMALL],
        env={"PYTHONPATH": str(tmp_path)},
        cwd=REPOSITORY,
        timeout=300,
    )
    assert done.returncode == 2
    assert "No process could train: ImportError: no trainer here" in " ".join(done.stderr.split())


BATCH = Batch(64, 8, 8, 600, 2048, 128, 0.5)


def test_the_drawn_lengths_have_the_median_and_the_longest() -> None:
    rows = [row for update in range(4) for row in drawn(update, BATCH)]
    lengths = [len(row.completion) for row in rows]
    assert 500 < statistics.median(lengths) < 720
    assert max(lengths) <= BATCH.longest
    assert all((row.completion[-1] == draws.END) == (len(row.completion) < BATCH.longest) for row in rows)
    assert all(draws.END not in row.completion[:-1] and draws.PAD not in row.completion for row in rows)
    assert all(row.prompt == first.prompt for first, *others in zip(*[iter(rows)] * 8, strict=True) for row in others)
    far = replace(BATCH, longest=100 * BATCH.median)  # no length that is drawn comes near it
    for update in range(4):
        assert [len(row.completion) for row in drawn(update, far)].count(far.longest) == 1
        assert max(len(row.prompt) for row in drawn(update, far)) == far.prompt
    assert rows == [row for update in range(4) for row in drawn(update, BATCH)]


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_the_share_of_dead_groups_is_the_same_in_every_update(share: float) -> None:
    batch = replace(BATCH, dead=share)
    which = []
    for update in range(5):
        numbers = range(update * batch.groups, (update + 1) * batch.groups)
        which.append([draws.is_dead(number, batch) for number in numbers])
        assert sum(which[-1]) == round(share * batch.groups)
        for number in numbers:
            rewards = {
                draws.reward(number, draws.row(number, place, batch, 512).completion, batch)
                for place in range(batch.group)
            }
            assert len(rewards) == (1 if draws.is_dead(number, batch) else batch.group)
    assert share in (0.0, 1.0) or len({tuple(each) for each in which}) > 1


CASE = Case("tiny", SHAPES["tiny"], CPU_BATCH, "full", "float32", False, 1, False, 2)


def update(name: str, milliseconds: float, norms: list[float]) -> Update:
    return Update(
        name,
        name,
        None,
        repeats=[[milliseconds, milliseconds]],
        tokens=[384, 384],
        used=[192, 192],
        norms=norms,
        losses=[0.0, 0.0],
        memory={"peak_bytes": 0},
    )


def section(*rows: Update) -> Section:
    for row in rows:
        command._check(row, rows[0], CASE)
    return Section(CASE, list(rows))


def test_no_ratio_is_made_where_the_norms_differ() -> None:
    found = section(
        update("plain", 80.0, [1.0, 2.0]), update("patched", 40.0, [1.0, 2.0]), update("drop", 20.0, [1.0, 2.1])
    )
    assert [row[3] for row in command.cells(found)] == ["", "2.00", "-"]
    assert command.cells(found)[2][-1].startswith("FAILED CHECK: 5.0e-02")
    assert [row[5] for row in command.cells(found)] == ["50%", "50%", "-"]


def test_a_plain_norm_that_is_nan_compares_with_nothing() -> None:
    found = section(update("plain", 80.0, [1.0, float("nan")]), update("patched", 40.0, [1.0, 2.0]))
    assert [row.passed for row in found.rows] == [False, False]
    assert [row[3] for row in command.cells(found)] == ["", "-"]
    forms = json.loads(command.as_json({}, [found]))["cases"][0]["forms"]
    assert forms[0]["norms"] == [1.0, "nan"]
    assert [form["times_faster_than_plain"] for form in forms] == [None, None]


@pytest.mark.parametrize(
    ("mine", "theirs", "apart"),
    [(2.0, 2.0, 0.0), (2.2, 2.0, 0.1), (0.0, 0.0, 0.0), (1.0, 0.0, float("inf")), (float("nan"), 1.0, float("inf"))],
)
def test_the_distance_of_two_norms(mine: float, theirs: float, apart: float) -> None:
    assert command.distance(mine, theirs) == pytest.approx(apart)


def test_a_form_that_did_not_run_says_why() -> None:
    broken = Update("patched", "patched", None, problem="error", reason="RuntimeError: no such kernel")
    found = section(update("plain", 80.0, [1.0, 2.0]), broken)
    assert command.cells(found)[1] == ["patched", *[""] * 7, "error: RuntimeError: no such kernel"]
    assert json.loads(command.as_json({}, [found]))["cases"][0]["forms"][1]["median"] is None


def test_another_hidden_size_takes_heads_and_width_along() -> None:
    changed = SHAPES["0.6b"].changed(2048, 4, None)
    assert (changed.hidden, changed.intermediate, changed.heads, changed.key_value_heads) == (2048, 6144, 32, 16)
    assert (changed.layers, changed.vocabulary, changed.head_dim) == (4, 151936, 128)
    for hidden in (16, 48, 80, 96, 640):
        some = SHAPES["tiny"].changed(hidden, None, None)
        assert some.heads % some.key_value_heads == 0


def test_the_variables_of_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPATCH", "0")
    monkeypatch.setenv("FUSEPATCH_HEAD_PREFER", "memory")
    assert command.environment("plain")["FUSEPATCH"] == "0"
    for name in ("patched", "drop"):
        found = command.environment(name)
        assert "FUSEPATCH" not in found
        assert found["FUSEPATCH_HEAD_PREFER"] == "memory"
        assert (found.get("FUSEPATCH_GRPO_ZERO_ADVANTAGE") == "drop") == (name == "drop")


def test_a_case_travels_as_json() -> None:
    assert Case.from_json(json.loads(json.dumps(CASE.as_json()))) == CASE
