"""What every benchmark measures of a peer, and how it is written: ratios, files, bars of a plot."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

GIB = 1 << 30
DOES_NOT_APPLY = "does not apply"
"""The ``problem`` of a peer that has nothing of its own to show in a case."""


@dataclass
class Row:
    """One peer in one case. ``problem`` says why there is no time, or is None; ``repeats`` are milliseconds of each
    call."""

    peer: str
    implementation: str
    version: str | None
    problem: str | None = None
    reason: str = ""
    repeats: list[list[float]] = field(default_factory=list)
    check: dict[str, Any] | None = None
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def times(self) -> list[float]:
        return [milliseconds for repeat in self.repeats for milliseconds in repeat]

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def comparable(self) -> bool:
        """Whether a ratio may be made of its time: it has one, and its check passed. The floor has nothing to check."""
        return self.problem is None and bool(self.times) and (self.implementation == "floor" or self.passed)

    @property
    def passed(self) -> bool:
        return self.check is not None and bool(self.check["passed"])


def ratio(row: Row, other: Row | None) -> float | None:
    """The median of ``row`` over that of ``other``; None unless both can be compared."""
    if other is None or not (row.comparable and other.comparable):
        return None
    return row.median / other.median


def ratio_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def gib(value: int | None) -> str:
    return "-" if value is None else f"{value / GIB:.2f}"


def write(path: str, text: str) -> None:
    """Write a whole file, or leave what was there."""
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(f"{path}.part", path)


def markdown_row(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> list[str]:
    """The lines of a table; the first column and the last ``words`` of them are text, those between are numbers."""
    numbers = len(headings) - 1 - words
    rule = markdown_row(["---", *["---:"] * numbers, *["---"] * words])
    return [markdown_row(headings), rule, *map(markdown_row, rows)]


def compared(row: Row, reference: Row) -> str:
    """How the check of a row came out, that has been compared with the reference."""
    if row.check is None:
        return f"not checked: {reference.peer} did not run"
    if row is reference and row.passed:
        return "the others are compared with it"
    return (
        f"{'passed' if row.passed else 'FAILED CHECK'}: {row.check['error']:.1e} (at most {row.check['tolerance']:g})"
    )


def finite(value: Any) -> Any:
    # JSON has no NaN.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


OURS, OTHERS, FLOOR = "#2f86d6", "#8a8f98", "#d9603b"
"""Colours for white and for black grounds: fusepatch, what it is compared with, the matrix products alone."""


class Bar(NamedTuple):
    """One bar: its name, its length, the text at its end, and whether fusepatch made it."""

    name: str
    value: float
    text: str
    ours: bool


def draw_bars(panel: Any, bars: Sequence[Bar], floor: float | None) -> None:
    """Draw horizontal bars on matplotlib's axes ``panel``, the first on top, and ``floor`` as a line."""
    drawn = panel.barh([bar.name for bar in bars], [bar.value for bar in bars])
    for rectangle, bar in zip(drawn, bars, strict=True):
        rectangle.set_color(OURS if bar.ours else OTHERS)
    panel.bar_label(drawn, [bar.text for bar in bars], padding=4)
    panel.margins(x=0.15)
    panel.invert_yaxis()
    if floor is not None:
        panel.axvline(floor, color=FLOOR, linewidth=1.2, label="matrix products alone")
