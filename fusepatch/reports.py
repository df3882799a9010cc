"""Reads the reports of many processes (`FUSEPATCH_REPORT`) and says which process trains with what."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fusepatch import patch_lines, process_record, terminal
from fusepatch.engine.patch import Outcome, Reason
from fusepatch.errors import FusepatchError
from fusepatch.patch_lines import Line, Place
from fusepatch.patches import PATCHES

MAXIMUM_NOTES = 12
"""Distinct notes printed; all of them are in the JSON."""
SHOWN = 3
"""Process ids, hosts, files and the like that are named where there are many; the rest is counted."""
MAXIMUM_BYTES = 8 << 20
"""A larger file is no report: one holds at most 200 notes of each kind for each patch, about 1 MiB."""

_BY_THE_USER = (Outcome.DISABLED, Outcome.REMOVED)

_CHILD = re.compile(r"-\d+(?::\d+)* of ")
"""The number of a child process in its role: `SpawnProcess-3 of train.py`."""

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


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
    seen: dict[str, Any] = {}
    for name in names:
        if name.startswith("."):  # what a process is writing, or was when it was killed
            continue
        try:
            processes.append(process_record.checked(_json(os.path.join(folder, name)), seen))
        except OSError as error:
            not_read.append((name, f"{type(error).__name__}: {error.strerror or error}"))
        except ValueError as error:
            not_read.append((name, str(error)))
        except RecursionError:
            not_read.append((name, "none of fusepatch's: nested too deeply"))
    processes.sort(key=lambda process: (process["started"], process["host"], process["pid"]))
    return Report(folder, tuple(processes), tuple(not_read))


def _json(path: str) -> Any:
    content = _content(path)
    try:
        return json.loads(content, parse_constant=_no_number, parse_float=_number)
    except ValueError as error:
        raise ValueError(f"torn, or none of fusepatch's: no JSON ({error})") from None


def _content(path: str) -> bytes:
    """The bytes of a regular file. Nothing else is opened, since that may wait for ever or do something (a FIFO, a device)."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise ValueError(f"{_KINDS.get(stat.S_IFMT(mode), 'no regular file')}, which is not opened")
    with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        content = file.read(MAXIMUM_BYTES + 1)
    if len(content) > MAXIMUM_BYTES:
        raise ValueError(f"none of fusepatch's: larger than {MAXIMUM_BYTES >> 20} MiB")
    return content


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number in JSON")


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


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


def text(report: Report, columns: int, verbose: bool) -> str:
    """Which process trains with what, then what is not applied, what calls could not have, what could not be read."""
    parts = ["no process has reported"]
    if report.processes:
        hosts = {process["host"] for process in report.processes}
        parts = [f"{_count(len(report.processes), 'process', 'es')} on {_count(len(hosts), 'host')}"]
        parts += [_group(processes, columns, verbose) for processes in _alike(report)]
    notes = [*_not_applied(report), *_notes(report), *_not_read(report)]
    if notes:
        parts.append("\n".join(terminal.wrap(f"- {terminal.printable(note)}", columns) for note in notes))
    return "\n\n".join(parts)


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
        alike: dict[Outcome, list[str]] = {}
        for who, outcome in failed.items():
            alike.setdefault(outcome, []).append(who)
        problems.extend(f"{name} is {outcome.value} in {_few(processes)}" for outcome, processes in alike.items())
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


def _alike(report: Report) -> list[list[dict[str, Any]]]:
    """The processes in groups of one role in which every patch fares alike, whatever their ranks and counts."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for process in report.processes:
        fares = tuple(
            (
                target.patch,
                target.outcome,
                *map(target.site.get, ("module", "version")),
                *target.site["reason"].values(),
            )
            for target in _loaded_in(process)
        )
        asked_for = tuple(process["settings"].get(patch.requested_by) for patch in PATCHES)
        groups.setdefault((_CHILD.sub("-* of ", process["role"]), fares, asked_for), []).append(process)
    return list(groups.values())


def _group(processes: Sequence[dict[str, Any]], columns: int, verbose: bool) -> str:
    roles = {process["role"] for process in processes}
    role = roles.pop() if len(roles) == 1 else _CHILD.sub("-* of ", roles.pop())
    pids: dict[str, list[str]] = {}
    for process in processes:
        pids.setdefault(process["host"], []).append(str(process["pid"]))
    hosts = "; ".join(f"{host} {_few(of_it)}" for host, of_it in list(pids.items())[:SHOWN])
    if len(pids) > SHOWN:
        hosts += f"; {_count(len(pids) - SHOWN, 'further host')}"
    ranks = _ranks(processes)
    title = f"{role}: {_count(len(processes), 'process', 'es')}{f', {ranks}' if ranks else ''} ({hosts})"
    lines = _lines(processes)
    below = patch_lines.text(lines, columns, verbose, "  ") if lines else "  - no target is loaded"
    return f"{terminal.wrap(terminal.printable(title), columns)}\n{below}"


def _lines(processes: Sequence[dict[str, Any]]) -> list[Line]:
    """The patches of which processes that fare alike have loaded a target."""
    targets: dict[str, list[Loaded]] = {}
    for target in _loaded_in(processes[0]):
        targets.setdefault(target.patch, []).append(target)
    calls: dict[str, list[int]] = {}
    for process in processes:
        for patch in process["patches"]:
            calls.setdefault(patch["id"], []).append(patch["calls"])
    return [_line(name, own, calls[name], processes[0]["settings"]) for name, own in targets.items()]


def _line(name: str, targets: Sequence[Loaded], calls: Sequence[int], set_by_user: Mapping[str, str]) -> Line:
    places = tuple(
        Place(target.site["module"], target.outcome.value, str(Reason(**target.site["reason"]))) for target in targets
    )
    # What is wrong comes first, then what is applied: what the user switched off is said of a patch that is off everywhere.
    target = min(targets, key=lambda target: (not target.wrong, target.outcome is not Outcome.APPLIED))
    line = Line(patch_lines.mark(target.outcome), terminal.printable(name), target.outcome.value, "", places)
    idle = patch_lines.on_request(name, target.outcome, set_by_user)
    if target.outcome is not Outcome.APPLIED:
        return line._replace(detail=patch_lines.short(target.outcome, Reason(**target.site["reason"])))
    if idle is not None:
        return line._replace(mark="-", outcome=patch_lines.ON_REQUEST, detail=f"set {idle.requested_by}")
    upstreams = patch_lines.versions(
        (target.site["upstream"], target.site["version"], target.site["flags"])
        for target in targets
        if target.outcome is Outcome.APPLIED
    )
    uncalled = calls.count(0)
    none = f", none in {_count(uncalled, 'process', 'es')}" if 0 < uncalled < len(calls) else ""
    return line._replace(detail=f"{upstreams}; {_count(sum(calls), 'call')}{none}")


def _ranks(processes: Sequence[dict[str, Any]]) -> str:
    """`rank 3 of 8`, `ranks 0-5, 7 of 8`; empty where a launcher gave none."""
    ranks = sorted({process["rank"] for process in processes if process["rank"] is not None})
    if not ranks:
        return ""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    sizes = {process["world_size"] for process in processes}
    size = sizes.pop() if len(sizes) == 1 else None
    text = _few(["-".join(map(str, run)) for run in runs])
    return f"rank{'' if len(ranks) == 1 else 's'} {text}{f' of {size}' if size is not None else ''}"


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


def _not_read(report: Report) -> Iterator[str]:
    same: dict[str, list[str]] = {}
    for name, why in report.not_read:
        same.setdefault(why, []).append(name)
    for why, names in list(same.items())[:MAXIMUM_NOTES]:
        yield f"not read: {_few(names)}: {why}"
    if len(same) > MAXIMUM_NOTES:
        further = sum(map(len, list(same.values())[MAXIMUM_NOTES:]))
        yield f"not read: {_count(further, 'further file')}: `--json` names them all"


def _who(process: dict[str, Any]) -> str:
    ranks = _ranks([process])
    return f"{process['role']} ({process['host']} {process['pid']}{f', {ranks}' if ranks else ''})"


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN:,} more"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"
