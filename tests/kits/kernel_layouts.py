"""Every layout that a kernel's arguments may have, as one list: run by the interpreter on the CPU, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from fusepatch.loss import LogitMap, Wanted
from fusepatch.loss.chunks import padded_columns
from fusepatch.loss.logit_map import RawLogits
from kits.layouts import LAYOUTS, laid_out
from kits.loss_cases import (
    ALL,
    FROZEN,
    Batch,
    Setting,
    assert_equal,
    log_probabilities_like,
    make_batch,
    reference,
    run,
)
from kits.loss_steps import exact, make

MAP = LogitMap(1.2, 0.5, 4.0)
WIDTH, ROWS = 70, 5
OUTSIDE = 1e4


class Matrix(NamedTuple):
    """How a matrix of logits lies in memory."""

    rows: int
    stride: int
    offset: int


MATRICES = {
    "buffer": Matrix(ROWS, padded_columns(WIDTH), 0),
    "no padding": Matrix(ROWS, WIDTH, 0),
    "cut from the middle": Matrix(ROWS, padded_columns(WIDTH), 32),
    # A stride that is no multiple of the rows' length, and one that says nothing, as a transposed column has.
    "odd stride": Matrix(ROWS, WIDTH + 3, 1),
    "one row of stride 1": Matrix(1, 1, 0),
}


def matrix(kind: Matrix, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values in memory of that kind, and all of that memory, ``OUTSIDE`` elsewhere."""
    storage = torch.full((kind.offset + kind.stride * kind.rows + WIDTH,), OUTSIDE, device=values.device)
    return storage.as_strided((kind.rows, WIDTH), (kind.stride, 1), kind.offset).copy_(values), storage


class Vectors(NamedTuple):
    layout: str
    targets: torch.dtype
    matrix: str


VECTORS = [
    *(Vectors(layout, dtype, "buffer") for layout in LAYOUTS for dtype in (torch.int64, torch.int32)),
    *(Vectors("packed", torch.int64, name) for name in MATRICES if name != "buffer"),
]


def check_vectors(kernels: Any, case: Vectors, device: str) -> None:
    """Each launcher against float64, and nothing outside of the logits' rows written or read."""
    kind = MATRICES[case.matrix]
    logits, targets, bias = make(kind.rows, WIDTH, True)
    assert bias is not None
    targets = laid_out(targets.to(device, case.targets), case.layout)
    bias = laid_out(bias.to(device), case.layout)
    values, normaliser, gradient = exact(logits.to(device), targets.long(), bias, MAP)
    found = torch.empty((3, kind.rows), device=device)

    raw, _ = matrix(kind, logits.to(device))
    kernels.log_sum_exp(RawLogits(raw, targets, bias, MAP), found[0], found[1])
    torch.testing.assert_close(found[:2].double(), torch.stack((values, normaliser)), rtol=1e-5, atol=1e-5)

    kernels.exponentials(RawLogits(raw, targets, bias, MAP), raw, *found, 1.0)
    torch.testing.assert_close(found[:2].double(), torch.stack((values, normaliser)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close((raw * found[2].unsqueeze(1)).double(), gradient, rtol=1e-4, atol=1e-6)

    raw, storage = matrix(kind, logits.to(device))
    before = (storage == OUTSIDE).sum()
    scale = laid_out(torch.linspace(-1, 1, kind.rows, device=device), case.layout)
    norm = laid_out(normaliser.float(), case.layout)
    if case.layout == "expanded":
        # The normaliser belongs to its row, so rows that are all alike go with it.
        raw.copy_(raw[:1].clone().expand_as(raw))
        gradient = gradient[:1].expand_as(gradient)
    kernels.gradient_of_logits(RawLogits(raw, targets, bias, MAP), raw, norm, scale, 0)
    expected = gradient * scale.unsqueeze(1) / MAP.slope
    torch.testing.assert_close(raw.double(), expected, rtol=1e-4, atol=1e-5)
    if case.matrix != "buffer":
        assert (storage == OUTSIDE).sum() == before

    raw, _ = matrix(kind, logits.to(device))
    kernels.scale_rows(raw, scale)
    torch.testing.assert_close(raw, logits.to(device) * scale.unsqueeze(1))


REFUSED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "bias must have shape \\(70,\\), found \\(1,\\)": lambda a: a.update(bias=a["bias"][:1]),
    "bias must be on": lambda a: a.update(bias=a["bias"].to("meta")),
    "targets must have shape \\(5,\\)": lambda a: a.update(targets=a["targets"][:4]),
    "targets must be int64 or int32, found torch.float32": lambda a: a.update(targets=a["targets"].float()),
    "normaliser must have shape \\(5,\\)": lambda a: a.update(normaliser=a["normaliser"][:1]),
    "logits must have rows that are contiguous and do not overlap": lambda a: a.update(
        logits=a["logits"][:1].expand(ROWS, WIDTH)
    ),
    "logits must have rows that are": lambda a: a.update(logits=a["logits"].t().contiguous().t()),
    "gradients must have shape \\(5, 70\\)": lambda a: a.update(gradients=a["gradients"][:, :64]),
    "gradients that share memory": lambda a: a.update(gradients=a["logits"].as_strided((ROWS, WIDTH), (WIDTH, 1))),
}
"""What no launcher may read: the beginning of the message, and the change that leads to it."""


def check_refused(kernels: Any, said: str, device: str) -> None:
    logits, targets, bias = make(ROWS, WIDTH, True)
    assert bias is not None
    raw, _ = matrix(MATRICES["buffer"], logits.to(device))
    arguments: dict[str, Any] = {
        "logits": raw,
        "gradients": torch.empty_like(raw),
        "targets": targets.to(device),
        "bias": bias.to(device),
        "normaliser": torch.ones(ROWS, device=device),
    }
    REFUSED[said](arguments)
    ones = torch.ones(ROWS, device=device)
    given = RawLogits(*(arguments[name] for name in ("logits", "targets", "bias")), MAP)
    norm = arguments["normaliser"]
    launches = {
        "gradient_of_logits": (given, arguments["gradients"], norm, ones, 0),
        "exponentials": (given, arguments["gradients"], ones, norm, ones, 1.0),
    }
    if "gradients" not in said:
        launches["log_sum_exp"] = (given, ones, norm)
    for name, passed in launches.items():
        with pytest.raises(ValueError, match=said):
            getattr(kernels, name)(*passed)


class Whole(NamedTuple):
    """One call of the driver: a layout for every argument, or for one."""

    layout: str
    length: int = 9
    wanted: Wanted = ALL
    prefer: str = "speed"


WHOLE = [
    *(Whole(layout, length) for layout in LAYOUTS for length in (9, 1)),
    *(Whole(layout, 9, FROZEN) for layout in ("packed", "expanded")),
    Whole("packed", 9, ALL, "memory"),
]


def check_whole(case: Whole, device: str) -> None:
    """The driver, Triton form, with every tensor in that layout."""
    batch = make_batch(3, case.length, 8, 37)
    batch = replace(batch, mask=torch.ones_like(batch.mask), advantages=torch.tensor([1.0, -0.5, 0.7]))
    setting = Setting(beta=0.04, old=log_probabilities_like(batch, 1), reference=log_probabilities_like(batch, 2))
    plain = {name: value for name, value in vars(batch).items() if value is not None}
    # A gradient of hidden states or a weight that are one number is nothing but rounding.
    dense = ("hidden", "weight") if case.layout == "expanded" else ()
    layouts = {name: "dense" if name in dense else case.layout for name in plain}
    batch = Batch(**{name: laid_out(value.to(device), layouts[name]) for name, value in plain.items()})
    assert setting.old is not None
    assert setting.reference is not None
    setting = replace(
        setting,
        old=laid_out(setting.old.to(device), case.layout),
        reference=laid_out(setting.reference.to(device), case.layout),
    )
    found = run(batch, setting, case.wanted, prefer=case.prefer, backend="triton")
    assert found.backend.name == "triton"
    assert_equal(found, reference(batch, setting), case.wanted, tolerance=1e-4)
