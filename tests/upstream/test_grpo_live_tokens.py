"""`grpo.live_tokens` on the TRL of this environment and on releases between: real updates, plain and patched, end
alike."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from kits.helpers import run
from kits.upstream import CHECKOUT, factor, install_overlay, version
from tools.rows import enter

pytestmark = pytest.mark.upstream

BETWEEN = {"old": ("0.19.1",), "latest": ("1.4.0", "1.8.0", "1.14.2", "1.15.0")}
"""Releases of TRL that are put in front of an environment's own."""

LOSSES = {
    "bnpo": "0.17",
    "dr_grpo": "0.17",
    "grpo": "0.17",
    "dapo": "0.22",
    "cispo": "0.27",
    "sapo": "0.27",
    "luspo": "0.29",
    "vespo": "1.0",
}
"""The loss types, with the release that each came with."""


def cases(release: Version) -> list[dict[str, Any]]:
    """Every loss type that the release has, the options spread over them; Liger's loss and RLOO where it has those."""
    has_slices, has_levels = release >= Version("0.18"), release >= Version("0.20")
    spread: Sequence[dict[str, Any]] = (
        {"num_iterations": 2},
        {"steps_per_generation": 2, "mask_truncated_completions": True} if has_slices else {},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 4} if has_slices else {"num_iterations": 2},
    )
    known = [name for name, since in LOSSES.items() if release >= Version(since)]
    found: list[dict[str, Any]] = []
    for place, name in enumerate(known):
        config = {"loss_type": name, "max_steps": 2, **spread[place % len(spread)]}
        if has_levels and place % 2:
            config["importance_sampling_level"] = "sequence"
        found.append({"config": config, "lora": release >= Version("0.18") and place % 4 == 1})
    found.append({"config": {"loss_type": "grpo", "beta": 0.04, "max_steps": 2}, "tools": release >= Version("1.0")})
    found.append({"config": {"loss_type": "bnpo", "max_steps": 2}, "liger": True})
    if release >= Version("0.22"):
        found.append({"kind": "RLOO", "config": {"num_iterations": 2, "max_steps": 2}})
    return found


def updates(release: Version, overlay: str | None, patched: bool, **variables: str) -> list[dict[str, Any]]:
    # Only Triton's interpreter runs the head of TRL 1.15 on a CPU.
    interpreted = {"TRITON_INTERPRET": "1"} if release.release[:2] == (1, 15) else {}
    paths = [*([overlay] if overlay else []), CHECKOUT]
    seen = enter(
        "grpo_update",
        "--cases",
        json.dumps(cases(release)),
        python=sys.executable,
        paths=paths,
        patched=patched,
        variables={**interpreted, **variables},
    )
    assert seen["versions"]["trl"] == str(release)
    if patched:
        record = seen["fusepatch"]["grpo.live_tokens"]
        assert not [note for note in record["fallbacks"] if "the patch itself failed" in note]
        assert not [note for note in record["fallbacks"] if "rows are not moved" in note and "luspo" not in note]
    found: list[dict[str, Any]] = seen["cases"]
    return found


def test_every_model_type_that_this_release_of_transformers_has_is_moved_or_left() -> None:
    tests = Path(__file__).parents[1]
    models = tests / "patches" / "test_grpo_live_tokens_models.py"
    done = run([sys.executable, "-m", "pytest", models, "-q"], cwd=tests.parent)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


def own_release() -> list[str]:
    found = version("trl")
    return [] if found is None else [found]


@pytest.mark.parametrize("release", [*own_release(), *BETWEEN.get(factor() or "", ())])
def test_updates_end_with_upstreams_weights_and_fewer_tokens(release: str) -> None:
    overlay = None if release == version("trl") else install_overlay({"requirements": [f"trl=={release}"]})
    parsed = Version(release)
    plain = updates(parsed, overlay, patched=False)
    kept = updates(parsed, overlay, patched=True)
    dropped = updates(parsed, overlay, True, FUSEPATCH_GRPO_ZERO_ADVANTAGE="drop")
    for case, wanted, moved, fewer in zip(cases(parsed), plain, kept, dropped, strict=True):
        for found in (moved, fewer):
            assert found["weights"] == pytest.approx(wanted["weights"], rel=1e-5, abs=1e-6), case
            assert found["random"] == wanted["random"], case
            for then, now in zip(wanted["logs"], found["logs"], strict=True):
                assert now["loss"] == pytest.approx(then["loss"], rel=1e-5, abs=1e-6), case
                assert now["grad_norm"] == pytest.approx(then["grad_norm"], rel=1e-5, abs=1e-6), case
        tokens = [sum(rows * width for rows, width, _ in run["forwards"]) for run in (wanted, moved, fewer)]
        luspo = case["config"].get("loss_type") == "luspo" and parsed < Version("1.10")
        assert tokens[1] < tokens[0] or luspo, case
        assert tokens[2] < tokens[1] or case["config"].get("beta"), case
