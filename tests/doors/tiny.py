"""Tiny models from a config, in memory or on disk with a tokenizer: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = ("<pad>", "<bos>", "<eos>", "<unk>", *(f"token{index}" for index in range(60)))

SHAPE: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
}


def tiny_model(name: str) -> Any:
    """A model of two layers with random weights, float32, on the CPU."""
    import torch
    import transformers

    config_class, model_class = CLASSES[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**SHAPE, attn_implementation="eager")
    return getattr(transformers, model_class)(config)


def save_tiny_model(name: str, folder: Path) -> Path:
    """Write the model and a word tokenizer as `from_pretrained` reads them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)
    tiny_model(name).save_pretrained(folder)
    return folder


def decoder_layer(name: str) -> str:
    """The class name of the model's decoder layer, for wrap policies."""
    return CLASSES[name][1].replace("ForCausalLM", "DecoderLayer")
