"""The figures of the benchmark pages: `python -m docs.generate.plots` draws them from `data/benchmarks.json`.

The data are cells of the page's tables, by heading; a test compares them. `python -m docs.generate.plots --check` says
which of the committed figures are stale, and exits with 1 if one is; `tox -e docs` does that with the matplotlib that
drew them. Another release of it may write other bytes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

from fusepatch.bench.report import FLOOR, OTHERS, OURS, Bar, draw_bars

matplotlib.use("svg")

from matplotlib import pyplot

DOCS = Path(__file__).parents[1]
FIGURES = DOCS / "figures"
DATA: dict[str, list[list[str]]] = json.loads((DOCS / "data" / "benchmarks.json").read_text(encoding="utf-8"))

WIDTH = 5.0
"""Inches: 360 points, about the width of a phone's column, where the text keeps its size."""

TEXT = "#787878"
"""A grey of the same contrast on white and on the dark background of the site, so that one file serves both."""

STYLE: Mapping[str, Any] = {
    "svg.hashsalt": "fusepatch",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), TEXT),
}

HEADS = ("frozen", "trainable")

NAMES = {
    "fusepatch": "fusepatch",
    "fusepatch-memory": "fusepatch, memory",
    "liger": "Liger 0.8.5",
    "liger-0.8.3": "Liger 0.8.3",
    "trl": "TRL 1.16.0",
    "verl": "verl 0.9.1",
    "cut-cross-entropy": "cut-cross-entropy",
    "full-logits": "full logits",
}
"""A peer of the bench to what it is called in a figure."""

CASES = {
    "": "on-policy",
    "-old": "old log-probs",
    "-beta": "beta 0.04",
    "-sequence": "sequence level",
    "-ragged": "55 % valid tokens",
    "-half": "half zero advantages",
}
"""The end of a case's name to what it is called in a figure."""

MARKERS = {
    "fusepatch": ("o", OURS),
    "fusepatch-memory": ("D", OURS),
    "trl": ("^", "#c07a12"),
    "full-logits": ("s", OTHERS),
    "cut-cross-entropy": ("v", "#2f9a64"),
    "verl": ("P", "#a565c9"),
    "liger": ("X", FLOOR),
    "liger-0.8.3": ("*", FLOOR),
}


def rows_below(heading: str) -> list[dict[str, str]]:
    """The rows of the one table whose heading begins so."""
    ((columns, *rows),) = (table for title, table in DATA.items() if title.startswith(heading))
    return [dict(zip(columns, row, strict=True)) for row in rows]


def peers(case: str) -> dict[str, dict[str, str]]:
    """Peer to its row in one case of `bench grpo`."""
    return {row["peer"].split()[0]: row for row in rows_below(f"{case}:")}


def grpo_time() -> Any:
    """Medians of the on-policy case as bars, with the ratio to the floor."""
    figure, panels = pyplot.subplots(2, 1, figsize=(WIDTH, 6.4), layout="constrained", height_ratios=(7, 8))
    for panel, head in zip(panels, HEADS, strict=True):
        rows = peers(head)
        floor = float(rows.pop("floor")["median ms"])
        bars = [
            Bar(
                NAMES[peer],
                float(row["median ms"]),
                f"{row['median ms']} ms, {row['x floor']} x",
                peer.startswith("fusepatch"),
            )
            for peer, row in rows.items()
        ]
        draw_bars(panel, sorted(bars, key=lambda bar: bar.value), floor)
        panel.set(title=f"{head} head", xlim=(0, 900), xticks=range(0, 500, 100))
    panels[-1].set_xlabel("median ms; line and x: the matrix products alone", loc="right")
    return figure


def grpo_memory() -> Any:
    """Memory above the inputs against time, on-policy; both scales are logarithmic."""
    figure, panels = pyplot.subplots(2, 1, figsize=(WIDTH, 7.4), layout="constrained")
    beside = {
        ("frozen", "fusepatch"): (8, -10),
        ("frozen", "liger-0.8.3"): (-8, 8),
        ("trainable", "fusepatch"): (8, -10),
        ("trainable", "fusepatch-memory"): (4, 8),
        ("trainable", "verl"): (8, -2),
        ("trainable", "cut-cross-entropy"): (8, -10),
        ("trainable", "liger"): (-8, 8),
    }
    names = {**NAMES, "liger": "Liger 0.8.3 and 0.8.5", "liger-0.8.3": ""}
    for panel, head in zip(panels, HEADS, strict=True):
        rows = peers(head)
        panel.axvline(float(rows.pop("floor")["median ms"]), color=FLOOR, linewidth=1.2)
        for peer, row in rows.items():
            at = float(row["median ms"]), float(row["above inputs GiB"])
            ours = peer.startswith("fusepatch")
            offset = beside.get((head, peer), (8, -4))
            panel.plot(*at, "o", color=OURS if ours else OTHERS, markersize=8)
            panel.annotate(
                (names if head == "trainable" else NAMES)[peer],
                at,
                offset,
                textcoords="offset points",
                color=OURS if ours else TEXT,
                horizontalalignment="right" if offset[0] < 0 else "left",
            )
        panel.set(title=f"{head} head", ylabel="GiB above the inputs")
        _logarithmic(panel.xaxis, (25, 50, 100, 200, 400), (22, 640))
        _logarithmic(panel.yaxis, (0.1, 0.3, 1, 3, 10), (0.04, 20) if head == "frozen" else (0.7, 20))
    panels[-1].set_xlabel("median ms; line: the matrix products alone")
    return figure


def grpo_cases() -> Any:
    """The ratio to the floor in every case, on a logarithmic scale."""
    figure, panels = pyplot.subplots(2, 1, figsize=(WIDTH, 7.6), layout="constrained", sharex=True)
    for panel, head in zip(panels, HEADS, strict=True):
        for line, end in enumerate(CASES):
            panel.axhline(line, color=OTHERS, linewidth=0.5, alpha=0.5)
            for peer, row in peers(head + end).items():
                if peer != "floor":
                    marker, colour = MARKERS[peer]
                    size = 9 if peer == "fusepatch" else 7
                    panel.plot(float(row["x floor"]), line, marker, color=colour, markersize=size)
        panel.axvline(1, color=FLOOR, linewidth=1.2)
        panel.set(title=f"{head} head", ylim=(len(CASES) - 0.5, -0.5))
        panel.set_yticks(range(len(CASES)), CASES.values())
        _logarithmic(panel.xaxis, (1, 2, 4, 8, 16, 32), (0.9, 42))
    panels[-1].set_xlabel("x the time of the matrix products alone")
    handles = [
        pyplot.Line2D([], [], linestyle="", marker=marker, color=colour, markersize=7, label=NAMES[peer])
        for peer, (marker, colour) in MARKERS.items()
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=2, handletextpad=0.2)
    return figure


def grpo_trainer() -> Any:
    """A step of TRL's trainer, and the peak of its memory."""
    figure, panels = pyplot.subplots(2, 1, figsize=(WIDTH, 4.6), layout="constrained")
    rows = rows_below("One update of TRL's GRPOTrainer")
    for panel, column, title, limit in zip(
        panels, ("step", "peak of the updates"), ("one update", "peak memory of the updates"), (1150, 21), strict=True
    ):
        bars = []
        for row in rows:
            ours = "fusepatch" in row["loss"]
            name = "Liger 0.8.5 and\nfusepatch" if ours else row["loss"].removeprefix("no Liger: ")
            bars.append(Bar(name, float(row[column].split()[0]), row[column], ours))
        draw_bars(panel, bars, None)
        panel.set(title=title, xlim=(0, limit))
    return figure


def optimizer_forms() -> Any:
    """What of a step is not forward and backward, and its memory above parameters and optimizer state."""
    figure, panels = pyplot.subplots(4, 1, figsize=(WIDTH, 7.6), layout="constrained")
    rows = rows_below("The forms of AdamW")
    parts = (
        ("optimizer ms", "ms of the optimizer", "{} of {median ms} ms", 27),
        ("above state GiB", "GiB above the state", "{} GiB", 8),
    )
    for number, (panel, dtype) in enumerate(zip(panels, ("float32", "float32", "bfloat16", "bfloat16"), strict=True)):
        column, title, label, limit = parts[number % 2]
        bars = [
            Bar(
                row["variant"],
                float(row[column]),
                label.format(row[column], **row),
                row["variant"] in ("fused", "in-backward"),
            )
            for row in rows
            if row["dtype"] == dtype
        ]
        draw_bars(panel, bars, None)
        panel.set(title=f"{dtype}: {title}", xlim=(0, limit))
    return figure


FIGURE: Mapping[str, Callable[[], Any]] = {
    "grpo-time.svg": grpo_time,
    "grpo-memory.svg": grpo_memory,
    "grpo-cases.svg": grpo_cases,
    "grpo-trainer.svg": grpo_trainer,
    "optimizer-forms.svg": optimizer_forms,
}
"""File name to the function that draws the figure."""


def draw(folder: Path) -> None:
    """Write every figure into the folder."""
    folder.mkdir(exist_ok=True)
    for name, make in FIGURE.items():
        with matplotlib.rc_context(STYLE):
            figure = make()
            figure.savefig(folder / name, transparent=True, metadata={"Date": None, "Creator": None})
            pyplot.close(figure)


def stale() -> list[str]:
    """The names of committed figures that are not what would be drawn now, and of files that are no figure."""
    with tempfile.TemporaryDirectory() as folder:
        draw(Path(folder))
        wanted = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    found = {path.name: path.read_bytes() for path in FIGURES.iterdir()}
    return sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))


def _logarithmic(axis: Any, ticks: tuple[float, ...], limits: tuple[float, float]) -> None:
    set_scale, set_limits = (
        (axis.axes.set_xscale, axis.axes.set_xlim)
        if axis.axis_name == "x"
        else (axis.axes.set_yscale, axis.axes.set_ylim)
    )
    set_scale("log")
    axis.set_ticks([tick for tick in ticks if limits[0] <= tick <= limits[1]])
    axis.set_ticks([], minor=True)
    axis.set_major_formatter("{x:g}")
    set_limits(*limits)


def main() -> int:
    """Draw the figures, or with `--check` compare them."""
    if sys.argv[1:] != ["--check"]:
        draw(FIGURES)
        return 0
    for name in (names := stale()):
        print(
            f"docs/figures/{name} is stale: run `python -m docs.generate.plots` (`tox -e docs` has its matplotlib)",
            file=sys.stderr,
        )
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
