"""The Trainer's own application of Liger, from inside `train()`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

from demo import tiny
from demo.parts import parts
from demo.scenario import PATCHED, PLAIN, Column, Scenario, Value

SCENARIO = Scenario(
    title="transformers Trainer, use_liger_kernel=True",
    told=(
        "Trainer.train() applies Liger and is stopped before its first step, since these kernels need a GPU. Nothing "
        "changes by the import alone; with variables each kernel is a choice, and one that the model does not have is named."
    ),
    columns=(
        PLAIN,
        PATCHED,
        Column("with variables", True, {"FUSEPATCH_LIGER_RMS_NORM": "0", "FUSEPATCH_LIGER_GEGLU": "0"}),
    ),
    applied=("liger.instance_flags",),
    wanted={
        "rotary embedding": ("Liger", "Liger", "Liger"),
        "RMSNorm": ("Liger", "Liger", "transformers"),
        "SwiGLU MLP": ("Liger", "Liger", "Liger"),
        "the model's forward": ("Liger", "Liger", "Liger"),
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

        def on_train_begin(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
            self.seen = parts(model)
            raise StopHereError

    words = tiny.tokenizer()
    rows = [{"input_ids": words(text)["input_ids"], "labels": words(text)["input_ids"]} for text in tiny.text(48)]
    look = Look()
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            model=tiny.model(),
            args=TrainingArguments(
                output_dir=directory, use_cpu=True, use_liger_kernel=True, max_steps=1, report_to=[], disable_tqdm=True
            ),
            train_dataset=rows,
            callbacks=[look],
        )
        try:
            trainer.train()
        except StopHereError:
            return look.seen
    raise RuntimeError("the Trainer never began to train")
