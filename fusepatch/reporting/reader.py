"""Reads the reports of many processes (`FUSEPATCH_REPORT`): which process trains with what, which are alike, what is
not applied."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Sequence
from typing import Any, NamedTuple

from fusepatch.engine.patch import Outcome
from fusepatch.errors import FusepatchError
from fusepatch.patches import PATCHES
from fusepatch.reporting.record import checked

SHOWN = 3
"""Process ids, hosts, files and the like that are named where there are many; the rest is counted."""
MAXIMUM_BYTES = 8 << 20
"""A larger file is not a report: one holds at most 200 notes of each kind for each patch, about 1 MiB."""

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
    """What one directory holds: the processes' records as they wrote them, oldest first, and the files that are
    none."""

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
        FusepatchError: `folder` is not a directory that can be listed.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise FusepatchError(
            f"the reports cannot be read ({type(error).__name__}: {error}); wanted the directory that FUSEPATCH_REPORT "
            f"named in the run, found --report {folder}. Nothing was checked; name that directory, on a machine that "
            "can read it."
        ) from None
    processes: list[dict[str, Any]] = []
    not_read = []
    seen: dict[str, Any] = {}
    for name in names:
        if name.startswith("."):  # what a process is writing, or was when it was killed
            continue
        try:
            processes.append(checked(_json(os.path.join(folder, name)), seen))
        except OSError as error:
            not_read.append((name, f"{type(error).__name__}: {error.strerror or error}"))
        except ValueError as error:
            not_read.append((name, str(error)))
        except RecursionError:
            not_read.append((name, "not a report of fusepatch: nested too deeply"))
    processes.sort(key=lambda process: (process["started"], process["host"], process["pid"]))
    return Report(folder, tuple(processes), tuple(not_read))


def _json(path: str) -> Any:
    content = _content(path)
    try:
        return json.loads(content, parse_constant=_no_number, parse_float=_number)
    except ValueError as error:
        raise ValueError(f"incomplete, or not a report of fusepatch: not JSON ({error})") from None


def _content(path: str) -> bytes:
    """The bytes of a regular file. Nothing else is opened, since that may wait for ever or do something (a FIFO, a
    device)."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise ValueError(f"{_KINDS.get(stat.S_IFMT(mode), 'no regular file')}, which is not opened")
    with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        content = file.read(MAXIMUM_BYTES + 1)
    if len(content) > MAXIMUM_BYTES:
        raise ValueError(f"not a report of fusepatch: larger than {MAXIMUM_BYTES >> 20} MiB")
    return content


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number in JSON")


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def loaded(report: Report) -> list[Loaded]:
    """Every target that some process has loaded. What the installed version does not have is not a target."""
    return [target for process in report.processes for target in loaded_in(process)]


def loaded_in(process: dict[str, Any]) -> list[Loaded]:
    """The targets that one process has loaded."""
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


def missing(report: Report, required: Sequence[str]) -> list[str]:
    """Why the required patches do not hold in every process that has loaded a target of theirs; empty where they do.

    Who requires a patch has not switched it off knowingly: DISABLED is missing too.
    """
    targets = loaded(report)
    problems = []
    for name in required:
        own = [target for target in targets if target.patch == name]
        if not own:
            reported = count(len(report.processes), "process", "es")
            problems.append(
                f"{name} is not applied anywhere: of {reported} that reported, none has loaded a target of it"
            )
        failed = {who(target.process): target.outcome for target in own if target.outcome is not Outcome.APPLIED}
        same: dict[Outcome, list[str]] = {}
        for process, outcome in failed.items():
            same.setdefault(outcome, []).append(process)
        problems.extend(f"{name} is {outcome.value} in {few(processes)}" for outcome, processes in same.items())
    return problems


def used(report: Report, ids: Sequence[str]) -> str:
    """In how many processes each patch has a target, and how many calls went through it; every patch where none is
    named."""
    targets: dict[str, set[int]] = {}
    calls: dict[str, int] = {}
    for index, process in enumerate(report.processes):
        for target in loaded_in(process):
            targets.setdefault(target.patch, set()).add(index)
        for patch in process["patches"]:
            calls[patch["id"]] = calls.get(patch["id"], 0) + patch["calls"]
    return "; ".join(
        f"{name} in {count(len(targets[name]), 'process', 'es')} with {count(calls[name], 'call')}"
        for name in ids or targets
    )


def alike(report: Report) -> list[list[dict[str, Any]]]:
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
            for target in loaded_in(process)
        )
        asked_for = tuple(process["settings"].get(patch.requested_by) for patch in PATCHES)
        groups.setdefault((_CHILD.sub("-* of ", process["role"]), fares, asked_for), []).append(process)
    return list(groups.values())


def common_role(processes: Sequence[dict[str, Any]]) -> str:
    """The role of processes that are alike, without the numbers of children where these differ."""
    roles = {process["role"] for process in processes}
    role: str = roles.pop()
    return _CHILD.sub("-* of ", role) if roles else role


def ranks(processes: Sequence[dict[str, Any]]) -> str:
    """`rank 3 of 8`, `ranks 0-5, 7 of 8`; empty where a launcher gave none."""
    found = sorted({process["rank"] for process in processes if process["rank"] is not None})
    if not found:
        return ""
    runs: list[list[int]] = []
    for rank in found:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    sizes = {process["world_size"] for process in processes}
    size = sizes.pop() if len(sizes) == 1 else None
    text = few(["-".join(map(str, run)) for run in runs])
    return f"rank{'' if len(found) == 1 else 's'} {text}{f' of {size}' if size is not None else ''}"


def who(process: dict[str, Any]) -> str:
    """A process in words: role, host, process id, and its rank where it has one."""
    of_it = ranks([process])
    return f"{process['role']} ({process['host']} {process['pid']}{f', {of_it}' if of_it else ''})"


def few(names: Sequence[str]) -> str:
    """The names with commas between them, of many the first and how many more there are."""
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN:,} more"


def count(number: int, noun: str, plural: str = "s") -> str:
    """`1 call`, `2 calls`, `12,000 processes`."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"
