"""Door: axolotl's `LigerPlugin.pre_model_load`, which takes the model's function out of `MODEL_TYPE_TO_APPLY_LIGER_FN`.

It calls that function without a model, with every flag of its signature from the configuration: an unset key is passed
as None, which Liger reads as off. The model is built afterwards, as axolotl does.

    python tests/doors/axolotl_plugin.py --models llama --config '{"liger_rms_norm": true}'
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import script


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=script.names, default=["llama", "gemma2"])
    parser.add_argument("--config", type=json.loads, default={"liger_rms_norm": True}, help="liger_* keys as JSON")
    script.run(door, parser)


def door(arguments: argparse.Namespace) -> dict[str, Any]:
    from axolotl.integrations.liger.plugin import LigerPlugin
    from axolotl.utils.dict import DictDefault
    from observe import observe_model
    from tiny import tiny_model

    seen = {}
    for name in arguments.models:
        LigerPlugin().pre_model_load(DictDefault({"model_config_type": name, **arguments.config}))
        seen[name] = observe_model(tiny_model(name))
    return {"door": "axolotl_plugin", "models": seen}


if __name__ == "__main__":
    main()
