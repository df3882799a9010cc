"""The real GRPOTrainer of TRL trains the same with and without `liger.grpo_loss`: a tiny Qwen3 on the CPU."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
importlib.import_module("torch._dynamo")
trl = pytest.importorskip("trl")
pytest.importorskip("peft")

import fusepatch  # noqa: E402
from kits.liger_grpo import patched, record  # noqa: E402
from kits.liger_grpo_trainer import STEPS, WITHOUT_PEFT, trainer  # noqa: E402

COMPARED = ("loss", "grad_norm", "kl", "clip_ratio")

pytestmark = pytest.mark.skipif(
    not hasattr(trl.GRPOTrainer, "compute_liger_loss"), reason="this TRL has no fused loss of Liger's"
)


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    fusepatch.deactivate()
    os.environ.pop("FUSEPATCH", None)
    # Upstream compiles its policy, which is the same arithmetic and takes half a minute here.
    with torch._dynamo.config.patch(disable=True):
        yield
    fusepatch.deactivate()


def train(folder: Path, lora: bool, **changes: Any) -> list[dict[str, float]]:
    torch.manual_seed(0)
    running = trainer(folder, lora, **changes)
    running.train()
    logged = [entry for entry in running.state.log_history if "loss" in entry]
    return [{name: entry[name] for name in COMPARED} for entry in logged]


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_training_is_the_same(tmp_path: Path, lora: bool, accumulation: int) -> None:
    if lora and WITHOUT_PEFT:
        pytest.skip("this TRL refuses PEFT with Liger's loss")
    theirs = train(tmp_path, lora, gradient_accumulation_steps=accumulation)
    with patched():
        ours = train(tmp_path, lora, gradient_accumulation_steps=accumulation)
        notes = record()
    assert notes.outcome.value == "APPLIED"
    assert notes.calls == STEPS * accumulation
    assert [note.text for note in notes.fallbacks if "upstream's own" in note.text or "failed" in note.text] == []
    assert len(ours) == len(theirs) == STEPS
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=2e-4, abs=2e-6)
    # The steps after the first of an iteration have log-probabilities of an older policy, and clip.
    assert any(entry["clip_ratio"] > 0 for entry in theirs)
    assert any(entry["kl"] > 0 for entry in theirs)
    assert all(entry["grad_norm"] > 0 for entry in theirs)
