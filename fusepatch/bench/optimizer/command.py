"""`python -m fusepatch bench optimizer`: the forms of AdamW in one run, and what they cost in time and memory."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import fusepatch
from fusepatch import terminal
from fusepatch.bench import arguments, report
from fusepatch.bench.optimizer.cases import (
    CHECK_STEPS,
    CPU_HIDDEN,
    CPU_MILLIONS,
    CPU_ROWS,
    GPU_HIDDEN,
    GPU_MILLIONS,
    GPU_ROWS,
    TOLERANCES,
    VARIANTS,
    Size,
)
from fusepatch.bench.processes import FAILED, Peer, Worker
from fusepatch.bench.report import Row

_ABOUT = """\
Times training steps of a stack of feed-forward blocks with AdamW on this
machine. Each variant has its own process; they take turns, several times.
Prints minimum and median of forward, backward and step together, the part that
is not forward and backward, the memory of a step above parameters and optimizer
state, and a check of the weights after {steps} steps against those of
`default`. Nothing is compared with a time whose check failed.

variants:
{variants}
tolerances of the check: {tolerances}

exit status: 0; 1 where a check failed; 2 for wrong arguments
"""


@dataclass
class Variant(Row):
    """One variant with one dtype; `alone` are milliseconds of forward and backward without the step."""

    alone: list[list[float]] = field(default_factory=list)

    @property
    def optimizer_part(self) -> float:
        """Milliseconds of the fastest step that the fastest forward and backward alone do not take."""
        return min(self.times) - min(value for repeat in self.alone for value in repeat)


@dataclass(frozen=True)
class Table:
    """All variants with one dtype."""

    dtype: str
    rows: list[Variant]


def add_parser(what: Any) -> None:
    """Add `optimizer` to the benchmarks that the command line knows."""
    parser = what.add_parser(
        "optimizer",
        help="AdamW in its forms, and inside backward",
        description=_ABOUT.format(
            steps=CHECK_STEPS,
            variants="".join(f"  {name:<12} {text}\n" for name, text in VARIANTS.items()),
            tolerances=", ".join(f"{value:g} {name}" for name, value in TOLERANCES.items()),
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", type=arguments.positive, metavar="N", help="millions of parameters, about")
    parser.add_argument("--hidden", type=arguments.positive, metavar="N", help="size of a hidden state")
    parser.add_argument("--rows", type=arguments.positive, metavar="N", help="rows of a batch")
    parser.add_argument("--dtypes", type=arguments.names(TOLERANCES), default=tuple(TOLERANCES), metavar="NAME,...")
    parser.add_argument("--variants", type=arguments.names(VARIANTS), default=tuple(VARIANTS), metavar="NAME,...")
    parser.add_argument("--repeats", type=arguments.repeats, default=3, metavar="N", help="at least 3, the default")
    parser.add_argument("--json", metavar="FILE", help="write everything measured")
    parser.add_argument(
        "--markdown", metavar="FILE", nargs="?", const="-", help="write the tables; to stdout without FILE"
    )


def run(options: argparse.Namespace, command: str) -> int:
    """Measure as asked; returns the exit status."""
    # Every other variant is checked against the default one.
    names = [name for name in VARIANTS if name == "default" or name in options.variants]
    with tempfile.TemporaryDirectory(prefix="fusepatch-bench-") as folder:
        workers = {name: _started(name, folder) for name in names}
        try:
            hellos = {name: worker.answer() for name, worker in workers.items()}
            machine = next((hello["machine"] for hello in hellos.values() if "machine" in hello), None)
            if machine is None:
                raise arguments.BenchError(f"No process could be started: {next(iter(hellos.values()))['reason']}")
            size = _size(options, machine["cuda"])
            document = {
                "fusepatch": fusepatch.__version__,
                "command": command,
                "machine": machine,
                "size": asdict(size),
                "parameters": size.parameters,
                "repeats": options.repeats,
            }
            print(machine_text(document))
            if not machine["cuda"]:
                print("This machine has no CUDA GPU: the checks count, the times say little about a GPU's.")
            tables: list[Table] = []
            for dtype in options.dtypes:
                tables.append(Table(dtype, _measure(workers, size, dtype, options.repeats, folder)))
                print(f"\n{dtype}\n")
                terminal.print_table(headings(), cells(tables[-1]), max(terminal.width(), 150))
                sys.stdout.flush()
                if options.json:
                    report.write(options.json, as_json(document, tables))
                if options.markdown not in (None, "-"):
                    report.write(options.markdown, markdown(document, tables))
        finally:
            for worker in workers.values():
                worker.close()
    if options.markdown == "-":
        print("\n" + markdown(document, tables), end="")
    failed = [f"{row.peer} in {table.dtype}" for table in tables for row in table.rows if row.check and not row.passed]
    if failed:
        print(f"\nFAILED CHECK: {'; '.join(failed)}. No ratio was made with these times.")
    return FAILED if failed else 0


def _started(name: str, folder: str) -> Worker:
    return Worker(Peer(name, name), folder, "fusepatch.bench.optimizer.worker")


def _size(options: argparse.Namespace, gpu: bool) -> Size:
    hidden = options.hidden or (GPU_HIDDEN if gpu else CPU_HIDDEN)
    wanted = (options.size or (GPU_MILLIONS if gpu else CPU_MILLIONS)) * 1_000_000
    blocks = max(round(wanted / Size(1, hidden, 1).parameters), 1)
    return Size(blocks, hidden, options.rows or (GPU_ROWS if gpu else CPU_ROWS))


def _measure(workers: dict[str, Worker], size: Size, dtype: str, repeats: int, folder: str) -> list[Variant]:
    rows = {name: Variant(name, name, None) for name in workers}

    def ask(name: str, do: str) -> dict[str, Any] | None:
        row = rows[name]
        answer = workers[name].ask({"do": do, "dtype": dtype, "size": asdict(size), "path": f"{folder}/{dtype}.pt"})
        if "problem" in answer:
            row.problem, row.reason = answer["problem"], answer["reason"]
            return None
        return answer

    for name, row in rows.items():
        found = ask(name, "check")
        if found is not None:
            row.check = found.pop("check")
            row.memory = found
    for _ in range(repeats):
        for name, row in rows.items():
            found = None if row.problem is not None else ask(name, "time")
            if found is not None:
                row.repeats.append(found["milliseconds"])
                row.alone.append(found["forward_backward"])
    return list(rows.values())


def headings() -> list[str]:
    return [
        "variant",
        "min ms",
        "median ms",
        "x faster than default",
        "optimizer ms",
        "state GiB",
        "above state GiB",
        "check: distance of the weights",
    ]


def cells(table: Table) -> list[list[str]]:
    """One list of texts for each row, in the order of `headings`."""
    default = table.rows[0]
    result = []
    for row in table.rows:
        if row.problem is not None:
            result.append([row.peer, *[""] * (len(headings()) - 2), f"{row.problem}: {row.reason}"])
            continue
        faster = report.ratio(default, row)
        result.append(
            [
                row.peer,
                f"{min(row.times):.4g}",
                f"{row.median:.4g}",
                "" if row is default else report.ratio_text(faster),
                f"{row.optimizer_part:.4g}",
                report.gib(row.memory.get("state_bytes")),
                report.gib(row.memory.get("above_state_bytes")),
                report.compared(row, default),
            ]
        )
    return result


def machine_text(document: dict[str, Any]) -> str:
    machine, size = document["machine"], document["size"]
    return (
        f"{machine['device']}, torch {machine['torch']}, Python {machine['python']}; {document['parameters']:,} "
        f"parameters in {size['blocks']} blocks, hidden {size['hidden']}, {size['rows']} rows; {document['repeats']} "
        "interleaved repeats"
    )


def markdown(document: dict[str, Any], tables: Sequence[Table]) -> str:
    """The tables in Markdown, with the command and the machine."""
    lines = [machine_text(document), "", "```", document["command"], "```"]
    for table in tables:
        lines += ["", f"### {table.dtype}", "", *report.markdown_table(headings(), cells(table))]
    return "\n".join(lines) + "\n"


def as_json(document: dict[str, Any], tables: Sequence[Table]) -> str:
    """Everything measured, with the ratios."""
    return json.dumps({**document, "tables": [_data(table) for table in tables]}, indent=1, allow_nan=False)


def _data(table: Table) -> dict[str, Any]:
    return {
        "dtype": table.dtype,
        "variants": [
            {
                "variant": row.peer,
                "problem": row.problem,
                "reason": row.reason,
                "milliseconds": row.repeats,
                "forward_backward_milliseconds": row.alone,
                "minimum": min(row.times, default=None),
                "median": row.median if row.times else None,
                "optimizer_part": row.optimizer_part if row.times else None,
                "check": None if row.check is None else {name: report.finite(v) for name, v in row.check.items()},
                **row.memory,
                "times_faster_than_default": report.ratio(table.rows[0], row),
            }
            for row in table.rows
        ],
    }
