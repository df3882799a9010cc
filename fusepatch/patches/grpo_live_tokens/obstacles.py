"""Why rows are not moved, not regrouped, or not dropped: each reason as words for the record.

Deny by default: a model type that no test has compared is left to upstream, and so is every setting that is not known
here.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from fusepatch.engine import versions
from fusepatch.patches.upstreams import TRL

MOVED = frozenset(
    {
        "bamba",
        "bloom",
        "cohere2",
        "deepseek_v3",
        "falcon",
        "falcon_h1",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "glm4",
        "gpt_neox",
        "gpt_oss",
        "gptj",
        "granite",
        "granitemoehybrid",
        "jamba",
        "lfm2",
        "llama",
        "mamba",
        "mamba2",
        "minimax",
        "mistral",
        "mixtral",
        "mpt",
        "nemotron_h",
        "olmo2",
        "opt",
        "phi3",
        "qwen2",
        "qwen2_5_vl",
        "qwen3",
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_vl",
        "smollm3",
    }
)
"""Model types of which a test has seen that a row moved to the left gives what upstream's padded row gives."""

NOT_MOVED: Mapping[str, str] = {
    "gpt2": "it has learned absolute positions, counted from the first column",
    "gpt_bigcode": "it has learned absolute positions, counted from the first column",
    "llama4_text": "it scales attention by the position (attn_temperature_tuning)",
    "ministral3": "it scales attention by the position (llama_4_scaling_beta)",
    "recurrent_gemma": "its recurrent state runs through the padding",
    "rwkv": "its recurrent state runs through the padding",
}
"""Model types whose padded rows give something else than the row alone, which moved rows give."""

ROPE_TYPES = frozenset({"default", "linear", "llama3", "mrope", "yarn"})
"""Rotary embeddings that depend on the distance of two tokens alone, whatever the width of the batch."""

ATTENTION = frozenset({"eager", "flash_attention_2", "flash_attention_3", "sdpa"})

LOSS_TYPES = frozenset({"bnpo", "cispo", "dapo", "dr_grpo", "grpo", "luspo", "sapo", "vespo"})
"""Loss types that are proportional to the advantage, row by row."""

_OF_ALL_ROWS = frozenset({"bnpo"})
"""Loss types that divide by the number of tokens of the micro-batch."""

_OF_ITEMS = frozenset({"cispo", "dapo", "vespo"})
"""Loss types that divide by `num_items_in_batch`; Liger's loss divides by the micro-batch where it is not given
that."""


def of_call(others: Mapping[str, Any]) -> str | None:
    """Why the rows of one call stay where they are: `others` are its arguments beside the tokens."""
    if others.get("compute_aux_loss"):
        return "the auxiliary router loss counts padding where there is no mask"
    given = [
        name for name, value in others.items() if not (name == "compute_entropy" or value is None or value is False)
    ]
    return f"the model gets {', '.join(sorted(given))} too" if given else None


def of_trainer(trainer: Any) -> str | None:
    """Why the rows of a trainer stay where they are."""
    if getattr(trainer, "pad_to_multiple_of", None) is not None:
        return f"pad_to_multiple_of={trainer.pad_to_multiple_of} asks for fixed widths"
    if getattr(trainer.args, "torch_compile", False):
        return "torch_compile=True: each width would be compiled"
    if _is_compiled(trainer.model_wrapped):
        return "the model is compiled: each width would be compiled"
    if getattr(trainer, "loss_type", None) == "luspo" and not _masks_luspo(trainer):
        return "loss_type=luspo averages over padding columns too in this release, or in Liger's loss"
    return None


def _masks_luspo(trainer: Any) -> bool:
    """Whether nothing at padding reaches the loss: it is masked, or has one value a sequence."""
    whole = trainer.importance_sampling_level == "sequence" and trainer.beta == 0.0
    if whole and trainer.top_entropy_quantile == 1.0 and not trainer.use_vllm:
        return True
    return versions.is_within(_version(), ">=1.10") is True and not uses_liger(trainer)


def of_settings(model: Any, unwrapped: Any, base: Any) -> str | None:
    """Why the rows stay where they are, by what a model is set to now. unwrapped: perhaps PEFT's; base: transformers'
    own."""
    kind = getattr(base.config.get_text_config(), "_attn_implementation", None)
    if kind is not None and kind not in ATTENTION:
        return f"the attention implementation {kind} is not known here"
    name = type(base).__name__
    if any(config.is_prompt_learning for config in getattr(unwrapped, "peft_config", {}).values()):
        return f"{name}: PEFT's prompt learning puts tokens before each row and needs the mask"
    if _is_compiled(model):
        return f"{name} is compiled: each width would be compiled"
    return None


def _is_compiled(model: Any) -> bool:
    """Whether torch.compile was called on a module, or with it: either leaves a mark."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules
        for module in model.modules()
    )


def of_model(base: Any) -> str | None:
    """Why the rows for a model stay where they are, by what it is. base: transformers' own, below all wrappers."""
    name = type(base).__name__
    # FSDP2 makes a class of its own above the model's.
    own = next(kind for kind in type(base).__mro__ if not kind.__module__.startswith("torch.distributed."))
    if not own.__module__.startswith("transformers.models."):
        return f"{name} is not one of transformers' own classes"
    config = base.config.get_text_config()
    for kind in (str(base.config.model_type), str(config.model_type)):
        if kind in NOT_MOVED:
            return f"{name}: {NOT_MOVED[kind]}"
    if str(base.config.model_type) not in MOVED:
        return f"{name}: no test has compared moved rows with padded ones for the model type {base.config.model_type}"
    fields = config.to_dict()
    wrong = sorted(set(_rope_types(fields)) - ROPE_TYPES)
    if wrong:
        return f"{name}: rotary embeddings of the type {', '.join(wrong)} depend on the width of the batch"
    for field in ("attn_temperature_tuning", "llama_4_scaling_beta"):
        if _has(fields, field):
            return f"{name}: {field} scales attention by the position"
    return None


def _rope_types(fields: Any) -> Iterator[str]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _rope_types(value)
        elif name == "rope_type" or (name == "type" and isinstance(value, str)):
            yield str(value)


def _has(fields: Mapping[str, Any], name: str) -> bool:
    return bool(fields.get(name)) or any(isinstance(value, dict) and _has(value, name) for value in fields.values())


def of_dropping(trainer: Any, module: str, class_name: str) -> str | None:
    """Why a sequence of advantage 0 may have a gradient, or its gradient may not be known to be 0."""
    own = of_own_loss(trainer, module, class_name)
    if own is not None:
        return own
    if class_name == "GRPOTrainer" and trainer.beta != 0.0:
        return f"beta={trainer.beta:g}: its KL term has a gradient"
    shared = _of_statistics(trainer)
    if shared is not None:
        return shared
    if trainer.accelerator.num_processes > 1 and has_list_of_experts(trainer.model):
        return "experts that are a ModuleList run on some ranks only, where a micro-batch is short"
    return None


def of_regrouping(trainer: Any, module: str, class_name: str) -> str | None:
    """Why rows stay in the micro-batches that upstream put them in."""
    own = of_own_loss(trainer, module, class_name)
    if own is not None:
        return own
    shared = _of_statistics(trainer)
    if shared is not None:
        return shared
    loss_type = getattr(trainer, "loss_type", None)
    if class_name == "GRPOTrainer" and loss_type in _OF_ALL_ROWS:
        return f"loss_type={loss_type} divides by the tokens of each micro-batch"
    if class_name == "GRPOTrainer" and loss_type in _OF_ITEMS and uses_liger(trainer):
        function = getattr(type(trainer), "compute_liger_loss", None)
        if function is not None and not _mentions(inspect.unwrap(function).__code__, "num_items_in_batch"):
            return f"Liger's loss gets no num_items_in_batch, and divides {loss_type} by the tokens of each micro-batch"
    return None


_LOSS_METHODS = (
    "compute_loss",
    "_compute_loss",
    "compute_liger_loss",
    "_get_per_token_logps",
    "_get_per_token_logps_and_entropies",
    "_get_last_hidden_state",
)


def of_own_loss(trainer: Any, module: str, class_name: str) -> str | None:
    """Why the loss is not known: a class derived from the trainer, or another patch, has its own."""
    defining = vars(sys.modules[module])[class_name]
    for name in _LOSS_METHODS:
        function = getattr(defining, name, None)
        if function is None:
            continue
        if name in vars(trainer) or getattr(type(trainer), name) is not function:
            return f"{type(trainer).__name__} has a {name} of its own"
        if not all(_is_known(link) for link in _links(function)):
            return f"{class_name}.{name} is not TRL's own"
    if class_name == "GRPOTrainer" and trainer.loss_type not in LOSS_TYPES:
        return f"loss_type={trainer.loss_type} is not known here"
    return _of_release()


@functools.cache
def _version() -> str | None:
    found = versions.find(TRL)
    return None if found is None else found.version


def _of_release() -> str | None:
    if versions.is_within(_version(), TRL.tested):
        return None
    return f"TRL {_version()} is not a tested release ({TRL.tested}), and may have a loss that is not known here"


def _of_statistics(trainer: Any) -> str | None:
    if getattr(trainer, "_entropy_bonus_enabled", False):
        return "the entropy bonus takes every token's entropy"
    if getattr(trainer, "top_entropy_quantile", 1.0) < 1.0:
        return f"top_entropy_quantile={trainer.top_entropy_quantile:g} compares the entropies of all tokens"
    if getattr(trainer, "aux_loss_enabled", False):
        return "the auxiliary router loss takes every token"
    return None


def has_list_of_experts(model: Any) -> bool:
    """Whether each expert is a module of its own, which runs only where a token chose it."""
    from torch.nn import ModuleList

    return any(name.endswith("experts") and isinstance(module, ModuleList) for name, module in model.named_modules())


def uses_liger(trainer: Any) -> bool:
    return bool(getattr(trainer, "use_liger_loss", False) or getattr(trainer, "use_liger_kernel", False))


def _links(function: Any) -> Iterator[Any]:
    """A function and everything that it wraps."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _is_known(function: Any) -> bool:
    """Whether TRL or this package defines it."""
    code = getattr(function, "__code__", None)
    folders = [os.path.dirname(str(sys.modules[name].__file__)) + os.sep for name in ("trl", "fusepatch")]
    return code is not None and code.co_filename.startswith(tuple(folders))


def _mentions(code: Any, name: str) -> bool:
    constants = [
        part for constant in code.co_consts for part in (constant if isinstance(constant, tuple) else (constant,))
    ]
    return name in constants or name in code.co_names
