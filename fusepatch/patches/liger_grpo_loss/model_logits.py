"""What a model does to the output of its lm_head, which no release of Liger's loss is told: read off the model.

TRL hands the loss hidden states and `lm_head.weight`. Gemma 2 caps the logits, Cohere multiplies them, Granite divides
them, in their own forward, which the fused loss goes round. The handler of `GRPOTrainer.compute_liger_loss` reads the
model and the handlers of the loss, which run inside of it, ask here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

from fusepatch import settings
from fusepatch.engine import ledger
from fusepatch.engine.patch import Proceed

ID = "liger.grpo_loss"

MULTIPLY: Mapping[str, str] = {
    "cohere": "logit_scale",
    "cohere2": "logit_scale",
    "cohere2_moe": "logit_scale",
    "cohere_compass": "logit_scale",
    "falcon_h1": "lm_head_multiplier",
    "hyperclovax": "logits_scaling",
}
"""By the model type of the text configuration: the field that the logits are multiplied by."""

DIVIDE: Mapping[str, str] = {
    "granite": "logits_scaling",
    "granite_swa": "logits_scaling",
    "granitemoe": "logits_scaling",
    "granitemoe_swa": "logits_scaling",
    "granitemoehybrid": "logits_scaling",
    "granitemoeshared": "logits_scaling",
}
"""The same, for a field that they are divided by."""

SCALES = frozenset({*MULTIPLY.values(), *DIVIDE.values(), "output_multiplier"})
CAP = "final_logit_softcapping"


class ModelLogits(NamedTuple):
    """The map from the output of the lm_head to the model's logits: times `scale`, then the soft cap unless it is None."""

    scale: float = 1.0
    final_logit_softcapping: float | None = None

    @property
    def described(self) -> str:
        """What would be missing without it; empty where nothing would."""
        parts = [] if self.scale == 1.0 else [f"logit scale of {self.scale:g}"]
        if self.final_logit_softcapping is not None:
            parts.append(f"{CAP} of {self.final_logit_softcapping:g}")
        return " and ".join(parts)


_current: ContextVar[ModelLogits] = ContextVar("fusepatch_model_logits", default=ModelLogits())  # noqa: B039


def model_logits() -> ModelLogits:
    """Of the model whose loss is being computed; the plain map outside of `compute_liger_loss`."""
    return _current.get()


def compute_liger_loss(proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
    """Handler of TRL's `GRPOTrainer.compute_liger_loss(self, model, inputs)`."""
    if settings.current().grpo_loss == "keep":
        return proceed(*args, **kwargs)
    trainer, model, *_ = inspect.signature(proceed.target.original).bind(*args, **kwargs).arguments.values()
    model = trainer.accelerator.unwrap_model(model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = read(base)
    if found.described:
        ledger.replaced(
            ID, f"{type(base).__name__}: the loss takes the model's {found.described}, which upstream leaves out"
        )
    _report_what_is_dropped(trainer, base)
    token = _current.set(found)
    try:
        return proceed(*args, **kwargs)
    finally:
        _current.reset(token)


def read(model: Any) -> ModelLogits:
    """What this model's own forward does to its logits, by its configuration and by the names that the forward uses."""
    config = model.config.get_text_config()
    used = _names_used(type(model).forward)
    kind = str(config.model_type)
    scale = 1.0
    if kind in MULTIPLY:
        scale = float(getattr(config, MULTIPLY[kind]))
    elif kind in DIVIDE:
        scale = 1.0 / float(getattr(config, DIVIDE[kind]))
    elif SCALES & used:
        ledger.refused(
            ID,
            f"{type(model).__name__} uses {', '.join(sorted(SCALES & used))} in its forward, in a way that is not known here: "
            f"the loss is computed without it, as upstream does; compare with a run without Liger's loss",
        )
    cap = getattr(config, CAP, None) if CAP in used else None
    return ModelLogits(scale, None if cap is None else float(cap))


def _names_used(function: Any) -> frozenset[str]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return frozenset(code.co_names if code is not None else ())


def _report_what_is_dropped(trainer: Any, model: Any) -> None:
    if _has_adapter(getattr(model, "lm_head", None)):
        ledger.refused(
            ID,
            f"the lm_head of {type(model).__name__} carries an adapter, and the fused loss reads the base weight alone: the "
            f"adapter is left out of the loss and gets no gradient; take lm_head out of target_modules, or train without "
            f"Liger's loss",
        )
    if getattr(trainer, "aux_loss_enabled", False):
        ledger.refused(
            ID,
            f"the auxiliary router loss of {type(model).__name__} is enabled, and the fused loss leaves it out; set "
            f"router_aux_loss_coef=0, or train without Liger's loss",
        )


def _has_adapter(module: Any) -> bool:
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None or not isinstance(module, tuners.BaseTunerLayer):
        return False
    return bool(module.active_adapters) and not module.disable_adapters and not module.merged
