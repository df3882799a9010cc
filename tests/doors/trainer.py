"""Door: the transformers Trainer with `use_liger_kernel=True`.

Liger is applied in `Trainer.__init__` up to transformers 5.2 and in `Trainer.train()`, before the optimizer is created,
from 5.3 on. `on_train_begin` is the first callback after both, with the optimizer built and no batch run: a callback
raises there, so the same door serves every version and no Triton kernel is launched.

    python tests/doors/trainer.py --models llama,qwen3,gemma2 --liger-config '{"rope": false}'
"""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

import script


class ReachedTraining(Exception):  # noqa: N818  (no error)
    """Raised by the callback, caught by the door."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=script.names, default=["llama", "qwen3", "gemma2"])
    parser.add_argument("--liger-config", type=json.loads, help="liger_kernel_config as JSON (transformers 4.53 on)")
    parser.add_argument("--optim", help="TrainingArguments.optim")
    script.run(door, parser)


def door(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"door": "trainer", "models": {name: through_trainer(name, arguments) for name in arguments.models}}


def through_trainer(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    from observe import observe_model, observe_optimizer
    from tiny import tiny_model
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class StopBeforeTheFirstBatch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            raise ReachedTraining

    options: dict[str, Any] = {}
    if arguments.liger_config is not None:
        options["liger_kernel_config"] = arguments.liger_config
    if arguments.optim:
        options["optim"] = arguments.optim
    rows = [{"input_ids": [1, 5, 6, 7, 2], "labels": [1, 5, 6, 7, 2]}] * 2
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=tiny_model(name),
            args=TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                max_steps=1,
                report_to=[],
                disable_tqdm=True,
                use_liger_kernel=True,
                **options,
            ),
            train_dataset=rows,
            callbacks=[StopBeforeTheFirstBatch()],
        )
        after_init = observe_model(trainer.model)
        try:
            trainer.train()
        except ReachedTraining:
            pass
        else:
            raise AssertionError("Trainer.train() never called on_train_begin")
    return {
        **observe_model(trainer.model),
        "applied_in": "__init__" if any(after_init["liger"].values()) else "train",
        "optimizer": observe_optimizer(trainer.optimizer),
    }


if __name__ == "__main__":
    main()
