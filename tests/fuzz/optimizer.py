"""The optimizers that frameworks construct against torch's default: parameters, gradients, states and memory of any
layout.

`check` trains twice in one process: once with optimizers that a framework's module constructs, which fusepatch decides
about, once with those of user code, which it leaves alone. Whatever a fused kernel does to memory that is not as it
presumes shows as a difference.
"""

from __future__ import annotations

import copy
import pickle
import random
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import fusepatch

LAYOUTS = ("contiguous", "transposed", "columns", "every other", "flat", "overlapping", "same")
"""Of parameters. `flat`, `overlapping` and `same` lie in one memory: side by side, one element shared, all shared."""

GRADIENTS = ("alike", "mirrored", "contiguous", "transposed", "expanded", "missing", "sparse")
"""`alike` is what autograd makes, `mirrored` has the parameter's strides even where they leave gaps."""

EVENTS = (
    "nothing",
    "resume",
    "resume without",
    "resume with",
    "copy",
    "pickle",
    "exchange",
    "states",
    "steps",
    "tie",
    "group",
)
"""What happens between the steps: a checkpoint loaded by an optimizer of the same kind, by a plain one, by a patched
one; parameters, states or step counts that are put elsewhere; a group that is added."""


@dataclass(frozen=True)
class Parameter:
    shape: tuple[int, ...]
    layout: str = "contiguous"
    dtype: str = "float32"


@dataclass(frozen=True)
class Case:
    """`gradients` and `events` are by step, `settings` and `flags` keyword arguments, `flags` those of the second
    group."""

    optimizer: str
    parameters: tuple[Parameter, ...]
    gradients: tuple[tuple[str, ...], ...]
    events: tuple[str, ...]
    settings: tuple[tuple[str, Any], ...] = ()
    split: int = 0
    flags: tuple[tuple[str, Any], ...] = ()
    scaled: bool = False
    overflows: tuple[int, ...] = ()
    tensor_rate: bool = False
    seed: int = 0


def sample(rng: random.Random) -> Case:
    """A case; most are ordinary in most respects, so that what is odd in them is reached."""
    name = rng.choice(["Adam", "AdamW", "SGD", "Adagrad"])
    odd = rng.random()
    count = rng.randint(1, 4)
    dtype = rng.choice(["float32"] * 6 + ["float64", "bfloat16"])
    shapes = [(3, 4), (4, 4), (6,), (2, 3, 4), (1, 5), (0,), ()]
    parameters = tuple(
        Parameter(
            rng.choice(shapes),
            rng.choice(LAYOUTS) if odd < 0.5 and rng.random() < 0.6 else "contiguous",
            rng.choice(["float32", "float64"]) if odd > 0.95 else dtype,
        )
        for _ in range(count)
    )
    steps = rng.randint(2, 5)
    gradients = tuple(
        tuple(rng.choice(GRADIENTS) if rng.random() < 0.2 else "alike" for _ in range(count)) for _ in range(steps)
    )
    events = tuple(rng.choice(EVENTS) if rng.random() < 0.4 else "nothing" for _ in range(steps))
    settings: dict[str, Any] = {"lr": 0.01}
    settings["weight_decay"] = rng.choice([0.0, 0.1])
    settings["maximize"] = rng.random() < 0.1
    if name in ("Adam", "AdamW"):
        settings["amsgrad"] = rng.random() < 0.3
    if name == "SGD":
        settings["momentum"] = rng.choice([0.0, 0.9])
        settings["nesterov"] = bool(settings["momentum"]) and rng.random() < 0.3
        if settings["momentum"] and not settings["nesterov"]:
            settings["dampening"] = rng.choice([0.0, 0.5])
    if name == "Adagrad":
        settings["lr_decay"] = rng.choice([0.0, 0.1])
    if rng.random() < 0.1:
        settings.update(rng.choice([{"foreach": True}, {"foreach": False}, {"fused": False}]))
    scaled = rng.random() < 0.25
    return Case(
        name,
        parameters,
        gradients,
        events,
        tuple(settings.items()),
        rng.randrange(count),
        rng.choice([(), (), (), (("foreach", False),), (("foreach", True),), (("fused", False),), (("lr", 0.02),)]),
        scaled,
        tuple(step for step in range(steps) if scaled and rng.random() < 0.3),
        rng.random() < 0.05,
        rng.randrange(1000),
    )


def check(case: Case) -> None:
    """Raise AssertionError where the run of a framework's optimizers and that of torch's own differ."""
    if not hasattr(torch.optim.AdamW.__init__, "__wrapped__"):
        fusepatch.activate()
    wanted, found = _Run(case, _USER, _USER), _Run(case, _FRAMEWORK, _USER)
    for step in range(len(case.events)):
        errors = [run.error_of(step) for run in (wanted, found)]
        assert errors[0] == errors[1], f"step {step}: torch's default gives {errors[0]}, patched it is {errors[1]}"
        if errors[0] is not None:
            return
        for place, (one, other) in enumerate(zip(wanted.memory, found.memory, strict=True)):
            _assert_close(one, other, f"step {step}: the memory of parameter {place}")
        assert wanted.taken == found.taken, (
            f"step {step}: steps that were not skipped {wanted.taken}, patched {found.taken}"
        )
        assert wanted.saved() == found.saved(), f"step {step}: saved {wanted.saved()}, patched {found.saved()}"


def _module(name: str) -> Callable[..., Any]:
    made = types.ModuleType(name)
    exec("def construct(kind, *args, **kwargs):\n    return kind(*args, **kwargs)\n", vars(made))
    construct: Callable[..., Any] = made.construct
    return construct


_FRAMEWORK = _module("verl.workers.config.optimizer")
_USER = _module("user_code")

_TOLERANCE = {torch.float64: (1e-7, 1e-8), torch.float32: (1e-4, 2e-5), torch.bfloat16: (3e-2, 3e-2)}


def _assert_close(wanted: torch.Tensor, found: torch.Tensor, what: str) -> None:
    relative, absolute = _TOLERANCE[wanted.dtype]
    torch.testing.assert_close(
        found, wanted, rtol=relative, atol=absolute, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


class _Run:
    """One training, step by step. `construct` makes its optimizers, `plain` those that a resume without fusepatch
    has."""

    def __init__(self, case: Case, construct: Callable[..., Any], plain: Callable[..., Any]) -> None:
        self.case = case
        self.construct, self.plain = construct, plain
        self.generator = torch.Generator().manual_seed(case.seed)
        self.parameters, self.memory = self._parameters([parameter.layout for parameter in case.parameters])
        self.optimizer: Any = None
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=case.scaled)
        self.taken: list[int] = []

    def error_of(self, step: int) -> str | None:
        """Take a step and what comes before it; the class of the error where it raises."""
        try:
            if self.optimizer is None:
                self.optimizer = self._optimizer(self.plain if "resume with" in self.case.events else self.construct)
            self._event(self.case.events[step])
            self._step(step)
        except Exception as error:
            return type(error).__name__
        return None

    def saved(self) -> list[tuple[Any, ...]]:
        """What a checkpoint written now says of the flags and of the states' layouts in time and type."""
        state = self.optimizer.state_dict()
        groups = [tuple((flag, group[flag]) for flag in ("fused", "foreach")) for group in state["param_groups"]]
        steps = sorted(
            (key, str(value["step"].dtype), value["step"].item())
            for key, value in state["state"].items()
            if isinstance(value.get("step"), torch.Tensor)
        )
        return [*groups, *steps]

    def _parameters(self, layouts: list[str]) -> tuple[list[torch.nn.Parameter], list[torch.Tensor]]:
        parameters: list[torch.nn.Parameter] = []
        memory: list[torch.Tensor] = []
        flat: dict[torch.dtype, tuple[torch.Tensor, int]] = {}
        for wanted, layout in zip(self.case.parameters, layouts, strict=True):
            shape, dtype = wanted.shape, getattr(torch, wanted.dtype)
            size = torch.Size(shape).numel()
            if layout in ("flat", "overlapping", "same"):
                whole, used = flat.get(dtype) or (self._numbers(100, dtype=dtype), 0)
                start = {"flat": used, "overlapping": max(0, used - 1), "same": 0}[layout]
                view = whole[start : start + size].view(shape)
                flat[dtype] = (whole, max(used, start + size))
            elif layout == "columns" and shape:
                whole = self._numbers(*shape[:-1], 2 * shape[-1], dtype=dtype)
                view = whole[..., : shape[-1]]
            elif layout == "every other" and shape:
                whole = self._numbers(2 * shape[0], *shape[1:], dtype=dtype)
                view = whole[::2]
            else:
                whole = self._numbers(*reversed(shape) if layout == "transposed" else shape, dtype=dtype)
                view = (
                    whole.permute(*reversed(range(len(shape)))) if layout == "transposed" and len(shape) > 1 else whole
                )
            parameters.append(torch.nn.Parameter(view.view(shape) if view.shape != torch.Size(shape) else view))
            memory.append(whole)
        return parameters, memory

    def _numbers(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype)

    def _optimizer(self, construct: Callable[..., Any]) -> Any:
        settings = dict(self.case.settings)
        if self.case.tensor_rate:
            settings["lr"] = torch.tensor(settings["lr"])
        split = self.case.split
        groups = [{"params": self.parameters[split:]}]
        if split:
            groups.append({"params": self.parameters[:split], **dict(self.case.flags)})
        return construct(getattr(torch.optim, self.case.optimizer), groups, **settings)

    def _event(self, event: str) -> None:
        if event in ("resume", "resume without", "resume with"):
            state = copy.deepcopy(self.optimizer.state_dict())
            values = [parameter.detach().clone() for parameter in self.parameters]
            layouts = ["transposed" if len(value.shape) > 1 else "contiguous" for value in values]
            groups = len(state["param_groups"])
            added = self.parameters[len(self.case.parameters) :]
            self.parameters, self.memory = self._parameters(layouts)
            for parameter, value in zip(self.parameters, values, strict=False):
                parameter.data.copy_(value)
            self.optimizer = self._optimizer(self.plain if event == "resume without" else self.construct)
            for parameter in added[: groups - len(self.optimizer.param_groups)]:
                self._add(parameter.detach().clone())
            self.optimizer.load_state_dict(state)
        elif event in ("copy", "pickle"):
            whole = (self.parameters, self.memory, self.optimizer)
            self.parameters, self.memory, self.optimizer = (
                copy.deepcopy(whole) if event == "copy" else pickle.loads(pickle.dumps(whole))
            )
        elif event == "exchange":
            first = self.parameters[0]
            wide = torch.stack([first.detach(), first.detach()], dim=-1)
            first.data = wide[..., 0]
            self.memory[0] = wide
        elif event == "states":
            for state in self.optimizer.state.values():
                state.update(
                    {name: _transposed(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
                )
        elif event == "steps":
            states = [state for state in self.optimizer.state.values() if "step" in state]
            for state in states[1:]:
                state["step"] = states[0]["step"]
        elif event == "tie" and len(self.parameters) > 1:
            one, other = self.parameters[:2]
            if one.shape == other.shape and one.dtype == other.dtype:
                other.data = one.data
        elif event == "group":
            self._add(self._numbers(3, 4, dtype=torch.float32))

    def _add(self, value: torch.Tensor) -> None:
        self.parameters.append(torch.nn.Parameter(value))
        self.memory.append(value)
        self.optimizer.add_param_group({"params": [self.parameters[-1]]})

    def _step(self, step: int) -> None:
        kinds = (*self.case.gradients[step], *("alike" for _ in self.parameters))
        scale = self.scaler.scale(torch.ones(())).item()
        for parameter, kind in zip(self.parameters, kinds, strict=False):
            gradient = self._numbers(*parameter.shape, dtype=parameter.dtype)
            if step in self.case.overflows:
                gradient = gradient / 0
            parameter.grad = _laid_out(gradient * scale, parameter, kind)
        original = self.optimizer.step
        self.optimizer.step = lambda *args, **kwargs: (self.taken.append(step), original(*args, **kwargs))[1]
        try:
            self.scaler.step(self.optimizer)
        finally:
            del self.optimizer.step
        self.scaler.update()


def _laid_out(gradient: torch.Tensor, parameter: torch.nn.Parameter, kind: str) -> torch.Tensor | None:
    if kind == "missing":
        return None
    if kind == "sparse":
        return gradient.to_sparse() if gradient.dim() else gradient
    if kind == "transposed":
        return _transposed(gradient)
    if kind == "expanded" and gradient.numel():
        return gradient.flatten()[0].expand(gradient.shape)
    if kind == "mirrored":
        reach = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
        memory = torch.zeros(max(0, reach) + 1, dtype=gradient.dtype)
        return memory.as_strided(parameter.shape, parameter.stride()).copy_(gradient)
    return gradient if kind == "contiguous" else torch.empty_like(parameter).copy_(gradient)


def _transposed(value: torch.Tensor) -> torch.Tensor:
    """The same numbers, with the dimensions in memory in reverse order."""
    order = [*reversed(range(value.dim()))]
    return value.permute(order).contiguous().permute(order) if value.dim() > 1 else value
