"""The commands, their options and their exit statuses.

The package does not activate itself in this process (see `fusepatch/__init__.py`): only `check` does, by its own call.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fusepatch import activation, patches, settings, terminal
from fusepatch._version import __version__
from fusepatch.cli import run, show
from fusepatch.engine import contract, ledger
from fusepatch.engine.patch import Outcome, PatchRecord, Reason, SiteRecord
from fusepatch.errors import FusepatchError
from fusepatch.explain import page
from fusepatch.reporting import reader
from fusepatch.reporting.reader import Report
from fusepatch.reporting.record import as_data

USAGE = 2
"""Exit status for a wrong argument, an unknown patch id, a variable whose value cannot be read."""
REQUIRED = 8
"""Exit status of `check --require` where a required patch is not applied."""
READER_GONE = 1
"""Exit status of `bench` whose reader has gone; what the other commands have to say is complete by then."""
INTERRUPTED = 130
"""Exit status after Ctrl-C; the usual one of shells."""

CHECK_STATUS = {
    Outcome.APPLIED: 0,
    Outcome.DISABLED: 0,
    Outcome.ABSENT: 3,
    Outcome.GATED: 4,
    Outcome.DRIFTED: 5,
    Outcome.SHADOWED: 6,
    Outcome.PENDING: 7,
    Outcome.FAILED: 7,
}
"""Exit status of `check` by the outcome of a patch; of several patches the highest one counts."""

_STATUS_HELP = """\
Prints, for each place that a patch changes, what a fresh process with this
environment would do. Reads package metadata and source files; imports nothing
and changes nothing.

With --report DIR it prints what became of the processes of a run that had
FUSEPATCH_REPORT=DIR: which one trains with what, and, as NOT APPLIED, each
target that is loaded in a process without its patch.

exit status: 0; 2 where a FUSEPATCH_* value, or DIR, cannot be read
"""

_JSON_HELP = """
--json prints a list with one object per patch, with the keys
  id, outcome, reason   the patch's: APPLIED where a site is in and none is
                        broken, PENDING where none is in yet, and else that of
                        its worst site
  sites                 a list of objects: patch, upstream, module, version,
                        outcome, reason (an object: found, wanted,
                        consequence, action), flags, holders, slots, traceback
  calls                 how many calls went through the patch
  replaced, fallbacks   lists of objects: text, times
An outcome is one of DISABLED, ABSENT, PENDING, GATED, DRIFTED, APPLIED,
SHADOWED, FAILED, REMOVED; PENDING means: would be applied.
With --report it is one object:
  processes             a list of objects: format, fusepatch, host, pid,
                        parent, rank, world_size, role, python, upstreams,
                        settings, started, written (UTC), and patches, the
                        list above with loaded in each site (PENDING means
                        there: its module has not been imported)
  not_applied           a list of objects: host, pid, rank, role, patch,
                        module, version, outcome, reason
  not_read              a list of objects: file, why
"""

_CHECK_HELP = """\
Imports every installed library that a patch changes, applies the patches for
real, and says what became of them. Trains nothing, needs no GPU.

exit status (of several, the highest):
  0  every patch is applied, or switched off by you
  2  wrong arguments, or a FUSEPATCH_* value that cannot be read
  3  ABSENT: a library, the target in it, or what a patch is for is not there
  4  GATED: a library's version is outside the supported range
  5  DRIFTED: a target has another shape than the patch was written for
  6  SHADOWED: something else replaced a target afterwards
  7  FAILED: applying a patch raised, or importing a library did
  8  a patch named by --require is not applied
With --require only the patches that it names count: 0 or 8.

With --report DIR nothing is imported: what counts are the processes of a run
that had FUSEPATCH_REPORT=DIR, each for the patches of which it has loaded a
target. A patch named by --require that no process has loaded a target of is
not applied (8); without --require, 3 where no process has loaded any target.
A file in DIR that is not a report is named and does not count.
"""


class Answer(NamedTuple):
    """What a command has to say: the text for stdout, the exit status, and messages for stderr."""

    text: str
    status: int = 0
    complaints: tuple[str, ...] = ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; `run` does not return, since it becomes the program that it
    starts."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return run.become(given[1:]) if _is_run(given) else _answered(given)
    except FusepatchError as error:
        terminal.complain(str(error))
        return USAGE
    except BrokenPipeError:
        return READER_GONE
    except OSError as error:
        terminal.complain(f"stopped by {type(error).__name__}: {error}")
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        terminal.finish()


def _is_run(given: Sequence[str]) -> bool:
    return given[:1] == ["run"] and given[1:2] not in ([], ["-h"], ["--help"])


def _answered(given: Sequence[str]) -> int:
    terminal.prepare()
    parser = _parser()
    if given[:1] == ["bench"]:
        from fusepatch.bench.main import main as bench

        return bench(given[1:], parser.prog)
    options = parser.parse_args(given)
    answer: Answer = Answer(parser.format_help(), USAGE) if options.command is None else options.function(options)
    with contextlib.suppress(BrokenPipeError):  # who left has read enough: `status | head -1`
        terminal.show(answer.text.removesuffix("\n"))
    for complaint in answer.complaints:
        terminal.complain(complaint)
    return answer.status


def _parser() -> argparse.ArgumentParser:
    program = "fusepatch" if os.path.basename(sys.argv[0]) == "fusepatch" else "python -m fusepatch"
    parser = terminal.Parser(
        prog=program,
        description="Version-gated patches for the post-training stack that is installed.",
        epilog=f"`{program} COMMAND --help` says more.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"fusepatch {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    def add(
        name: str, function: Callable[[argparse.Namespace], Answer], summary: str, text: str, usage: str | None = None
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=summary,
            description=text,
            usage=usage,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(function=function)
        return command

    status = add("status", _status, "what a fresh process would patch, and why", _STATUS_HELP + _JSON_HELP)
    status.add_argument(
        "-v", "--verbose", action="store_true", help="each module that a patch changes too, with reasons"
    )
    status.add_argument("--json", action="store_true", help="print the records as JSON")
    status.add_argument("--report", metavar="DIR", help="merge the reports of a run's processes instead")
    check = add("check", _check, "import the libraries, apply the patches, report", _CHECK_HELP + _JSON_HELP)
    check.add_argument("--require", metavar="ID,...", type=_ids, default=(), help="patches that must be applied")
    check.add_argument(
        "-v", "--verbose", action="store_true", help="each module that a patch changes too, with reasons"
    )
    check.add_argument("--json", action="store_true", help="print the records as JSON")
    check.add_argument("--report", metavar="DIR", help="check the processes of a run instead")
    ids = "".join(f"\n  {patch.id}" for patch in patches.PATCHES)
    explain = add(
        "explain",
        _explain,
        "one patch: why, what it changes, its variables",
        f"Explains one patch. The patches are{ids}\n\nexit status: 0; 2 where there is no such patch\n",
    )
    explain.add_argument("id", metavar="ID", help="the patch, as `status` names it")
    add(
        "env",
        _env,
        "every variable, its value, and where that came from",
        "Prints every FUSEPATCH_* variable.\n\nexit status: 0; 2 where a value cannot be read\n",
    )
    add(
        "run",
        lambda options: parser.error("run needs a script, -m MODULE or -c CODE"),
        "start a program with the patches switched on",
        run.HELP,
        usage=f"{program} run [PYTHON OPTIONS] [-m MODULE | -c CODE | SCRIPT] [ARGUMENTS]",
    )
    add(
        "bench",
        lambda options: parser.error("bench needs arguments"),
        "times implementations on this machine, each checked",
        "",
    )
    return parser


def _ids(text: str) -> tuple[str, ...]:
    names = settings.names(text)
    if not names:
        raise argparse.ArgumentTypeError(f"wanted the id of a patch or several with commas, found {text!r}")
    return names


def _status(options: argparse.Namespace) -> Answer:
    if options.report is not None:
        report = reader.read(options.report)
        return Answer(_json(reader.as_data(report)) if options.json else _report_text(report, options.verbose))
    records = activation.planned(os.environ)
    unknown = tuple(map(settings.unknown_name, settings.read(os.environ).unknown))
    if options.json:
        return Answer(_json(list(map(as_data, records))), complaints=unknown)
    more = "`explain ID` describes a patch, `check` applies them for real."
    parts = [
        f"{_this_process()}: what a fresh process would do",
        _lines(records, options.verbose, planned=True),
        terminal.wrap(
            more if options.verbose else f"`status -v` shows each module and the reasons, {more}", terminal.width()
        ),
    ]
    return Answer("\n\n".join(parts), complaints=unknown)


def _check(options: argparse.Namespace) -> Answer:
    for required in options.require:
        patches.find(required)  # an unknown id stops here
    if options.report is not None:
        return _check_report(options)
    records = activation.planned(os.environ)
    if settings.read(os.environ).switch is not False:
        os.environ.pop(activation.REPORT, None)  # this process trains nothing: it is no part of what is reported
        terminal.claim_stdout()
        activation.activate()
        _import_upstreams(records)
        records = activation.status()
    missing = [record for record in records if record.id in options.require and record.outcome is not Outcome.APPLIED]
    if options.require:
        status = REQUIRED if missing else 0
    else:
        status = max(CHECK_STATUS[record.outcome] for record in records)
    if options.json:
        return Answer(_json(list(map(as_data, records))), status)
    parts = [
        f"{_this_process()}: what was applied here",
        _lines(records, options.verbose, planned=False),
        terminal.wrap(f"exit status {status}: {_verdict(status, records, missing)}", terminal.width()),
    ]
    return Answer("\n\n".join(parts), status)


def _check_report(options: argparse.Namespace) -> Answer:
    report = reader.read(options.report)
    if options.require:
        problems = reader.missing(report, options.require)
        status = REQUIRED if problems else 0
    elif reader.loaded(report):
        outcomes = reader.not_applied(report)
        problems = [f"{patch} is {outcome.value}" for patch, outcome in outcomes]
        status = max((CHECK_STATUS[outcome] for _, outcome in outcomes), default=0)
    else:
        problems = ["no process has loaded a target of any patch"]
        status = CHECK_STATUS[Outcome.ABSENT]
    if options.json:
        return Answer(_json(reader.as_data(report)), status)
    verdict = "; ".join(problems)
    if not problems:
        verdict = f"applied wherever a target is loaded, or switched off by you: {reader.used(report, options.require)}"
    verdict = terminal.wrap(terminal.printable(f"exit status {status}: {verdict}"), terminal.width())
    return Answer(f"{_report_text(report, options.verbose)}\n\n{verdict}", status)


def _report_text(report: Report, verbose: bool) -> str:
    head = terminal.printable(f"{_this_process()}: the processes that report to {report.folder}")
    return f"{head}\n{show.of_report(report, terminal.width(), verbose)}"


def _lines(records: Sequence[PatchRecord], verbose: bool, planned: bool) -> str:
    lines = show.of_records(records, os.environ, planned)
    return show.text(lines, terminal.width(), verbose)


def _verdict(status: int, records: Sequence[PatchRecord], missing: Sequence[PatchRecord]) -> str:
    if missing:
        return f"required, but not applied: {', '.join(record.id for record in missing)}"
    if status == 0:
        return "every patch that counts is applied or switched off by you"
    return ", ".join(f"{record.id} is {record.outcome.value}" for record in records if CHECK_STATUS[record.outcome])


def _import_upstreams(planned: Sequence[PatchRecord]) -> None:
    """Import the module of every site that no version rules out: a source does not show all that its import makes.

    An import that raises becomes the site's record.
    """
    for site in [site for record in planned for site in record.sites]:
        if site.outcome in (Outcome.DISABLED, Outcome.GATED) or contract.source_path(site.module) is None:
            continue
        try:
            importlib.import_module(site.module)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a library that calls sys.exit() as well
            ledger.record(_import_failure(site, error))


def _import_failure(site: SiteRecord, error: BaseException) -> SiteRecord:
    reason = Reason(
        f"importing it raised {' '.join(traceback.format_exception_only(error)[-1].split())}",
        consequence="a program that imports it stops there, with or without fusepatch",
        action=f"make `python -c 'import {site.module}'` work",
    )
    return site._replace(outcome=Outcome.FAILED, reason=reason, traceback=traceback.format_exc())


def _explain(options: argparse.Namespace) -> Answer:
    patch = patches.find(options.id)
    planned = next(record for record in activation.planned(os.environ) if record.id == patch.id)
    text = page(patch, planned, settings.read(os.environ), "In a fresh process")
    return Answer(terminal.wrap(text, terminal.width()))


def _env(options: argparse.Namespace) -> Answer:
    columns = terminal.width()
    names = [name for name in sorted(os.environ) if settings.is_own(name)]
    problems = {name: problem for name in names if (problem := run.problem({name: os.environ[name]}))}
    blocks = []
    for variable in settings.TABLE:
        own = [name for name in names if settings.find(name) is variable and not settings.is_unknown(name)]
        block = [variable.shown_name]
        for number, text in enumerate(_values(variable, own, problems)):
            block.append(terminal.labelled("value" if number == 0 else "", text, columns))
        for label, text in (
            ("accepted", variable.values),
            ("meaning", variable.meaning),
            ("read by", ", ".join(patches.readers(variable.name)) or "start-up"),
        ):
            block.append(terminal.labelled(label, text.replace("`", ""), columns))
        blocks.append("\n".join(block))
    blocks += [terminal.wrap(settings.unknown_name(name), columns) for name in names if settings.is_unknown(name)]
    together = [] if problems else [run.problem(os.environ)]
    wrong = tuple(problem for problem in (*problems.values(), *together) if problem)
    return Answer("\n\n".join(blocks) + "\n\n", USAGE if wrong else 0, wrong)


def _values(variable: settings.Variable, names: Sequence[str], problems: Mapping[str, str]) -> Iterator[str]:
    if not names:
        yield f"not set (default: {variable.default.replace('`', '').removeprefix('unset: ')})"
    for name in names:
        text = os.environ[name].strip()
        shown = f"{name}={text}" if variable.is_family else text
        source = "from the environment"
        if (name, text) == (settings.SWITCH, "1"):
            source += ": set by you, or exported by an active process that started this one"
        if not text:
            yield f"{shown}(empty, which counts as not set; {source})"
        elif name in problems:
            yield f"{shown} CANNOT BE READ ({source})"
        else:
            yield f"{shown} ({source})"


def _json(data: Any) -> str:
    return json.dumps(data, indent=2)


def _this_process() -> str:
    return f"fusepatch {__version__}, Python {platform.python_version()}"
