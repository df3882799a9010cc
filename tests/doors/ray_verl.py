"""Door: verl's FSDP engine (0.6.0 and later) in the workers of a verl worker group, which are Ray actors: two ranks
over gloo.

verl creates the actors and gives each a runtime_env of its own with RANK, WORLD_SIZE and the master's address. Each
takes one optimizer step in an engine, and initialises a second one with `use_liger`, whose kernels need a GPU to run.
What else differs from a run on GPUs: the pool is one of CPUs, the process group is gloo's, and verl 0.9 needs a
platform for the CPU (see verl_engine.py).

    python tests/doors/ray_verl.py --fused-kernels
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import tempfile
from pathlib import Path
from typing import Any

import script

RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fused-kernels", action="store_true", help="model.use_fused_kernels, the torch backend")
    parser.add_argument(
        "--trinity", action="store_true", help="the engine as Trinity-RFT 0.6 changes it in its workers"
    )
    script.run(door, parser)


def door(arguments: argparse.Namespace) -> dict[str, Any]:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    if importlib.metadata.version("verl") >= "0.9":
        external = os.environ.get("VERL_USE_EXTERNAL_MODULES")
        os.environ["VERL_USE_EXTERNAL_MODULES"] = ",".join(["cpu_platform", *([external] if external else [])])
        os.environ["VERL_PLATFORM"] = "cpu"
    import ray
    from ray_verl_worker import EngineWorker
    from tiny import save_tiny_model
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    ray.init(num_cpus=RANKS + 1, include_dashboard=False, object_store_memory=80 * 2**20)
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_model("qwen3", Path(folder))
        group = RayWorkerGroup(
            resource_pool=RayResourcePool([RANKS], use_gpu=False, max_colocate_count=1),
            ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(EngineWorker)),
            use_gpu=False,
        )
        seen = group.train(folder, arguments.fused_kernels, arguments.trinity)
    ray.shutdown()
    return {"door": "ray_verl", "models": {f"rank {rank}": one for rank, one in enumerate(seen)}}


if __name__ == "__main__":
    main()
