"""Text for a terminal of any width: wrapped lines, and tables through rich where it is installed, plain ones elsewhere."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Sequence

GAP = 2
"""Columns of blanks between two columns of a table."""

_COLOURS = {
    "APPLIED": "green",
    "would": "green",
    "FAILED": "red",
    "DRIFTED": "red",
    "SHADOWED": "red",
    "NOT": "red",
    "GATED": "yellow",
}


def width() -> int:
    """The columns of the terminal (`COLUMNS` where it is set), 80 where there is none."""
    return max(shutil.get_terminal_size().columns, 40)


def wrap(text: str, columns: int) -> str:
    """Wrap each line of `text` by itself; what follows stands under the line's own indentation, or under its bullet."""
    return "\n".join(_wrap_line(line, columns) for line in text.splitlines())


def labelled(label: str, text: str, columns: int) -> str:
    """`text` wrapped to the right of an indented label."""
    return textwrap.fill(
        text,
        columns,
        initial_indent=f"  {label:<10}",
        subsequent_indent=" " * 12,
        break_long_words=False,
        break_on_hyphens=False,
    )


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], columns: int) -> None:
    """Print a table that fits `columns`, down to about 75. Its last column takes what the others leave."""
    widths = _widths(headings, rows, columns)
    folded = [[_fold(cell, width) for cell, width in zip(row, widths, strict=True)] for row in (headings, *rows)]
    try:
        import rich  # noqa: F401
    except ImportError:
        _print_plain(folded, widths)
    else:
        _print_rich(folded, widths)


def _wrap_line(line: str, columns: int) -> str:
    body = line.lstrip(" ")
    indent = " " * (len(line) - len(body))
    hanging = indent + "  " if body.startswith("- ") else indent
    return textwrap.fill(
        body,
        columns,
        initial_indent=indent,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _widths(headings: Sequence[str], rows: Sequence[Sequence[str]], columns: int) -> list[int]:
    """Each column at its longest cell; the last one is left 40, for which the others fold at blanks and dots, the widest first."""
    cells = list(zip(headings, *rows, strict=True))[:-1]
    widths = [max(map(len, column)) for column in cells]
    parts = [max(len(part) for cell in column for part in re.findall(r"[^ .]+\.?", cell)) for column in cells]
    gaps = GAP * len(cells)
    for index in sorted(range(len(cells)), key=lambda index: -widths[index]):
        excess = sum(widths) + gaps + 40 - columns
        widths[index] = min(widths[index], max(widths[index] - excess, parts[index], 12))
    return [*widths, max(columns - sum(widths) - gaps, 16)]


def _fold(text: str, columns: int) -> list[str]:
    """Break at blanks; a word that is too long also after a dot, slash or underscore, and anywhere if it must be."""
    lines = [""]
    for word in text.split():
        pieces = [word] if len(word) <= columns else re.findall(r"[^._/]*[._/]+|[^._/]+", word)
        for number, piece in enumerate(pieces):
            gap = " " if number == 0 and lines[-1] else ""
            if len(lines[-1]) + len(gap) + len(piece) <= columns:
                lines[-1] += gap + piece
            else:
                lines.extend(piece[start : start + columns] for start in range(0, len(piece), columns))
    return lines if lines[0] else lines[1:] or [""]


def _print_plain(rows: Sequence[Sequence[list[str]]], widths: Sequence[int]) -> None:
    def print_line(cells: Sequence[str]) -> None:
        print((" " * GAP).join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())

    for number, row in enumerate(rows):
        for index in range(max(map(len, row))):
            print_line([cell[index] if index < len(cell) else "" for cell in row])
        if number == 0:
            print_line(["-" * width for width in widths])
        elif number < len(rows) - 1:
            print()


def _print_rich(rows: Sequence[Sequence[list[str]]], widths: Sequence[int]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0), header_style="bold", leading=1
    )
    for heading, width in zip(rows[0], widths, strict=True):
        table.add_column("\n".join(heading), width=width, no_wrap=True)
    for row in rows[1:]:
        table.add_row(*(Text("\n".join(cell), style=_COLOURS.get(cell[0].split(" ")[0], "")) for cell in row))
    Console(file=sys.stdout, width=sum(widths) + GAP * len(widths)).print(table)
