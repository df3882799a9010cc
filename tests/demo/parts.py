"""Whose code each part of a model runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any


def parts(model: Any) -> Mapping[str, str]:
    """The library that owns the code of each part that Liger can replace in a Qwen3."""
    layer = model.model.layers[0]
    rope = sys.modules["transformers.models.qwen3.modeling_qwen3"].apply_rotary_pos_emb
    return {
        "rotary embedding": owner(rope),
        "RMSNorm": owner(layer.input_layernorm.forward),
        "SwiGLU MLP": owner(layer.mlp.forward),
        "the model's forward": owner(model.forward),
    }


def owner(function: Callable[..., Any]) -> str:
    """The library that a function or bound method was written in."""
    code = getattr(function, "__func__", function)
    library = str(code.__module__).partition(".")[0]
    return {"liger_kernel": "Liger", "transformers": "transformers"}.get(library, library)
