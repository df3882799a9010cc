"""One line per patch, as `status`, `check` and `status --report` show it, with the places behind it where they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fusepatch import activation, settings, terminal
from fusepatch.engine.patch import Outcome, Patch, PatchRecord, Reason, SiteRecord
from fusepatch.errors import SettingError
from fusepatch.patches import PATCHES

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
    """A patch. `mark` is `+` for what is well, `!` for what wants a look, `-` for the rest; `detail` are versions or a reason."""

    mark: str
    id: str
    outcome: str
    detail: str
    places: tuple[Place, ...] = ()


def of_records(records: Iterable[PatchRecord], environ: Mapping[str, str], planned: bool) -> list[Line]:
    """A line for each record; `planned` says that they are of a process with this environment that has yet to start."""
    return [_of_record(record, environ, planned) for record in records]


def on_request(id: str, outcome: Outcome, environ: Mapping[str, str]) -> Patch | None:
    """The patch where its outcome is as it should be and it changes nothing, since nobody has set the variable that asks for it."""
    patch = next((patch for patch in PATCHES if patch.id == id and patch.requested_by), None)
    if patch is None or outcome not in _WELL:
        return None
    try:
        read = settings.read({patch.requested_by: environ.get(patch.requested_by, "")})
    except SettingError:  # a value that another version of fusepatch could read
        return None
    return None if activation.is_requested(patch, read) else patch


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
        return Line("+", record.id, _word(record.outcome, planned), versions(own), places)
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
