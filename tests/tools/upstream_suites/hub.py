"""Stand-ins for what TRL's tests take from the model hub: tiny models from a configuration, and small data sets, as
folders.

`from_pretrained("trl-internal-testing/X")` and `load_dataset("trl-internal-testing/zen", ...)` read a folder of that
name where the working directory has one, so that a test session started beside them needs no network. The real tiny
models have random weights too; the tokenizer here is a byte-level one that is trained on the texts below, with ChatML's
markers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ORGANISATION = "trl-internal-testing"

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' "
    "}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

SENTENCES = (
    ("Beautiful is better than", "ugly."),
    ("Explicit is better than", "implicit."),
    ("Simple is better than", "complex."),
    ("Complex is better than", "complicated."),
    ("Flat is better than", "nested."),
    ("Sparse is better than", "dense."),
    ("Readability", "counts."),
    ("Special cases are not special enough to", "break the rules."),
    ("Practicality beats", "purity."),
    ("Errors should never", "pass silently."),
    ("In the face of ambiguity, refuse", "the temptation to guess."),
    ("There should be one obvious way", "to do it."),
    ("Now is better than", "never."),
    ("If the implementation is hard to explain,", "it is a bad idea."),
    ("If the implementation is easy to explain,", "it may be a good idea."),
    ("Namespaces are", "one honking great idea."),
    ("A test that cannot fail", "proves nothing."),
    ("Measure", "twice."),
    ("A promise needs", "a number."),
)

SMALL = {
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
}
"""The sizes of the real ones."""

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tiny-Qwen2ForCausalLM-2.5": ("Qwen2Config", "Qwen2ForCausalLM", SMALL),
    "tiny-Qwen2ForSequenceClassification-2.5": (
        "Qwen2Config",
        "Qwen2ForSequenceClassification",
        {**SMALL, "num_labels": 1},
    ),
    "tiny-Qwen3ForCausalLM": ("Qwen3Config", "Qwen3ForCausalLM", {**SMALL, "head_dim": 2}),
    "tiny-Qwen3MoeForCausalLM": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**SMALL, "head_dim": 2, **EXPERTS}),
    "tiny-LlamaForCausalLM-3.2": ("LlamaConfig", "LlamaForCausalLM", SMALL),
    "tiny-MistralForCausalLM-0.2": ("MistralConfig", "MistralForCausalLM", SMALL),
    "tiny-GPTNeoXForCausalLM": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {name: value for name, value in SMALL.items() if name != "num_key_value_heads"},
    ),
}
"""By the name on the hub: the classes of configuration and model in transformers, and the sizes."""


def build(folder: Path) -> None:
    """Write `folder/trl-internal-testing/...`; what is there already stays."""
    target = folder / ORGANISATION
    if target.is_dir():
        return
    partial = folder / f"{ORGANISATION}.partial"
    tokenizer = _tokenizer()
    for name, (config, model, sizes) in MODELS.items():
        _write_model(partial / name, config, model, sizes, tokenizer)
    _write_dataset(partial / "zen", dict(_zen()))
    partial.rename(target)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(pair) for pair in SENTENCES], trainer)
    end, _, end_of_turn = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end_of_turn, pad_token=end)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _write_model(folder: Path, config: str, model: str, sizes: dict[str, Any], tokenizer: Any) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    made = getattr(transformers, config)(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **sizes,
    )
    getattr(transformers, model)(made).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _zen() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    def user(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    def assistant(text: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": text}]

    yield "standard_language_modeling", [{"text": f"{start} {end}"} for start, end in SENTENCES]
    yield "standard_prompt_only", [{"prompt": start} for start, _ in SENTENCES]
    yield "standard_prompt_completion", [{"prompt": start, "completion": f" {end}"} for start, end in SENTENCES]
    yield (
        "conversational_language_modeling",
        [{"messages": user(f"{start}?") + assistant(f"{start} {end}")} for start, end in SENTENCES],
    )
    yield "conversational_prompt_only", [{"prompt": user(f"{start}?")} for start, _ in SENTENCES]
    yield (
        "conversational_prompt_completion",
        [{"prompt": user(f"{start}?"), "completion": assistant(f"{start} {end}")} for start, end in SENTENCES],
    )


def _write_dataset(folder: Path, configurations: dict[str, list[dict[str, Any]]]) -> None:
    """A folder as the hub's data sets are: one file per configuration and split, and a card that names them."""
    head = ["---", "configs:"]
    for name, rows in configurations.items():
        (folder / name).mkdir(parents=True)
        # The real ones have 17 rows for training and 2 for the test.
        for split, part in (("train", rows[:17]), ("test", rows[17:])):
            text = "".join(json.dumps(row) + "\n" for row in part)
            (folder / name / f"{split}.jsonl").write_text(text, encoding="utf-8")
        head += [f"- config_name: {name}", "  data_files:"]
        for split in ("train", "test"):
            head += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*head, "---", ""]), encoding="utf-8")
