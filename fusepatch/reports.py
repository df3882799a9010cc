"""Reads the reports of many processes (`FUSEPATCH_REPORT`) and says which process trains with what."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fusepatch import process_record, terminal
from fusepatch.engine.patch import Outcome, Reason
from fusepatch.errors import FusepatchError

MAXIMUM_NOTES = 12
"""Distinct notes printed; all of them are in the JSON."""
PIDS_SHOWN = 3

_BY_THE_USER = (Outcome.DISABLED, Outcome.REMOVED)


class Report(NamedTuple):
    """What one directory holds: the processes' records as they wrote them, oldest first, and the files that are none."""

    folder: str
    processes: tuple[dict[str, Any], ...]
    not_read: tuple[tuple[str, str], ...]


class Loaded(NamedTuple):
    """A target that is loaded in a process: the process's record, the patch's id, the site as the process wrote it."""

    process: dict[str, Any]
    patch: str
    site: dict[str, Any]
    outcome: Outcome

    @property
    def wrong(self) -> bool:
        """Whether it is not applied though the user has not switched it off."""
        return self.outcome is not Outcome.APPLIED and self.outcome not in _BY_THE_USER


def read(folder: str) -> Report:
    """Read every record in `folder`; a file that is none is named in the result.

    Raises:
        FusepatchError: `folder` is no directory that can be listed.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise FusepatchError(
            f"the reports cannot be read ({type(error).__name__}: {error}); wanted the directory that FUSEPATCH_REPORT named in "
            f"the run, found --report {folder}. Nothing was checked; name that directory, on a machine that sees it."
        ) from None
    processes: list[dict[str, Any]] = []
    not_read = []
    for name in names:
        if name.startswith("."):  # what a process is writing, or was when it was killed
            continue
        try:
            processes.append(_record(os.path.join(folder, name)))
        except (OSError, ValueError) as error:
            not_read.append((name, str(error)))
    processes.sort(key=lambda process: (process["started"], process["host"], process["pid"]))
    return Report(folder, tuple(processes), tuple(not_read))


def _record(path: str) -> dict[str, Any]:
    if os.path.isdir(path):
        raise ValueError("a directory")
    with open(path, "rb") as file:
        text = file.read()
    try:
        record = json.loads(text)
    except ValueError as error:
        raise ValueError(f"torn, or none of fusepatch's: no JSON ({error})") from None
    if not isinstance(record, dict) or "format" not in record or "fusepatch" not in record:
        raise ValueError("none of fusepatch's: JSON of another kind")
    if record["format"] != process_record.FORMAT:
        raise ValueError(
            f"written by fusepatch {record['fusepatch']} in format {record['format']}; this one reads {process_record.FORMAT}"
        )
    return record


def loaded(report: Report) -> list[Loaded]:
    """Every target that some process has loaded. What the installed version does not have is no target."""
    return [target for process in report.processes for target in _loaded_in(process)]


def _loaded_in(process: dict[str, Any]) -> list[Loaded]:
    return [
        Loaded(process, patch["id"], site, Outcome[site["outcome"]])
        for patch in process["patches"]
        for site in patch["sites"]
        if site["loaded"] and site["outcome"] != Outcome.ABSENT.name
    ]


def not_applied(report: Report) -> list[tuple[str, Outcome]]:
    """The patches with a target that is loaded in some process and not applied there, each with each outcome."""
    return list(dict.fromkeys((target.patch, target.outcome) for target in loaded(report) if target.wrong))


def as_data(report: Report) -> dict[str, Any]:
    """The merged report in the types of JSON."""
    return {
        "processes": report.processes,
        "not_applied": [
            {
                **{name: target.process[name] for name in ("host", "pid", "rank", "role")},
                **{name: target.site[name] for name in ("patch", "module", "version", "outcome", "reason")},
            }
            for target in loaded(report)
            if target.wrong
        ],
        "not_read": [{"file": name, "why": why} for name, why in report.not_read],
    }


def print_report(report: Report, columns: int) -> None:
    """Print which process trains with what, then what is not applied, what calls could not have, what could not be read."""
    if report.processes:
        hosts = {process["host"] for process in report.processes}
        print(f"{_count(len(report.processes), 'process', 'es')} on {_count(len(hosts), 'host')}\n")
        terminal.print_table(("process", "where", "rank", "outcome", "patches"), _rows(report), columns)
    else:
        print("no process has reported")
    lines = [*_not_applied(report), *_notes(report), *(f"not read: {name}: {why}" for name, why in report.not_read)]
    if lines:
        print("\n" + "\n".join(terminal.wrap(f"- {line}", columns) for line in lines))


def missing(report: Report, required: Sequence[str]) -> list[str]:
    """Why the required patches do not hold in every process that has loaded a target of theirs; empty where they do.

    Who requires a patch has not switched it off knowingly: DISABLED is missing too.
    """
    targets = loaded(report)
    problems = []
    for name in required:
        own = [target for target in targets if target.patch == name]
        if not own:
            processes = _count(len(report.processes), "process", "es")
            problems.append(
                f"{name} is not applied anywhere: of {processes} that reported, none has loaded a target of it"
            )
        failed = {_who(target.process): target.outcome for target in own if target.outcome is not Outcome.APPLIED}
        problems.extend(f"{name} is {outcome.value} in {who}" for who, outcome in failed.items())
    return problems


def used(report: Report, ids: Sequence[str]) -> str:
    """In how many processes each patch has a target, and how many calls went through it; every patch where none is named."""
    targets: dict[str, set[int]] = {}
    calls: dict[str, int] = {}
    for index, process in enumerate(report.processes):
        for target in _loaded_in(process):
            targets.setdefault(target.patch, set()).add(index)
        for patch in process["patches"]:
            calls[patch["id"]] = calls.get(patch["id"], 0) + patch["calls"]
    return "; ".join(
        f"{name} in {_count(len(targets[name]), 'process', 'es')} with {_count(calls[name], 'call')}"
        for name in ids or targets
    )


def _rows(report: Report) -> list[tuple[str, ...]]:
    same: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for process in report.processes:
        outcome, text = _patches(process)
        key = (process["role"], _rank(process), outcome, text)
        same.setdefault(key, {}).setdefault(process["host"], []).append(str(process["pid"]))
    return [
        (role, "; ".join(f"{host} {_few(pids)}" for host, pids in hosts.items()), rank, outcome, text)
        for (role, rank, outcome, text), hosts in same.items()
    ]


def _patches(process: dict[str, Any]) -> tuple[str, str]:
    """The process's outcome in one word or two, and each patch of which it has loaded a target."""
    targets = _loaded_in(process)
    if not targets:
        return "nothing loaded", "no target is loaded in this process"
    wrong, called, uncalled = [], [], []
    for patch in process["patches"]:
        own = [target for target in targets if target.patch == patch["id"]]
        upstreams = ", ".join(
            f"{name} {process['upstreams'].get(name, 'of unknown version')}"
            for name in dict.fromkeys(target.site["upstream"] for target in own)
        )
        others = sorted({target.outcome.value for target in own if target.outcome is not Outcome.APPLIED})
        if others:
            wrong.append(f"{patch['id']} {', '.join(others)} ({upstreams})")
        elif own and patch["calls"]:
            called.append(f"{patch['id']} {_count(patch['calls'], 'call')} ({upstreams})")
        elif own:
            uncalled.append(patch["id"])
    parts = [*wrong, *called, *([f"without a call: {', '.join(uncalled)}"] if uncalled else [])]
    if any(target.wrong for target in targets):
        outcome = "NOT APPLIED"
    else:
        outcome = "APPLIED" if any(target.outcome is Outcome.APPLIED for target in targets) else "DISABLED"
    return outcome, "; ".join(parts)


def _not_applied(report: Report) -> Iterator[str]:
    same: dict[str, list[str]] = {}
    for target in loaded(report):
        if target.wrong:
            site = target.site
            text = f"NOT APPLIED: {target.patch}: {site['module']} is loaded, but {target.outcome.value}: {Reason(**site['reason'])}"
            same.setdefault(text, []).append(_who(target.process))
    for text, processes in same.items():
        yield f"{text}. In {_few(processes)}"


def _notes(report: Report) -> Iterator[str]:
    times: dict[tuple[str, str, str], list[int]] = {}
    for process in report.processes:
        for record in process["patches"]:
            for kind, label in (("fallbacks", "not done"), ("replaced", "replaced")):
                for note in record[kind]:
                    times.setdefault((label, record["id"], note["text"]), []).append(note["times"])
    for (label, patch, text), each in sorted(times.items(), key=lambda item: item[0][0])[:MAXIMUM_NOTES]:
        yield f"{patch}: {label} {sum(each)}x in {_count(len(each), 'process', 'es')}: {text}"
    if len(times) > MAXIMUM_NOTES:
        yield f"{_count(len(times) - MAXIMUM_NOTES, 'further note')}: `--json` has them all"


def _who(process: dict[str, Any]) -> str:
    rank = f", rank {_rank(process)}" if process["rank"] is not None else ""
    return f"{process['role']} ({process['host']} {process['pid']}{rank})"


def _rank(process: dict[str, Any]) -> str:
    if process["rank"] is None:
        return ""
    return f"{process['rank']}/{process['world_size']}" if process["world_size"] else str(process["rank"])


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:PIDS_SHOWN])
    return shown if len(names) <= PIDS_SHOWN else f"{shown} and {len(names) - PIDS_SHOWN} more"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"
