"""A pytest plugin that runs tests under the patches and says what the patches did: `pytest -p fusepatch.testing`.

It never loads by itself. Importing it activates fusepatch, which `-p` does before conftest files and test modules are
imported. `FUSEPATCH=0` leaves everything unpatched; the deselections hold all the same, so that both runs have the same
tests.
"""

from __future__ import annotations

import fnmatch
import json
import os
import sys
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.markers import InvalidMarker, Marker
from packaging.requirements import InvalidRequirement, Requirement

import fusepatch
from fusepatch import settings
from fusepatch.engine import ledger
from fusepatch.engine.patch import Outcome, Reason
from fusepatch.errors import UnknownPatchError
from fusepatch.explain import summary
from fusepatch.patches import PATCHES, find
from fusepatch.reporting import reader
from fusepatch.reporting.reader import Report, count
from fusepatch.reporting.record import of_this_process

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest depends on there

FAIL_ON_FALLBACK = "--fusepatch-fail-on-fallback"
REQUIRE = "--fusepatch-require"
DESELECT = "--fusepatch-deselect"

NOTES_SHOWN = 20
"""Distinct notes printed per patch and kind; `FUSEPATCH_REPORT` keeps all of them."""

_INERT = os.environ.get(settings.SWITCH, "").strip() == "0"


class Deselection(NamedTuple):
    """One entry of a deselection file: a glob of node ids, the conditions that must all hold, and why."""

    test: str
    when: tuple[Requirement | Marker, ...]
    reason: str


@dataclass
class Session:
    """What the plugin knows of one pytest session. `workers` holds what pytest-xdist's workers sent."""

    deselections: tuple[Deselection, ...] = ()
    deselected: Counter[Deselection] = field(default_factory=Counter)
    unmatched: tuple[Deselection, ...] = ()
    seen: Counter[tuple[str, str]] = field(default_factory=Counter)
    outside: Counter[tuple[str, str]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    workers: list[dict[str, Any]] = field(default_factory=list)


SESSION = pytest.StashKey[Session]()
"""Where a pytest `Config` keeps the plugin's session."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fusepatch", "fusepatch's patches")
    group.addoption(
        FAIL_ON_FALLBACK,
        action="store_true",
        help="fail a test during which a patch recorded a fallback, and the session where one was recorded outside of "
        "any test",
    )
    group.addoption(
        REQUIRE,
        metavar="ID[,ID]",
        action="append",
        default=[],
        help="exit with 1 unless these patches are applied and calls went through each of them",
    )
    group.addoption(
        DESELECT,
        metavar="FILE",
        action="append",
        default=[],
        help="a TOML file of [[deselect]] tables with test (a glob of node ids), when (version conditions) and reason",
    )


def pytest_configure(config: pytest.Config) -> None:
    required = _required(config)
    for name in required:
        try:
            find(name)
        except UnknownPatchError as error:
            raise pytest.UsageError(f"{REQUIRE}: {error}") from None
    if _INERT and required:
        raise pytest.UsageError(
            f"FUSEPATCH=0 leaves every patch out, and {REQUIRE} asks for {', '.join(required)}: no test was run; unset "
            "one of the two"
        )
    files = [config.invocation_params.dir / name for name in config.getoption(DESELECT)]
    session = Session(deselections=tuple(entry for file in files for entry in read_deselections(file)))
    session.seen = _fallbacks()
    config.stash[SESSION] = session


def pytest_report_header(config: pytest.Config) -> list[str]:
    if _INERT:
        return [f"fusepatch {fusepatch.__version__}: FUSEPATCH=0, so nothing is patched"]
    lines = [f"fusepatch {fusepatch.__version__}: {summary(fusepatch.status(), settings.current())}"]
    own = {name: text for name, text in settings.current().set_by_user.items() if name != settings.SWITCH}
    if own:
        lines.append("fusepatch: " + " ".join(f"{name}={text}" for name, text in own.items()))
    return lines


@pytest.hookimpl(tryfirst=True)  # before -k and -m take tests away that an entry is about
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    session = config.stash[SESSION]
    holding = [entry for entry in session.deselections if _holds(entry)]
    matched: set[Deselection] = set()
    kept, gone = [], []
    for item in items:
        entries = [entry for entry in holding if _matches(entry.test, item.nodeid)]
        matched.update(entries)
        if entries:
            session.deselected[entries[0]] += 1
            gone.append(item)
        else:
            kept.append(item)
    session.unmatched = tuple(entry for entry in holding if entry not in matched)
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = kept


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    session = item.config.stash[SESSION]
    session.outside += _new_fallbacks(session)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after pytest has made a skip of an expected failure
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    new = _new_fallbacks(item.config.stash[SESSION])
    if new and item.config.getoption(FAIL_ON_FALLBACK):
        text = "\n".join([*_fallback_lines(new), f"({FAIL_ON_FALLBACK} makes that a failure)"])
        if report.failed:
            report.sections.append(("fusepatch", text))
        else:
            report.outcome = "failed"
            report.longrepr = text
            vars(report).pop("wasxfail", None)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    own = config.stash[SESSION]
    own.outside += _new_fallbacks(own)
    record = json.dumps(of_this_process(fusepatch.status()))
    outside = [[*note, times] for note, times in own.outside.items()]
    workeroutput = getattr(config, "workeroutput", None)
    if workeroutput is not None:  # a worker of pytest-xdist: its controller draws the conclusions
        workeroutput["fusepatch"] = {
            "record": record,
            "outside": outside,
            "deselected": [own.deselected[entry] for entry in own.deselections],
            "unmatched": [entry in own.unmatched for entry in own.deselections],
        }
        return
    for worker in own.workers:
        own.outside.update({(patch, text): times for patch, text, times in worker["outside"]})
    if own.workers:  # each of them collects the same tests
        first = own.workers[0]
        own.deselected = Counter(dict(zip(own.deselections, first["deselected"], strict=True)))
        own.unmatched = tuple(entry for entry, bare in zip(own.deselections, first["unmatched"], strict=True) if bare)
    if not config.option.collectonly:
        own.problems += _problems(config, own)
    if own.problems and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist has ended; one that crashed has sent nothing."""
    sent = getattr(node, "workeroutput", {}).get("fusepatch")
    if sent is not None:
        node.config.stash[SESSION].workers.append(sent)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    session = config.stash[SESSION]
    lines = [] if _INERT else list(_patch_lines(_report(session)))
    lines += _deselection_lines(session)
    if lines or session.problems:
        terminalreporter.section("fusepatch")
    for line in lines:
        terminalreporter.write_line(line)
    for problem in session.problems:
        terminalreporter.write_line(f"ERROR: {problem}", red=True)


def read_deselections(file: Path) -> tuple[Deselection, ...]:
    """The entries of a deselection file.

    Raises:
        pytest.UsageError: the file cannot be read, or an entry lacks a key, has another one, or holds a condition that
        is none.
    """
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"{DESELECT} {file}: it cannot be read: {error}") from None
    tables = data.pop("deselect", [])
    if data or not isinstance(tables, list):
        raise pytest.UsageError(
            f"{DESELECT} {file}: wanted [[deselect]] tables only, found {', '.join(data) or 'a value'}"
        )
    return tuple(_entry(table, f"{DESELECT} {file}: entry {number}") for number, table in enumerate(tables, 1))


def _entry(table: Mapping[str, Any], where: str) -> Deselection:
    wanted = set(Deselection._fields)
    if set(table) != wanted or not all(isinstance(table[name], str) and table[name] for name in ("test", "reason")):
        found = ", ".join(sorted(table)) or "nothing"
        raise pytest.UsageError(f"{where}: wanted the texts test, when and reason, found {found}")
    when = table["when"]
    texts = when if isinstance(when, list) else [when]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise pytest.UsageError(f"{where}: when must be a condition or a list of conditions, found {when!r}")
    return Deselection(table["test"], tuple(_condition(text, where) for text in texts), table["reason"])


def _condition(text: str, where: str) -> Requirement | Marker:
    try:
        return Requirement(text)
    except InvalidRequirement:
        pass
    try:
        return Marker(text)
    except InvalidMarker:
        raise pytest.UsageError(
            f"{where}: {text!r} is not a condition; wanted a requirement such as 'transformers>=5' or 'torch<2.14; "
            'python_version < "3.12"\', or a marker such as \'python_version < "3.12"\''
        ) from None


def _holds(entry: Deselection) -> bool:
    return all(_condition_holds(condition) for condition in entry.when)


def _condition_holds(condition: Requirement | Marker) -> bool:
    if isinstance(condition, Marker):
        return condition.evaluate()
    if condition.marker is not None and not condition.marker.evaluate():
        return False
    try:
        version = metadata.version(condition.name)
    except metadata.PackageNotFoundError:
        return False
    return condition.specifier.contains(version, prereleases=True)


def _matches(pattern: str, nodeid: str) -> bool:
    """Only `*` and `?` are wildcards: brackets are part of the ids of parametrized tests."""
    return fnmatch.fnmatchcase(nodeid, pattern.replace("[", "[[]"))


def _required(config: pytest.Config) -> list[str]:
    lists = config.getoption(REQUIRE)
    return [name for text in lists for name in settings.names(text)]


def _fallbacks() -> Counter[tuple[str, str]]:
    return Counter({(patch.id, note.text): note.times for patch in PATCHES for note in ledger.fallbacks(patch.id)})


def _new_fallbacks(session: Session) -> Counter[tuple[str, str]]:
    """What was recorded since the last look. A test that activates anew empties the ledger: then all of it is new."""
    now, before = _fallbacks(), session.seen
    session.seen = now
    if any(now[note] < times for note, times in before.items()):
        return now
    return now - before


def _fallback_lines(notes: Mapping[tuple[str, str], int]) -> Iterator[str]:
    for (patch, text), times in notes.items():
        yield f"{patch}: fallback {times}x: {text}"


def _report(session: Session) -> Report:
    processes = [json.loads(worker["record"]) for worker in session.workers]
    return Report("", tuple(processes or [of_this_process(fusepatch.status())]), ())


def _problems(config: pytest.Config, session: Session) -> Iterator[str]:
    required = _required(config)
    report = _report(session)
    for problem in reader.missing(report, required):
        yield f"{REQUIRE}: {problem}"
    targets = {target.patch for target in reader.loaded(report)}
    for name in required:
        if name in targets and not _calls(report, name):
            yield f"{REQUIRE}: no call went through {name}, so the tests prove nothing about it"
    if config.getoption(FAIL_ON_FALLBACK):
        for line in _fallback_lines(session.outside):
            yield f"{FAIL_ON_FALLBACK}: outside of any test, {line}"


def _calls(report: Report, patch: str) -> int:
    return sum(
        record["calls"] for process in report.processes for record in process["patches"] if record["id"] == patch
    )


def _patch_lines(report: Report) -> Iterator[str]:
    targets = reader.loaded(report)
    for first in report.processes[0]["patches"]:
        patch = first["id"]
        own = [target.outcome for target in targets if target.patch == patch]
        wrong = sorted({outcome.value for outcome in own if outcome is not Outcome.APPLIED})
        if not own:
            pending = first["outcome"] == Outcome.PENDING.value
            yield f"{patch}: {'not imported by these tests' if pending else first['outcome'] + ': ' + first['reason']}"
            continue
        records = [record for process in report.processes for record in process["patches"] if record["id"] == patch]
        yield f"{patch}: {', '.join(wrong) or 'APPLIED'}, {count(_calls(report, patch), 'call')}"
        reasons = {
            f"  {target.site['module']}: {target.outcome.value}: {Reason(**target.site['reason'])}"
            for target in targets
            if target.patch == patch and target.wrong
        }
        yield from sorted(reasons)
        yield from _note_lines("replaced", [record["replaced"] for record in records])
        yield from _note_lines("fallback", [record["fallbacks"] for record in records])


def _note_lines(label: str, lists: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    notes: Counter[str] = Counter()
    for each in lists:
        notes.update({note["text"]: note["times"] for note in each})
    for text, times in list(notes.items())[:NOTES_SHOWN]:
        yield f"  {label} {times}x: {text}"
    if len(notes) > NOTES_SHOWN:
        yield f"  {label}: {count(len(notes) - NOTES_SHOWN, 'further text')}; FUSEPATCH_REPORT=DIR keeps all of them"


def _deselection_lines(session: Session) -> Iterator[str]:
    for entry in session.deselections:
        if session.deselected[entry]:
            yield f"deselected {session.deselected[entry]}: {entry.test}: {entry.reason}"
    for entry in session.unmatched:
        conditions = ", ".join(map(str, entry.when))
        yield f"deselection without a test: {entry.test} ({conditions}) matches nothing that was collected"
