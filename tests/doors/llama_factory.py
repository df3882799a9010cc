"""Door: LLaMA-Factory's `apply_liger_kernel`, which its loader calls before the model is loaded.

It looks up `apply_liger_kernel_to_<model>` in `liger_kernel.transformers` and calls it without a model, so that only
the modeling module changes; the model is built afterwards, as the loader does.

    python tests/doors/llama_factory.py --models llama --require-logits
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import script


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=script.names, default=["llama", "gemma2"])
    parser.add_argument("--require-logits", action="store_true", help="a stage other than pt and sft")
    script.run(door, parser)


def door(arguments: argparse.Namespace) -> dict[str, Any]:
    from llamafactory.model.model_utils.liger_kernel import apply_liger_kernel
    from observe import observe_model
    from tiny import tiny_model

    seen = {}
    for name in arguments.models:
        apply_liger_kernel(
            SimpleNamespace(model_type=name),
            SimpleNamespace(enable_liger_kernel=True),
            is_trainable=True,
            require_logits=arguments.require_logits,
        )
        seen[name] = observe_model(tiny_model(name))
    return {"door": "llama_factory", "models": seen}


if __name__ == "__main__":
    main()
