"""Sites and handlers on the small library of the engine's tests."""

from __future__ import annotations

from fusepatch.engine.patch import Contract, Proceed, Site, Slot, Upstream


def passing(proceed: Proceed, *args: object, **kwargs: object) -> object:
    return proceed(*args, **kwargs)


def adding_hundred(proceed: Proceed, *args: object, **kwargs: object) -> object:
    return proceed(*args, **kwargs) + 100


def site(*slots: Slot, **changes: object) -> Site:
    """A site on the library's module, with one slot on `scale` where none is named."""
    values: dict[str, object] = {
        "upstream": Upstream("toylib", ("toylib", "toylib-nightly"), tested="<=1.9"),
        "module": "toylib.core",
        "slots": slots or (Slot("scale", adding_hundred, Contract(parameters=("value", "factor"))),),
        "supported": ">=1.0.dev0,<3",
        **changes,
    }
    return Site(**values)
