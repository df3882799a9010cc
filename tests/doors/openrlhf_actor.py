"""Door: OpenRLHF's `Actor(use_liger_kernel=True)`, which loads through `AutoLigerKernelForCausalLM.from_pretrained`.

OpenRLHF imports flash_attn and deepspeed at the top of its modules; neither is reached here, placeholders stand in.

    python tests/doors/openrlhf_actor.py --models llama
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import script


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=script.names, default=["llama", "gemma2"])
    script.run(door, parser)


def door(arguments: argparse.Namespace) -> dict[str, Any]:
    import transformers.trainer  # noqa: F401  (asks for deepspeed's metadata, which a stand-in does not have)
    from observe import observe_model
    from stand_in import stand_in_for
    from tiny import save_tiny_model

    stand_in_for("flash_attn.bert_padding", "flash_attn.utils.distributed", "deepspeed")
    from openrlhf.models.actor import Actor

    seen = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            path = save_tiny_model(name, Path(folder) / name)
            actor = Actor(str(path), attn_implementation="eager", use_liger_kernel=True)
            seen[name] = observe_model(actor.model)
    return {"door": "openrlhf_actor", "models": seen}


if __name__ == "__main__":
    main()
