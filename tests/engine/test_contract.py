from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

import pytest

from fusepatch.engine import contract
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
    from_source = contract.in_source(site(slot)).problem
    assert "toylib" not in sys.modules, "the source is read without importing"
    module = importlib.import_module("toylib.core")
    assert contract.broken_by(module.scale, wanted) == problem
    if source.startswith("def"):
        assert from_source == (None if problem is None else f"scale {problem}")
    else:
        assert from_source == "toylib.core has no scale", "only functions are read from the source"


def test_source_of_methods_patterns_and_missing_modules(library: Callable[..., str]) -> None:
    library()
    assert contract.in_source(site(Slot("Model.forward", passing, Contract(("value",))))).problem is None
    assert contract.in_source(site(Slot("Model.__init__", passing, Contract(("size",))))).problem is None, "inherited"
    assert contract.in_source(site(Slot("Gone.forward", passing))).problem == "toylib.core has no Gone.forward"
    assert contract.in_source(site(Slot("scale*", passing, Contract(("factor",))))).problem is None
    assert contract.in_source(site(module="toylib.gone")).problem == "there is no module toylib.gone"
    assert contract.in_source(site(module="no_such_library.core")).problem == "there is no module no_such_library.core"


def test_what_only_an_import_can_show_is_named(library: Callable[..., str]) -> None:
    library()
    known, inherited = Slot("Model.forward", passing), Slot("Model.__init__", passing)
    assert contract.in_source(site(known)).inherited == ()
    assert contract.in_source(site(known, inherited)).inherited == ("Model.__init__",)
    assert contract.in_source(site(Slot("Gone.forward", passing))).inherited == ()
    assert contract.in_source(site(module="toylib.gone")).inherited == ()


def test_what_is_wanted_is_said_in_words() -> None:
    assert contract.describe(Slot("f", passing)) == "f"
    assert contract.describe(Slot("f", passing, Contract(("a",)))) == "f taking the parameter a"
    assert (
        contract.describe(Slot("f", passing, Contract(("a", "b"), keywords=True)))
        == "f taking the parameters a, b and further keywords"
    )


def test_builtins_without_a_signature_break_the_contract() -> None:
    assert contract.broken_by(min, Contract()) == "has no readable signature"
