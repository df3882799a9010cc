"""What every door script shares: its arguments and its last line of output."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any


def run(door: Callable[[argparse.Namespace], dict[str, Any]], parser: argparse.ArgumentParser) -> None:
    """Parse the command line, open the door and print one JSON object as the last line of stdout.

    `--import-fusepatch` imports fusepatch before anything else, as a user's training script would. Where fusepatch is
    active (by that flag, or switched on from outside) the object also holds its records under `fusepatch`.
    """
    parser.add_argument("--import-fusepatch", action="store_true", help="import fusepatch before any upstream")
    arguments = parser.parse_args()
    if arguments.import_fusepatch:
        import fusepatch  # noqa: F401
    seen = door(arguments)
    from observe import versions

    seen = {"versions": versions(), **seen}
    if "fusepatch" in sys.modules:
        seen["fusepatch"] = records()
    print(f"\n{json.dumps(seen)}", flush=True)


def records() -> dict[str, Any]:
    """fusepatch's own account, as plain data."""
    import fusepatch

    return {
        record.id: {
            "outcome": record.outcome.value,
            "calls": record.calls,
            "replaced": [note.text for note in record.replaced],
            "fallbacks": [note.text for note in record.fallbacks],
            "times_replaced": sum(note.times for note in record.replaced),
            "times_fallen_back": sum(note.times for note in record.fallbacks),
            "sites": [
                {
                    "upstream": site.upstream,
                    "module": site.module,
                    "outcome": site.outcome.value,
                    "flags": list(site.flags),
                    "version": site.version,
                    "reason": str(site.reason),
                }
                for site in record.sites
            ],
        }
        for record in fusepatch.status()
    }


def names(text: str) -> Sequence[str]:
    """A comma-separated list."""
    return [name for name in text.split(",") if name]
