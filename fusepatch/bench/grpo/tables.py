"""What `bench grpo` measured, as a table for the terminal, Markdown, JSON and a plot."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fusepatch import terminal
from fusepatch.bench.report import DOES_NOT_APPLY, Bar, Row, draw_bars, finite, gib, markdown_table, ratio, ratio_text


@dataclass(frozen=True)
class Section:
    """One case at one vocabulary."""

    case: str
    description: str
    vocabulary: int
    rows: list[Row]

    @property
    def title(self) -> str:
        return f"{self.case}: {self.description}; V = {self.vocabulary:,}"


def failed_checks(sections: Sequence[Section]) -> list[str]:
    """The peers whose check failed, each with its case."""
    return [
        f"{row.peer} in {section.case}"
        for section in sections
        for row in section.rows
        if row.check is not None and not row.passed
    ]


def baselines(section: Section) -> list[Row]:
    """The unpatched Ligers, which the others are compared with."""
    return [row for row in section.rows if row.implementation == "liger"]


def _floor(section: Section) -> Row | None:
    return next((row for row in section.rows if row.implementation == "floor"), None)


def headings(section: Section) -> list[str]:
    return [
        "peer",
        "min ms",
        "median ms",
        "x floor",
        *(f"x faster than {row.peer}" for row in baselines(section)),
        "peak GiB",
        "above inputs GiB",
        "check: relative errors of loss, grad-hidden, grad-weight",
    ]


def cells(section: Section) -> list[list[str]]:
    """One list of texts for each row, in the order of `headings`; a peer to which the case does not apply has none."""
    floor = _floor(section)
    result = []
    for row in section.rows:
        if row.problem == DOES_NOT_APPLY:
            continue
        name = row.peer if row.version is None else f"{row.peer} ({row.version})"
        if row.problem is not None:
            blank = [""] * (len(headings(section)) - 2)
            result.append([name, *blank, f"{row.problem}: {row.reason}"])
            continue
        result.append(
            [
                name,
                f"{min(row.times):.4g}",
                f"{row.median:.4g}",
                ratio_text(ratio(row, floor)),
                *(
                    "" if base is row else ratio_text(None if (found := ratio(row, base)) is None else 1 / found)
                    for base in baselines(section)
                ),
                gib(row.memory.get("peak_bytes")),
                gib(row.memory.get("above_inputs_bytes")),
                _check_text(row),
            ]
        )
    return result


def _check_text(row: Row) -> str:
    if row.check is None:
        return "nothing to check: products alone"
    names = ("loss", "grad_hidden", "grad_weight")
    found = ", ".join(f"{row.check[name]:.1e}" for name in names if row.check[name] is not None)
    return f"{'passed' if row.passed else 'FAILED CHECK'}: {found} (at most {row.check['tolerance']:g})"


def print_section(section: Section) -> None:
    print(f"\n{section.title}\n")
    terminal.print_table(headings(section), cells(section), max(terminal.width(), 150))


def markdown(document: dict[str, Any], sections: Sequence[Section]) -> str:
    """The tables in Markdown, with the command and the machine."""
    lines = [machine_text(document), "", "```", document["command"], "```"]
    for section in sections:
        lines += ["", f"### {section.title}", "", *markdown_table(headings(section), cells(section))]
    return "\n".join(lines) + "\n"


def machine_text(document: dict[str, Any]) -> str:
    machine, shape = document["machine"], document["shape"]
    return (
        f"{machine['device']}, torch {machine['torch']}, Triton {machine['triton']}, Python {machine['python']}; "
        f"B={shape['batch']}, T={shape['length']}, H={shape['hidden']}, {shape['dtype']}; forward and backward, "
        f"{document['repeats']} interleaved repeats"
    )


def as_json(document: dict[str, Any], sections: Sequence[Section]) -> str:
    """Everything measured, with the ratios."""
    data = {**document, "cases": [_section_data(section) for section in sections]}
    return json.dumps(data, indent=1, allow_nan=False)


def _section_data(section: Section) -> dict[str, Any]:
    floor = _floor(section)
    peers = []
    for row in section.rows:
        peers.append(
            {
                "peer": row.peer,
                "implementation": row.implementation,
                "version": row.version,
                "problem": row.problem,
                "reason": row.reason,
                "milliseconds": row.repeats,
                "minimum": min(row.times, default=None),
                "median": row.median if row.times else None,
                "check": None if row.check is None else {name: finite(value) for name, value in row.check.items()},
                **row.memory,
                "times_floor": ratio(row, floor),
                "times_baseline": {base.peer: ratio(row, base) for base in baselines(section)},
            }
        )
    return {
        "case": section.case,
        "description": section.description,
        "vocabulary": section.vocabulary,
        "peers": peers,
    }


def plot(path: str, document: dict[str, Any], sections: Sequence[Section]) -> None:
    """Write medians of all comparable peers as bars, one panel for each case, the floor as a line. Needs matplotlib."""
    importlib.import_module("matplotlib").use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")

    columns = min(len(sections), 3)
    lines = -(-len(sections) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(6 * columns, 3.2 * lines), squeeze=False)
    for index, panel in enumerate(axes.flat):
        if index >= len(sections):
            panel.axis("off")
            continue
        section = sections[index]
        rows = [row for row in section.rows if row.comparable and row.implementation != "floor"]
        floor = _floor(section)
        at = floor.median if floor is not None and floor.comparable else None
        draw_bars(panel, [Bar(row.peer, row.median, f"{row.median:.3g}", "fusepatch" in row.peer) for row in rows], at)
        if at is not None:
            panel.legend(fontsize=8)
        panel.set_title(f"{section.case}, V = {section.vocabulary:,}", fontsize=10)
        panel.set_xlabel("median, ms (less is better)")
    figure.suptitle(machine_text(document), fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
