"""`optimizer.flags`: `fused`, `foreach` and `eps` of the optimizers that frameworks construct.

The constructors of torch's classes are wrapped in place, so every way to them passes here: `create_optimizer` of the
transformers Trainer and its heirs, `build_optimizer` and the older direct calls of verl, Trinity-RFT's workers. Who
constructs is read off the stack. An optimizer is constructed once, with everything decided before: torch fills and keeps
the caller's dictionaries, and a generator of parameters can be read only once.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from fusepatch import settings
from fusepatch.engine import ledger
from fusepatch.engine.callers import calling_module, is_below
from fusepatch.engine.patch import Contract, Patch, Proceed, Site, Slot
from fusepatch.errors import FusepatchError
from fusepatch.patches.frameworks import own_values
from fusepatch.patches.upstreams import TORCH

if TYPE_CHECKING:
    from fusepatch.optim.capability import Verdict
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


class _Managed:
    """An optimizer whose flags are decided here, and what they are decided from, also for groups that are added later.

    `name` is torch's class whose constructor is wrapped, `takes` that constructor's parameters, `passed` the flags of the
    call, `own` the values of `frameworks.FRAMEWORKS` that the caller passes by itself.
    """

    def __init__(
        self, proceed: Proceed, takes: Mapping[str, Any], caller: str, own: Mapping[str, tuple[Any, ...]]
    ) -> None:
        self.name = proceed.target.path.partition(".")[0]
        self.takes = takes
        self.caller = caller
        self.own = own
        self.passed: Mapping[str, Passed] = {}

    def passed_in(self, values: Mapping[str, Any]) -> dict[str, Passed]:
        """The flags among `values`; None counts as not passed."""
        from fusepatch.optim.flags import FLAGS, Passed

        present = {flag: values[flag] for flag in FLAGS if values.get(flag) is not None}
        return {flag: Passed(value, value not in self.own.get(flag, ())) for flag, value in present.items()}

    def tell(self, notes: Iterable[Note], where: str = "") -> None:
        """Record what was decided; StrictError where a request was refused and strict mode is on."""
        subject = f"{self.name} in {self.caller}{where}"
        for note in notes:
            _RECORD[note.kind](ID, f"{subject}: {note.text}")


def _warn(patch: str, text: str) -> None:
    ledger.warn_once(f"{patch}: {text}")


_RECORD: Mapping[str, Callable[[str, str], None]] = {
    "replaced": ledger.replaced,
    "kept": ledger.replaced,
    "refused": ledger.refused,
    "fallback": ledger.fallback,
    "warning": _warn,
}

_managed: WeakKeyDictionary[Any, _Managed] = WeakKeyDictionary()


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
        unsettled = _decide_all(optimizer, managed, call)
    except FusepatchError:
        raise
    except Exception:
        # The engine would run the original with the caller's arguments, whose generators are used up by now.
        trace = traceback.format_exc(limit=-3)
        ledger.refused(ID, f"the patch itself failed for {managed.name} in {caller}; please report this: {trace}")
        return proceed(optimizer, *call.args, **call.kwargs)
    result = proceed(optimizer, *call.args, **call.kwargs)
    _managed[optimizer] = managed
    optimizer.register_load_state_dict_pre_hook(_keep_flags)
    if unsettled:
        optimizer.register_step_pre_hook(_settled_by_first_step(managed))
    return result


def add_param_group(proceed: Proceed, optimizer: Any, param_group: Any, *args: Any, **kwargs: Any) -> Any:
    """Handler of `Optimizer.add_param_group`: a group that comes later is judged as if it had been there from the start."""
    managed = _managed.get(optimizer)
    if managed is not None and isinstance(param_group, dict):
        from fusepatch.optim import groups

        groups.materialise([param_group])
        for member in groups.members([param_group]):
            devices = _devices(optimizer.param_groups) | {tensor.device.type for tensor in member.tensors}
            decision, _ = _decide(type(optimizer), managed, member, optimizer.defaults, devices)
            managed.tell(decision.notes, ", added param group")
            _write_group(param_group, decision, optimizer.defaults)
    return proceed(optimizer, param_group, *args, **kwargs)


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
    asked = ["FUSEPATCH_OPTIMIZER_FUSED=1"] if request.fused is True else []
    asked += ["FUSEPATCH_OPTIMIZER_FOREACH=1"] if request.foreach else []
    asked += [f"FUSEPATCH_OPTIMIZER_EPS={request.eps:g}"] if request.eps is not None else []
    if asked:
        ledger.refused(
            ID,
            f"{subject}: {', '.join(asked)} was not followed: the class is none of torch's that have fused or foreach; it is "
            f"constructed as the framework wrote it; pass what the class has through the framework's configuration",
        )
    elif request.fused is None:
        ledger.fallback(ID, f"{subject}: not fused: the class is none of torch's that have fused or foreach")


def _request() -> Request:
    from fusepatch.optim.flags import Request

    current = settings.current()
    fused = None if current.optimizer_fused == "auto" else current.optimizer_fused
    return Request(fused, current.optimizer_foreach, current.optimizer_eps)


def _decide_all(optimizer: Any, managed: _Managed, call: _Call) -> bool:
    """Decide every group and write the call; returns whether the first step has to show whether fused can run."""
    from fusepatch.optim import groups

    arrived = call.passed()
    members = groups.members(arrived.get("params"))
    if not members:
        return False  # torch refuses the call
    managed.passed = managed.passed_in(arrived)
    devices = {tensor.device.type for member in members for tensor in member.tensors}
    values = call.values()
    decided = [_decide(type(optimizer), managed, member, values, devices) for member in members]
    decisions = [decision for decision, _ in decided]
    if all(decision.notes == decisions[0].notes for decision in decisions):
        managed.tell(decisions[0].notes)
    else:
        for index, decision in enumerate(decisions):
            managed.tell(decision.notes, f", param group {index}")
    for flag in ("fused", "foreach", "eps"):
        wanted = [getattr(decision, flag) for decision in decisions]
        if all(value == wanted[0] for value in wanted):
            call.write(flag, wanted[0])
        elif flag != "eps":
            # fused=True in the call would make GradScaler leave the unscaling to groups that cannot do it.
            call.write(flag, None)
    if members[0].own is not None:
        values = call.values()
        for member, decision in zip(members, decisions, strict=True):
            _write_group(member.own, decision, values)
    return any(decision.chosen and verdict.unsettled for decision, verdict in decided)


def _decide(
    kind: type[Any], managed: _Managed, member: Members, values: Mapping[str, Any], devices: set[str]
) -> tuple[Decision, Verdict]:
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
    passed = {**managed.passed, **managed.passed_in(own)}
    group = flags.Group(passed, frozenset(managed.takes), eps, verdict, obstacle, managed.name, managed.caller)
    decision = flags.decide(group, request)
    if request.eps is not None and decision.eps == request.eps and not decision.fused:
        dtype = capability.becomes_zero(request.eps, tensors)
        if dtype is not None:
            text = (
                f"FUSEPATCH_OPTIMIZER_EPS={request.eps:g} is 0 in {dtype}, the dtype of parameters of this optimizer: a gradient "
                f"of 0 makes them NaN; use a larger value"
            )
            decision = decision._replace(notes=(*decision.notes, flags.Note("warning", text)))
    return decision, verdict


def _write_group(own: dict[str, Any] | None, decision: Decision, defaults: Mapping[str, Any]) -> None:
    """Put a group's own value of a flag into its dictionary, where the optimizer's default is another."""
    if own is None:
        return
    for flag in ("fused", "foreach"):
        wanted = getattr(decision, flag)
        if own.get(flag, defaults.get(flag)) != wanted:
            own[flag] = wanted
    if decision.eps is not None and own.get("eps", defaults.get("eps")) != decision.eps:
        own["eps"] = decision.eps


def _devices(param_groups: list[dict[str, Any]]) -> set[str]:
    return {param.device.type for group in param_groups for param in group["params"]}


def _keep_flags(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """`load_state_dict` pre-hook: a checkpoint's groups bring everything but the flags, which stay the optimizer's own.

    Before the loading, not after it: the flag decides on which device torch puts the `step` of each parameter's state.
    """
    from fusepatch.optim.flags import with_flags_of

    live, saved = optimizer.param_groups, state_dict["param_groups"]
    groups = with_flags_of(live, saved)
    managed = _managed.get(optimizer)
    subject = f"load_state_dict of {type(optimizer).__name__} in {managed.caller if managed else 'a framework'}"
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
                f"{subject}: FUSEPATCH_OPTIMIZER_EPS={asked:g} does not outlast the loading: eps={', '.join(map(str, sorted(lost)))} "
                f"comes from the checkpoint, as every number in its param groups does; change it there",
            )
    return {**state_dict, "param_groups": groups}


def _settled_by_first_step(managed: _Managed) -> Callable[[Any, Any, Any], Any]:
    """A step pre-hook that looks at what the parameters did not show before: their device, sparse gradients.

    It looks until every parameter of a fused group has had a gradient, and where the step is given a closure, which makes
    the gradients, after that. It stays registered, for torch iterates over the hooks when it calls it.
    """
    import torch

    from fusepatch.optim import capability

    settled = False

    def settle(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if settled:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            look(optimizer)
            return None

        def evaluated() -> Any:
            loss = closure()
            look(optimizer)
            return loss

        return (args[0], evaluated, *args[2:]), {name: kwargs[name] for name in kwargs if name != "closure"}

    def look(optimizer: Any) -> None:
        nonlocal settled
        settled = True
        devices = _devices(optimizer.param_groups)
        for group in optimizer.param_groups:
            differentiable = bool(group.get("differentiable"))
            verdict = capability.fused(type(optimizer), managed.name, group["params"], differentiable, devices)
            obstacle = verdict.obstacle
            if any(param.is_meta for param in group["params"]):
                obstacle = "its parameters are still on the meta device at the first step"
            if group["fused"] and obstacle is not None:
                group["fused"] = None
                optimizer._step_supports_amp_scaling = False
                subject = f"{managed.name} in {managed.caller}, at the first step"
                if settings.current().optimizer_fused is True:
                    ledger.refused(
                        ID,
                        f"{subject}: FUSEPATCH_OPTIMIZER_FUSED=1 was not followed: {obstacle}; torch's own default is left",
                    )
                else:
                    ledger.fallback(ID, f"{subject}: not fused: {obstacle}")
            elif group["fused"] and managed.name in capability.SPARSE_GRADIENTS:
                settled = settled and all(param.grad is not None for param in group["params"] if param.requires_grad)

    uncompiled: Callable[[Any, Any, Any], Any] = torch.compiler.disable(settle)  # type: ignore[no-untyped-call]
    return uncompiled


PATCH = Patch(
    id=ID,
    promise="Fused optimizers in every framework, where they can run; foreach and eps on request.",
    why=(
        "Frameworks construct AdamW with torch's multi-tensor default, which needs about one more copy of the parameters at every "
        "step and is slower than the fused kernel. A hard-coded fused=True stops at the first step where it cannot run, and "
        "verl's configuration has no eps at all. A checkpoint made without the flag takes it away again when it is loaded."
    ),
    upstream=(
        "https://github.com/volcengine/verl/issues/2556",
        "https://github.com/pytorch/pytorch/issues/97712",
        "https://github.com/pytorch/pytorch/issues/135340",
        "https://github.com/pytorch/pytorch/issues/188174",
    ),
    fixed_in="transformers passes fused=True from 4.54.1 with torch 2.8 and its default optim; no verl or Trinity-RFT does",
    remove_when="torch chooses the fused kernel by itself, and load_state_dict leaves the flag alone",
    variables=(
        "FUSEPATCH_OPTIMIZER_FUSED",
        "FUSEPATCH_OPTIMIZER_FOREACH",
        "FUSEPATCH_OPTIMIZER_EPS",
        "FUSEPATCH_OPTIMIZER_SCOPE",
    ),
    requested_by="",
    changes=(
        "an optimizer of torch that transformers, TRL, verl, Trinity-RFT, LLaMA-Factory, axolotl, ms-swift or AReaL constructs "
        "without saying gets fused=True, per param group, where class, device, dtype and mesh allow it; where not, the "
        "reason is recorded",
        "the variables reach those optimizers over what the framework hard-codes (fused=True and eps=1e-8 of the Trainer)",
        "fused and foreach are never both true, whoever set the other one",
        "load_state_dict leaves fused and foreach as the optimizer was constructed; learning rate, betas, eps and the state are "
        "the checkpoint's",
        "groups that are added later are judged in the same way",
    ),
    limits=(
        "in bfloat16 and float16 parameters a fused step computes in float32 inside the kernel, so results differ from the "
        "multi-tensor form by roundings; state dtypes are the same",
        "a value in a framework's configuration that differs from the framework's default counts as the user's and beats the "
        "variables (adam_epsilon=1e-6, override_optimizer_config); one that equals the default cannot be told from it, so "
        'FUSEPATCH_OPTIMIZER_FUSED=0 also removes an explicit optim="adamw_torch_fused"',
        "a subclass with a constructor of its own counts as code of the module that defines it",
        "a framework that shards parameters after it has constructed the optimizer is judged by what they were before",
        "a framework's own fused=True stays, also where torch will refuse it at the first step; that is recorded",
        "an optimizer that was pickled or deep-copied keeps its flags but no longer protects them in load_state_dict",
        "optimizers that are not torch's (bitsandbytes, torchao, DeepSpeed's) are left alone",
    ),
    sites=(
        *(
            Site(
                upstream=TORCH,
                module=module,
                supported=">=2.4",
                tested=">=2.11,<2.16",
                slots=(Slot(f"{name}.__init__", construct, Contract(parameters=("params", "foreach"))),),
            )
            for name, module in CLASSES.items()
        ),
        Site(
            upstream=TORCH,
            module="torch.optim.optimizer",
            supported=">=2.4",
            tested=">=2.11,<2.16",
            slots=(
                Slot("Optimizer.__init__", construct_other, Contract(parameters=("params", "defaults"))),
                Slot("Optimizer.add_param_group", add_param_group, Contract(parameters=("param_group",))),
            ),
        ),
    ),
)
