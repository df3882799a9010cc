"""`python -m fusepatch bench update`: one update of TRL's GRPOTrainer, plain and patched, each in processes of its
own, by turns."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fusepatch
from fusepatch import terminal
from fusepatch.bench import arguments, report
from fusepatch.bench.processes import FAILED
from fusepatch.bench.report import Row
from fusepatch.bench.update.cases import (
    CPU_BATCH,
    FEWEST_TOKENS,
    FORMS,
    GPU_BATCH,
    SHAPES,
    TOLERANCES,
    TRAINED,
    WARM_UP,
    Batch,
    Case,
)

_ABOUT = """\
Times one update of TRL's GRPOTrainer on this machine, without generation: the
completions are drawn, with lengths around a median, and rewards leave a chosen
share of the groups dead, which is without a gradient. Each form runs in
processes of its own, by turns, several times over. Prints the seconds of an
update, the tokens that entered the model and those of them that are no padding,
the peak memory, and the gradient norms beside the plain ones. Nothing is
compared with a time whose norms differ.

forms:
{forms}
shapes (of Qwen3, with random weights): {shapes}
trained:
{trained}
tolerances of the norms: {tolerances}

An update is everything between two calls of the optimizer, and the call. The
learning rate is 0, so that all updates have the same weights. Without a GPU the
default is tiny, and times say little.

exit status: 0; 1 where norms differ or a process failed; 2 for wrong arguments
"""


@dataclass
class Update(Row):
    """One form in one case; the lists have an entry for each timed update of one process."""

    tokens: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    applied: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """Every form in one case."""

    case: Case
    rows: list[Update]


def add_parser(what: Any) -> None:
    """Add `update` to the benchmarks that the command line knows."""
    parser = what.add_parser(
        "update",
        help="one update of TRL's GRPOTrainer, without generation",
        description=_ABOUT.format(
            forms="".join(f"  {name:<8} {form.text}\n" for name, form in FORMS.items()),
            shapes=", ".join(SHAPES),
            trained="".join(f"  {name:<8} {text}\n" for name, text in TRAINED.items()),
            tolerances=", ".join(f"{value:g} {name}" for name, value in TOLERANCES.items()),
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=SHAPES, nargs="+", help="one or several")
    for name, text in (
        ("hidden", "another hidden size; heads and feed-forward width follow"),
        ("layers", "another number of layers"),
        ("vocabulary", "another vocabulary"),
        ("completions", "rows of an update, over all ranks"),
        ("group", "completions of one prompt"),
        ("micro-batches", "forward and backward passes of an update"),
        ("median", "tokens of the median completion"),
        ("longest", "tokens of the longest completion"),
        ("prompt", "tokens of the longest prompt"),
    ):
        parser.add_argument(f"--{name}", type=arguments.positive, metavar="N", help=text)
    parser.add_argument("--dead", type=_share, nargs="+", default=[0.0], metavar="SHARE", help="0 to 1, one or several")
    parser.add_argument("--trained", choices=TRAINED, nargs="+", default=["full"], help="one or both")
    parser.add_argument("--dtype", choices=TOLERANCES, help="of the weights: bfloat16 on a GPU, float32 without one")
    parser.add_argument("--liger", action="store_true", help="use_liger_kernel=True, with Liger's layers off")
    parser.add_argument("--ranks", type=arguments.positive, default=1, metavar="N", help="processes, one GPU each")
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 in place of DDP")
    parser.add_argument("--forms", type=arguments.names(FORMS), default=tuple(FORMS), metavar="NAME,...")
    parser.add_argument(
        "--updates", type=arguments.positive, default=3, metavar="N", help=f"timed in each process, after {WARM_UP}"
    )
    parser.add_argument("--repeats", type=arguments.positive, default=2, metavar="N", help="processes of each form")
    parser.add_argument("--json", metavar="FILE", help="write everything measured")
    parser.add_argument(
        "--markdown", metavar="FILE", nargs="?", const="-", help="write the tables; to stdout without FILE"
    )


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, found {text}")
    return value


def run(options: argparse.Namespace, command: str) -> int:
    """Measure as asked; returns the exit status.

    Raises:
        BenchError: the sizes do not fit each other, or no process could be started.
    """
    cases = _cases(options, gpu=_has_gpu())
    names = [name for name in FORMS if name == "plain" or name in options.forms]
    document: dict[str, Any] = {"fusepatch": fusepatch.__version__, "command": command, "repeats": options.repeats}
    sections: list[Section] = []
    with tempfile.TemporaryDirectory(prefix="fusepatch-bench-") as folder:
        for case in cases:
            rows = {name: Update(name, name, None) for name in names}
            for _ in range(options.repeats):
                for row in rows.values():
                    if row.problem is None:
                        _note(row, _one_process(row.peer, case, folder), document)
            for row in rows.values():
                _check(row, rows["plain"], case)
            if "machine" not in document:
                raise arguments.BenchError(f"No process could train: {rows['plain'].reason}")
            if not sections:
                print(machine_text(document))
                if not document["machine"]["cuda"]:
                    print("This machine has no CUDA GPU: the norms count, the times say little about a GPU's.")
            sections.append(Section(case, list(rows.values())))
            print(f"\n{case.title}\n{batch_text(case)}\n")
            terminal.print_table(headings(), cells(sections[-1]), max(terminal.width(), 150))
            sys.stdout.flush()
            if options.json:
                report.write(options.json, as_json(document, sections))
            if options.markdown not in (None, "-"):
                report.write(options.markdown, markdown(document, sections))
    if options.markdown == "-":
        print("\n" + markdown(document, sections), end="")
    failed = [f"{row.peer} in {section.case.title}" for section in sections for row in section.rows if not row.passed]
    if failed:
        print(f"\nFAILED: {'; '.join(failed)}. No ratio was made with these times.")
    return FAILED if failed else 0


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _cases(options: argparse.Namespace, gpu: bool) -> list[Case]:
    batch = GPU_BATCH if gpu else CPU_BATCH
    for name in ("completions", "group", "micro_batches", "median", "longest", "prompt"):
        batch = replace(batch, **{name: getattr(options, name) or getattr(batch, name)})
    _fits(batch, options.ranks)
    cases = []
    for shape in options.shape or (["0.6b"] if gpu else ["tiny"]):
        model = SHAPES[shape].changed(options.hidden, options.layers, options.vocabulary)
        if model.vocabulary < FEWEST_TOKENS:
            raise arguments.BenchError(
                f"--vocabulary {model.vocabulary} is too small: wanted at least {FEWEST_TOKENS}. Nothing was measured."
            )
        for trained in options.trained:
            for dead in options.dead:
                cases.append(
                    Case(
                        shape=shape if model == SHAPES[shape] else f"{shape} changed",
                        model=model,
                        batch=replace(batch, dead=dead),
                        trained=trained,
                        dtype=options.dtype or ("bfloat16" if gpu else "float32"),
                        liger=options.liger,
                        ranks=options.ranks,
                        fsdp=options.fsdp,
                        updates=options.updates,
                    )
                )
    return cases


def _fits(batch: Batch, ranks: int) -> None:
    for name, divisor in (("--group", batch.group), ("--micro-batches times --ranks", batch.micro_batches * ranks)):
        if batch.completions % divisor:
            raise arguments.BenchError(
                f"--completions {batch.completions} cannot be divided by {name}, which is {divisor}: every group and "
                f"every micro-batch must be whole. Nothing was measured."
            )
    if batch.group < 2:
        raise arguments.BenchError(
            "--group 1 leaves no group to compare rewards in: wanted at least 2. Nothing was measured."
        )
    if batch.longest < 2:
        raise arguments.BenchError(
            "--longest 1 leaves no room for a token and the end: wanted at least 2. Nothing was measured."
        )


def _one_process(form: str, case: Case, folder: str) -> dict[str, Any]:
    """What one process of a form, or one set of ranks, says."""
    asked, answered = Path(folder, "case.json"), Path(folder, "result.json")
    asked.write_text(json.dumps(case.as_json()), encoding="utf-8")
    answered.unlink(missing_ok=True)
    module = ["-m", "fusepatch.bench.update.worker", str(asked), str(answered)]
    if case.ranks > 1:
        several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
        module = [*several, *module]
    done = subprocess.run(
        [sys.executable, *module],
        env=environment(form),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if answered.is_file():
        found: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
        return found
    last = " ".join(_last_error(done.stdout).split())[-400:]
    return {"problem": "error", "reason": f"its process ended with status {done.returncode}: {last}"}


def _last_error(output: str) -> str:
    """The last line that names an error: what a launcher prints afterwards tells less. All of it where none does."""
    lines = [line for line in output.splitlines() if "Error: " in line and "ChildFailedError" not in line]
    return lines[-1] if lines else output


def environment(form: str) -> dict[str, str]:
    """The variables of a form's process: the caller's, FUSEPATCH=0 for a plain one, and else what the form sets."""
    variables = {name: value for name, value in os.environ.items() if name != "FUSEPATCH"}
    own = {**FORMS[form].variables} if FORMS[form].patched else {"FUSEPATCH": "0"}
    return {"TRL_EXPERIMENTAL_SILENCE": "1", **variables, **own}


def _note(row: Update, found: dict[str, Any], document: dict[str, Any]) -> None:
    if "problem" in found:
        row.problem, row.reason = found["problem"], found["reason"]
        return
    document.setdefault("machine", found["machine"])
    document.setdefault("versions", found["versions"])
    row.repeats.append(found["milliseconds"])
    row.memory = {"peak_bytes": max(found["peak_bytes"], row.memory.get("peak_bytes", 0))}
    # Of the last process: each draws the same rows, and computes the same but for the order of sums.
    row.tokens, row.used, row.norms, row.losses = (found[name] for name in ("tokens", "used", "norms", "losses"))
    row.applied = found["fusepatch"]


def _check(row: Update, plain: Update, case: Case) -> None:
    """Compare the gradient norms of a form with those of the plain one. The plain ones must be finite."""
    if row.problem is not None or not plain.norms:
        return
    tolerance = TOLERANCES[case.dtype]
    error = max(distance(mine, theirs) for mine, theirs in zip(row.norms, plain.norms, strict=True))
    row.check = {"error": error, "tolerance": tolerance, "passed": error <= tolerance}


def distance(mine: float, theirs: float) -> float:
    """How far two norms are apart, relative to the second; infinite where one is not finite."""
    if not (math.isfinite(mine) and math.isfinite(theirs)):
        return math.inf
    return abs(mine - theirs) / theirs if theirs else (0.0 if mine == 0 else math.inf)


def headings() -> list[str]:
    return [
        "form",
        "min s",
        "median s",
        "x faster than plain",
        "tokens through the model",
        "of these no padding",
        "peak GiB",
        "gradient norms",
        "check: distance of the norms",
    ]


def cells(section: Section) -> list[list[str]]:
    """One list of texts for each form, in the order of `headings`."""
    plain = section.rows[0]
    result = []
    for row in section.rows:
        if row.problem is not None:
            result.append([row.peer, *[""] * (len(headings()) - 2), f"{row.problem}: {row.reason}"])
            continue
        faster = report.ratio(plain, row)
        peak = row.memory["peak_bytes"]
        result.append(
            [
                row.peer,
                f"{min(row.times) / 1000:.4g}",
                f"{row.median / 1000:.4g}",
                "" if row is plain else report.ratio_text(faster),
                f"{round(statistics.mean(row.tokens)):,}",
                # What was dropped is no longer among the tokens, so their share says nothing of padding.
                "-" if row.peer == "drop" else f"{statistics.mean(row.used) / statistics.mean(row.tokens):.0%}",
                report.gib(peak) if peak else "-",
                ", ".join(f"{norm:.4g}" for norm in row.norms),
                report.compared(row, plain),
            ]
        )
    return result


def machine_text(document: dict[str, Any]) -> str:
    machine, versions = document["machine"], document["versions"]
    processes = "process" if document["repeats"] == 1 else "processes"
    return (
        f"{machine['device']}, torch {machine['torch']}, transformers {versions['transformers']}, TRL "
        f"{versions['trl']}, Python {machine['python']}; {document['repeats']} {processes} of each form, by turns"
    )


def batch_text(case: Case) -> str:
    batch, model = case.batch, case.model
    return (
        f"{batch.completions} completions in groups of {batch.group}, {batch.micro_batches} micro-batches; median "
        f"{batch.median} of {batch.longest:,} tokens, prompts up to {batch.prompt}; {case.dtype}, "
        f"hidden {model.hidden}, {model.layers} layers, vocabulary {model.vocabulary:,}"
    )


def markdown(document: dict[str, Any], sections: Sequence[Section]) -> str:
    """The tables in Markdown, with the command and the machine."""
    lines = [machine_text(document), "", "```", document["command"], "```"]
    for section in sections:
        lines += ["", f"### {section.case.title}", "", batch_text(section.case), ""]
        lines += report.markdown_table(headings(), cells(section), words=2)
    return "\n".join(lines) + "\n"


def as_json(document: dict[str, Any], sections: Sequence[Section]) -> str:
    """Everything measured, with the ratios."""
    data = {**document, "cases": [_data(section) for section in sections]}
    return json.dumps(data, indent=1, allow_nan=False)


def _data(section: Section) -> dict[str, Any]:
    return {
        "case": section.case.title,
        **section.case.as_json(),
        "forms": [
            {
                "form": row.peer,
                "problem": row.problem,
                "reason": row.reason,
                "milliseconds": row.repeats,
                "minimum": min(row.times, default=None),
                "median": row.median if row.times else None,
                "tokens": row.tokens,
                "used": row.used,
                "norms": [report.finite(norm) for norm in row.norms],
                "losses": [report.finite(loss) for loss in row.losses],
                "check": None if row.check is None else {name: report.finite(v) for name, v in row.check.items()},
                "fusepatch": row.applied,
                **row.memory,
                "times_faster_than_plain": report.ratio(section.rows[0], row),
            }
            for row in section.rows
        ],
    }
