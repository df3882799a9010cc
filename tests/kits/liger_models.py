"""Tiny models of transformers that Liger is applied to, and which of its kernels are on them."""

from __future__ import annotations

import sys

import pytest

import fusepatch

transformers = pytest.importorskip("transformers", reason="the models are transformers'")
monkey_patch = pytest.importorskip("liger_kernel.transformers.monkey_patch", reason="Liger is what is patched")

ID = "liger.instance_flags"
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
PREFIX = "FUSEPATCH_LIGER_"


def build(kind: str):
    """A tiny model of a kind: the `model_type` of transformers."""
    config = transformers.AutoConfig.for_model(kind, **SIZES)
    return transformers.AutoModelForCausalLM.from_config(config)


def build_llava():
    text = transformers.AutoConfig.for_model("llama", **SIZES)
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=63)
    )


def kernels(model, kind: str) -> dict[str, bool]:
    """Which of Liger's kernels are on the model, or in its modeling module, by the name of the flag."""
    import torch
    from liger_kernel.transformers.functional import liger_cross_entropy

    modeling = sys.modules[f"transformers.models.{kind}.modeling_{kind}"]
    layer = model.model.layers[0]
    return {
        "rope": modeling.apply_rotary_pos_emb.__module__.startswith("liger_kernel"),
        "rms_norm": "forward" in vars(model.model.norm),
        "mlp": "forward" in vars(layer.mlp) or type(layer.mlp).__module__.startswith("liger_kernel"),
        "fused_linear_cross_entropy": has_fused_loss(model),
        "cross_entropy": torch.nn.functional.cross_entropy is liger_cross_entropy,
    }


def has_fused_loss(model) -> bool:
    """Whether Liger's forward is what runs: on the instance from Liger 0.6.0 on, on the class before."""
    return "forward" in vars(model) or type(model).forward.__module__.startswith("liger_kernel")


def text_model(llava):
    """The decoder inside: transformers 5 keeps it in `model`, older ones have the causal model on the outside."""
    inner = llava.model.language_model if hasattr(llava, "model") else llava.language_model
    return getattr(inner, "model", inner)


def apply_and_look(kind: str, caller: str, *args: object, **kwargs: object) -> dict[str, object]:
    """Apply Liger to a model from a module named `caller`, through the dispatcher, and look at the model."""
    model = build(kind)
    called_from(caller, "from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance as apply")(
        model, *args, **kwargs
    )
    (record,) = [record for record in fusepatch.status() if record.id == ID]
    return {
        **kernels(model, kind),
        "replaced": [note.text for note in record.replaced],
        "fallbacks": [note.text for note in record.fallbacks],
        "calls": record.calls,
    }


def called_from(module: str, statement: str):
    """A function `apply` that calls what `statement` imports, from a module of that name."""
    namespace: dict[str, object] = {"__name__": module}
    exec(f"{statement}\ndef call(*args, **kwargs):\n    return apply(*args, **kwargs)", namespace)
    return namespace["call"]


ALL_ON = {"rope": True, "rms_norm": True, "mlp": True, "fused_linear_cross_entropy": True, "cross_entropy": False}
MLP_FLAG = {"llama": "swiglu", "qwen2": "swiglu", "qwen3": "swiglu", "gemma2": "geglu"}


KINDS = [kind for kind in sorted(MLP_FLAG) if kind in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN]


def needs(kind: str) -> None:
    if kind not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        pytest.skip(f"the installed Liger has no kernels for {kind}")


def on_model(result: dict[str, object]) -> dict[str, object]:
    return {name: result[name] for name in ALL_ON}
