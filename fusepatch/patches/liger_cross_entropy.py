"""Whether the cross-entropy that Liger puts in place is one that the model's loss is computed with.

Most functions of Liger replace `torch.nn.functional.cross_entropy`, at which every loss of transformers arrives. Some
replace the name `CrossEntropyLoss` in the modeling module instead (in 0.8.5: gemma3, llama4, ministral, mistral,
nemotron, paligemma, qwen2_vl, qwen2_5_vl), which the models of newer transformers do not use.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

NAME = "CrossEntropyLoss"
PREFIX = "apply_liger_kernel_to_"
WITH_A_LOSS = ("ForCausalLM", "ForConditionalGeneration")


def acts(model: Any, function: str) -> bool:
    """Whether the loss of `model` goes through a cross-entropy of Liger's, after Liger's `function` put it in place.

    Without a model, the classes that the function is for are looked at; true where they cannot be found.
    """
    functional = vars(sys.modules["torch.nn.functional"])["cross_entropy"]
    if str(getattr(functional, "__module__", "")).startswith("liger_kernel."):
        return True
    classes = [type(model)] if model is not None else _classes(function.removeprefix(PREFIX))
    return not classes or any(NAME in _names(code) for cls in classes for code in _codes(cls))


def _classes(kind: str) -> list[type]:
    module = sys.modules.get(f"transformers.models.{kind}.modeling_{kind}")
    return [
        value
        for name, value in ({} if module is None else vars(module)).items()
        if name.endswith(WITH_A_LOSS) and isinstance(value, type)
    ]


def _codes(cls: type) -> Iterator[CodeType]:
    """The code of every method of a class, and of every function beside it in a modeling module."""
    for base in cls.__mro__:
        module = sys.modules.get(base.__module__) if base.__module__.startswith("transformers.models.") else None
        beside = {} if module is None else vars(module)
        for value in (*vars(base).values(), *beside.values()):
            function = inspect.unwrap(value) if isinstance(value, FunctionType) else None
            if isinstance(function, FunctionType):
                yield function.__code__


def _names(code: CodeType) -> frozenset[str]:
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*map(_names, nested))
