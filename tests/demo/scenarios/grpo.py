"""TRL's GRPOTrainer with Liger's loss, on Python's own language reference."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

from demo import tiny
from demo.scenario import PATCHED, PLAIN, Scenario, Value

STEPS = 4

SCENARIO = Scenario(
    title="TRL GRPOTrainer, Liger's loss",
    told=(
        f"{STEPS} GRPO steps of a two-layer Qwen3 on Python's own language reference. Liger's layer kernels need a GPU "
        "and are off through liger_kernel_config, its loss is on. The patched loss takes another way to the same "
        "numbers."
    ),
    columns=(PLAIN, PATCHED),
    applied=("liger.instance_flags", "optimizer.flags", "liger.grpo_loss"),
    equal=("loss, *", "gradient norm, *", "reward, *", "weights, *"),
    tolerance=1e-5,
)


def run() -> Mapping[str, Value]:
    """Train, and return what the trainer logged at each step."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    with tempfile.TemporaryDirectory() as directory:
        tiny.model().save_pretrained(directory)
        trainer = GRPOTrainer(
            model=directory,
            reward_funcs=share_of_letters,
            args=GRPOConfig(
                output_dir=directory,
                use_cpu=True,
                bf16=False,
                model_init_kwargs={"dtype": "float32"},
                seed=tiny.SEED,
                max_steps=STEPS,
                learning_rate=1e-3,
                per_device_train_batch_size=8,
                num_generations=4,
                max_completion_length=24,
                beta=0.04,
                gradient_checkpointing=False,
                use_liger_kernel=True,
                liger_kernel_config={
                    "rope": False,
                    "rms_norm": False,
                    "swiglu": False,
                    "fused_linear_cross_entropy": False,
                },
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            processing_class=tiny.tokenizer(),
            train_dataset=Dataset.from_dict({"prompt": tiny.text(48)}),
        )
        trainer.train()
    rows: dict[str, Value] = {}
    for step, logged in enumerate((entry for entry in trainer.state.log_history if "loss" in entry), start=1):
        rows[f"loss, step {step}"] = logged["loss"]
        rows[f"gradient norm, step {step}"] = logged["grad_norm"]
        rows[f"reward, step {step}"] = logged["reward"]
    rows["weights, squared sum"] = sum(float(p.detach().double().square().sum()) for p in trainer.model.parameters())
    return rows


def share_of_letters(completions: list[str], **_: Any) -> list[float]:
    """How much of a completion is lower-case letters and spaces: what a model of bytes learns of prose first."""
    return [sum(c == " " or "a" <= c <= "z" for c in text) / max(len(text), 1) for text in completions]
