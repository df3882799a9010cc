"""What a scenario declares, and what one run of it brings back."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

from demo import scenarios

Value = str | float
"""What one row shows of one run."""


@dataclass(frozen=True)
class Column:
    """One run of a scenario in its own process: with or without `import fusepatch`, under these variables."""

    heading: str
    patched: bool
    variables: Mapping[str, str] = field(default_factory=dict)


PLAIN = Column("plain", patched=False)
PATCHED = Column("import fusepatch", patched=True)


@dataclass(frozen=True)
class Scenario:
    """What is compared.

    `equal` are patterns of rows that must be the same in every column, numbers within `tolerance` (of their size, or of
    1 where they are smaller).
    `wanted` are rows with the value that each column must have. `applied` are patches that must be applied, and used,
    in every patched column.
    """

    title: str
    told: str
    columns: tuple[Column, ...]
    applied: tuple[str, ...]
    equal: tuple[str, ...] = ()
    tolerance: float = 0.0
    wanted: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)


class Run(NamedTuple):
    """What one process brought back.

    `rows` is what `run()` returned, `patches` is `fusepatch.status()` as data, None where fusepatch was not imported;
    `said` is what fusepatch wrote to stderr. `failure` is the end of stderr where the process failed.
    """

    rows: Mapping[str, Value]
    patches: list[dict[str, Any]] | None
    said: tuple[str, ...]
    seconds: float
    failure: str = ""


def modules() -> Iterator[tuple[str, ModuleType]]:
    """The scenarios' names and modules, by name; importing one is cheap."""
    for found in sorted(pkgutil.iter_modules(scenarios.__path__), key=lambda found: found.name):
        yield found.name, importlib.import_module(f"demo.scenarios.{found.name}")
