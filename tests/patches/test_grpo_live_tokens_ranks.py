"""`grpo.live_tokens` on two gloo ranks: whole updates of TRL's GRPOTrainer under DDP."""

from __future__ import annotations

import os
from typing import Any

import pytest

from doors import grpo_update
from kits.forked import forked
from kits.ranks import on_ranks

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

CASE = {"config": {"loss_type": "grpo", "num_iterations": 2, "max_steps": 2, "shuffle_dataset": False}, "dead": "fours"}
DROP = {"FUSEPATCH_GRPO_ZERO_ADVANTAGE": "drop"}


def on_rank(rank: int, env: dict[str, str] | None, case: dict[str, Any]) -> dict[str, Any]:
    import fusepatch

    if env is not None:
        os.environ.update(env)
        fusepatch.activate()
    found = grpo_update.run(**case)
    return {"weights": found["weights"], "forwards": found["forwards"], "logs": found["logs"]}


def test_a_rank_of_which_no_sequence_has_a_gradient_trains_with_the_other() -> None:
    """The first four prompts of each eight are of rank 0, the others, with equal rewards, of rank 1."""
    one = {**CASE, "config": {**CASE["config"], "per_device_train_batch_size": 8}}
    alone = forked(on_rank, 0, None, one, env={"FUSEPATCH": "0"})
    plain = on_ranks(2, on_rank, None, CASE)
    found = on_ranks(2, on_rank, DROP, CASE)
    for rank in (0, 1):
        assert found[rank]["weights"] == pytest.approx(plain[rank]["weights"], rel=1e-5, abs=1e-6)
        assert found[rank]["weights"] == pytest.approx(alone["weights"], rel=1e-5, abs=1e-6)
    for wanted, patched in zip(plain[0]["logs"], found[0]["logs"], strict=True):
        assert patched["loss"] == pytest.approx(wanted["loss"], rel=1e-5, abs=1e-6)
        assert patched["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    assert len(found[0]["forwards"]) == len(found[1]["forwards"])
    rows = [[size for size, *_ in found[rank]["forwards"]] for rank in (0, 1)]
    assert rows[0].count(1) == 0
    assert rows[1].count(1) == 8, "one row in each of the micro-batches of two steps"
