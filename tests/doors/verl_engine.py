"""Door: verl's FSDP engine (0.6.0 and later) with `use_liger`, initialised on the CPU: fsdp2, gloo, one rank.

verl 0.6 to 0.8 run on the CPU as they are; 0.9 and later take the device from a platform registry, where the door
registers a CPU (see cpu_platform.py). The registry of engines lists accelerators only, so the class is constructed
directly.

    python tests/doors/verl_engine.py --models llama,qwen3
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import script


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=script.names, default=["qwen3"])
    parser.add_argument("--fused-kernels", action="store_true", help="model.use_fused_kernels, the torch backend")
    script.run(door, parser)


def door(arguments: argparse.Namespace, prepare: Callable[[], None] = lambda: None) -> dict[str, Any]:
    from gloo import one_rank

    if importlib.metadata.version("verl") >= "0.9":
        os.environ.update({"VERL_USE_EXTERNAL_MODULES": "cpu_platform", "VERL_PLATFORM": "cpu"})
    seen = {}
    prepare()
    with one_rank(), tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            seen[name] = through_engine(name, Path(folder) / name, arguments.fused_kernels)
    return {"door": "verl_engine", "models": seen}


def through_engine(name: str, folder: Path, fused_kernels: bool) -> dict[str, Any]:
    from observe import observe_model, observe_optimizer
    from tiny import save_tiny_model

    save_tiny_model(name, folder)
    engine = construct(name, folder, fused_kernels=fused_kernels)
    engine.initialize()
    return {**observe_model(engine.module), "optimizer": observe_optimizer(engine.optimizer)}


def construct(name: str, folder: Path, fused_kernels: bool = False, liger: bool = True) -> Any:
    """The engine for the tiny model in `folder`, not initialised yet."""
    from tiny import decoder_layer
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    return FSDPEngineWithLMHead(
        model_config=HFModelConfig(
            path=str(folder),
            use_liger=liger,
            use_remove_padding=False,
            use_fused_kernels=fused_kernels,
            fused_kernel_options={"impl_backend": "torch"} if fused_kernels else {},
            override_config={"attn_implementation": "eager"},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            wrap_policy={"transformer_layer_cls_to_wrap": [decoder_layer(name)]},
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-5, total_training_steps=2),
        checkpoint_config=CheckpointConfig(),
    )


if __name__ == "__main__":
    main()
