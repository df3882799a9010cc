"""What TRL's `compute_liger_loss` leaves out of a training step that the trainer's native path has: said once, not
mended."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping
from types import CodeType
from typing import Any

from fusepatch.engine import ledger

ID = "liger.grpo_loss"

LOG_PROBABILITIES = ("_get_per_token_logps_and_entropies", "_get_per_token_logps")
"""The native path's call of the model; the second up to TRL 0.18."""
HIDDEN_STATES = "_get_last_hidden_state"
OBJECTIVE = "_compute_loss"


def report(trainer: Any, model: Any, inputs: Mapping[str, Any], compute_liger_loss: Any) -> None:
    """Say (an error under FUSEPATCH_STRICT=1) what the native path would take into account here and Liger's does
    not."""
    name = type(model).__name__
    if has_adapter(getattr(model, "lm_head", None)):
        ledger.refused(
            ID,
            f"the lm_head of {name} carries an adapter, and the fused loss reads the base weight alone: the adapter is "
            "left out of the loss and gets no gradient; remove lm_head from target_modules, or train without Liger's "
            "loss",
        )
    if getattr(trainer, "aux_loss_enabled", False):
        ledger.refused(
            ID,
            f"the auxiliary router loss of {name} is enabled, and the fused loss leaves it out; set "
            f"router_aux_loss_coef=0, or train without Liger's loss",
        )
    dropped = dropped_inputs(trainer, inputs)
    if dropped:
        ledger.refused(
            ID,
            f"TRL's Liger path leaves {', '.join(dropped)} of this batch out of its call of {name}, which the native "
            "path passes: the hidden states, and so the loss, may differ; train this model without Liger's loss",
        )
    for method in overridden(trainer, compute_liger_loss):
        ledger.refused(
            ID,
            f"{type(trainer).__name__} has a {method} of its own, which TRL does not call while Liger's loss is on: "
            "what it computes is left out, and the objective is TRL's GRPO loss; train without Liger's loss to use "
            "yours",
        )


def dropped_inputs(trainer: Any, inputs: Mapping[str, Any]) -> list[str]:
    """Entries of the batch that the native path of this TRL passes to the model and the Liger path does not.

    Read from the code of both: an input of a model is a parameter of the native path's method, and the key under which
    it is passed on is a string there.
    """
    native = next((found for name in LOG_PROBABILITIES if (found := _code(getattr(trainer, name, None)))), None)
    fused = _code(getattr(trainer, HIDDEN_STATES, None))
    objective = _code(getattr(trainer, OBJECTIVE, None))
    if native is None or fused is None or objective is None:
        return []
    passed = set(_parameters(native)) & _strings(native) & _strings(objective)
    return sorted(name for name in passed - _strings(fused) if inputs.get(name) is not None)


def overridden(trainer: Any, compute_liger_loss: Any) -> list[str]:
    """Methods of the native objective that are not TRL's own here, where the fused objective is."""
    own = _code(compute_liger_loss)
    fused = _code(trainer.compute_liger_loss)
    if own is None or fused is None or fused.co_filename != own.co_filename:
        return []
    methods = {name: getattr(trainer, name) for name in (OBJECTIVE, *LOG_PROBABILITIES) if hasattr(trainer, name)}
    return [name for name, method in methods.items() if getattr(_code(method), "co_filename", None) != own.co_filename]


def has_adapter(module: Any) -> bool:
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None or not isinstance(module, tuners.BaseTunerLayer):
        return False
    return bool(module.active_adapters) and not module.disable_adapters and not module.merged


def _code(function: Any) -> CodeType | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _parameters(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


@functools.lru_cache(maxsize=32)
def _strings(code: CodeType) -> frozenset[str]:
    """The strings in a function's code; of its keywords in calls too."""
    found: set[str] = set()
    for constant in code.co_consts:
        if isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, tuple):
            found.update(part for part in constant if isinstance(part, str))
        elif isinstance(constant, CodeType):
            found |= _strings(constant)
    return frozenset(found)
