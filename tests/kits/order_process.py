"""Runs orders of steps, each in a forked child, and prints what became of the sites; see test_orders.py.

Its argument is a JSON list: the orders, the sites' modules, the patch id, the modules to import before forking.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import sys
from collections.abc import Sequence


def step(name: str, modules: Sequence[str]) -> None:
    if name == "import upstream":
        for module in modules:
            importlib.import_module(module)
    elif name == "import fusepatch":
        importlib.import_module("fusepatch")
    else:
        getattr(sys.modules["fusepatch"], name)()


def look(module: str, patch: str) -> list[object]:
    """Outcome, flags, and for each slot of the site whether the engine's wrapper is in it."""
    import fusepatch
    from fusepatch.engine import versions
    from fusepatch.patches import PATCHES

    (site,) = [site for declared in PATCHES if declared.id == patch for site in declared.sites if site.module == module]
    records = [record for shown in fusepatch.status() if shown.id == patch for record in shown.sites]
    (record,) = [record for record in records if record.module == module]
    found = versions.find(site.upstream)
    slots = versions.in_release(site, found.version if found else None).slots
    paths = record.slots or [slot.path for slot in slots if "*" not in slot.path]
    return [record.outcome.value, list(record.flags), {path: is_ours(module, path) for path in paths}]


def is_ours(module: str, path: str) -> bool:
    *classes, name = path.split(".")
    owner = sys.modules[module]
    for part in classes:
        owner = vars(owner)[part]
    raw = inspect.getattr_static(owner, name)
    code = getattr(getattr(raw, "__func__", raw), "__code__", None)
    return code is not None and code.co_filename.endswith(os.path.join("engine", "install.py"))


def run(order: Sequence[str], modules: Sequence[str], patch: str) -> dict[str, list[object]]:
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        try:
            for name in order:
                step(name, modules)
            result = {module: look(module, patch) for module in modules}
        except BaseException as error:
            result = {module: [repr(error), [], {}] for module in modules}
        os.write(write_end, json.dumps(result).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        told = pipe.read()
    os.wait()
    return dict(json.loads(told))


def main() -> None:
    orders, modules, patch, needs = json.loads(sys.argv[1])
    for need in needs:
        with contextlib.suppress(ImportError):
            importlib.import_module(need)
    assert sys.modules.keys().isdisjoint(modules), "the sites' modules must be imported by the order itself"
    assert "fusepatch" not in sys.modules
    print(json.dumps([[order, run(order, modules, patch)] for order in orders]))


if __name__ == "__main__":
    main()
