"""What the command line writes, and text for a terminal of any width. No state of stdout or stderr makes a traceback
here."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

from fusepatch.errors import FusepatchError

GAP = 2
"""Columns of blanks between two columns of a table."""

WIDEST = 1000
"""Columns that a line is filled to at most, whatever `COLUMNS` says."""

_COLOURS = {"green": "32", "yellow": "33", "red": "31", "bold": "1", "dim": "2"}

_claimed: TextIO | None = None


class StdoutError(FusepatchError):
    """Nothing can be written to stdout."""


class Parser(argparse.ArgumentParser):
    """Writes its help and its complaints as the other functions here write."""

    def error(self, message: str) -> NoReturn:
        # argparse's own takes stdout where stderr is closed.
        self.exit(2, f"{self.format_usage()}{self.prog}: error: {message}\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stdout:
            with contextlib.suppress(BrokenPipeError):
                show(message.removesuffix("\n"))
        elif sys.stderr is not None:
            with contextlib.suppress(OSError):
                sys.stderr.write(message)


def prepare() -> None:
    """Make stdout take any text: what its encoding does not have is written as an escape.

    Raises:
        StdoutError: stdout is closed.
    """
    if sys.stdout is None:
        raise StdoutError(
            "stdout is closed, so there is nowhere to write what was asked for. Nothing was done; for the exit status "
            "alone use >/dev/null."
        )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def claim_stdout() -> None:
    """Keep stdout for `show`: what anything else in this process writes there, from Python or from C, goes to
    stderr."""
    global _claimed
    sys.stdout.flush()
    number = sys.stdout.fileno()
    _claimed = open(os.dup(number), "w", encoding=sys.stdout.encoding, errors="backslashreplace")  # noqa: SIM115
    try:
        os.dup2(2, number)
    except OSError:  # stderr is closed
        _lead_nowhere(number)


def show(text: str) -> None:
    """Write lines to stdout, all of them or an error.

    Raises:
        BrokenPipeError: the reader has gone.
        StdoutError: they cannot be written: a full disk, a stdout that was opened for reading.
    """
    try:
        print(text, file=_stdout(), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StdoutError(
            f"the output could not be written to stdout ({error}), so it is incomplete. Free space there, or send it "
            "elsewhere."
        ) from None


def complain(text: str) -> None:
    """Write a message to stderr. Where that cannot be done it is lost, and nothing else happens."""
    if sys.stderr is not None:  # print() would take None for stdout
        with contextlib.suppress(OSError, ValueError):
            print(wrap(f"fusepatch: {text}", width()), file=sys.stderr, flush=True)


def finish() -> None:
    """Write what is still buffered, so that the interpreter finds nothing that it cannot write at its end."""
    for stream in (_claimed, sys.stdout, sys.stderr):
        if stream is not None:
            try:
                stream.flush()
            except (OSError, ValueError):
                with contextlib.suppress(OSError, ValueError):
                    _lead_nowhere(stream.fileno())


def width() -> int:
    """The columns of the terminal (`COLUMNS` where it is set), 80 where there is none."""
    return min(max(shutil.get_terminal_size().columns, 40), WIDEST)


def either(text: str, plain: str) -> str:
    """`text` where stdout's encoding has it, else `plain`."""
    try:
        text.encode(getattr(_stdout(), "encoding", None) or "ascii")
    except UnicodeError:
        return plain
    return text


def coloured(text: str, colour: str) -> str:
    """`text` in a colour (green, yellow, red), bold or dim, where stdout is a terminal; no colours under NO_COLOR."""
    code = _COLOURS.get(colour)
    stream = _stdout()
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    if code is None or not text or plain or stream is None or not stream.isatty():
        return text
    return f"\033[{code}m{text}\033[0m"


def printable(text: str) -> str:
    """The text on one line and without what a terminal would act on: control characters are written as escapes."""
    words = " ".join(text.split())
    if words.isprintable():
        return words
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in words)


def wrap(text: str, columns: int) -> str:
    """Wrap each line of `text` by itself; what follows stands under the line's own indentation, or under its bullet."""
    return "\n".join(_wrap_line(line, columns) for line in text.splitlines())


def labelled(label: str, text: str, columns: int) -> str:
    """`text` wrapped to the right of an indented label."""
    return _fill(text, columns, f"  {label:<10}", " " * 12)


def hanging(head: str, text: str, columns: int, further: int = 0) -> str:
    """`text` folded to the right of `head`, its further lines by so many columns more."""
    first, *rest = _fold(printable(text), max(columns - len(head) - further, 20))
    return "\n".join([f"{head}{first}".rstrip(), *(" " * (len(head) + further) + line for line in rest)])


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], columns: int) -> None:
    """Print a table that fits `columns`, down to about 75. Its last column takes what the others leave."""
    widths = _widths(headings, rows, columns)
    folded = [[_fold(cell, width) for cell, width in zip(row, widths, strict=True)] for row in (headings, *rows)]

    def line(cells: Sequence[str]) -> str:
        return (" " * GAP).join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()

    lines = []
    for number, row in enumerate(folded):
        lines += [
            line([cell[index] if index < len(cell) else "" for cell in row]) for index in range(max(map(len, row)))
        ]
        if number == 0:
            lines.append(line(["-" * width for width in widths]))
        elif number < len(folded) - 1:
            lines.append("")
    show("\n".join(lines))


def _stdout() -> TextIO | None:
    return _claimed or sys.stdout


def _lead_nowhere(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def _wrap_line(line: str, columns: int) -> str:
    body = line.lstrip(" ")
    indent = " " * (len(line) - len(body))
    return _fill(body, columns, indent, indent + "  " if body.startswith("- ") else indent)


def _fill(text: str, columns: int, initial_indent: str, subsequent_indent: str) -> str:
    return textwrap.fill(
        printable(text),
        columns,
        initial_indent=initial_indent,
        subsequent_indent=subsequent_indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _widths(headings: Sequence[str], rows: Sequence[Sequence[str]], columns: int) -> list[int]:
    """Each column at its longest cell; the last one is left 40, for which the others fold at blanks and dots, the
    widest first."""
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
