from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

import pytest

from fusepatch.engine import contract
from fusepatch.engine.contract import Seen
from fusepatch.engine.patch import Contract, Slot
from kits.declarations import passing, site

CASES = [
    ("def scale(value, factor=2): ...", Contract(("value", "factor")), None),
    ("def scale(value, *, factor=2): ...", Contract(("value", "factor")), None),
    ("def scale(value, factor, /): ...", Contract(("value",)), "no longer takes value"),
    ("def scale(value): ...", Contract(("value", "factor")), "no longer takes factor"),
    ("def scale(value, **kwargs): ...", Contract(("value",), keywords=True), None),
    ("def scale(value): ...", Contract(("value",), keywords=True), "no longer takes further keywords"),
    ("scale = 3", Contract(), "is a int, not a function"),
]


@pytest.mark.parametrize(("source", "wanted", "problem"), CASES)
def test_the_loaded_object_and_its_source_say_the_same(
    library: Callable[..., str], source: str, wanted: Contract, problem: str | None
) -> None:
    library(source)
    slot = Slot("scale", passing, wanted)
    from_source = contract.in_source(site(slot))
    assert "toylib" not in sys.modules, "the source is read without importing"
    module = importlib.import_module("toylib.core")
    assert contract.broken_by(module.scale, wanted) == problem
    shown = Seen(slot, {"scale": problem}) if source.startswith("def") else Seen(slot, {}, unclear=True)
    assert from_source == (shown,)


def seen(path: str) -> tuple[list[str], bool]:
    (found,) = contract.in_source(site(Slot(path, passing))) or ()
    return list(found.functions), found.unclear


def test_source_of_methods_patterns_and_missing_modules(library: Callable[..., str]) -> None:
    library()
    assert seen("Model.forward") == (["Model.forward"], False)
    assert seen("Model.__init__") == ([], True), "inherited"
    assert seen("Base.__repr__") == ([], True), "every class has it"
    assert seen("Base.forward") == seen("Gone.forward") == seen("gone") == ([], False)
    assert seen("scale*") == (["scale", "scale_more"], False)
    assert contract.in_source(site(module="toylib.gone")) is None
    assert contract.in_source(site(module="no_such_library.core")) is None


@pytest.mark.parametrize("content", [b"def (", b"\0", b"# coding: none\n", b"\x7fELF"])
def test_a_source_that_cannot_be_read_shows_nothing(library: Callable[..., str], content: bytes) -> None:
    library()
    path = contract.source_path("toylib.core")
    assert path is not None
    path.write_bytes(content)
    assert seen("scale") == ([], True)


def test_what_is_wanted_is_said_in_words() -> None:
    assert contract.describe(Slot("f", passing)) == "f"
    assert contract.describe(Slot("f", passing, Contract(("a",)))) == "f taking the parameter a"
    assert (
        contract.describe(Slot("f", passing, Contract(("a", "b"), keywords=True)))
        == "f taking the parameters a, b and further keywords"
    )


def test_builtins_without_a_signature_break_the_contract() -> None:
    assert contract.broken_by(min, Contract()) == "has no readable signature"
