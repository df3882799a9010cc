"""The real Trainer of transformers and the real SFT and GRPO trainers of TRL, on a tiny model and a few lines of
text."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

STEPS = 20
MIDDLE = 10
WORDS = ("<pad>", "<bos>", "<eos>", "<unk>", *(f"w{index}" for index in range(44)))


def tiny_model() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.LlamaConfig(vocab_size=len(WORDS), num_key_value_heads=2, **shape, **special)
    return transformers.LlamaForCausalLM(config)


def words() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    names = ["input_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side="left", model_input_names=names, **special
    )


def texts(count: int) -> list[str]:
    return [" ".join(f"w{(3 * row + 5 * column * row) % 44}" for column in range(8)) for row in range(count)]


def arguments(kind: Any, folder: Path, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "lr_scheduler_type": "linear",
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": MIDDLE,
        "logging_steps": 1000,
        "report_to": [],
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "optim": "adamw_torch",
        **changes,
    }
    return kind(**{name: value for name, value in values.items() if value is not None})


def plain_trainer(folder: Path, **changes: Any) -> Any:
    rows = [{"input_ids": ids, "labels": ids} for ids in words()(texts(40))["input_ids"]]
    return transformers.Trainer(
        tiny_model(), arguments(transformers.TrainingArguments, folder, **changes), train_dataset=rows
    )


def sft_trainer(folder: Path, **changes: Any) -> Any:
    trl = pytest.importorskip("trl")
    import datasets

    rows = datasets.Dataset.from_dict({"text": texts(40)})
    config = arguments(trl.SFTConfig, folder, max_length=16, dataset_num_proc=None, **changes)
    return trl.SFTTrainer(tiny_model(), args=config, train_dataset=rows, processing_class=words())


def grpo_trainer(folder: Path, **changes: Any) -> Any:
    trl = pytest.importorskip("trl")
    import datasets

    def many_even_words(completions: list[str], **_: Any) -> list[float]:
        return [float(sum(word in text for word in WORDS[4::2])) for text in completions]

    rows = datasets.Dataset.from_dict({"prompt": [text[:11] for text in texts(40)]})
    known = inspect.signature(trl.GRPOConfig).parameters
    options = {"num_generations": 4, "max_completion_length": 6, "beta": 0.0, "use_liger_kernel": False}
    options |= {name: value for name, value in {"max_prompt_length": 8}.items() if name in known}
    config = arguments(trl.GRPOConfig, folder, **options, **changes)
    return trl.GRPOTrainer(
        tiny_model(), reward_funcs=many_even_words, args=config, train_dataset=rows, processing_class=words()
    )


TRAINERS: dict[str, Callable[..., Any]] = {"Trainer": plain_trainer, "SFT": sft_trainer, "GRPO": grpo_trainer}


def weights(trainer: Any) -> Any:
    return torch.cat([param.detach().flatten().double() for param in trainer.model.parameters()])
