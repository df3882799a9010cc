"""Types of command-line arguments that the benchmarks share, and the error of both."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from fusepatch import settings
from fusepatch.errors import FusepatchError


class BenchError(FusepatchError):
    """The benchmark cannot start as asked."""


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {text}")
    return value


def repeats(text: str) -> int:
    value = int(text)
    if value < 3:
        raise argparse.ArgumentTypeError(f"must be at least 3, so that there is a spread to see; found {text}")
    return value


def names(known: Sequence[str] | dict[str, Any]) -> Callable[[str], tuple[str, ...]]:
    """A comma-separated list of some of the `known` names."""

    def read(text: str) -> tuple[str, ...]:
        found = settings.names(text)
        unknown = [name for name in found if name not in known]
        if unknown or not found:
            raise argparse.ArgumentTypeError(f"found {', '.join(unknown) or 'none'}; wanted some of {', '.join(known)}")
        return found

    return read
