"""TRL's own GRPOTrainer with Liger's loss on the CPU, for whatever TRL and model."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import trl
from packaging.version import Version

from demo import tiny

STEPS = 5
WITHOUT_PEFT = Version(trl.__version__) < Version("0.18")
"""TRL 0.17 raises where a PEFT model meets Liger's loss."""


def reward(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(ord, text)) % 97 / 97 for text in completions]


def config(folder: Path, **changes: Any) -> Any:
    known = inspect.signature(trl.GRPOConfig).parameters
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "seed": tiny.SEED,
        "max_steps": STEPS,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "num_iterations": 2,
        "max_completion_length": 10,
        "epsilon": 0.02,
        "beta": 0.04,
        "temperature": 0.9,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        **changes,
    }
    if "use_liger_kernel" in known and "use_liger_loss" not in known:
        layers = ("rope", "rms_norm", "swiglu", "fused_linear_cross_entropy")
        values |= {"use_liger_kernel": True, "liger_kernel_config": dict.fromkeys(layers, False)}
    else:
        values["use_liger_loss"] = True
    return trl.GRPOConfig(**values)


def trainer(folder: Path, lora: bool, model: Any = None, **changes: Any) -> Any:
    from datasets import Dataset
    from peft import LoraConfig

    model = model or tiny.model()
    tokenizer = tiny.tokenizer()
    tokenizer.model_input_names = ["input_ids", "attention_mask"]  # transformers 4 adds token types
    source = folder / "model"
    if not source.exists():
        model.save_pretrained(source)
    model.config._name_or_path = str(source)  # the reference model is loaded from there
    return trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config(folder, **changes),
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": tiny.text(16)}),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if lora else None,
    )
