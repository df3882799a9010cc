"""verl's real `build_optimizer` and its FSDP2 engine on the CPU, where a single rank is enough."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed here", allow_module_level=True)

from doors import tiny  # noqa: E402
from kits.forked import forked  # noqa: E402

VERL = importlib.metadata.version("verl")
STEPS = 20
if VERL >= "0.8":  # this verl takes its device from a registry, where the doors register a CPU
    os.environ.update({"VERL_USE_EXTERNAL_MODULES": "doors.cpu_platform", "VERL_PLATFORM": "cpu"})
try:
    from verl.workers.config.optimizer import FSDPOptimizerConfig
    from verl.workers.config.optimizer import build_optimizer as build_optimizer
except ImportError as error:
    pytest.skip(f"verl {VERL} has no build_optimizer ({error})", allow_module_level=True)


def config(**changes: Any) -> Any:
    return FSDPOptimizerConfig(**{"lr": 1e-3, "weight_decay": 0.1, "total_training_steps": STEPS, **changes})


def network() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def on_one_rank(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a forked child that has a gloo group of its own, whose threads would be lost to what forks
    later."""

    @functools.wraps(test)
    def run(tmp_path: Path, **fixtures: Any) -> None:
        def child() -> None:
            import torch.distributed as distributed

            os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
            store = distributed.FileStore(str(tmp_path / "store"), 1)
            distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            test(tmp_path=tmp_path, **fixtures)

        forked(child, env={"FUSEPATCH": "0"})

    return run


def engine(folder: Path) -> Any:
    """verl's FSDP2 engine on a model of two layers: what its workers run, with DTensor parameters."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    contents = ["model", "optimizer"]
    built = FSDPEngineWithLMHead(
        model_config=HFModelConfig(
            path=str(folder), use_remove_padding=False, override_config={"attn_implementation": "eager"}
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            # float32 throughout, so that rounding can be told from a fault
            model_dtype="fp32",
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            wrap_policy={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        ),
        optimizer_config=config(lr=1e-3),
        # Without the random states: torch.cpu has none, and nothing here draws from them. The learning rate is
        # constant.
        checkpoint_config=CheckpointConfig(save_contents=contents, load_contents=contents),
    )
    built.initialize()
    return built


def train_engine(built: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(3, 64, (2, 8), generator=generator)
        built.optimizer_zero_grad()
        logits = built.module(input_ids=ids, use_cache=False).logits.float()
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        built.optimizer_step()
        built.lr_scheduler_step()


def engine_weights(built: Any) -> Any:
    from torch.distributed.tensor import DTensor

    params = list(built.module.parameters())
    assert all(isinstance(param, DTensor) for param in params)
    return torch.cat([param.full_tensor().detach().flatten().double() for param in params])


def save_tiny_model(folder: Path) -> Path:
    tiny.save_tiny_model("llama", folder)
    return folder
