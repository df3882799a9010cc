"""`optimizer.class` through every framework's own way to its optimizer, in fresh processes."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from packaging.version import Version

from kits.helpers import run
from kits.upstream import CHECKOUT, NEEDS, Seen, factor, install_overlay, needs, open_door, overlays, version
from tools.rows import DOORS

pytestmark = pytest.mark.upstream

SEES_OPTIMIZERS = ("trainer", "verl_engine", "verl_worker", "trinity_worker", "trinity_engine")
CLASS = "FUSEPATCH_OPTIMIZER_CLASS=torch.optim.SGD"
KWARGS = 'FUSEPATCH_OPTIMIZER_KWARGS={"momentum": 0.9, "nesterov": true}'
CASES = [
    (overlay, door)
    for overlay in overlays()
    for door in overlay["doors"]
    if door in SEES_OPTIMIZERS and not overlay["requirements"][0].startswith("liger")
]
LOW_BIT = [overlay for overlay in overlays() if overlay["requirements"][0].startswith("torchao")]


def _id(value: Any) -> str | None:
    return "+".join(value["requirements"]) if isinstance(value, dict) else None


def optimizers(seen: Seen) -> list[dict[str, Any]]:
    return [model["optimizer"] for model in seen.models.values()]


def check(door: str, overlay: str | None = None) -> None:
    models = ("--models", "llama")
    plain = open_door(door, *models, patched=False, overlay=overlay)
    seen = open_door(door, *models, variables=(CLASS, KWARGS), overlay=overlay)
    assert optimizers(plain)
    for before, after in zip(optimizers(plain), optimizers(seen), strict=True):
        assert before["class"] == "torch.optim.adamw.AdamW"
        assert after["class"] == "torch.optim.sgd.SGD"
        assert len(before["groups"]) == len(after["groups"])
        for old, new in zip(before["groups"], after["groups"], strict=True):
            for name in ("lr", "weight_decay", "parameters"):
                assert old[name] == new[name], name
    assert seen.records is not None
    notes = "\n".join(seen.records["optimizer.class"]["replaced"])
    assert "class torch.optim.AdamW -> torch.optim.SGD" in notes
    assert "betas=" in notes
    assert seen.records["optimizer.class"]["fallbacks"] == []


@pytest.mark.parametrize("door", SEES_OPTIMIZERS)
def test_the_class_reaches_every_framework(door: str) -> None:
    needs(door)
    check(door)


@pytest.mark.parametrize(("overlay", "door"), CASES, ids=_id)
def test_the_class_reaches_the_releases_between(overlay: dict[str, Any], door: str) -> None:
    check(door, install_overlay(overlay))


@pytest.mark.parametrize("door", SEES_OPTIMIZERS)
def test_parameters_that_the_class_cannot_train_end_the_run(door: str) -> None:
    needs(door)
    script = DOORS / f"{door}.py"
    env = {"PYTHONPATH": str(CHECKOUT), "FUSEPATCH_OPTIMIZER_CLASS": "torch.optim.Muon"}
    done = run([sys.executable, script, "--models", "llama", "--import-fusepatch"], env=env)
    assert done.returncode != 0
    assert "OptimizerClassError: AdamW in " in done.stderr
    assert "it takes matrices only" in done.stderr


def test_what_the_doors_need_is_known() -> None:
    assert set(SEES_OPTIMIZERS) <= set(NEEDS)


@pytest.mark.parametrize("overlay", LOW_BIT, ids=_id)
def test_eight_bit_states(overlay: dict[str, Any]) -> None:
    """torchao and bitsandbytes are installed for these tests alone: other libraries change what they do beside them."""
    tests = DOORS.parent / "patches" / "test_optimizer_class_low_bit.py"
    path = os.pathsep.join([install_overlay(overlay), str(CHECKOUT)])
    done = run([sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", tests], env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    has_build_optimizer = Version(version("verl") or "0") >= Version("0.6.1")
    assert ("skipped" in done.stdout) == (not has_build_optimizer), done.stdout
    assert factor() is not None
