"""One line per patch, as `status`, `check` and `status --report` show it, with the places behind it where they are
asked for; and the reports of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fusepatch import settings, terminal
from fusepatch.engine.patch import Outcome, Patch, PatchRecord, Reason, SiteRecord
from fusepatch.errors import SettingError
from fusepatch.patches import PATCHES, is_requested
from fusepatch.reporting import reader
from fusepatch.reporting.reader import Loaded, Report

MAXIMUM_NOTES = 12
"""Distinct notes printed; all of them are in the JSON."""
WOULD_APPLY = "would apply"
ON_REQUEST = "on request"

_WELL = (Outcome.APPLIED, Outcome.PENDING)
_QUIET = (Outcome.ABSENT, Outcome.DISABLED, Outcome.REMOVED)
_COLOURS = {"+": "green", "!": "red", "-": "dim"}
_BETTER_MARKS = {"+": "\u2713"}


class Place(NamedTuple):
    """A module that a patch changes, and what became of it there, in words."""

    module: str
    outcome: str
    reason: str


class Line(NamedTuple):
    """A patch. `mark` is `+` for what is well, `!` for what wants a look, `-` for the rest; `detail` are versions or a
    reason."""

    mark: str
    id: str
    outcome: str
    detail: str
    places: tuple[Place, ...] = ()


def of_records(records: Iterable[PatchRecord], environ: Mapping[str, str], planned: bool) -> list[Line]:
    """A line for each record; `planned` says that they are of a process with this environment that has yet to start."""
    return [_of_record(record, environ, planned) for record in records]


def on_request(id: str, outcome: Outcome, environ: Mapping[str, str]) -> Patch | None:
    """The patch where its outcome is as it should be and it changes nothing, since nobody has set the variable that
    asks for it."""
    patch = next((patch for patch in PATCHES if patch.id == id and patch.requested_by), None)
    if patch is None or outcome not in _WELL:
        return None
    try:
        read = settings.read({patch.requested_by: environ.get(patch.requested_by, "")})
    except SettingError:  # a value that another version of fusepatch could read
        return None
    return None if is_requested(patch, read) else patch


def mark(outcome: Outcome) -> str:
    """The mark of an outcome in a process that runs, where PENDING means that a hook still waits."""
    if outcome is Outcome.APPLIED:
        return "+"
    return "-" if outcome in _QUIET else "!"


def short(outcome: Outcome, reason: Reason) -> str:
    """What was found, and of a version what was wanted; the shape of a target would fill a screen."""
    return f"{reason.found}; wanted {reason.wanted}" if outcome is Outcome.GATED else reason.found


def versions(names: Iterable[tuple[str, str | None, Sequence[str]]]) -> str:
    """Each upstream once, with its version and what is said of it: `torch 2.13.0, trl 2.0 (untested)`."""
    flags: dict[str, list[str]] = {}
    for upstream, version, of_it in names:
        said = flags.setdefault(f"{upstream} {version or 'of unknown version'}", [])
        said.extend(flag for flag in of_it if flag not in said)
    return ", ".join(f"{text} ({', '.join(said)})" if said else text for text, said in flags.items())


def text(lines: Sequence[Line], columns: int, verbose: bool, indent: str = "") -> str:
    """The lines under each other; what does not fit `columns` goes on below its own start."""
    ids = max((len(line.id) for line in lines), default=0)
    outcomes = max((len(line.outcome) for line in lines), default=0)
    start = len(indent) + ids + outcomes + 6
    shown = []
    for line in lines:
        sign = terminal.either(_BETTER_MARKS.get(line.mark, line.mark), line.mark)
        colour = _COLOURS[line.mark]
        detail = terminal.hanging(" " * start, line.detail, columns)[start:]
        outcome = terminal.coloured(line.outcome, colour) + " " * (outcomes - len(line.outcome))
        shown.append(f"{indent}{terminal.coloured(sign, colour)} {line.id:<{ids}}  {outcome}  {detail}".rstrip())
        if verbose:
            shown += [_place(modules, place, columns, indent) for place, modules in _alike(line.places)]
    return "\n".join(shown)


def _of_record(record: PatchRecord, environ: Mapping[str, str], planned: bool) -> Line:
    places = tuple(_of_site(site, planned) for site in record.sites)
    idle = on_request(record.id, record.outcome, environ)
    if idle is not None:
        return Line("-", record.id, ON_REQUEST, f"set {idle.requested_by}", places)
    if record.outcome is Outcome.APPLIED or (planned and record.outcome is Outcome.PENDING):
        own = [(site.upstream, site.version, site.flags) for site in record.sites if site.outcome is record.outcome]
        waiting = f"; waiting: {listed(record.waiting)}" if record.waiting and not planned else ""
        return Line("+", record.id, _word(record.outcome, planned), versions(own) + waiting, places)
    # The site that decided: its reason says in short what the patch's own says in full.
    site = next((site for site in record.sites if site.outcome is record.outcome), None)
    why = record.reason if site is None else short(site.outcome, site.reason)
    return Line(mark(record.outcome), record.id, record.outcome.value, why, places)


def _of_site(site: SiteRecord, planned: bool) -> Place:
    flags = f" ({', '.join(site.flags)})" if site.flags else ""
    return Place(site.module, _word(site.outcome, planned) + flags, str(site.reason))


def _word(outcome: Outcome, planned: bool) -> str:
    return WOULD_APPLY if planned and outcome is Outcome.PENDING else outcome.value


def _alike(places: Iterable[Place]) -> list[tuple[Place, list[str]]]:
    modules: dict[Place, list[str]] = {}
    for place in places:
        modules.setdefault(place._replace(module=""), []).append(place.module)
    return list(modules.items())


def _place(modules: Sequence[str], place: Place, columns: int, indent: str) -> str:
    return terminal.hanging(f"{indent}    ", f"{listed(modules)}: {place.outcome}: {place.reason}", columns, 2)


def listed(modules: Sequence[str]) -> str:
    """The modules in few words: those of one package behind its name."""
    packages: dict[str, list[str]] = {}
    for module in dict.fromkeys(modules):
        package, _, name = module.rpartition(".")
        packages.setdefault(package, []).append(name)
    return "; ".join(
        f"{package}: {', '.join(names)}" if len(names) > 1 else f"{package}.{names[0]}".lstrip(".")
        for package, names in packages.items()
    )


def of_report(report: Report, columns: int, verbose: bool) -> str:
    """Which process trains with what, then what is not applied, what calls could not have, what could not be read."""
    parts = ["no process has reported"]
    if report.processes:
        hosts = {process["host"] for process in report.processes}
        parts = [f"{reader.count(len(report.processes), 'process', 'es')} on {reader.count(len(hosts), 'host')}"]
        parts += [_group(processes, columns, verbose) for processes in reader.alike(report)]
    notes = [*_not_applied(report), *_notes(report), *_not_read(report)]
    if notes:
        parts.append("\n".join(terminal.wrap(f"- {terminal.printable(note)}", columns) for note in notes))
    return "\n\n".join(parts)


def _group(processes: Sequence[dict[str, Any]], columns: int, verbose: bool) -> str:
    pids: dict[str, list[str]] = {}
    for process in processes:
        pids.setdefault(process["host"], []).append(str(process["pid"]))
    hosts = "; ".join(f"{host} {reader.few(of_it)}" for host, of_it in list(pids.items())[: reader.SHOWN])
    if len(pids) > reader.SHOWN:
        hosts += f"; {reader.count(len(pids) - reader.SHOWN, 'further host')}"
    ranks = reader.ranks(processes)
    title = (
        f"{reader.common_role(processes)}: "
        f"{reader.count(len(processes), 'process', 'es')}{f', {ranks}' if ranks else ''} ({hosts})"
    )
    lines = _lines(processes)
    below = text(lines, columns, verbose, "  ") if lines else "  - no target is loaded"
    return f"{terminal.wrap(terminal.printable(title), columns)}\n{below}"


def _lines(processes: Sequence[dict[str, Any]]) -> list[Line]:
    """The patches of which processes that fare alike have loaded a target."""
    targets: dict[str, list[Loaded]] = {}
    for target in reader.loaded_in(processes[0]):
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
    # What is wrong comes first, then what is applied: what the user switched off is said of a patch that is off
    # everywhere.
    target = min(targets, key=lambda target: (not target.wrong, target.outcome is not Outcome.APPLIED))
    line = Line(mark(target.outcome), terminal.printable(name), target.outcome.value, "", places)
    idle = on_request(name, target.outcome, set_by_user)
    if target.outcome is not Outcome.APPLIED:
        return line._replace(detail=short(target.outcome, Reason(**target.site["reason"])))
    if idle is not None:
        return line._replace(mark="-", outcome=ON_REQUEST, detail=f"set {idle.requested_by}")
    upstreams = versions(
        (target.site["upstream"], target.site["version"], target.site["flags"])
        for target in targets
        if target.outcome is Outcome.APPLIED
    )
    uncalled = calls.count(0)
    none = f", none in {reader.count(uncalled, 'process', 'es')}" if 0 < uncalled < len(calls) else ""
    return line._replace(detail=f"{upstreams}; {reader.count(sum(calls), 'call')}{none}")


def _not_applied(report: Report) -> Iterator[str]:
    same: dict[str, list[str]] = {}
    for target in reader.loaded(report):
        if target.wrong:
            site = target.site
            text = (
                f"NOT APPLIED: {target.patch}: {site['module']} is loaded, but {target.outcome.value}: "
                f"{Reason(**site['reason'])}"
            )
            same.setdefault(text, []).append(reader.who(target.process))
    for text, processes in same.items():
        yield f"{text}. In {reader.few(processes)}"


def _notes(report: Report) -> Iterator[str]:
    times: dict[tuple[str, str, str], list[int]] = {}
    for process in report.processes:
        for record in process["patches"]:
            for kind, label in (("fallbacks", "not done"), ("replaced", "replaced")):
                for note in record[kind]:
                    times.setdefault((label, record["id"], note["text"]), []).append(note["times"])
    for (label, patch, text), each in sorted(times.items(), key=lambda item: item[0][0])[:MAXIMUM_NOTES]:
        yield f"{patch}: {label} {sum(each)}x in {reader.count(len(each), 'process', 'es')}: {text}"
    if len(times) > MAXIMUM_NOTES:
        yield f"{reader.count(len(times) - MAXIMUM_NOTES, 'further note')}: `--json` has them all"


def _not_read(report: Report) -> Iterator[str]:
    same: dict[str, list[str]] = {}
    for name, why in report.not_read:
        same.setdefault(why, []).append(name)
    for why, names in list(same.items())[:MAXIMUM_NOTES]:
        yield f"not read: {reader.few(names)}: {why}"
    if len(same) > MAXIMUM_NOTES:
        further = sum(map(len, list(same.values())[MAXIMUM_NOTES:]))
        yield f"not read: {reader.count(further, 'further file')}: `--json` names them all"
