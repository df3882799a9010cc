"""The arguments of `python -m fusepatch bench`."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence

from fusepatch import terminal
from fusepatch.bench.arguments import BenchError
from fusepatch.bench.grpo import command as grpo
from fusepatch.bench.optimizer import command as optimizer
from fusepatch.bench.update import command as update

PLOTS = (".png", ".pdf", ".svg")


def main(arguments: Sequence[str], program: str) -> int:
    """Run `bench ARGUMENTS`; ``program`` is what the help shows before `bench`. Returns the exit status."""
    options = _parser(program).parse_args(arguments)
    _check_paths(options)
    command = shlex.join(["python", "-m", "fusepatch", "bench", *arguments])
    runs = {"grpo": grpo.run, "optimizer": optimizer.run, "update": update.run}
    return runs[options.what](options, command)


def _check_paths(options: argparse.Namespace) -> None:
    """Refuse, before anything is measured, a file that could not be written afterwards."""
    for option in ("json", "markdown", "plot"):
        path = getattr(options, option, None)
        if path is None or (option == "markdown" and path == "-"):
            continue
        parent = os.path.dirname(os.path.abspath(path))
        problem = ""
        if path in ("", "-"):
            problem = "it needs the name of a file"
        elif not os.path.isdir(parent):
            problem = f"there is no folder {parent}"
        elif os.path.lexists(path) and not os.path.isfile(path):
            problem = "it exists and is not a regular file"  # which would be replaced by one: /dev/null
        elif not os.access(parent, os.W_OK):
            problem = f"the folder {parent} is not writable"
        elif option == "plot" and os.path.splitext(path)[1] not in PLOTS:
            problem = f"a plot's name ends in one of {', '.join(PLOTS)}"
        if problem:
            raise BenchError(f"--{option} {path!r} cannot be written: {problem}. Nothing was measured.")


def _parser(program: str) -> argparse.ArgumentParser:
    parser = terminal.Parser(prog=f"{program} bench", description="Benchmarks on this machine.")
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    grpo.add_parser(what)
    optimizer.add_parser(what)
    update.add_parser(what)
    return parser
