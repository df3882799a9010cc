"""Run rows of the matrix and write down what became of every site: `tox -e matrix -- --help`.

Each row's environment or overlay is made on demand below a folder and kept for the next run. Then, each in a fresh
process: the module of every site is imported, and the row's doors are opened without fusepatch and with it. A row's
results lie in `RESULTS/NAME.json` below the folder; `--write` puts them into `outcomes.json`, from which the page is
generated. Exit status 1 where an outcome is not the expected one, or a door does not open.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

import fusepatch
from doors.observe import DISTRIBUTIONS
from fusepatch.engine.patch import Patch
from fusepatch.patches import PATCHES
from tools.rows import OPTIONS, Key, Row, enter, make_environment, make_overlay, outcomes, rows

CHECKOUT = Path(__file__).parents[2]
OUTCOMES = Path(__file__).parent / "outcomes.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="the whole matrix; without it, the chosen set")
    parser.add_argument("--rows", nargs="+", default=[], metavar="TEXT", help="only rows whose name contains a TEXT")
    parser.add_argument(
        "--patch", metavar="ID", help="only this patch's sites, without the entry points; the rest stays as recorded"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the rows, and run nothing")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many rows run at once (default: 1)")
    parser.add_argument("--folder", type=Path, default=CHECKOUT / ".tox" / "rows", help="where environments are kept")
    parser.add_argument("--write", action="store_true", help=f"put the results into {OUTCOMES.name}")
    arguments = parser.parse_args()

    chosen = choose(arguments.rows, arguments.all)
    if arguments.list:
        print("\n".join(row.name for row in chosen))
        return 0
    if not chosen:
        print(f"matrix: no row has {' or '.join(arguments.rows)} in its name; --list shows them", file=sys.stderr)
        return 2
    if arguments.patch is not None and not any(
        arguments.patch == patch for row in chosen for patch, _, _ in row.expected
    ):
        print(f"matrix: matrix.toml expects nothing of {arguments.patch} in these rows: add its table", file=sys.stderr)
        return 2
    results: dict[str, Any] = {}
    found = []
    try:
        for row, result in run_rows(chosen, arguments.folder, arguments.jobs, arguments.patch):
            if "failed" not in result:
                results[row.name] = result
            found += differences(row, result, arguments.patch)
            if arguments.write:  # after every row: what has been run is kept where a later row stops the run
                everything = arguments.all and not arguments.rows and arguments.patch is None
                OUTCOMES.write_text(merged(results, everything, arguments.patch), encoding="utf-8")
    except subprocess.CalledProcessError as error:  # uv's, which has said on stderr what was wrong
        print(
            f"matrix: an environment could not be made: `{shlex.join(error.cmd)}` ended with exit status "
            f"{error.returncode}; its error is above. The remaining rows were not run. Start again once that is "
            "mended: finished environments are kept.",
            file=sys.stderr,
        )
        return 2
    print(f"\n{len(chosen)} rows; {len(found) or 'no'} differences from what matrix.toml expects")
    print("\n".join(found))
    return 1 if found else 0


def choose(texts: Sequence[str], everything: bool) -> list[Row]:
    """The rows to run: those named by a part of their name, whatever their set; else the chosen set, or all."""
    if texts:
        return [row for row in rows() if any(text in row.name for text in texts)]
    return [row for row in rows() if everything or row.runs_in != "whole"]


def run_rows(
    chosen: Iterable[Row], folder: Path, jobs: int, patch: str | None = None
) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Each row with its result as it ends, and one line printed for it; `failed` is the result of a row that cannot
    run.

    With `patch`, the result is the recorded one with that patch's sites looked at anew.
    """
    results = folder / "results"
    results.mkdir(parents=True, exist_ok=True)
    before = {} if patch is None else recorded()
    with ThreadPoolExecutor(jobs) as pool:
        running = []
        for row in chosen:
            if patch is not None:
                known = before.get(row.name)
                if known is None:
                    yield row, {"failed": "it has never been run as a whole, and --patch adds to what is recorded"}
                    continue
                if without_library(patch, known["versions"]):
                    yield row, with_patch(known, patch, not_installed(patch))
                    continue
            started = time.monotonic()
            python = make_environment(row, folder / "environments" / row.factor)
            overlay = [make_overlay(row.overlay, python, folder / "overlays")] if row.overlay else []
            if time.monotonic() - started > 1:
                print(f"{row.name}: installed in {time.monotonic() - started:.0f} s", flush=True)
            running.append(pool.submit(_run_row, row, python, [*overlay, CHECKOUT], patch, before.get(row.name)))
        for future in as_completed(running):
            row, result, seconds = future.result()
            (results / f"{row.name}.json").write_text(as_json(result), encoding="utf-8")
            wrong = differences(row, result, patch)
            verdict = f"{len(wrong)} DIFFERENCES" if wrong else "as expected"
            print(f"{row.name}: {verdict} ({seconds:.0f} s)", flush=True)
            yield row, result


def _run_row(
    row: Row, python: Path, paths: Sequence[Path], patch: str | None, known: Mapping[str, Any] | None
) -> tuple[Row, dict[str, Any], float]:
    started = time.monotonic()
    try:
        if patch is None or known is None:
            result = record(row.doors, python, paths)
        else:
            result = with_patch(known, patch, look_at_sites(python, paths, patch))
    except (AssertionError, subprocess.TimeoutExpired) as error:
        result = {"failed": str(error)}
    return row, result, time.monotonic() - started


def record(doors: Iterable[str], python: Path, paths: Sequence[Path]) -> dict[str, Any]:
    """What one environment shows: the versions that were imported, every site's outcome, and what went through the
    doors.

    Returns a JSON object:
        versions: of Python and of every library that was imported, by distribution.
        sites: patch id -> upstream -> module -> outcome with its flags.
        reasons: patch id -> module -> why, for every site that is not simply APPLIED.
        doors: door -> `plain` and `patched`: model -> the kernels of Liger in it; `ledger`: patch id -> how many calls
            went through it, how many values it replaced, how many fallbacks it recorded. Or `failed`, with the last
            line of the error, `how` it was opened and its `output`.
    """
    return {
        **look_at_sites(python, paths),
        "doors": {door: _through(door, python, paths) for door in doors},
    }


def look_at_sites(python: Path, paths: Sequence[Path], patch: str | None = None) -> dict[str, Any]:
    """The `versions`, `sites` and `reasons` of `record`: of every patch, or of one, importing what its sites are in
    alone."""
    only = () if patch is None else ("--patch", patch)
    seen = enter("sites", *only, python=python, paths=paths, patched=True)
    found, reasons = outcomes(seen["fusepatch"])
    found = {key: outcome for key, outcome in found.items() if patch in (None, key[0])}
    return {"versions": seen["versions"], "sites": _nested(found), "reasons": _reasons(found, reasons)}


def with_patch(known: Mapping[str, Any], patch: str, seen: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded result with one patch's sites and reasons, and the versions seen with them, in place of its own."""

    def replaced(name: str) -> dict[str, Any]:
        return {**{other: value for other, value in known[name].items() if other != patch}, **seen[name]}

    return {
        **known,
        "versions": {**known["versions"], **seen["versions"]},
        "sites": replaced("sites"),
        "reasons": replaced("reasons"),
    }


def without_library(patch: str, versions: Mapping[str, str]) -> bool:
    """Whether a row with these recorded versions has none of the libraries in which the patch has sites."""
    distributions = {name for site in _declared(patch).sites for name in site.upstream.distributions}
    return distributions <= DISTRIBUTIONS.keys() - versions.keys()


def not_installed(patch: str) -> dict[str, Any]:
    """What `look_at_sites` finds of a patch where none of its libraries is installed."""
    names = {
        (patch, site.upstream.import_name, site.module): site.upstream.import_name for site in _declared(patch).sites
    }
    found = dict.fromkeys(names, "ABSENT")
    reasons = {key: f"{name} is not installed" for key, name in names.items()}
    return {"versions": {}, "sites": _nested(found), "reasons": _reasons(found, reasons)}


def _declared(patch: str) -> Patch:
    return next(declared for declared in PATCHES if declared.id == patch)


def _through(door: str, python: Path, paths: Sequence[Path]) -> dict[str, Any]:
    options = OPTIONS.get(door, ())
    seen = {}
    for how, patched in (("without fusepatch", False), ("with fusepatch", True)):
        try:
            seen[how] = enter(door, *options, python=python, paths=paths, patched=patched)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            return {"failed": str(error).rstrip().rpartition("\n")[2], "how": how, "output": str(error)}
    plain, patched = seen.values()
    ledger = {
        patch: {"calls": of["calls"], "replaced": of["times_replaced"], "fallbacks": of["times_fallen_back"]}
        for patch, of in patched["fusepatch"].items()
    }
    return {
        "plain": _kernels(plain),
        "patched": _kernels(patched),
        "ledger": {patch: counts for patch, counts in ledger.items() if any(counts.values())},
    }


def _kernels(seen: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: ", ".join(kernel for kernel, there in model["liger"].items() if there) or "none"
        for name, model in seen["models"].items()
    }


def differences(row: Row, result: Mapping[str, Any], only: str | None = None) -> list[str]:
    """What is not as the matrix says, one text each; of the sites of one patch where `only` names it."""
    if "failed" in result:
        return [f"{row.name}: its sites cannot be looked at: {result['failed']}"]
    found = flat(result["sites"])
    lines = []
    for key in sorted(key for key in {*found, *row.expected} if only in (None, key[0])):
        wanted, is_there = row.expected.get(key, "no such site"), found.get(key, "no such site")
        if wanted != is_there:
            patch, _, module = key
            reason = result["reasons"].get(patch, {}).get(module, "")
            lines.append(
                f"{row.name}: {patch} at {module}: expected {wanted}, found {is_there}" + f" ({reason})" * bool(reason)
            )
    for door in row.doors if only is None else ():
        seen = result["doors"].get(door, {"failed": "it was not run", "how": "in both runs"})
        if "failed" in seen:
            lines.append(f"{row.name}: the entry point {door} fails {seen['how']}: {seen['failed']}")
        elif not seen["ledger"]:
            lines.append(f"{row.name}: no patch counted a call in the entry point {door}")
    return [*lines, *_wrong_versions(row, result["versions"])]


def _wrong_versions(row: Row, versions: Mapping[str, str]) -> list[str]:
    overlaid = [Requirement(text) for text in row.overlay]
    names = {pin.name for pin in overlaid}
    own = [pin for pin in map(Requirement, (*row.requirements, *row.no_deps)) if pin.name not in names]
    lines = []
    for pin in (*own, *overlaid):
        found = versions.get(pin.name)
        if found is not None and not pin.specifier.contains(found, prereleases=True):
            lines.append(f"{row.name}: {pin} is in the matrix, {found} was imported")
    if not versions["python"].startswith(f"{row.python}."):
        lines.append(f"{row.name}: Python {row.python} is in the matrix, {versions['python']} ran")
    return lines


def flat(sites: Mapping[str, Any]) -> dict[Key, str]:
    """The sites of a result by their key."""
    return {
        (patch, upstream, module): outcome
        for patch, upstreams in sites.items()
        for upstream, modules in upstreams.items()
        for module, outcome in modules.items()
    }


def _nested(found: Mapping[Key, str]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for (patch, upstream, module), outcome in found.items():
        nested.setdefault(patch, {}).setdefault(upstream, {})[module] = outcome
    return nested


def _reasons(found: Mapping[Key, str], reasons: Mapping[Key, str]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, outcome in found.items():
        if outcome != "APPLIED":
            patch, _, module = key
            nested.setdefault(patch, {})[module] = reasons[key]
    return nested


def recorded() -> dict[str, Any]:
    """The rows of the file of outcomes by their names."""
    rows: dict[str, Any] = json.loads(OUTCOMES.read_text(encoding="utf-8"))["rows"]
    return rows


def merged(results: Mapping[str, Any], everything: bool, only: str | None = None) -> str:
    """The text of the file of outcomes with these results: in place of all that it held, or over it.

    A row is dropped where the matrix no longer has it, or has sites that it did not have when the row was run, other
    than those of the patch `only`. Rows that have not been run are named.
    """

    def others(keys: Iterable[Key]) -> set[Key]:
        return {key for key in keys if key[0] != only}

    before = {} if everything or not OUTCOMES.is_file() else recorded()
    known = list(rows())
    kept = dict(results)
    for row in known:
        if row.name in before and others(flat(before[row.name]["sites"])) == others(row.expected):
            kept.setdefault(row.name, before[row.name])
    return as_json(
        {
            "date": datetime.date.today().isoformat(),
            "fusepatch": fusepatch.__version__,
            "rows": kept,
            "not run": [row.name for row in known if row.name not in kept],
        }
    )


def as_json(value: Any) -> str:
    """Sorted and indented, so that a change is a readable difference."""
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.exit(main())
