"""A model's own logits of a few rows of hidden states, beside what its lm_head alone gives for them.

The model's forward runs once with its backbone exchanged for the rows, on a copy that shares every module and parameter
with the model: the model itself is not touched, and neither hooks of the model or its backbone nor collectives run.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

from fusepatch.patches.liger_grpo_loss import sharded

if TYPE_CHECKING:
    import torch

TARGETS = (0.03, 1.0, 30.0, 300.0)
"""The largest raw output of each pair of rows: the small ones show a scale, the large ones a cap."""
COLUMNS_TRIED = 512
HALF_TOLERANCE, FLOAT_TOLERANCE = 0.015, 2e-3
"""Largest difference that rounding explains, relative to the largest logit of a row: a few operations in bfloat16, or
one product of float32 operands in TF32."""
ROUNDED_OPERANDS = 5e-5
"""A product of half-precision operands differs by more than this from the same product in float32."""


class NotComparedError(Exception):
    """Why the model's own logits could not be had."""


class Map(NamedTuple):
    """Times `scale`, then `cap * tanh(x / cap)` unless `cap` is None; and the names that the two have in the
    configuration."""

    scale: float = 1.0
    cap: float | None = None
    scale_name: str = ""
    cap_name: str = ""

    def __call__(self, raw: torch.Tensor) -> torch.Tensor:
        scaled = raw * self.scale
        return scaled if self.cap is None else (scaled / self.cap).tanh() * self.cap


class Comparison(NamedTuple):
    """raw, logits: float32 [R, V], the output of the lm_head and the model's own logits of the same rows."""

    raw: torch.Tensor
    logits: torch.Tensor
    tolerance: float
    autocast: bool

    def difference(self, candidate: Map) -> float:
        """The largest one, relative to the largest logit of its row; infinite where a value is not finite."""
        wanted = candidate(self.raw)
        largest = wanted.abs().amax(1)
        found = float(((self.logits - wanted).abs().amax(1) / largest).amax())
        return found if math.isfinite(found) else math.inf

    def holds(self, candidate: Map) -> bool:
        return self.difference(candidate) <= self.tolerance


def compare(model: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Comparison:
    """The model's own logits and the head's, of rows with the width, dtype and device of `hidden`.

    The random state stays as it is, no gradient is made, and every process of a run computes the same rows.

    Raises:
        NotComparedError: this model cannot be asked, or not without side effects.
    """
    import torch

    name, backbone = _backbone(model)
    forward = _own_forward(model)
    _assure_no_side_effects(model, name, weight)
    devices = [hidden.device] if hidden.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        try:
            rows = _rows(hidden, weight)
            raw = torch.nn.functional.linear(*_as_the_head_takes_them(rows, weight, bias)).float()
            logits = _logits(model, forward, name, _Backbone(backbone, rows.unsqueeze(0)))
        except NotComparedError:
            raise
        except Exception as error:
            raise NotComparedError(f"{type(error).__name__}: {error}") from error
    if logits.shape != raw.shape:
        raise NotComparedError(f"its logits have shape {tuple(logits.shape)}, the head's {tuple(raw.shape)}")
    autocast = _autocast(hidden)
    half = autocast or any(tensor.element_size() < 4 for tensor in (weight, logits))
    return Comparison(raw, logits.float(), HALF_TOLERANCE if half else FLOAT_TOLERANCE, autocast)


def explained(comparison: Comparison, numbers: Mapping[str, float]) -> Map | None:
    """The scale and the cap, out of the numbers of the model's configuration, that turn the raw output into the
    logits."""
    import torch

    raw, logits = comparison.raw, comparison.logits
    if not bool(torch.isfinite(logits).all()):
        return None
    spread = torch.linspace(0, raw.shape[1] - 1, COLUMNS_TRIED, device=raw.device).long()
    columns = torch.cat([spread, raw.abs().argmax(1)])
    few = comparison._replace(raw=raw[:, columns], logits=logits[:, columns])
    small, its_logits = raw[:2], logits[:2]
    large_enough = small.abs() >= small.abs().amax(1, keepdim=True) / 2
    scale = float((its_logits[large_enough] / small[large_enough]).median())
    highest = float(logits.abs().max())
    scales = [("", 1.0), *numbers.items(), *((name, 1.0 / value) for name, value in numbers.items())]
    caps = [("", None), *((name, cap) for name, cap in numbers.items() if cap > highest * (1 - comparison.tolerance))]
    candidates = [
        Map(number, cap, scale_name, cap_name)
        for scale_name, number in scales
        if abs(number - scale) <= 2 * comparison.tolerance * abs(scale)
        for cap_name, cap in caps
    ]
    # Of those that give the same, the one with the fewest parts, and with a name that speaks of logits.
    candidates.sort(
        key=lambda one: (bool(one.scale_name) + bool(one.cap_name), "logit" not in one.scale_name + one.cap_name)
    )
    best = min(candidates, key=few.difference, default=None)
    return best if best is not None and comparison.holds(best) else None


class _Backbone:
    """Stands where the model's forward calls its backbone, and answers with the rows. Everything else of it is the real
    one's."""

    def __init__(self, real: Any, rows: torch.Tensor) -> None:
        self._real = real
        self._rows = rows
        self.calls = 0

    def __call__(self, *_: Any, **__: Any) -> _BackboneOutput:
        self.calls += 1
        return _BackboneOutput(self._rows)

    forward = __call__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _BackboneOutput:
    """What a backbone returns in transformers, with the hidden states alone."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.last_hidden_state = rows

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _backbone(model: Any) -> tuple[str, Any]:
    """The submodule that TRL takes the hidden states from, and its name."""
    backbone = getattr(model, "base_model", model)
    if backbone is model:
        backbone = getattr(model, "model", None)
    for name, module in model._modules.items():
        if module is backbone and module is not None:
            return name, module
    raise NotComparedError("its backbone is not a direct submodule")


def _own_forward(model: Any) -> Callable[..., Any]:
    """The forward that a call of the model would run, as a function of the model."""
    forward = vars(model).get("forward")
    if forward is None:
        function: Callable[..., Any] = type(model).forward
        return function
    if isinstance(forward, MethodType) and forward.__self__ is model:
        return forward.__func__
    raise NotComparedError("its forward has been replaced by one that is bound to something else")


def _assure_no_side_effects(model: Any, backbone: str, weight: torch.Tensor) -> None:
    import torch

    head = getattr(model, "lm_head", None)
    own = getattr(head, "weight", None)
    if not isinstance(own, torch.Tensor) or own.data_ptr() != weight.data_ptr() or own.shape != weight.shape:
        raise NotComparedError("the loss was not given the weight of its lm_head")
    alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    for module in _tail(model, backbone):
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise NotComparedError(f"its {type(module).__name__} is compiled")
        if hasattr(module, "_fsdp_wrapped_module"):
            raise NotComparedError("its head is wrapped by FSDP1")
        if not alone and (module._forward_pre_hooks or module._forward_hooks):
            raise NotComparedError(f"its {type(module).__name__} has hooks, which may communicate")
        for parameter in module._parameters.values():
            if parameter is not None and (sharded.is_sharded(parameter) or hasattr(parameter, "ds_id")):
                raise NotComparedError("its head is sharded")


def _tail(model: Any, backbone: str) -> Iterator[Any]:
    """Every module outside of the backbone but the model itself, whose own hooks do not run."""
    for name, child in model._modules.items():
        if name != backbone and child is not None:
            yield from child.modules()


def _rows(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows [R, H] of fixed pseudo-random hidden states, two for each of TARGETS."""
    import torch

    made = torch.Generator().manual_seed(0)
    rows = torch.randn(2 * len(TARGETS), hidden.shape[-1], generator=made).to(hidden.device)
    largest = torch.nn.functional.linear(rows.to(weight.dtype), weight).float().abs().amax(1)
    wanted = torch.tensor(TARGETS, device=hidden.device).repeat_interleave(2)
    rows = (rows * (wanted / largest).unsqueeze(1)).to(hidden.dtype)
    if not bool(torch.isfinite(rows).all()):
        raise NotComparedError("its head gives zeros, or values that are not finite")
    return rows


def _as_the_head_takes_them(rows: torch.Tensor, weight: torch.Tensor, bias: Any) -> tuple[torch.Tensor, ...]:
    return rows.to(weight.dtype), weight, bias


def _logits(model: Any, forward: Callable[..., Any], name: str, stand_in: _Backbone) -> torch.Tensor:
    import torch

    # Not copy.copy: FSDP2's classes construct their module anew for it.
    twin = object.__new__(type(model))
    vars(twin).update(vars(model))
    vars(twin)["_modules"] = {**model._modules, name: stand_in}
    rows = stand_in._rows
    wanted = {
        "input_ids": torch.zeros(rows.shape[:2], dtype=torch.int64, device=rows.device),
        "use_cache": False,
        "output_router_logits": False,
    }
    taken = inspect.signature(forward).parameters
    output = forward(twin, **{key: value for key, value in wanted.items() if key in taken})
    if stand_in.calls != 1:
        raise NotComparedError(f"its forward calls the backbone {stand_in.calls} times")
    logits: torch.Tensor = output.logits
    return logits.reshape(-1, logits.shape[-1])


def _autocast(hidden: torch.Tensor) -> bool:
    from fusepatch.loss.products import autocast_dtype

    return autocast_dtype(hidden.device) is not None
