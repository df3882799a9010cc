"""`python -m fusepatch bench grpo`: a linear head with a GRPO loss, every implementation that is installed by turns."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import fusepatch
from fusepatch.bench import report
from fusepatch.bench.arguments import BenchError, names, positive, repeats
from fusepatch.bench.grpo import tables
from fusepatch.bench.grpo.cases import (
    CASES,
    CPU_SHAPE,
    GPU_SHAPE,
    PEERS,
    TOLERANCES,
    VOCABULARIES,
    Case,
    Shape,
    describe,
)
from fusepatch.bench.grpo.tables import Section
from fusepatch.bench.processes import FAILED, Peer, PeerError, Worker, read_peer
from fusepatch.bench.report import Row

_WORKER = "fusepatch.bench.grpo.worker"

_ABOUT = """\
Times forward and backward of a linear head with a GRPO loss on this machine:
each implementation has its own process, and they take turns, several times.
Prints minimum and median of all calls, the memory, and beside each time a check
of the loss and the gradients against float64 on the same inputs. Nothing is
compared with a time whose check failed.

peers:
{peers}
cases (frozen-... and trainable-... of each):
{cases}
The masks and policies are measured at the first vocabulary, plain `frozen` and
`trainable` at every one. A float64 reference is slow on GPUs without float64
matrix units. Without a GPU the default shape is tiny, and times say little.

tolerances of the check: {tolerances}

exit status: 0; 1 where a check failed; 2 for wrong arguments
"""


def add_parser(what: Any) -> None:
    """Add `grpo` to the benchmarks that the command line knows."""
    grpo = what.add_parser(
        "grpo",
        help="a linear head with a GRPO loss",
        description=_ABOUT.format(
            peers="".join(f"  {name:<18} {text}\n" for name, text in PEERS.items()),
            cases="".join(
                f"  {name:<18} {describe(case).partition(', ')[2]}\n"
                for name, case in CASES.items()
                if not case.trainable
            ),
            tolerances=", ".join(f"{value:g} {name}" for name, value in TOLERANCES.items()),
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, text in (("batch", "sequences"), ("length", "tokens of each"), ("hidden", "size of a hidden state")):
        grpo.add_argument(f"--{name}", type=positive, metavar="N", help=text)
    grpo.add_argument("--vocabulary", type=positive, nargs="+", metavar="N", help="one or several")
    grpo.add_argument("--dtype", choices=TOLERANCES)
    grpo.add_argument("--cases", type=names(CASES), default=tuple(CASES), metavar="NAME,...")
    grpo.add_argument("--peers", type=names(PEERS), default=tuple(PEERS), metavar="NAME,...")
    grpo.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="a wheel or folder that comes first on that peer's path; a NAME with a label (liger-0.8.3) is one more "
        "peer",
    )
    grpo.add_argument("--repeats", type=repeats, default=3, metavar="N", help="at least 3, the default")
    grpo.add_argument("--json", metavar="FILE", help="write everything measured")
    grpo.add_argument(
        "--markdown", metavar="FILE", nargs="?", const="-", help="write the tables; to stdout without FILE"
    )
    grpo.add_argument("--plot", metavar="FILE.png", help="write a plot; needs matplotlib")


def run(options: argparse.Namespace, command: str) -> int:
    """Measure as asked; returns the exit status.

    Raises:
        BenchError: an option cannot be followed, or no process could be started.
    """
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise BenchError(
            "--plot needs matplotlib, which is not installed. Nothing was measured: install it, or leave --plot out."
        )
    peers = _peers(options)
    with tempfile.TemporaryDirectory(prefix="fusepatch-bench-") as folder:
        return _run(options, peers, command, folder)


def _peers(options: argparse.Namespace) -> list[Peer]:
    placed = {peer.name: peer for peer in (read_peer(text, PEERS) for text in options.peer)}
    if len(placed) < len(options.peer):
        raise PeerError("--peer was given twice for one name. Give each its own label, as in liger-0.8.3=PATH.")
    names = list(dict.fromkeys([*(name for name in PEERS if name in options.peers), *placed]))
    return [placed.get(name, Peer(name, name)) for name in names]


def _run(options: argparse.Namespace, peers: list[Peer], command: str, folder: str) -> int:
    workers = {peer.name: Worker(peer, folder, _WORKER) for peer in peers}
    try:
        hellos = {name: worker.answer() for name, worker in workers.items()}
        machine = next((hello["machine"] for hello in hellos.values() if "machine" in hello), None)
        if machine is None:
            raise BenchError(f"No peer's process could be started: {next(iter(hellos.values()))['reason']}")
        default = GPU_SHAPE if machine["cuda"] else CPU_SHAPE
        given = {name: value for name in asdict(default) if (value := getattr(options, name)) is not None}
        vocabularies = given.pop("vocabulary", VOCABULARIES if machine["cuda"] else (default.vocabulary,))
        shape = replace(default, **given)
        document = {
            "fusepatch": fusepatch.__version__,
            "command": command,
            "machine": machine,
            "shape": {name: value for name, value in asdict(shape).items() if name != "vocabulary"},
            "repeats": options.repeats,
        }
        print(tables.machine_text(document))
        if not machine["cuda"]:
            print("This machine has no CUDA GPU: the checks count, the times say little about a GPU's.")
        sections: list[Section] = []
        for vocabulary in vocabularies:
            for case in (CASES[name] for name in options.cases):
                if vocabulary != vocabularies[0] and not case.on_policy:
                    continue
                for name, worker in workers.items():
                    if "problem" not in hellos[name] and not worker.alive:
                        worker.close()
                        workers[name] = Worker(worker.peer, folder, _WORKER)
                        hellos[name] = workers[name].answer()
                rows = _measure(case, replace(shape, vocabulary=vocabulary), workers, hellos, machine, options.repeats)
                sections.append(Section(case.name, describe(case), vocabulary, rows))
                tables.print_section(sections[-1])
                sys.stdout.flush()
                _write(options, document, sections)
    finally:
        for worker in workers.values():
            worker.close()
    if options.markdown == "-":
        print("\n" + tables.markdown(document, sections), end="")
    if options.plot is not None:
        tables.plot(options.plot, document, sections)
    failed = tables.failed_checks(sections)
    if failed:
        print(f"\nFAILED CHECK: {'; '.join(failed)}. No ratio was made with these times.")
    return FAILED if failed else 0


def _measure(
    case: Case,
    shape: Shape,
    workers: dict[str, Worker],
    hellos: dict[str, dict[str, Any]],
    machine: dict[str, Any],
    repeats: int,
) -> list[Row]:
    rows = {}
    for name, worker in workers.items():
        hello = hellos[name]
        rows[name] = Row(name, worker.peer.implementation, hello.get("version"))
        _note(rows[name], hello)

    def running() -> list[Worker]:
        return [workers[name] for name, row in rows.items() if row.problem is None]

    def command(do: str) -> dict[str, Any]:
        return {"do": do, "case": case.name, "shape": asdict(shape)}

    # Upstreams compile for many seconds on the CPU: all at once where the memory has room for all of them.
    most = len(running()) * 14 * shape.batch * shape.length * shape.vocabulary
    together = machine["memory_bytes"] > most
    for group in [running()] if together else [[worker] for worker in running()]:
        for worker in group:
            worker.send(command("warm"))
        for worker in group:
            _note(rows[worker.peer.name], worker.answer())
    for worker in running():
        answer = worker.ask(command("check"))
        row = rows[worker.peer.name]
        if not _note(row, answer):
            row.check = answer.pop("check", None)
            row.memory = answer
    for _ in range(repeats):
        for worker in running():
            answer = worker.ask(command("time"))
            if not _note(rows[worker.peer.name], answer):
                rows[worker.peer.name].repeats.append(answer["milliseconds"])
    return list(rows.values())


def _note(row: Row, answer: dict[str, Any]) -> bool:
    """Whether the answer is a problem, which is then the row's."""
    if "problem" not in answer:
        return False
    row.problem, row.reason = answer["problem"], answer["reason"]
    return True


def _write(options: argparse.Namespace, document: dict[str, Any], sections: Sequence[Section]) -> None:
    texts = (
        (options.json, tables.as_json(document, sections)),
        (options.markdown, tables.markdown(document, sections)),
    )
    for path, text in texts:
        if path not in (None, "-"):
            report.write(path, text)  # after each case, so that a run that is stopped leaves what it has
