"""Dynamo traces our wrappers: what runs compiled is what runs eagerly. (It goes round wrapt's silently.)"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest

from fusepatch.engine import install
from fusepatch.engine.patch import Slot
from kits.declarations import adding_hundred, site

torch = pytest.importorskip("torch", reason="Dynamo is torch's")

CALLS = {
    "scale": lambda module, x: module.scale(x),
    "Model.forward": lambda module, x: module.Model(1).forward(x),
    "Model.double": lambda module, x: module.Model.double(x),
}


@pytest.mark.parametrize("path", sorted(CALLS))
def test_compiled_equals_eager(library: Callable[..., str], path: str) -> None:
    module = importlib.import_module(library())
    unpatched = CALLS[path](module, torch.ones(3))
    install.install("p", site(Slot(path, adding_hundred)), module, late=False)

    def model(x):
        return CALLS[path](module, x) * 1.0

    torch._dynamo.reset()
    eager = model(torch.ones(3))
    compiled = torch.compile(model, backend="eager", fullgraph=True)(torch.ones(3))
    assert torch.equal(eager, unpatched + 100)
    assert torch.equal(compiled, eager)
    install.uninstall("p", site(Slot(path, adding_hundred)))
    torch._dynamo.reset()  # code compiled before keeps the method it was compiled with, as with any replaced method
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(torch.ones(3)), unpatched)
