"""Door: Trinity-RFT's own FSDP worker, `init_model` for the role of an actor, on the CPU.

Trinity-RFT 0.2 to 0.5: trinity.trainer.verl.fsdp_workers; 0.6, for verl below 0.8:
trinity.trainer.verl_legacy.fsdp_workers. Beside what verl's worker needs (see verl_worker.py): these modules import
vllm at the top, for its side effect on an NCCL variable and for one type annotation. vllm is no part of what is looked
at and needs a GPU: a module of placeholders stands in. Trinity-RFT 0.6 asks `torch.cuda.get_device_capability()`
whether the GPU is a Hopper: the door answers (0, 0). The checkpoint manager at the end of `init_model` needs a Ray
cluster: the door stops there, with model and optimizer built. `model.use_liger` is set in the worker's configuration,
which no Trinity configuration file of these releases can do.

    python tests/doors/trinity_worker.py --models qwen3
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
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
    from legacy_worker import build
    from stand_in import stand_in_for

    stand_in_for("vllm.lora.request")
    import torch

    torch.cuda.get_device_capability = lambda *_: (0, 0)
    legacy = importlib.metadata.version("trinity-rft") >= "0.6"
    module = f"trinity.trainer.{'verl_legacy' if legacy else 'verl'}.fsdp_workers"
    workers = importlib.import_module(module)
    workers.FSDPCheckpointManager = stop
    seen = {}
    with one_rank(), tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            seen[name] = build(workers.ActorRolloutRefWorker, name, Path(folder) / name, arguments.fused_kernels)
    return {"door": "trinity_worker", "module": module, "models": seen}


def stop(*_: Any, **__: Any) -> None:
    """Stands for the checkpoint manager, which starts Ray actors; model, optimizer and actor are built by then."""
    from legacy_worker import Reached

    raise Reached


if __name__ == "__main__":
    main()
