"""Releases between the environments, by overlay: each opens its doors plain, switched, and with nothing asked for.

They are installed on demand into the folder that UPSTREAM_OVERLAYS names, and skipped where it names none.
"""

from __future__ import annotations

from typing import Any

import pytest

from kits.upstream import factor, install_overlay, open_door, overlays, sites
from tools.rows import MATRIX, OPTIONS, expected

pytestmark = pytest.mark.upstream

# TRL's own trainer is opened with Liger's layers off: there is nothing to see on its model.
CASES = [(overlay, door) for overlay in overlays() for door in overlay["doors"] if door != "grpo_trainer"]
AUTOMATIC = "fused_linear_cross_entropy: not passed -> False (automatic; called by "


def _id(value: Any) -> str | None:
    return "+".join(value["requirements"]) if isinstance(value, dict) else None


@pytest.mark.parametrize("overlay", [overlay for overlay in overlays() if "expected" in overlay], ids=_id)
def test_the_outcome_of_every_site_is_what_the_matrix_says(overlay: dict[str, Any]) -> None:
    found, reasons = sites(install_overlay(overlay))
    assert found == expected(MATRIX, MATRIX["factor"][factor()], overlay), reasons


@pytest.mark.parametrize(("overlay", "door"), CASES, ids=_id)
def test_without_variables_only_the_automatic_rule_changes_the_model(overlay: dict[str, Any], door: str) -> None:
    path = install_overlay(overlay)
    plain = open_door(door, *OPTIONS.get(door, ()), patched=False, overlay=path)
    patched = open_door(door, *OPTIONS.get(door, ()), overlay=path)
    assert plain.models
    for name in plain.models:
        wanted = dict(plain.liger(name))
        # Where verl or Trinity-RFT says nothing of the loss; the doors of others have no such record.
        if any(note.startswith(AUTOMATIC) for note in patched.notes("replaced").splitlines()):
            assert door in ("verl_engine", "verl_worker", "trinity_worker")
            wanted["fused_linear_cross_entropy"] = False
        assert patched.liger(name) == wanted


@pytest.mark.parametrize(("overlay", "door"), CASES, ids=_id)
def test_a_variable_reaches_the_model(overlay: dict[str, Any], door: str) -> None:
    path = install_overlay(overlay)
    variables = ("LIGER_ROPE=0", "LIGER_RMS_NORM=0", "LIGER_SWIGLU=0")
    seen = open_door(door, *OPTIONS.get(door, ()), variables=variables, overlay=path)
    for name in seen.models:
        kernels = seen.liger(name)
        # axolotl hands over what a user wrote in a configuration, and that beats the environment.
        assert kernels["rms_norm"] == (door == "axolotl_plugin")
        assert not kernels["rope"]
        assert not kernels["mlp"] or name == "gemma2"
