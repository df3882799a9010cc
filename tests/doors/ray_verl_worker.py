"""The worker of `ray_verl.py`, importable in Ray's workers as a framework's worker class is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register


class EngineWorker(Worker):
    """Takes one step of supervised fine-tuning in verl's engine, then builds one with Liger."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, folder: str, fused_kernels: bool, trinity: bool) -> dict[str, Any]:
        import functools
        import sys

        import torch
        import torch.distributed
        from observe import observe_model, observe_optimizer
        from verl.workers.utils.losses import sft_loss
        from verl_engine import construct

        torch.distributed.init_process_group("gloo")
        if trinity:
            from trinity_engine import take_over_the_engine

            take_over_the_engine()
        engine = construct("qwen3", Path(folder), liger=False)
        engine.initialize()
        with engine.train_mode():
            loss = functools.partial(sft_loss, config=None)
            output = engine.train_batch(batch(torch.distributed.get_rank()), loss_function=loss)
        step = {"grad_norm": float(output["metrics"]["grad_norm"]), "optimizer": observe_optimizer(engine.optimizer)}
        # Afterwards: Liger replaces classes and functions in the modeling module, for every model in the process.
        engine = construct("qwen3", Path(folder), fused_kernels)
        engine.initialize()
        seen = {**observe_model(engine.module), "optimizer": observe_optimizer(engine.optimizer)}
        seen.update(pid=os.getpid(), step=step)
        if "fusepatch" in sys.modules:
            from script import records

            seen["fusepatch"] = records()
        return seen


def batch(rank: int) -> Any:
    """Two rows of eight tokens as verl's SFT dataset makes them, and what its trainer says about micro-batches."""
    import torch
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(rank)
    rows = [torch.randint(3, 64, (8,), generator=generator) for _ in range(2)]

    def nested(tensors: list[Any]) -> Any:
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    return tu.get_tensordict(
        tensor_dict={
            "input_ids": nested(rows),
            "position_ids": nested([torch.arange(8)] * 2),
            "loss_mask": nested([torch.ones(8, dtype=torch.long)] * 2),
        },
        non_tensor_dict={
            "use_remove_padding": False,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 2,
            "temperature": 1.0,
            "global_batch_size": 4,
            "pad_mode": "no_padding",
            "pad_token_id": 0,
            "max_response_length": 8,
            "use_fused_kernels": False,
        },
    )
