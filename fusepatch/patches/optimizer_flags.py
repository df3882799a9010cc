"""`optimizer.flags`: `fused`, `foreach` and `eps` of the optimizers that frameworks construct.

The constructors of torch's classes are wrapped in place, so every way to them passes here: `create_optimizer` of the
transformers Trainer and its subclasses, `build_optimizer` and the older direct calls of verl, Trinity-RFT's workers.
Who constructs is read off the stack. An optimizer is constructed once, with everything decided before: torch fills and
keeps the caller's dictionaries, and a generator of parameters can be read only once.
"""

from __future__ import annotations

import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fusepatch import settings
from fusepatch.engine import ledger
from fusepatch.engine.callers import calling_module, is_below
from fusepatch.engine.patch import PASSES, Contract, Patch, Proceed, Site, Slot
from fusepatch.errors import FusepatchError
from fusepatch.patches.frameworks import own_values
from fusepatch.patches.upstreams import TORCH

if TYPE_CHECKING:
    from fusepatch.optim.flags import Decision, Note, Passed, Request
    from fusepatch.optim.groups import Members

ID = "optimizer.flags"

CLASSES = {
    "Adam": "torch.optim.adam",
    "AdamW": "torch.optim.adamw",
    "SGD": "torch.optim.sgd",
    "Adagrad": "torch.optim.adagrad",
    "ASGD": "torch.optim.asgd",
    "Adadelta": "torch.optim.adadelta",
    "Adafactor": "torch.optim._adafactor",
    "Adamax": "torch.optim.adamax",
    "NAdam": "torch.optim.nadam",
    "RAdam": "torch.optim.radam",
    "RMSprop": "torch.optim.rmsprop",
    "Rprop": "torch.optim.rprop",
}
"""torch's classes that have at least one of the flags, with the modules that define them (names in `sys.modules` only:
torch deletes the attributes of most)."""


VARIABLES_OF_FLAGS = {flag: f"FUSEPATCH_OPTIMIZER_{flag.upper()}" for flag in ("fused", "foreach", "eps")}

FUSED = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
"""Those that have a fused form."""


class _Managed:
    """An optimizer whose flags are decided here, and what they are decided from, also for groups that are added later.

    `name` is torch's class whose constructor is wrapped, `takes` that constructor's parameters, `passed` the flags of
    the call, `own` the values of `frameworks.FRAMEWORKS` that the caller passes by itself. `plain` is what `fused` and
    `foreach` of each group would be without this patch, `plain_call` the same for a group that is not among them (a
    copy that someone made).
    """

    def __init__(
        self, proceed: Proceed, takes: Mapping[str, Any], caller: str, own: Mapping[str, tuple[Any, ...]]
    ) -> None:
        self.name = proceed.target.path.partition(".")[0]
        self.takes = takes
        self.caller = caller
        self.own = own
        self.passed: Mapping[str, Passed] = {}
        self.plain_call: Mapping[str, Any] = {}
        self.plain: list[tuple[dict[str, Any], Mapping[str, Any]]] = []
        self.judged: dict[tuple[int, bool], Any] = {}
        self.looking = False
        self.warned = False

    def passed_in(self, values: Mapping[str, Any]) -> dict[str, Passed]:
        """The flags among `values`; None counts as not passed."""
        from fusepatch.optim.flags import FLAGS, Passed

        present = {flag: values[flag] for flag in FLAGS if values.get(flag) is not None}
        return {flag: Passed(value, value not in self.own.get(flag, ())) for flag, value in present.items()}

    def passed_for(self, own: Mapping[str, Any] | None) -> dict[str, Passed]:
        """The flags that a group was passed: its own values, else the call's."""
        return {**self.passed, **self.passed_in(own or {})}

    def value_of(self, flag: str, own: Mapping[str, Any] | None) -> Any:
        """What was passed for a flag of a group, None where nothing was."""
        passed = self.passed_for(own).get(flag)
        return passed.value if passed is not None else None

    def plain_of(self, group: dict[str, Any]) -> Mapping[str, Any]:
        """`fused` and `foreach` as a group would have them without this patch."""
        return next((flags for known, flags in self.plain if known is group), self.plain_call)

    def chose_fused(self, group: dict[str, Any]) -> bool:
        """Whether a group is fused because this patch set the flag."""
        return bool(group.get("fused")) and not self.plain_of(group).get("fused")

    def tell(self, notes: Iterable[Note], where: str = "") -> None:
        """Record what was decided; StrictError where a request was refused and strict mode is on."""
        for note in notes:
            _RECORD[note.kind](ID, f"{self.subject}{where}: {note.text}")

    @property
    def subject(self) -> str:
        return f"{self.name} in {self.caller}"


def _warn(patch: str, text: str) -> None:
    ledger.warn_once(f"{patch}: {text}")


_RECORD: Mapping[str, Callable[[str, str], None]] = {
    "replaced": ledger.replaced,
    "kept": ledger.replaced,
    "refused": ledger.refused,
    "fallback": ledger.fallback,
    "warning": _warn,
}

_managed: dict[int, tuple[weakref.ref[Any], _Managed]] = {}
"""By the optimizer's id, since an optimizer may compare by value and be unhashable. Nothing is kept on the optimizer
itself: it pickles, copies and compiles as an ordinary one."""


def _manage(optimizer: Any, managed: _Managed) -> None:
    key = id(optimizer)
    _managed[key] = (weakref.ref(optimizer, lambda _: _managed.pop(key, None)), managed)


def _managed_by(optimizer: Any) -> _Managed | None:
    reference, managed = _managed.get(id(optimizer), (None, None))
    return managed if reference is not None and reference() is optimizer else None


class _Call:
    """The arguments of one constructor call, read and written by name, positional ones in their place."""

    def __init__(self, takes: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.positions = [name for name, p in takes.items() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
        self.defaults = {name: p.default for name, p in takes.items()}
        self.args = list(args)
        self.kwargs = dict(kwargs)

    def passed(self) -> dict[str, Any]:
        if not self.args:
            return self.kwargs
        return {**dict(zip(self.positions, self.args, strict=False)), **self.kwargs}

    def values(self) -> dict[str, Any]:
        return {**self.defaults, **self.passed()}

    def write(self, name: str, value: Any) -> None:
        """Set an argument; None takes a keyword away."""
        position = self.positions.index(name) if name in self.positions else len(self.args)
        if position < len(self.args):
            self.args[position] = value
        elif value is None:
            self.kwargs.pop(name, None)
        else:
            self.kwargs[name] = value


def construct(proceed: Proceed, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Handler of the constructors of `CLASSES`."""
    caller = calling_module()
    if is_below(caller, ("torch.optim",)):
        return proceed(optimizer, *args, **kwargs)  # AdamW's constructor calls Adam's: it is decided already
    own = own_values(caller)
    if own is None:
        return proceed(optimizer, *args, **kwargs)
    ledger.count_call(ID)
    if _request().keeps_everything:
        return proceed(optimizer, *args, **kwargs)
    from fusepatch.optim import capability, groups

    managed = _Managed(proceed, capability.parameters_of(proceed.target.original), caller, own)
    call = _Call(managed.takes, args, kwargs)
    call.write("params", groups.materialise(call.passed().get("params")))
    try:
        decisions = _decide_all(optimizer, managed, call)
    except FusepatchError:
        raise
    except Exception:
        # The engine would run the original with the caller's arguments, whose generators are used up by now.
        trace = traceback.format_exc(limit=-3)
        ledger.refused(ID, f"the patch itself failed for {managed.name} in {caller}; please report this: {trace}")
        return proceed(optimizer, *call.args, **call.kwargs)
    result = proceed(optimizer, *call.args, **call.kwargs)
    if len(decisions) == len(optimizer.param_groups):
        _manage(optimizer, managed)
        for group, (decision, plain) in zip(optimizer.param_groups, decisions, strict=True):
            _take_over(managed, group, decision, plain)
    return result


def _take_over(managed: _Managed, group: dict[str, Any], decision: Decision, plain: Mapping[str, Any]) -> None:
    """Fuse a group where that was decided here.

    In the group and not in the call: a constructor that is given `fused=True` has GradScaler leave the unscaling and
    the skipping to the kernels, so that AcceleratedOptimizer and schedulers no longer see skipped steps
    (huggingface/accelerate#4242).
    """
    managed.plain.append((group, plain))
    if decision.chosen:
        group["fused"] = True


def add_param_group(proceed: Proceed, optimizer: Any, param_group: Any, *args: Any, **kwargs: Any) -> Any:
    """Handler of `Optimizer.add_param_group`: a group that comes later is judged as if it had been there from the
    start."""
    managed = _managed_by(optimizer)
    if managed is None or not isinstance(param_group, dict):
        return proceed(optimizer, param_group, *args, **kwargs)
    from fusepatch.optim import groups

    groups.materialise([param_group])
    (member,) = groups.members([param_group])
    devices = _devices(optimizer.param_groups) | {tensor.device.type for tensor in member.tensors}
    decision = _decide(type(optimizer), managed, member, optimizer.defaults, devices)
    managed.tell(decision.notes, ", added param group")
    plain = {flag: param_group.get(flag, managed.plain_call.get(flag)) for flag in managed.plain_call}
    _write_group(param_group, decision, optimizer.defaults)
    result = proceed(optimizer, param_group, *args, **kwargs)
    _take_over(managed, param_group, decision, plain)
    return result


def construct_other(proceed: Proceed, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Handler of the base class's constructor: says of a class that has none of the flags that it was left alone."""
    ledger.tell_of_lost()  # a class whose own constructor was replaced since passes here
    if not _has_flags(type(optimizer)):
        kinds = type(optimizer).__mro__
        caller = calling_module(skip=("torch.optim", *(kind.__module__ for kind in kinds)))
        if own_values(caller) is not None:
            _tell_of_other(f"{type(optimizer).__module__}.{type(optimizer).__qualname__} in {caller}")
    return proceed(optimizer, *args, **kwargs)


def _has_flags(kind: type[Any]) -> bool:
    return any(base.__name__ in CLASSES and is_below(base.__module__, ("torch.optim",)) for base in kind.__mro__)


def _tell_of_other(subject: str) -> None:
    request = _request()
    asked = ["fused"] if request.fused is True else []
    asked += ["foreach"] if request.foreach else []
    asked += ["eps"] if request.eps is not None else []
    if asked:
        ledger.refused(
            ID,
            f"{subject}: {', '.join(map(request.said, asked))} was not followed: the class is not one of torch's with "
            "fused or foreach, so it is constructed as the framework wrote it; set what the class has through the "
            "framework's configuration",
        )
    elif request.fused is None:
        ledger.fallback(ID, f"{subject}: not fused: the class is not one of torch's with fused or foreach")


def _request() -> Request:
    from fusepatch.optim.flags import Request

    current = settings.current()
    fused = None if current.optimizer_fused == "auto" else current.optimizer_fused
    return Request(fused, current.optimizer_foreach, current.optimizer_eps, VARIABLES_OF_FLAGS)


def _decide_all(optimizer: Any, managed: _Managed, call: _Call) -> list[tuple[Decision, Mapping[str, Any]]]:
    """Decide every group and write the call; returns each group's decision, and its flags as they would be without
    it."""
    from fusepatch.optim import groups
    from fusepatch.optim.flags import FLAGS

    arrived = call.passed()
    members = groups.members(arrived.get("params"))
    if not members:
        return []  # torch refuses the call
    managed.passed = managed.passed_in(arrived)
    devices = {tensor.device.type for member in members for tensor in member.tensors}
    values = call.values()
    managed.plain_call = {flag: values[flag] for flag in ("fused", "foreach") if flag in values}
    decisions = [_decide(type(optimizer), managed, member, values, devices) for member in members]
    if all(decision.notes == decisions[0].notes for decision in decisions):
        managed.tell(decisions[0].notes)
    else:
        for index, decision in enumerate(decisions):
            managed.tell(decision.notes, f", param group {index}")
    plain = [{**managed.plain_call, **_flags_in(member.own)} for member in members]
    for flag in FLAGS:
        given = [managed.value_of(flag, member.own) for member in members]
        wanted = [_in_call(decision, flag, value) for decision, value in zip(decisions, given, strict=True)]
        if wanted == given:
            continue  # the constructor checks what the caller passed
        if all(value == wanted[0] for value in wanted):
            call.write(flag, wanted[0])
        elif flag != "eps":
            # fused=True in the call would make GradScaler leave the unscaling to groups that cannot do it.
            call.write(flag, None)
    if members[0].own is not None:
        values = call.values()
        for member, decision in zip(members, decisions, strict=True):
            _write_group(member.own, decision, values)
    return list(zip(decisions, plain, strict=True))


def _in_call(decision: Decision, flag: str, given: Any) -> Any:
    """What the constructor is given for a flag: a `fused=True` that was chosen here comes into the group later."""
    return given if flag == "fused" and decision.chosen else getattr(decision, flag)


def _flags_in(own: Mapping[str, Any] | None) -> dict[str, Any]:
    return {flag: own[flag] for flag in ("fused", "foreach") if flag in own} if own is not None else {}


def _decide(
    kind: type[Any], managed: _Managed, member: Members, values: Mapping[str, Any], devices: set[str]
) -> Decision:
    from fusepatch.optim import capability, flags

    own = member.own or {}
    at = {**values, **own}
    request = _request()
    tensors = member.tensors
    verdict = capability.fused(kind, managed.name, tensors, bool(at.get("differentiable")), devices)
    obstacle = None
    if request.foreach:
        scalars = (at.get("lr"), *(at.get("betas") or ()))
        obstacle = capability.foreach_obstacle(
            managed.name, tensors, scalars, bool(at.get("differentiable")), bool(at.get("capturable"))
        )
    eps = managed.takes["eps"].default if "eps" in managed.takes else None
    group = flags.Group(
        managed.passed_for(own), frozenset(managed.takes), eps, verdict, obstacle, managed.name, managed.caller
    )
    decision = flags.decide(group, request)
    if request.eps is not None and decision.eps == request.eps and not decision.fused:
        dtype = capability.becomes_zero(request.eps, tensors)
        if dtype is not None:
            text = (
                f"FUSEPATCH_OPTIMIZER_EPS={request.eps:g} is 0 in {dtype}, the dtype of parameters of this optimizer: "
                "a gradient of 0 makes them NaN; use a larger value"
            )
            decision = decision._replace(notes=(*decision.notes, flags.Note("warning", text)))
    return decision


def _write_group(own: dict[str, Any] | None, decision: Decision, defaults: Mapping[str, Any]) -> None:
    """Put a group's own value of a flag into its dictionary, where the optimizer's default is another."""
    if own is None:
        return
    for flag in ("fused", "foreach"):
        now = own.get(flag, defaults.get(flag))
        wanted = _in_call(decision, flag, now)
        if now != wanted:
            own[flag] = wanted
    if decision.eps is not None and own.get("eps", defaults.get("eps")) != decision.eps:
        own["eps"] = decision.eps


def _devices(param_groups: list[dict[str, Any]]) -> set[str]:
    return {param.device.type for group in param_groups for param in group["params"]}


def load_state_dict(proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
    """Handler of `Optimizer.load_state_dict`: a checkpoint's groups bring everything but the flags, which stay the
    optimizer's own."""
    optimizer: Any
    optimizer, *rest = args or (kwargs.pop("self"),)
    state_dict = rest[0] if rest else kwargs.get("state_dict")
    managed = _managed_by(optimizer)
    if managed is None or not isinstance(state_dict, dict) or not isinstance(state_dict.get("param_groups"), list):
        return proceed(optimizer, *rest, **kwargs)
    plain = [managed.plain_of(group) for group in optimizer.param_groups]
    flags = [_flags_in(group) for group in optimizer.param_groups]
    # Before the loading: the flag decides on which device torch puts the `step` of each parameter's state.
    result = proceed(optimizer, _with_own_flags(optimizer, managed, state_dict))
    managed.plain = list(zip(optimizer.param_groups, plain, strict=True))
    for group, own in zip(optimizer.param_groups, flags, strict=True):
        group.update(own)  # a pre-hook of the user's may have brought other groups
    return result


def _with_own_flags(optimizer: Any, managed: _Managed, state_dict: dict[str, Any]) -> dict[str, Any]:
    from fusepatch.optim.flags import with_flags_of

    live, saved = optimizer.param_groups, state_dict["param_groups"]
    groups = with_flags_of(live, saved)
    subject = f"load_state_dict of {type(optimizer).__name__} in {managed.caller}"
    asked = settings.current().optimizer_eps
    for before, after in zip(saved, groups, strict=True):
        for flag in ("fused", "foreach"):
            if (before.get(flag) or None) != (after.get(flag) or None):
                ledger.replaced(
                    ID, f"{subject}: {flag}: {before.get(flag)} in the checkpoint -> {after[flag]} (as constructed)"
                )
    if asked is not None and len(live) == len(saved):
        lost = {
            there["eps"]
            for here, there in zip(live, saved, strict=True)
            if here.get("eps") == asked != there.get("eps", asked)
        }
        if lost:
            ledger.refused(
                ID,
                f"{subject}: FUSEPATCH_OPTIMIZER_EPS={asked:g} is not kept: eps={', '.join(map(str, sorted(lost)))} "
                "comes from the checkpoint, like every number in its param groups; change it there",
            )
    return {**state_dict, "param_groups": groups}


def state_dict(proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
    """Handler of `Optimizer.state_dict`: the flags go into a checkpoint as they would be without this patch.

    A run that resumes without fusepatch, or elsewhere, trains as if the first one had been without it too.
    """
    result = proceed(*args, **kwargs)
    optimizer: Any = args[0] if args else kwargs.get("self")
    managed = _managed_by(optimizer)
    if managed is not None and isinstance(result, dict):
        with _contained(managed, "its state_dict() holds the flags that it trains with"):
            saved = result["param_groups"]
            for live, there in zip(optimizer.param_groups, saved, strict=True):
                there.update(_plain_flags(managed, live))
                if managed.chose_fused(live):
                    for key in there["params"]:
                        if key in result["state"]:
                            result["state"][key] = _with_plain_step(result["state"][key], there)
    return result


def reduce(proceed: Proceed, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Handler of `Optimizer.__reduce_ex__`: pickles and copies are ordinary optimizers, with the flags as they would
    be."""
    result = proceed(optimizer, *args, **kwargs)
    managed = _managed_by(optimizer)
    if managed is None or not (isinstance(result, tuple) and len(result) > 2 and isinstance(result[2], dict)):
        return result
    with _contained(managed, "a pickle or copy of it holds the flags that it trains with"):
        kept = dict(result[2])
        groups = kept["param_groups"]
        state = kept["state"].copy()
        for group in groups:
            if managed.chose_fused(group):
                for parameter in group["params"]:
                    if parameter in state:
                        state[parameter] = _with_plain_step(state[parameter], group)
        kept["state"] = state
        kept["param_groups"] = [{**group, **_plain_flags(managed, group)} for group in groups]
        return (*result[:2], kept, *result[3:])
    return result


def _plain_flags(managed: _Managed, group: dict[str, Any]) -> dict[str, Any]:
    return {flag: value for flag, value in managed.plain_of(group).items() if flag in group}


def _with_plain_step(state: dict[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state with `step` as an unfused optimizer keeps it: on the CPU, where reading it costs no
    waiting."""
    import torch

    step = state.get("step")
    if not isinstance(step, torch.Tensor) or group.get("capturable"):
        return state
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    return {**state, "step": step.to("cpu", dtype)} if (step.device.type, step.dtype) != ("cpu", dtype) else state


@contextmanager
def _contained(managed: _Managed, consequence: str) -> Iterator[None]:
    """A fault of ours beside torch's own work, which is done already, is recorded and ends nothing."""
    try:
        yield
    except FusepatchError:
        raise
    except Exception:
        trace = traceback.format_exc(limit=-3)
        ledger.refused(ID, f"the patch itself failed for {managed.subject}; {consequence}; please report this: {trace}")


def init_group(proceed: Proceed, optimizer: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
    """Handler of `_init_group`, in which a step gathers what it hands to the kernel: parameters, gradients and states.

    Every step of a fused group is looked at here, for gradients are new each time, and frameworks shard, swap and
    offload parameters and states in place. Where something is not as the kernel presumes, the group goes on unfused:
    the step reads the flag after this.
    """
    managed = _managed_by(optimizer)
    if managed is None or managed.looking or not group.get("fused"):
        return proceed(optimizer, group, *args, **kwargs)
    ours = managed.chose_fused(group)
    if managed.warned and not ours:
        return proceed(optimizer, group, *args, **kwargs)
    from fusepatch.optim import capability

    names = [*capability.parameters_of(proceed.target.original)][2:]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    managed.looking = True  # where AdamW inherits Adam's, both are wrapped
    try:
        _look(optimizer, managed, group, lambda: _before(optimizer, managed, group, ours), [])
        result = proceed(optimizer, group, *args, **kwargs)
        lists = {name: value for name, value in given.items() if isinstance(value, list)}
        if ours and not group.get("fused") and _is_traced():
            # Dynamo has read the group's flag already.
            restart = sys.modules["torch._dynamo.exc"].RestartAnalysis(
                restart_reason="the optimizer's group is not fused"
            )
            setattr(restart, PASSES, True)
            raise restart
        _look(optimizer, managed, group, lambda: _after(optimizer, managed, lists, ours), lists.get("state_steps", []))
        return result
    finally:
        managed.looking = False


def _look(
    optimizer: Any,
    managed: _Managed,
    group: dict[str, Any],
    why_not: Callable[[], str | None],
    steps: list[Any],
) -> None:
    """Take `fused` from a group where there is a reason why not; a fault of our own is one."""
    if not group.get("fused"):
        return
    try:
        reason = why_not()
    except Exception:
        reason = f"the patch itself failed; please report this: {traceback.format_exc(limit=-3)}"
    if reason is None:
        return
    if managed.chose_fused(group):
        _fall_back(optimizer, managed, group, reason, steps)
    elif not managed.warned:
        managed.warned = True
        ledger.warn_once(
            f"{ID}: {managed.subject}, at a step: fused=True was not set by this patch and is kept, but {reason}: "
            "torch's fused kernel then silently trains on wrong numbers, or its step raises; pass fused=False, or set "
            "FUSEPATCH_OPTIMIZER_FUSED=0 if a framework passes it"
        )


def _before(optimizer: Any, managed: _Managed, group: dict[str, Any], ours: bool) -> str | None:
    """Why the parameters are none for a fused kernel, where they are not the ones that were found to be."""
    from fusepatch.optim import capability, layout

    if ours and _is_traced():
        return "the step is compiled, which fuses it in torch.compile's own way"
    parameters = group["params"]
    places = layout.places(parameters)
    # A verdict on a flag that somebody else set says less than one on ours.
    key = (id(parameters[0]) if parameters else 0, ours)
    if managed.judged.get(key) == places:
        return None
    devices = _devices(optimizer.param_groups)
    verdict = capability.fused(type(optimizer), managed.name, parameters, bool(group.get("differentiable")), devices)
    unmade = [parameter for parameter in parameters if parameter.is_meta]
    reason = verdict.wrong
    if ours:
        reason = verdict.obstacle or reason or (verdict.caution if _request().fused is not True else None)
        if reason is None and any(parameter.grad is not None for parameter in unmade):
            reason = "its parameters are still on the meta device"
    if reason is None and not unmade:
        managed.judged[key] = places
    return reason


def _after(optimizer: Any, managed: _Managed, lists: Mapping[str, list[Any]], ours: bool) -> str | None:
    """Why what was gathered is nothing for a fused kernel. A state that only has other strides is copied into its
    parameter's."""
    from fusepatch.optim import layout

    parameters, gradients, *_ = lists.values()
    seen = layout.seen(parameters)
    for name, tensors in [*lists.items()][1:]:
        if name == "state_steps" or not tensors or (seen is not None and layout.seen(tensors) == seen):
            continue
        missing = sum(tensor is None for tensor in tensors)
        if missing == len(tensors):
            continue
        if missing:
            return (
                "some of its parameters have a momentum buffer, and others, whose first gradient came later, have none"
            )
        reason = layout.unlike(parameters, tensors, "gradient" if tensors is gradients else "state")
        if reason is None:
            continue
        if tensors is gradients or not _laid_out(optimizer, parameters, tensors):
            return reason
        ledger.replaced(ID, f"{managed.subject}: {reason}: copied into the parameter's strides")
    steps = lists.get("state_steps", [])
    if len({id(step) for step in steps}) != len(steps):
        return "several parameters share one `step`"
    if ours and steps:
        _on_device(optimizer, parameters, steps)
    return None


def _on_device(optimizer: Any, parameters: Sequence[Any], steps: list[Any]) -> None:
    """Put each `step` where the kernel reads it: Adagrad makes it before its group is fused, and offloading moves
    it."""
    import torch

    if {step.dtype for step in steps} == {torch.float32} and {step.is_cpu for step in steps} == {parameters[0].is_cpu}:
        return
    for place, (parameter, step) in enumerate(zip(parameters, steps, strict=True)):
        steps[place] = optimizer.state[parameter]["step"] = step.to(parameter.device, torch.float32)


def _laid_out(optimizer: Any, parameters: Sequence[Any], states: list[Any]) -> bool:
    """Copy the states that have other strides than their parameters; whether all are alike then."""
    from fusepatch.optim import layout

    for place, (parameter, state) in enumerate(zip(parameters, states, strict=True)):
        if layout.unlike([parameter], [state], "") is None or state.shape != parameter.shape:
            continue
        own = optimizer.state[parameter]
        states[place] = layout.like(state, parameter)
        own.update({name: states[place] for name, value in own.items() if value is state})
    return layout.unlike(parameters, states, "") is None


def _fall_back(optimizer: Any, managed: _Managed, group: dict[str, Any], reason: str, steps: list[Any]) -> None:
    """Go on as the framework constructed it, from this step on, and say why."""
    _unfuse(optimizer, managed, group, steps)
    text = f"{managed.subject}, at a step"
    if _request().fused is True:
        ledger.refused(ID, f"{text}: FUSEPATCH_OPTIMIZER_FUSED=1 was not followed: {reason}; torch's default is used")
    else:
        ledger.fallback(ID, f"{text}: not fused: {reason}")


def release() -> None:
    """Make every optimizer the one that its framework constructed: without the wrappers nothing looks at its steps any
    more."""
    for reference, managed in [*_managed.values()]:
        optimizer = reference()
        with _contained(managed, "it continues with the flags that it has"):
            for group in optimizer.param_groups if optimizer is not None else ():
                if managed.chose_fused(group):
                    _unfuse(optimizer, managed, group, [])
    _managed.clear()


def _unfuse(optimizer: Any, managed: _Managed, group: dict[str, Any], steps: list[Any]) -> None:
    """Give a group the flag that it would have without this patch, and its states the steps of an unfused one.

    `steps` is the list of them that the step under way has gathered already.
    """
    parameters = group["params"]
    for known, plain in managed.plain:
        # A group that is a view of one parameter (the step inside backward) stands for the whole one.
        if known is group or any(parameter is first for first in parameters[:1] for parameter in known["params"]):
            known["fused"] = plain.get("fused")
    group["fused"] = managed.plain_of(group).get("fused")
    for parameter in parameters:
        own = optimizer.state.get(parameter)
        if own:
            moved = _with_plain_step(own, group)
            if moved is not own:
                steps[:] = [moved["step"] if step is own["step"] else step for step in steps]
                own["step"] = moved["step"]


def _is_traced() -> bool:
    """Whether Dynamo is tracing the step: it calls `_init_group` itself, then traces the rest."""
    guards = sys.modules.get("torch._guards")
    return guards is not None and guards.TracingContext.try_get() is not None


PATCH = Patch(
    id=ID,
    promise="Fused optimizers in every framework, where they can run; foreach and eps on request.",
    why=(
        "Frameworks construct AdamW with torch's multi-tensor default, which needs about one more copy of the "
        "parameters at every step and is slower than the fused kernel. A hard-coded fused=True stops at the first step "
        "where it cannot run, and verl's configuration has no eps at all. Loading a checkpoint that was saved without "
        "the flag removes it."
    ),
    upstream=(
        "https://github.com/volcengine/verl/issues/2556",
        "https://github.com/pytorch/pytorch/issues/97712",
        "https://github.com/pytorch/pytorch/issues/135340",
        "https://github.com/pytorch/pytorch/issues/188174",
        "https://github.com/huggingface/accelerate/issues/4242",
        "https://github.com/pytorch/pytorch/issues/191763",
    ),
    fixed_in="transformers passes fused=True from 4.54.1 with torch 2.8 and its default optim; verl and Trinity-RFT do "
    "not",
    remove_when="torch chooses the fused kernel by itself, and load_state_dict keeps the flag",
    variables=(
        "FUSEPATCH_OPTIMIZER_FUSED",
        "FUSEPATCH_OPTIMIZER_FOREACH",
        "FUSEPATCH_OPTIMIZER_EPS",
        "FUSEPATCH_OPTIMIZER_SCOPE",
    ),
    requested_by="",
    changes=(
        "an optimizer of torch that transformers, TRL, verl, Trinity-RFT, LLaMA-Factory, axolotl, ms-swift or AReaL "
        "constructs without setting the flag gets fused=True, per param group, where class, device, dtype, mesh and "
        "memory allow it; otherwise the reason is recorded",
        "every step is checked before the kernel runs: parameters must be dense and share no memory, and gradients and "
        "states must have the layout of their parameters. Otherwise the group continues unfused; a loaded state that "
        "differs in its strides alone is copied into its parameter's",
        "loss scaling stays with GradScaler: skipped steps are detected, and schedules wait "
        "(huggingface/accelerate#4242)",
        "the variables apply to those optimizers and replace what the framework hard-codes (fused=True and eps=1e-8 of "
        "the Trainer)",
        "fused and foreach are never both true, whoever set them",
        "load_state_dict keeps fused and foreach as the optimizer was constructed; learning rate, betas, eps and the "
        "state are the checkpoint's",
        "state_dict() holds both as they would be without this patch, so a run can resume without it",
        "param groups that are added later are handled in the same way",
    ),
    limits=(
        "in bfloat16 and float16 parameters a fused step computes in float32 inside the kernel, so results differ from "
        "the multi-tensor form by roundings; state dtypes are the same",
        "a value in a framework's configuration that differs from the framework's default counts as the user's and "
        "beats the variables (adam_epsilon=1e-6, override_optimizer_config); one that equals the default cannot be "
        'distinguished from it, so FUSEPATCH_OPTIMIZER_FUSED=0 also removes an explicit optim="adamw_torch_fused"',
        "a subclass with its own constructor counts as code of the module that defines it",
        "a framework's own fused=True is kept, even where torch will refuse it at the first step (this is recorded) or "
        "train on wrong numbers (this triggers one warning)",
        "a pickle or deep copy is the optimizer that the framework constructed, without the flag; so is the optimizer "
        "itself after fusepatch.deactivate()",
        "a step that torch.compile compiles is not fused: the compiler fuses it in its own way",
        "a subclass with its own step or _init_group is not fused automatically, because nothing checks its steps",
        "optimizers that are not torch's (bitsandbytes, torchao, DeepSpeed's) are left alone",
    ),
    sites=(
        *(
            Site(
                upstream=TORCH,
                module=module,
                supported=">=2.4",
                slots=(
                    Slot(f"{name}.__init__", construct, Contract(parameters=("params", "foreach"))),
                    *(
                        (Slot(f"{name}._init_group", init_group, Contract(parameters=("group",))),)
                        if name in FUSED
                        else ()
                    ),
                ),
            )
            for name, module in CLASSES.items()
        ),
        Site(
            upstream=TORCH,
            module="torch.optim.optimizer",
            supported=">=2.4",
            slots=(
                Slot("Optimizer.__init__", construct_other, Contract(parameters=("params", "defaults"))),
                Slot("Optimizer.add_param_group", add_param_group, Contract(parameters=("param_group",))),
                Slot("Optimizer.load_state_dict", load_state_dict, Contract(parameters=("state_dict",))),
                Slot("Optimizer.state_dict", state_dict),
                Slot("Optimizer.__reduce_ex__", reduce),
            ),
        ),
    ),
    when_removed=release,
)
