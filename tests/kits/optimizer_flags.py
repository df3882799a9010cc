"""Activate fusepatch in this process under given variables, and look at what it made of an optimizer."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fusepatch
from fusepatch.engine.patch import PatchRecord

ID = "optimizer.flags"


@contextmanager
def active(**variables: object) -> Iterator[None]:
    """fusepatch active, with `FUSEPATCH_<name>` set to each value, for the time of the block."""
    named = {f"FUSEPATCH_{name}": str(value) for name, value in variables.items()}
    with inactive():
        os.environ.update(named)
        try:
            fusepatch.activate()
            yield
        finally:
            fusepatch.deactivate()
            for name in named:
                os.environ.pop(name, None)


@contextmanager
def inactive() -> Iterator[None]:
    """fusepatch switched off for the time of the block."""
    fusepatch.deactivate()
    os.environ.pop("FUSEPATCH", None)
    yield


def record() -> PatchRecord:
    return next(record for record in fusepatch.status() if record.id == ID)


def replaced() -> list[str]:
    return [note.text for note in record().replaced]


def fallbacks() -> list[str]:
    return [note.text for note in record().fallbacks]


def flags(optimizer: Any, *names: str) -> list[tuple[Any, ...]]:
    """The values of `names` in each param group; `fused` and `foreach` where none are given."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return [tuple(group.get(name) for name in names or ("fused", "foreach")) for group in inner.param_groups]


def module(name: str) -> types.ModuleType:
    """A module of that name whose `construct(optimizer_class, ...)` is a call from it: its place on the stack is all
    that tells who constructs. The frameworks themselves are in the tests of their own."""
    made = types.ModuleType(name)
    exec("def construct(optimizer_class, *args, **kwargs):\n    return optimizer_class(*args, **kwargs)\n", vars(made))
    return made
