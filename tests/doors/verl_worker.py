"""Door: `ActorRolloutRefWorker.init_model` of verl 0.4 to 0.7 (fsdp_workers.py), for the role of an actor, on the CPU.

The worker is constructed and its `init_model` called as Ray would: it loads the model, applies Liger, shards, builds
the optimizer and the actor. What stops it on a CPU, and what the door does about it:

- the constructor initialises NCCL: a gloo group of one rank is initialised beforehand, which the worker keeps;
- FSDP1 needs an accelerator: strategy fsdp2;
- verl 0.4 and 0.5 hard-code `attn_implementation="flash_attention_2"`: `model.override_config` sets the configuration's
  `_attn_implementation` afterwards. Later releases read `attn_implementation` from there;
- memory statistics and `empty_cache` are asked of `torch.cpu`, which has none: they are given to it.

    python tests/doors/verl_worker.py --models qwen3
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import script


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=script.names, default=["qwen3"])
    parser.add_argument("--fused-kernels", action="store_true", help="model.use_fused_kernels, the torch backend")
    script.run(door, parser)


def door(arguments: argparse.Namespace) -> dict[str, Any]:
    from gloo import one_rank

    seen = {}
    with one_rank(), tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            seen[name] = through_worker(name, Path(folder) / name, arguments.fused_kernels)
    return {"door": "verl_worker", "models": seen}


def through_worker(name: str, folder: Path, fused_kernels: bool) -> dict[str, Any]:
    from legacy_worker import build
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    return build(ActorRolloutRefWorker, name, folder, fused_kernels)


if __name__ == "__main__":
    main()
