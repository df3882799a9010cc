"""A late site on methods does not search the loaded modules for names that hold them."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest

from fusepatch.engine import holders, install
from fusepatch.engine.patch import Slot
from kits.declarations import adding_hundred, site


def test_a_late_method_is_wrapped_without_a_search(
    library: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(library())
    searched: list[object] = []

    def find(originals: object, outside: object) -> object:
        searched.extend(originals)  # type: ignore[call-overload]
        return {}

    monkeypatch.setattr(holders, "find", find)
    applied = install.install("p", site(Slot("Model.forward", adding_hundred)), module, late=True)
    assert applied.slots == ("Model.forward",)
    assert module.Model(1).forward(1) == 102, "the wrapped method is in force"
    assert searched == []
