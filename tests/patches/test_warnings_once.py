"""A warning that a training step gives again with other names or numbers is given once."""

from __future__ import annotations

import pytest

from fusepatch.engine import ledger
from fusepatch.patches.liger_grpo_loss import fused_linear_ppo, model_logits
from fusepatch.patches.optimizer_in_backward import verl_sft


@pytest.fixture(autouse=True)
def fresh_ledger() -> None:
    ledger.reset(strict=False, first_use=lambda: "")


def test_gradients_that_are_not_finite(caplog: pytest.LogCaptureFixture) -> None:
    for step in range(300):
        verl_sft._tell_skipped([f"layer.{layer}.weight" for layer in range(step % 7, 9)])
    assert len(caplog.records) == 1


def test_a_scale_that_upstreams_forward_leaves_out(caplog: pytest.LogCaptureFixture) -> None:
    model = model_logits.ModelLogits(model_logits.Map(scale=2.0))
    for step in range(20):
        obstacle = fused_linear_ppo._Obstacle(f"a shape of batch {step}")
        assert fused_linear_ppo._to_upstream(lambda: "upstream", (), {}, model, obstacle) == "upstream"
    assert len(caplog.records) == 1
