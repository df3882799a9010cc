"""The Trainer's own application of Liger and its own optimizer, from inside `train()`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

from demo import tiny
from demo.parts import parts
from demo.scenario import PATCHED, PLAIN, Column, Scenario, Value

SCENARIO = Scenario(
    title="transformers Trainer, use_liger_kernel=True, optim='adamw_torch'",
    told=(
        "Trainer.train() applies Liger, builds AdamW as optim='adamw_torch' says, and is stopped before its first "
        "step, since these kernels need a GPU. The import alone fuses AdamW and changes no kernel; with variables each "
        "kernel is a choice, and one that the model does not have is named."
    ),
    columns=(
        PLAIN,
        PATCHED,
        Column(
            "with variables",
            True,
            {
                "FUSEPATCH_LIGER_RMS_NORM": "0",
                "FUSEPATCH_LIGER_GEGLU": "0",
                "FUSEPATCH_OPTIMIZER_FUSED": "keep",
                "FUSEPATCH_OPTIMIZER_EPS": "1e-6",
            },
        ),
    ),
    applied=("liger.instance_flags", "optimizer.flags"),
    wanted={
        "rotary embedding": ("Liger", "Liger", "Liger"),
        "RMSNorm": ("Liger", "Liger", "transformers"),
        "SwiGLU MLP": ("Liger", "Liger", "Liger"),
        "the model's forward": ("Liger", "Liger", "Liger"),
        "AdamW's fused": ("None", "True", "None"),
        "AdamW's eps": ("1e-08", "1e-08", "1e-06"),
    },
)


def run() -> Mapping[str, Value]:
    """Start training, and look at the model where the first step would begin."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class StopHereError(Exception):
        """Training has begun and the model has been looked at."""

    class Look(TrainerCallback):
        seen: Mapping[str, Value]

        def on_train_begin(self, *_: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **__: Any) -> None:
            # The Trainer hands out accelerate's wrapper, which shows the optimizer's own groups.
            group = optimizer.param_groups[0]
            self.seen = {
                **parts(model),
                "AdamW's fused": str(group["fused"]),
                "AdamW's eps": f"{group['eps']:g}",
            }
            raise StopHereError

    words = tiny.tokenizer()
    rows = [{"input_ids": words(text)["input_ids"], "labels": words(text)["input_ids"]} for text in tiny.text(48)]
    look = Look()
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            model=tiny.model(),
            args=TrainingArguments(
                output_dir=directory,
                use_cpu=True,
                use_liger_kernel=True,
                optim="adamw_torch",
                max_steps=1,
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=rows,
            callbacks=[look],
        )
        try:
            trainer.train()
        except StopHereError:
            return look.seen
    raise RuntimeError("the Trainer never began to train")
