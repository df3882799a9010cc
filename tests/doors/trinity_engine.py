"""Door: Trinity-RFT 0.6 on verl 0.8 and later: verl's engine after Trinity's `patch_verl_engine()`, on the CPU.

Trinity's worker calls `patch_verl_engine()` at the start of its `init_model`; it replaces `FSDPEngine._build_module` by
Trinity's own function, in which Liger is applied. The door calls it and initialises verl's engine as verl_engine.py
does. Trinity's function asks `torch.cuda.get_device_capability(0)` whether the GPU is a Hopper: the door answers (0,
0).

    python tests/doors/trinity_engine.py --models qwen3
"""

from __future__ import annotations

import argparse
from typing import Any

import script
import verl_engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=script.names, default=["qwen3"])
    parser.add_argument("--fused-kernels", action="store_true", help="model.use_fused_kernels, the torch backend")
    script.run(door, parser)


def door(arguments: argparse.Namespace) -> dict[str, Any]:
    seen = verl_engine.door(arguments, prepare=take_over_the_engine)
    return {**seen, "door": "trinity_engine"}


def take_over_the_engine() -> None:
    import torch
    from trinity.trainer.verl.monkey_patch import patch_verl_engine
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    torch.cuda.get_device_capability = lambda *_: (0, 0)
    patch_verl_engine()
    if not FSDPEngine._build_module.__module__.startswith("trinity"):
        raise AssertionError(f"Trinity did not take over FSDPEngine._build_module: {FSDPEngine._build_module}")


if __name__ == "__main__":
    main()
