"""A tiny Qwen3 with SDPA attention, and a batch for it that is padded on the left."""

from __future__ import annotations

from typing import Any

import torch
import transformers


def tiny_model(layers: int = 2) -> Any:
    config = transformers.Qwen3Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=64,
        max_position_embeddings=4096,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(config)


def batch(width: int, pads: int, device: str = "cpu") -> dict[str, Any]:
    """Two rows, the first padded on the left."""
    tokens = torch.randint(1, 64, (2, width), generator=torch.Generator().manual_seed(width))
    seen = torch.ones_like(tokens)
    seen[0, :pads] = 0
    labels = tokens.masked_fill(seen == 0, -100)
    return {
        name: part.to(device) for name, part in (("input_ids", tokens), ("attention_mask", seen), ("labels", labels))
    }


def training_step(model: Any, data: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    model.zero_grad()
    loss = model(**data).loss
    loss.backward()
    return float(loss), {name: part.grad.clone() for name, part in model.named_parameters()}
