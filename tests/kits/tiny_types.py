"""A tiny model of each model type, from a config: float32, random weights, on the CPU."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

VOCABULARY = 64
SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LEFT_OUT = object()
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
VISION: Mapping[str, Mapping[str, Any]] = {
    "qwen2_5_vl": {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 32},
    "qwen3_vl": {
        "depth": 1,
        "hidden_size": 32,
        "out_hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 32,
        "deepstack_visual_indexes": [0],
    },
    "qwen3_5": {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 32},
    "gemma3": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
}
TYPES: Mapping[str, Mapping[str, Any]] = {
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "bloom": {"n_layer": 2, "n_head": 4},
    "cohere2": {**WINDOW, "logit_scale": 1.0},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "falcon": {"alibi": False, "head_dim": LEFT_OUT},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "gemma2": WINDOW,
    "gemma3": {},
    "gemma3_text": WINDOW,
    "glm4": {},
    "gpt_neox": {},
    "gpt_oss": {**LOCAL, **WINDOW},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 128},
    "granite": {},
    "granitemoehybrid": {
        **MAMBA,
        **LOCAL,
        "shared_intermediate_size": 16,
        "layer_types": ["mamba", "attention"],
    },
    "jamba": {
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama": {},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8, "expand": 2},
    "minimax": {**LOCAL, "layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    "mistral": {"sliding_window": 5},
    "mixtral": LOCAL,
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
    "nemotron_h": {
        **MAMBA,
        "layers_block_type": ["mamba", "attention"],
        "n_groups": 1,
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "chunk_size": 8,
    },
    "olmo2": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi3": {},
    "qwen2": {},
    "qwen2_5_vl": {"rope_parameters": MROPE},
    "qwen3": {},
    "qwen3_5": {**LINEAR, "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0, "mrope_interleaved": True}},
    "qwen3_5_text": {**LINEAR, "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0, "mrope_interleaved": True}},
    "qwen3_moe": EXPERTS,
    "qwen3_next": {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_vl": {"rope_parameters": {**MROPE, "mrope_interleaved": True}},
    "smollm3": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "llama4_text": {
        **LOCAL,
        "intermediate_size_mlp": 32,
        "attn_temperature_tuning": True,
        "floor_scale": 4,
        "attention_chunk_size": 128,
        "no_rope_layers": [1, 0],
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 4,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": 64},
    "rwkv": {"attention_hidden_size": 32, "context_length": 128},
}


def tiny_model(kind: str, **changes: Any) -> Any:
    """A model of that type; raises KeyError or ValueError where the installed transformers does not know it."""
    import torch
    import transformers

    torch.manual_seed(0)
    values = {**SHAPE, **TYPES[kind], **changes}
    if int(transformers.__version__.partition(".")[0]) < 5 and "rope_parameters" in values:
        values["rope_scaling"] = dict(values.pop("rope_parameters"))
        values["rope_theta"] = values["rope_scaling"].pop("rope_theta", 10000.0)
        if kind == "phi3":
            values["rope_scaling"]["type"] = values["rope_scaling"].pop("rope_type")
    values = {name: value for name, value in values.items() if value is not LEFT_OUT}
    if kind in VISION:
        config_class = type(transformers.AutoConfig.for_model(kind))
        ids = {
            f"{name}_token_id": place for place, name in enumerate(("image", "video", "vision_start", "vision_end"), 60)
        }
        has_parts = "text_config" in inspect.signature(config_class).parameters
        text = {"text_config": values} if has_parts else values
        config = config_class(**text, vision_config=dict(VISION[kind]), **ids)
        model = transformers.AutoModelForImageTextToText.from_config(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **values))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() == 2:
                param.mul_(4.0)  # so that attention and logits are far from uniform
            elif "norm" not in name and param.dim() == 1:
                param.add_(0.1 * torch.randn_like(param))
    return model.float().train()
