"""Door: TRL's GRPOTrainer with Liger's loss, one step of one batch on the CPU, with a reward that looks at the text.

TRL 0.17 to 0.24 call the switch `use_liger_loss`, later ones `use_liger_kernel`, which also replaces layers: their
kernels need a GPU and are switched off. From 1.15 on TRL computes the loss itself. Upstream's loss is compiled by
default, which is the same arithmetic: the door disables the compiler.

    python tests/doors/grpo_trainer.py --models qwen3
"""

from __future__ import annotations

import argparse
import inspect
import os
import tempfile
from pathlib import Path
from typing import Any

import script


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=script.names, default=["qwen3"])
    script.run(door, parser)


def door(arguments: argparse.Namespace) -> dict[str, Any]:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    seen = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            seen[name] = through_trainer(name, Path(folder) / name)
    return {"door": "grpo_trainer", "models": seen}


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 97) for text in completions]


def through_trainer(name: str, folder: Path) -> dict[str, Any]:
    import trl
    from datasets import Dataset
    from observe import observe_model, observe_optimizer
    from tiny import save_tiny_model
    from transformers import AutoTokenizer

    save_tiny_model(name, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.model_input_names = ["input_ids", "attention_mask"]  # transformers 4 adds token types
    if "use_liger_loss" in inspect.signature(trl.GRPOConfig).parameters:
        liger: dict[str, Any] = {"use_liger_loss": True}
    else:
        layers = ("rope", "rms_norm", "swiglu", "fused_linear_cross_entropy")
        liger = {"use_liger_kernel": True, "liger_kernel_config": dict.fromkeys(layers, False)}
    trainer = trl.GRPOTrainer(
        model=str(folder),
        reward_funcs=reward,
        args=trl.GRPOConfig(
            output_dir=str(folder / "out"),
            use_cpu=True,
            bf16=False,
            max_steps=1,
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=4,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **liger,
        ),
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": ["token1 token2 token3", "token4 token5 token6"]}),
    )
    trainer.train()
    return {**observe_model(trainer.model), "optimizer": observe_optimizer(trainer.optimizer)}


if __name__ == "__main__":
    main()
