"""Every order of importing fusepatch, importing the upstream, activating and deactivating, for every site.

Each order runs in a process of its own, forked from one that has imported what the upstream's module needs, but neither
fusepatch nor the module itself.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import pytest

from fusepatch.engine import contract
from fusepatch.patches import PATCHES
from kits.helpers import run

STEPS = ("import fusepatch", "import upstream", "activate", "deactivate")
ORDERS = [
    order
    for order in itertools.permutations(STEPS)
    if order.index(STEPS[0]) < min(order.index(STEPS[2]), order.index(STEPS[3]))
]
NEEDS = {
    "liger_kernel": ("transformers", "transformers.models.llama.modeling_llama", "peft"),
    "trl": ("transformers.trainer", "peft", "accelerate", "datasets"),
}
"""Imported once, before forking: what is slow to import and is no site's module."""
NEEDED_ON = {"sdpa.masked_width": ("kits.cuda_build",)}
"""Without these a site is ABSENT whatever the order, since nothing here needs it."""

GROUPS = sorted({(patch.id, site.upstream.import_name) for patch in PATCHES for site in patch.sites})
"""Sites of one patch in one upstream share the processes: importing an upstream is what takes the time."""


def expected(order: list[str]) -> tuple[str, bool]:
    """The outcome of a site after these steps, and whether it was wrapped late."""
    loaded = active = late = False
    outcome = "DISABLED"
    for step in order:
        if step == "import upstream":
            loaded = True
            if active:
                outcome, late = "APPLIED", False
        elif step == "deactivate":
            active = False
            outcome = "REMOVED" if outcome == "APPLIED" else "DISABLED"
        elif not active:
            active = True
            if loaded:
                outcome, late = "APPLIED", True
    return outcome, late


@pytest.mark.full
@pytest.mark.parametrize(("patch", "upstream"), GROUPS)
def test_every_order(patch: str, upstream: str) -> None:
    assert len(ORDERS) == 8
    in_orders(ORDERS, patch, upstream)


@pytest.mark.parametrize(("number", "patch", "upstream"), [(number, *group) for number, group in enumerate(GROUPS)])
def test_two_orders_of_each_site_and_each_order_of_some(number: int, patch: str, upstream: str) -> None:
    in_orders([ORDERS[number % 8], ORDERS[(number + 4) % 8]], patch, upstream)


def in_orders(orders: list[list[str]], patch: str, upstream: str) -> None:
    """Every site of the patch in this upstream has the outcome that each order calls for."""
    if importlib.util.find_spec(upstream) is None:
        pytest.skip(f"{upstream} is not installed in this environment")
    (declared,) = [declared for declared in PATCHES if declared.id == patch]
    modules = [site.module for site in declared.sites if site.upstream.import_name == upstream and exists(site.module)]
    needs = (*NEEDS.get(upstream, ()), *NEEDED_ON.get(patch, ()))
    argument = json.dumps([orders, modules, patch, needs])
    tests = Path(__file__).parent
    script = tests / "kits" / "order_process.py"
    done = run([sys.executable, script, argument], env={"PYTHONPATH": str(tests)}, timeout=900)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == len(orders)
    for order, sites in results:
        wanted, late = expected(order)
        assert sites.keys() == set(modules)
        for module, (outcome, flags, ours) in sites.items():
            assert outcome == wanted, (order, module, ours)
            assert ours
            assert set(ours.values()) == {wanted == "APPLIED"}, (order, module, ours)
            if wanted == "APPLIED":
                assert ("late" in flags) == late, (order, module)


def exists(module: str) -> bool:
    """Whether the installed release has the module; a release without it is another test's matter."""
    return contract.source_path(module) is not None
