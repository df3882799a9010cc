"""Judge the runs of a scenario and print them side by side, in 80 columns."""

from __future__ import annotations

import fnmatch
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from demo.scenario import Column, Run, Scenario, Value

WIDTH = 80
FIRST = 26
"""Width of the column with the rows' names."""


def problems(scenario: Scenario, runs: Sequence[Run]) -> Iterator[str]:
    """What is not as it must be, in words; nothing where all is well."""
    failed = [(column, run) for column, run in zip(scenario.columns, runs, strict=True) if run.failure]
    for column, run in failed:
        yield f"the run {column.heading!r} failed; the end of what it wrote:\n{run.failure}"
    if failed:
        return
    for column, run in zip(scenario.columns, runs, strict=True):
        yield from _patch_problems(scenario, column, run)
    names = list(runs[0].rows)
    for pattern in scenario.equal:
        rows = fnmatch.filter(names, pattern)
        if not rows:
            yield f"no row {pattern!r} came back"
        for name in rows:
            values = [run.rows.get(name) for run in runs]
            if not all(_same(values[0], value, scenario.tolerance) for value in values):
                yield f"{name} must be the same in every column: {', '.join(map(str, values))}"
    for name, wanted in scenario.wanted.items():
        found = tuple(run.rows.get(name) for run in runs)
        if found != wanted:
            yield f"{name} must be {', '.join(map(str, wanted))} and is {', '.join(map(str, found))}"


def _patch_problems(scenario: Scenario, column: Column, run: Run) -> Iterator[str]:
    if not column.patched:
        if run.patches is not None:
            yield f"fusepatch was imported in the run {column.heading!r}"
        return
    records = {record["id"]: record for record in run.patches or ()}
    for patch in scenario.applied:
        record = records.get(patch)
        if record is None or record["outcome"] != "APPLIED":
            yield f"{patch} must be applied in the run {column.heading!r}: {record and record['outcome']}"
        elif record["calls"] == 0:
            yield f"{patch} is applied in the run {column.heading!r} but was never used"


def _same(one: Value | None, other: Value | None, tolerance: float) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
    return one == other and one is not None


def render(scenario: Scenario, runs: Sequence[Run], wrong: Sequence[str]) -> Iterator[str]:
    """The lines of one scenario."""
    yield from ("", "=" * WIDTH, scenario.title, "=" * WIDTH)
    yield from (*_wrapped(scenario.told), "")
    for column in scenario.columns:
        for variable, value in column.variables.items():
            yield f"{column.heading}: {variable}={value}"
    if any(column.variables for column in scenario.columns):
        yield ""
    if not any(run.failure for run in runs):
        yield from _table(scenario, runs)
        for column, run in zip(scenario.columns, runs, strict=True):
            if run.patches is not None:
                yield from ("", f"{column.heading}: what was patched where, and what was not")
                yield from _patches(run)
    yield ""
    for problem in wrong:
        first, *traceback = f"NOT AS IT MUST BE: {problem}".split("\n")
        yield from (*_wrapped(first), *traceback)
    if not wrong:
        yield from _wrapped(f"ok: {_verdict(scenario)}")


def _verdict(scenario: Scenario) -> str:
    parts = []
    if scenario.equal:
        how = f"within {scenario.tolerance:g}" if scenario.tolerance else "to the last bit"
        names = ", ".join(pattern.partition(",")[0] for pattern in scenario.equal)
        parts.append(f"{names} are equal {how}")
    if scenario.wanted:
        parts.append("every part runs the code that it must run")
    return "; ".join(parts)


def _table(scenario: Scenario, runs: Sequence[Run]) -> Iterator[str]:
    width = (WIDTH - FIRST) // len(runs)
    yield "".join([" " * FIRST, *(column.heading.ljust(width) for column in scenario.columns)]).rstrip()
    yield "-" * WIDTH
    names = list(dict.fromkeys(name for run in runs for name in run.rows))
    for name in names:
        yield "".join([name.ljust(FIRST), *(_shown(run.rows.get(name)).ljust(width) for run in runs)]).rstrip()


def _shown(value: Value | None) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _patches(run: Run) -> Iterator[str]:
    for line in run.said:
        yield from _wrapped(f"it said: {line}", indent=2)
    for record in run.patches or ():
        yield f"  {record['id']}: {record['outcome']}, calls: {record['calls']}"
        for line in _sites(record["sites"]):
            yield from _wrapped(line, indent=4)
        for note in record["replaced"]:
            yield from _wrapped(f"replaced {note['times']}x: {note['text']}", indent=4)
        for note in record["fallbacks"]:
            yield from _wrapped(f"not done {note['times']}x: {note['text']}", indent=4)


def _sites(sites: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One line for all sites of a patch that share outcome and reason."""
    together: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for site in sites:
        reason = site["reason"]
        words = "; ".join(filter(None, [reason["found"], reason["wanted"], reason["consequence"], reason["action"]]))
        together.setdefault((site["outcome"], words), []).append(site)
    for (outcome, words), same in together.items():
        functions = sum(len(site["slots"]) for site in same)
        where = f"{same[0]['module']}" + (f" and {len(same) - 1} more modules" if len(same) > 1 else "")
        counted = f", functions wrapped: {functions}" if functions else ""
        yield f"{where}: {outcome}{counted}; {words}"


def _wrapped(text: str, indent: int = 0) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2 if indent else 0)
    )
