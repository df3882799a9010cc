"""A Qwen3 small enough for a CPU, a tokenizer of bytes made on the spot, and text that ships with Python."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

SEED = 7


def text(length: int) -> list[str]:
    """The first `length` characters of each topic of Python's own language reference, markup left out."""
    found = []
    for topic in topics.values():
        paragraphs = [" ".join(part.split()) for part in topic.split("\n\n")]
        prose = [part for part in paragraphs if len(part) >= length and part.isascii() and "***" not in part]
        found += [part[:length] for part in prose[:1]]
    return found


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and one each to pad and to end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )


def model() -> Qwen3ForCausalLM:
    """Two layers of width 64 with seeded weights in float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    words = tokenizer()
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
        pad_token_id=words.pad_token_id,
        eos_token_id=words.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)
