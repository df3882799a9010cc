"""What the newest releases and nightlies would change: `tox -e drift -- --help`.

Installs what the registry has now (the `drift` table of matrix.toml) into an environment of its own, looks at it as the
matrix looks at its rows, and compares each site with what `outcomes.json` has for the newest release of its upstream
that is not newer. Nothing is written. Exit status 1 where a site got worse, or a door opens without fusepatch and not
with it; a door that does not open without it is named, since these releases do not go together.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from tools.matrix import CHECKOUT, OUTCOMES, flat, record
from tools.rows import MATRIX, Key, make_environment, make_overlay, row

DISTRIBUTIONS = {"liger_kernel": ("liger-kernel", "liger-kernel-nightly")}
"""Where the distributions of an upstream are not called as it is imported."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=CHECKOUT / ".tox" / "newest", help="where it is installed")
    arguments = parser.parse_args()

    recorded = json.loads(OUTCOMES.read_text(encoding="utf-8"))["rows"]
    wanted = MATRIX["drift"]
    python = make_environment(row(MATRIX, "drift", wanted), arguments.folder / "environment", anew=True)
    shutil.rmtree(arguments.folder / "overlays", ignore_errors=True)
    environments = [("the newest releases", wanted["doors"], [CHECKOUT])]
    for overlay in wanted["overlay"]:
        root = arguments.folder / "overlays"
        path = make_overlay(tuple(overlay["requirements"]), python, root, nightly=overlay.get("nightly", False))
        environments.append((overlay["name"], overlay["doors"], [path, CHECKOUT]))
    changed, worse = [], False
    for name, doors, paths in environments:
        try:
            result = record(doors, python, paths)
        except AssertionError as error:
            changed.append(f"{name}: the sites cannot be looked at: {error}")
            worse = True
            continue
        versions = ", ".join(f"{library} {version}" for library, version in result["versions"].items())
        print(f"{name}: {versions}; entry points: {', '.join(doors)}", flush=True)
        lines, got_worse = compare(result, recorded)
        changed += [f"{name}: {line}" for line in lines]
        worse = worse or got_worse
    print("\n".join(["", *changed]) if changed else "\nnothing drifted")
    return 1 if worse else 0


def compare(result: Mapping[str, Any], recorded: Mapping[str, Any]) -> tuple[list[str], bool]:
    """What is new and what has changed, one text each, and whether anything got worse."""
    lines = list(_newer(result["versions"], recorded))
    worse = False
    for key, outcome in flat(result["sites"]).items():
        patch, upstream, module = key
        version = _version(upstream, result["versions"])
        before = _before(key, version, recorded)
        if before is None or before[1] == outcome:
            continue
        reason = result["reasons"].get(patch, {}).get(module, "")
        worse = worse or _rank(outcome) > _rank(before[1])
        lines.append(
            f"{patch} at {module}: {before[1]} with {upstream} {before[0]}, {outcome} with {upstream} "
            f"{version or 'none'}" + f" ({reason})" * bool(reason)
        )
    for door, seen in result["doors"].items():
        if "failed" in seen:
            worse = worse or seen["how"] == "with fusepatch"
            lines.append(f"the entry point {door} fails {seen['how']}: {seen['failed']}")
    return lines, worse


def _newer(versions: Mapping[str, str], recorded: Mapping[str, Any]) -> Sequence[str]:
    lines = []
    for library, version in versions.items():
        known = [Version(row["versions"][library]) for row in recorded.values() if library in row["versions"]]
        if not known or Version(version) > max(known):
            lines.append(f"{library} {version} is new; the newest in {OUTCOMES.name} is {max(known, default='none')}")
    return lines


def _before(key: Key, version: Version | None, recorded: Mapping[str, Any]) -> tuple[Version, str] | None:
    """The newest recorded release of the site's upstream up to `version`, and the best outcome recorded with it."""
    _, upstream, _ = key
    found = []
    for seen in recorded.values():
        there = _version(upstream, seen["versions"])
        if there is not None and (version is None or there <= version):
            found.append((there, flat(seen["sites"]).get(key, "no such site")))
    return max(found, key=lambda pair: (pair[0], -_rank(pair[1])), default=None)


def _version(upstream: str, versions: Mapping[str, str]) -> Version | None:
    names = DISTRIBUTIONS.get(upstream, (upstream,))
    return next((Version(versions[name]) for name in names if name in versions), None)


def _rank(outcome: str) -> int:
    return ("APPLIED", "APPLIED untested").index(outcome) if outcome.startswith("APPLIED") else 2


if __name__ == "__main__":
    sys.exit(main())
