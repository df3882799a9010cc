"""Keep an attention mask from a model, for the time of one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@contextmanager
def without_mask(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Inside, these modules get no attention mask when they are called."""
    with ExitStack() as stack:
        for module in modules:
            hook = module.register_forward_pre_hook(_drop_mask, prepend=True, with_kwargs=True)
            stack.callback(hook.remove)
        yield


def _drop_mask(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "attention_mask": None} if "attention_mask" in kwargs else kwargs
