"""`liger.sft_loss` in the real SFTTrainer of TRL: with Liger's fused linear cross-entropy off it trains as without
Liger."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

import fusepatch
from fusepatch import settings
from fusepatch.errors import StrictError
from kits.forked import forked

pytest.importorskip("liger_kernel.transformers.monkey_patch", reason="the kernels that are switched off are Liger's")
trl = pytest.importorskip("trl", reason="its SFTTrainer is what trains")
tiny = pytest.importorskip("demo.tiny")
sft_trainer = pytest.importorskip("trl.trainer.sft_trainer")

ID = "liger.sft_loss"
ASKS = "use_token_scaling" in Path(sft_trainer.__file__).read_text(encoding="utf-8")
pytestmark = pytest.mark.skipif(not ASKS, reason=f"TRL {trl.__version__} asks nothing of Liger by argument")

NO_TRITON = dict.fromkeys(("rope", "rms_norm", "swiglu"), False)
"""The kernels that a CPU cannot run, as a user's `liger_kernel_config` switches them off."""
OFF = {"FUSEPATCH_LIGER_FUSED_LINEAR_CROSS_ENTROPY": "0"}
UNSAID = {"disable_tqdm": True, "report_to": [], "save_strategy": "no"}


def make(
    loss: str,
    liger: bool,
    flags: dict[str, bool] | None = None,
    lora: bool = False,
    compute_loss_func: Any = None,
    **changes: Any,
) -> Any:
    from datasets import Dataset

    values: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "bf16": False,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        "max_length": 24,
        "gradient_checkpointing": False,
        "loss_type": loss,
        "use_liger_kernel": liger,
        **UNSAID,
        **changes,
    }
    if liger:
        values["liger_kernel_config"] = NO_TRITON | (flags or {})
    texts = [text[: 8 + 3 * i] for i, text in enumerate(tiny.text(40)[:8])]
    peft_config = None
    if lora:
        from peft import LoraConfig

        peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    return trl.SFTTrainer(
        model=tiny.model(),
        args=trl.SFTConfig(**values),
        processing_class=tiny.tokenizer(),
        train_dataset=Dataset.from_dict({"text": texts}),
        eval_dataset=Dataset.from_dict({"text": texts[:2]}),
        peft_config=peft_config,
        compute_loss_func=compute_loss_func,
    )


MEASURED = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "eval_loss", "eval_mean_token_accuracy")


def train(*args: Any, **kwargs: Any) -> list[dict[str, float]]:
    """What a run logs, step by step, and of the evaluation after it."""
    trainer = make(*args, **kwargs)
    trainer.train()
    assert trainer.args.use_liger_kernel is kwargs["liger"]
    trainer.evaluate()
    logged = [{key: row[key] for key in MEASURED if key in row} for row in trainer.state.log_history]
    return [row for row in logged if row]


def record() -> Any:
    return next(record for record in fusepatch.status() if record.id == ID)


def with_and_without_liger(loss: str, changes: dict[str, Any]) -> tuple[Any, Any, Any]:
    return train(loss, liger=False, **changes), train(loss, liger=True, **changes), record()


def assert_equal(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    assert len(found) == len(wanted) == 3, "two steps and an evaluation"
    for there, here in zip(wanted, found, strict=True):
        assert here == pytest.approx(there, rel=1e-5)
        assert any(key.endswith("mean_token_accuracy") for key in here)


CASES = [("dft", {}), ("nll", {}), ("dft", {"lora": True}), ("dft", {"gradient_accumulation_steps": 2})]


@pytest.mark.parametrize(("loss", "changes"), CASES, ids=["dft", "nll", "lora", "parts"])
def test_with_the_kernel_off_it_trains_and_logs_as_without_liger(loss: str, changes: dict[str, Any]) -> None:
    wanted, found, said = forked(with_and_without_liger, loss, changes, env=OFF)
    assert_equal(found, wanted)
    parts = changes.get("gradient_accumulation_steps", 1)
    (note,) = said.replaced
    assert note.text == (
        f"SFTTrainer.compute_loss: the {loss} loss and its metrics are computed from the logits by TRL, instead of by "
        "Liger's forward, which Qwen3ForCausalLM does not have (FUSEPATCH_LIGER_FUSED_LINEAR_CROSS_ENTROPY=0)"
    )
    assert said.calls == note.times == 2 * parts + 1
    assert said.fallbacks == ()


def test_without_the_patch_dft_trains_the_ordinary_loss_and_says_nothing() -> None:
    def attempt() -> Any:
        wanted, ordinary, trainer = train("dft", liger=False), train("nll", liger=False), make("dft", liger=True)
        try:
            trainer.train()
        except AttributeError as error:  # TRL up to 0.26
            return str(error)
        return wanted[0]["loss"], ordinary[0]["loss"], trainer.state.log_history[0]

    found = forked(attempt, env={**OFF, "FUSEPATCH_DISABLE": ID})
    if isinstance(found, str):
        assert "token_accuracy" in found
        return
    wanted, ordinary, logged = found
    assert logged["loss"] == pytest.approx(ordinary, rel=1e-5)
    assert abs(logged["loss"] - wanted) > 1, "the test can tell the two losses apart"
    assert "mean_token_accuracy" not in logged


def test_the_other_loss_of_liger_leaves_dft_too() -> None:
    wanted, found, said = forked(with_and_without_liger, "dft", {}, env={"FUSEPATCH_LIGER_CROSS_ENTROPY": "1"})
    assert_equal(found, wanted)
    assert "(FUSEPATCH_LIGER_CROSS_ENTROPY=1 implies it)" in said.replaced[0].text


def test_dft_where_the_users_configuration_switched_the_kernel_off() -> None:
    def attempt() -> Any:
        own = {"fused_linear_cross_entropy": False}
        return train("dft", liger=False), train("dft", liger=True, flags=own), record()

    wanted, found, said = forked(attempt)
    assert_equal(found, wanted)
    assert "(fused_linear_cross_entropy=False from transformers." in said.replaced[0].text


def test_the_ordinary_loss_where_the_users_configuration_switched_the_kernel_off_is_left_alone() -> None:
    def attempt() -> Any:
        trainer = make("nll", liger=True, flags={"fused_linear_cross_entropy": False})
        try:
            trainer.train()
        except AttributeError as error:
            return str(error), record()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row], record()

    found, said = forked(attempt)
    plain, _ = forked(attempt, env={"FUSEPATCH": "0"})
    assert found == plain
    assert said.calls == 0
    assert said.replaced == said.fallbacks == ()


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return outputs.logits.float().square().mean()


def with_own_loss() -> Any:
    trainer = make("dft", liger=True, compute_loss_func=own_loss)
    trainer.train()
    return trainer.state.log_history[0]["loss"], record()


def test_a_loss_of_the_users_own_beside_dft_stands_and_is_said() -> None:
    loss, said = forked(with_own_loss, env=OFF)
    (note,) = said.fallbacks
    assert note.text.startswith("loss_type='dft' was not followed: compute_loss_func=own_loss computes the loss")
    assert loss == forked(with_own_loss, env={**OFF, "FUSEPATCH_DISABLE": ID})[0]
    with pytest.raises(StrictError, match="loss_type='dft' was not followed"):
        forked(with_own_loss, env={**OFF, "FUSEPATCH_STRICT": "1"})


def test_a_loss_of_the_users_own_beside_nll_gets_the_logits_and_the_metrics() -> None:
    def attempt() -> Any:
        return (
            train("nll", liger=False, compute_loss_func=own_loss),
            train("nll", liger=True, compute_loss_func=own_loss),
            record(),
        )

    wanted, found, said = forked(attempt, env=OFF)
    assert_equal(found, wanted)
    assert said.fallbacks == ()


def test_where_ligers_forward_is_on_or_comes_back_nothing_is_done() -> None:
    def attempt() -> Any:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        trainer = make("dft", liger=True)
        trainer.train()
        before = record().calls
        asked = []
        settings.use(settings.Settings())
        _apply_liger_kernel_to_instance(model=trainer.model, **NO_TRITON)
        ligers = trainer.model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            asked.append({key: kwargs[key] for key in ("use_token_scaling", "return_token_accuracy")})
            raise KeyboardInterrupt

        forward.__wrapped__ = ligers  # as accelerate wraps a forward
        trainer.model.forward = forward
        with pytest.raises(KeyboardInterrupt):
            trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader())))
        return before, record().calls, asked, trainer.args.use_liger_kernel

    assert forked(attempt, env=OFF) == (2, 2, [{"use_token_scaling": True, "return_token_accuracy": True}], True)


def test_what_was_changed_for_a_call_is_put_back_when_it_raises() -> None:
    def attempt() -> Any:
        trainer = make("dft", liger=True, max_steps=1)
        trainer.train()
        batch = next(iter(trainer.get_train_dataloader()))
        del batch["input_ids"]
        with pytest.raises(ValueError, match="input_ids"):
            trainer.compute_loss(trainer.model, batch)
        return trainer.args.use_liger_kernel, trainer.compute_loss_func

    assert forked(attempt, env=OFF) == (True, None)


def test_taken_out_and_late() -> None:
    def attempt() -> Any:
        fusepatch.deactivate(ID)
        trainer = make("dft", liger=True, max_steps=1)
        trainer.train()
        gone = trainer.state.log_history[0]
        fusepatch.activate()
        trainer = make("dft", liger=True, max_steps=1)
        trainer.train()
        return "mean_token_accuracy" in gone, "mean_token_accuracy" in trainer.state.log_history[0]

    assert forked(attempt, env=OFF) == (False, True)
