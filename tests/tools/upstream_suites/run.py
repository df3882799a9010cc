"""Run upstreams' own tests with and without the patches, and keep what became of them in `results.json`.

`python tests/tools/upstream_suites/run.py [--sources DIR] [--suite NAME ...]`. DIR holds one folder per release,
`NAME-VERSION`, each a checkout of the upstream's repository at the tag of that version. Releases whose source
distribution contains the tests (`distribution` in `suites.toml`) are downloaded if DIR lacks them. Without DIR, the
other suites are left out, and named. So are suites for a GPU where there is none, unless they are named with `--suite`.
The tests that are left out in both runs are in `deselections*.toml`. Afterwards `docs/upstream-tests.md` is written.

Exit status: 0; 1 where a test fails with the patches only, a suite does not go through the patches that it is there
for, or did not finish, or a deselection matches no test; 2 where a source folder is missing or cannot be downloaded.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomllib

import fusepatch
from fusepatch.reporting import reader

FOLDER = Path(__file__).parent
SUITES = FOLDER / "suites.toml"
DESELECTIONS = FOLDER / "deselections.toml"
DESELECTIONS_CPU = FOLDER / "deselections-cpu.toml"
"""For the suites that run without a GPU."""
RESULTS = FOLDER / "results.json"
PAGE = FOLDER.parents[2] / "docs" / "upstream-tests.md"

SHOWN = ("torch", "transformers", "trl", "liger-kernel", "peft", "accelerate")
"""The distributions whose versions are kept with a result."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs upstreams' own tests with and without the patches.")
    parser.add_argument("--sources", metavar="DIR", type=Path, help="the folder of the checkouts")
    parser.add_argument(
        "--suite", metavar="NAME", action="append", default=[], help="only these; the others' results stay"
    )
    options = parser.parse_args()
    suites = tomllib.loads(SUITES.read_text(encoding="utf-8"))["suite"]
    names = [suite["name"] for suite in suites]
    unknown = sorted(set(options.suite) - set(names))
    if unknown:
        parser.error(f"there is no suite {', '.join(unknown)}; the suites are {', '.join(names)}")
    chosen = [next(suite for suite in suites if suite["name"] == name) for name in options.suite or names]
    if not options.suite and _gpu() is None:
        chosen = [suite for suite in chosen if not suite.get("gpu")]
    if options.sources is None and not options.suite:
        left = [suite["name"] for suite in chosen if "distribution" not in suite]
        print(f"left out, since they need --sources: {', '.join(left)}", flush=True)
        chosen = [suite for suite in chosen if suite["name"] not in left]
    try:
        sources = {suite["name"]: source_of(suite, options.sources) for suite in chosen}
    except FileNotFoundError as error:
        parser.error(str(error))
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {"suites": {}}
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as work:
        for suite in chosen:
            result = run_suite(suite, sources[suite["name"]], Path(work))
            results["suites"][suite["name"]] = result
            problems += problems_of(suite, result)
            kept = {name: results["suites"][name] for name in names if name in results["suites"]}
            RESULTS.write_text(json.dumps({"suites": kept}, indent=1) + "\n", encoding="utf-8")
            print(f"{suite['name']}: {_summary(result)}", flush=True)
    problems += stale(results["suites"].values(), set(names) <= set(results["suites"]))
    import page  # beside this program

    PAGE.write_text(page.render(), encoding="utf-8")
    for problem in problems:
        print(f"PROBLEM: {problem}")
    return 1 if problems else 0


def source_of(suite: Mapping[str, Any], given: Path | None) -> Path:
    """The folder of the release whose tests a suite runs; downloaded if its source distribution contains them.

    Raises:
        FileNotFoundError: it is not in the `given` folder, and is not or cannot be downloaded.
    """
    if given is not None and (given / suite["source"]).is_dir():
        return (given / suite["source"]).resolve()
    if "distribution" not in suite:
        where = "--sources was not given" if given is None else f"{given} lacks {suite['source']}"
        raise FileNotFoundError(
            f"{suite['name']}: {where}; wanted a folder that contains {suite['source']}, a checkout of "
            f"{suite['upstream']} at the tag of {suite['version']}"
        )
    folder = _kept("sources") / suite["source"]
    if not folder.is_dir():
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        done = subprocess.run([*command, "--dest", str(partial), suite["distribution"]])
        archives = [*partial.glob("*.tar.gz")]
        if done.returncode or len(archives) != 1:
            raise FileNotFoundError(f"{suite['name']}: {suite['distribution']} could not be downloaded as sources")
        with tarfile.open(archives[0]) as archive:
            archive.extractall(partial, filter="data")
        (unpacked,) = (path for path in partial.iterdir() if path.is_dir())
        unpacked.rename(folder)
        shutil.rmtree(partial)
    return folder


def _kept(name: str) -> Path:
    """A folder for what later runs use again."""
    overlays = Path(os.environ.get("UPSTREAM_OVERLAYS") or Path(tempfile.gettempdir()) / "upstream-overlays")
    return overlays.with_name(f"{overlays.name}-{name}")


def run_suite(suite: Mapping[str, Any], source: Path, work: Path) -> dict[str, Any]:
    """Both runs of a suite, and one more of each for the tests that failed in one of them only."""
    overlay = _overlay(suite.get("overlay", []))
    path = [*([overlay] if overlay else []), str(FOLDER), str(source), str(Path(fusepatch.__file__).parents[1])]
    path += [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    files = [DESELECTIONS] if suite.get("gpu") else [DESELECTIONS, DESELECTIONS_CPU]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("FUSEPATCH")},
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "huggingface"),
        "PYTHONPATH": os.pathsep.join(path),
        **({} if suite.get("gpu") else {"CUDA_VISIBLE_DEVICES": ""}),
        **suite.get("environment", {}),
    }
    place = source
    if suite.get("hub"):
        place = work / ("hub" + "+".join(suite.get("overlay", [])).replace("/", "-"))
        place.mkdir(exist_ok=True)
        build = f"import pathlib, hub; hub.build(pathlib.Path({str(place)!r}))"
        subprocess.run(
            [sys.executable, "-c", build], env={**environment, "FUSEPATCH": "0"}, check=True, capture_output=True
        )
    tests = [str(source / name) for name in suite["tests"]]
    left_out = [argument for file in files for argument in ("--fusepatch-deselect", str(file))]
    narrowed = [*tests, *(["-k", suite["select"]] if "select" in suite else [])]

    def session(patched: bool, arguments: Sequence[str]) -> dict[str, Any]:
        return _session([*left_out, *arguments], source, place, environment, suite["minutes"], work, patched)

    plain, patched = session(False, narrowed), session(True, narrowed)
    differ = [name for name in _failed(patched) ^ _failed(plain) if "::" in name]
    flaky: list[str] = []
    if differ:
        again = [f"{source / name}" for name in sorted(differ)]
        failed_without = _failed(plain) | _failed(session(False, again))
        failed_with = _failed(patched) | _failed(session(True, again))
        flaky = sorted(name for name in differ if name in failed_without & failed_with)
    both = _failed(plain) & _failed(patched)
    reasons: dict[str, list[str]] = {}
    for name in sorted(both):
        reasons.setdefault(plain["reasons"][name], []).append(name)
    return {
        **{name: suite[name] for name in ("upstream", "version", "tests")},
        "select": suite.get("select", ""),
        "environment": suite.get("environment", {}),
        "device": _gpu() if suite.get("gpu") else "CPU",
        "installed": _versions(overlay),
        "python": platform.python_version(),
        "without": _counts(plain),
        "with": _counts(patched),
        "patches": patched["patches"],
        "failed_in_both": [{"reason": reason, "tests": tests} for reason, tests in reasons.items()],
        "flaky": flaky,
        "only_with": {
            name: patched["reasons"][name] for name in sorted(_failed(patched) - _failed(plain)) if name not in flaky
        },
        "only_without": sorted(_failed(plain) - _failed(patched) - set(flaky)),
        "deselections": {test: times for test, times in patched["entries"] if times},
    }


def problems_of(suite: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """What is wrong with the result of one suite."""
    name = suite["name"]
    problems = [f"{name}: fails with the patches only: {test}: {why}" for test, why in result["only_with"].items()]
    for which in ("without", "with"):
        if not result[which]["finished"]:
            problems.append(f"{name}: the run {which} the patches did not finish within {suite['minutes']} minutes")
    for patch in suite["exercises"]:
        if not result["patches"].get(patch, {}).get("calls"):
            problems.append(f"{name}: no call went through {patch}")
    return problems


def stale(results: Iterable[Mapping[str, Any]], complete: bool) -> list[str]:
    """The deselections that matched no test of any suite, where every suite has a result."""
    if not complete:
        return []
    matched = {test for result in results for test in result["deselections"]}
    entries = tomllib.loads(DESELECTIONS.read_text(encoding="utf-8")).get("deselect", [])
    return [
        f"{DESELECTIONS.name}: {entry['test']} matches no test" for entry in entries if entry["test"] not in matched
    ]


def _session(
    arguments: Sequence[str],
    source: Path,
    place: Path,
    environment: Mapping[str, str],
    minutes: float,
    work: Path,
    patched: bool,
) -> dict[str, Any]:
    """One pytest process: outcomes by test, and what the patches did where they were on."""
    outcomes = work / "outcomes.json"
    outcomes.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "fusepatch.testing",
        "-p",
        "own_session",
    ]
    command += ["--rootdir", str(source), "-c", os.devnull, "--tb=short"]
    with tempfile.TemporaryDirectory(dir=work) as records:
        switch = {"FUSEPATCH_REPORT": records} if patched else {"FUSEPATCH": "0"}
        log = work / "log"
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                [*command, *arguments],
                env={**environment, **switch, "OWN_OUTCOMES": str(outcomes)},
                cwd=place,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                process.wait(minutes * 60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        patches = _patches(records) if patched else {}
    if not outcomes.is_file():
        print(log.read_text(encoding="utf-8")[-3000:], file=sys.stderr)
        return {"tests": {}, "reasons": {}, "deselected": 0, "entries": [], "patches": patches, "finished": False}
    read = json.loads(outcomes.read_text(encoding="utf-8"))
    reasons = {name: _without_paths(reason) for name, reason in read["reasons"].items()}
    return {**read, "reasons": reasons, "patches": patches, "finished": True}


def _patches(folder: str) -> dict[str, Any]:
    """Per patch, over the processes of the run: calls, replaced values, and the fallbacks by their texts."""
    found: dict[str, Any] = {}
    for process in reader.read(folder).processes:
        for record in process["patches"]:
            entry = found.setdefault(record["id"], {"calls": 0, "replaced": 0, "fallbacks": Counter()})
            entry["calls"] += record["calls"]
            entry["replaced"] += sum(note["times"] for note in record["replaced"])
            entry["fallbacks"].update({note["text"]: note["times"] for note in record["fallbacks"]})
    return {name: {**entry, "fallbacks": dict(entry["fallbacks"])} for name, entry in found.items() if entry["calls"]}


def _without_paths(text: str) -> str:
    """The names of this machine's folders are no part of a result."""
    return re.sub(r"(?<![\w.])/(?:[^\s/()'\"]+/)+", "", text)


def _failed(outcomes: Mapping[str, Any]) -> set[str]:
    return {name for name, outcome in outcomes["tests"].items() if outcome == "failed"}


def _counts(outcomes: Mapping[str, Any]) -> dict[str, Any]:
    counts = Counter(outcomes["tests"].values())
    return {
        **{name: counts[name] for name in ("passed", "failed", "skipped")},
        "deselected": sum(times for _, times in outcomes["entries"]),
        "finished": outcomes["finished"],
    }


def _versions(overlay: str | None) -> dict[str, str]:
    paths = [*([overlay] if overlay else []), *sys.path]
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions(path=paths):
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name in SHOWN:
            found.setdefault(name, distribution.version)
    return {name: found[name] for name in SHOWN if name in found}


def _overlay(requirements: Sequence[str]) -> str | None:
    """The folder that holds these releases, installed there if they are not yet; None where there are none."""
    if not requirements:
        return None
    root = Path(os.environ.get("UPSTREAM_OVERLAYS") or Path(tempfile.gettempdir()) / "upstream-overlays")
    folder = root / "+".join(requirements)
    if not folder.is_dir():
        partial = folder.with_name(folder.name + ".partial")
        install = ["uv", "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
        subprocess.run([*install, "--target", str(partial), *requirements], check=True)
        partial.rename(folder)
    return str(folder)


def _gpu() -> str | None:
    """The name of the first GPU; None where there is none."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _summary(result: Mapping[str, Any]) -> str:
    texts = []
    for which in ("without", "with"):
        counts = result[which]
        texts.append(f"{which} {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    calls = ", ".join(f"{name} {entry['calls']}" for name, entry in result["patches"].items())
    return (
        f"{'; '.join(texts)}; calls: {calls or 'none'}; only with: {len(result['only_with'])}; flaky: "
        f"{len(result['flaky'])}"
    )


if __name__ == "__main__":
    sys.exit(main())
