"""What a model does to the output of its lm_head, which no release of Liger's loss is told.

TRL hands the loss hidden states and `lm_head.weight`. Gemma 2 caps the logits, Cohere multiplies them, Granite divides
them, in their own forward, which the fused loss does not call. The handler of `GRPOTrainer.compute_liger_loss` says
which model is trained, and the handlers of the loss, which run inside of it, ask here. At the first call for a model
its own logits of a few rows are compared with the head's; what its names say is believed only where that cannot be
done.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from fusepatch import settings
from fusepatch.engine import ledger
from fusepatch.engine.patch import Proceed
from fusepatch.patches.liger_grpo_loss import left_out, model_tail
from fusepatch.patches.liger_grpo_loss.model_tail import Map, NotComparedError

if TYPE_CHECKING:
    import torch

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

CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Fields of the configuration that cap the logits where the model's forward uses them."""

SPEAKS_OF_LOGITS = re.compile(
    r"(?=.*(logit|lm_head|output))(?=.*(cap|scal|multipl))(?!.*(attn|attention|router|gate|init))"
)
"""Fields that may change the logits of a model that cannot be asked for them."""


class ModelLogits(NamedTuple):
    """From the output of the lm_head to the model's logits, and what there is to say of it at each call.

    replaced: what the loss takes that upstream leaves out. refused: what neither takes. unchecked: why the model was
    not asked.
    understood: whether `map` gives the model's logits, as far as is known. float32_head: whether the model multiplies
    its half-precision hidden states by a float32 head in float32.
    """

    map: Map = Map()
    replaced: str = ""
    refused: str = ""
    unchecked: str = ""
    understood: bool = True
    float32_head: bool = False

    @property
    def described(self) -> str:
        """What would be missing without the map; empty where nothing would."""
        parts = [] if self.map.scale == 1.0 else [f"logit scale of {self.map.scale:g}"]
        if self.map.cap is not None:
            parts.append(f"{self.map.cap_name} of {self.map.cap:g}")
        return " and ".join(parts)

    def report(self) -> None:
        """Record what there is to say, for one call."""
        if self.unchecked:
            ledger.fallback(ID, self.unchecked)
        if self.replaced:
            ledger.replaced(ID, self.replaced)
        if self.refused:
            ledger.refused(ID, self.refused)


class _Asked(NamedTuple):
    """What was found for a model, and what it was found with."""

    forward: Any
    head: Any
    found: ModelLogits


_current: ContextVar[Any] = ContextVar("fusepatch_model_in_training", default=None)
_asked: WeakKeyDictionary[Any, _Asked] = WeakKeyDictionary()


def compute_liger_loss(proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
    """Handler of TRL's `GRPOTrainer.compute_liger_loss(self, model, inputs)`."""
    if settings.current().head == "keep":
        return proceed(*args, **kwargs)
    trainer, model, inputs = inspect.signature(proceed.target.original).bind(*args, **kwargs).arguments.values()
    model = trainer.accelerator.unwrap_model(model)
    model = getattr(model, "_orig_mod", model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    left_out.report(trainer, base, inputs, proceed.target.original)
    token = _current.set(base)
    try:
        return proceed(*args, **kwargs)
    finally:
        _current.reset(token)


def model_logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> ModelLogits:
    """Of the model whose loss is being computed from these; the plain map outside of `compute_liger_loss`."""
    model = _current.get()
    if model is None:
        return ModelLogits()
    key = (vars(model).get("forward", type(model).forward), getattr(model, "lm_head", None))
    asked = _asked.get(model)
    if asked is None or asked[:2] != key:
        asked = _Asked(*key, read(model, hidden, weight, bias))
        _asked[model] = asked
    return asked.found


def read(model: Any, hidden: Any = None, weight: Any = None, bias: Any = None) -> ModelLogits:
    """Compare the model's own logits of a few rows with the head's, and say what is between them.

    hidden: hidden states of the dtype and device that the loss gets; weight, bias: the head that it gets. All three are
    the lm_head's own where they are not given.
    """
    if weight is None:
        weight, bias = model.lm_head.weight, model.lm_head.bias
        hidden = weight
    name = type(model).__name__
    named = by_name(model)
    try:
        if left_out.has_adapter(getattr(model, "lm_head", None)):
            raise NotComparedError("its lm_head carries an adapter")
        compared = model_tail.compare(model, hidden, weight, bias)
    except NotComparedError as error:
        return _unchecked(model, named, str(error))
    numbers = _numbers(model)
    found = next((one for one in (named, Map()) if compared.holds(one)), None) or model_tail.explained(
        compared, numbers
    )
    rows, largest = len(compared.raw), compared.difference(Map())
    if found is None:
        return ModelLogits(
            refused=f"the logits of {name} are not what its lm_head gives: for {rows} rows of hidden states they "
            f"differ by up to {largest:.2g} of the largest logit, which no soft cap or scale in its configuration "
            "explains; upstream's own forward computes the loss from the lm_head alone: log-probabilities differ from "
            "the model's; train this model without Liger's loss",
            understood=False,
        )
    logits = ModelLogits(found, float32_head=_multiplies_in_float32(compared, found, hidden, weight))
    taken = [logits.described] if logits.described else []
    taken += ["product in float32"] if logits.float32_head else []
    if not taken:
        return logits
    return logits._replace(
        replaced=f"{name}: the loss takes the model's {' and '.join(taken)}, which upstream leaves out; compared with "
        f"the model's own logits of {rows} rows: they differ by {compared.difference(found):.1g} of the largest logit, "
        f"without it by {largest:.1g}"
    )


def by_name(model: Any) -> Map:
    """What this model's own forward does to its logits, by its configuration and by the names that the forward uses."""
    config = model.config.get_text_config()
    kind = str(config.model_type)
    scale, scale_name = 1.0, ""
    if kind in MULTIPLY or kind in DIVIDE:
        scale_name = MULTIPLY.get(kind) or DIVIDE[kind]
        number = getattr(config, scale_name)
        scale = 1.0 if number is None else float(number)
        scale = 1.0 / scale if kind in DIVIDE else scale
    caps = [
        name for name in CAPS if name in _names_used(type(model).forward) and getattr(config, name, None) is not None
    ]
    cap_name = caps[0] if caps else ""
    return Map(scale, float(getattr(config, cap_name)) if caps else None, scale_name, cap_name)


def _unchecked(model: Any, named: Map, reason: str) -> ModelLogits:
    name = type(model).__name__
    logits = ModelLogits(named, unchecked=f"the logits of {name} were not compared with its lm_head's: {reason}")
    if logits.described:
        logits = logits._replace(
            replaced=f"{name}: the loss takes the model's {logits.described}, which upstream leaves out; known by its "
            "name"
        )
    config = model.config.get_text_config().to_dict()
    known = {named.scale_name, named.cap_name}
    suspicious = [
        field
        for field in sorted(config.keys() - known)
        if SPEAKS_OF_LOGITS.match(field) and _changes_something(config[field])
    ]
    if not suspicious:
        return logits
    return logits._replace(
        refused=f"the configuration of {name} sets {', '.join(suspicious)}, which fusepatch does not know, and its "
        f"logits could not be compared with its lm_head's ({reason}): the loss is computed without it, as upstream "
        "does; compare with a run without Liger's loss"
    )


def _changes_something(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value not in (0, 1)


def _numbers(model: Any) -> dict[str, float]:
    config = model.config.to_dict() | model.config.get_text_config().to_dict()
    return {
        name: float(value)
        for name, value in config.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    }


def _multiplies_in_float32(
    compared: model_tail.Comparison, found: Map, hidden: torch.Tensor, weight: torch.Tensor
) -> bool:
    if hidden.element_size() >= 4 or weight.element_size() < 4 or compared.autocast:
        return False
    return compared.difference(found) < model_tail.ROUNDED_OPERANDS


def _names_used(function: Any) -> frozenset[str]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return frozenset(code.co_names if code is not None else ())
