"""The arguments of `python -m fusepatch bench`."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence

from fusepatch.bench.arguments import BenchError
from fusepatch.bench.grpo import command as grpo
from fusepatch.bench.optimizer import command as optimizer


def main(arguments: Sequence[str], program: str) -> int:
    """Run `bench ARGUMENTS`; ``program`` is what the help shows before `bench`. Returns the exit status."""
    options = _parser(program).parse_args(arguments)
    _check_paths(options.json, options.markdown, getattr(options, "plot", None))
    command = shlex.join(["python", "-m", "fusepatch", "bench", *arguments])
    if options.what == "optimizer":
        return optimizer.run(options, command)
    return grpo.run(options, command)


def _check_paths(*paths: str | None) -> None:
    for path in paths:
        parent = os.path.dirname(os.path.abspath(path)) if path else "."
        if not os.path.isdir(parent):
            raise BenchError(f"{path} cannot be written: there is no folder {parent}. Nothing was measured.")


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{program} bench", description="Benchmarks on this machine.")
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    grpo.add_parser(what)
    optimizer.add_parser(what)
    return parser
