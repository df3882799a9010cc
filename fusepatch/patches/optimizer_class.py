"""`optimizer.class`: the class of the optimizers that frameworks construct as `torch.optim.AdamW`.

verl up to 0.6.0 and Trinity-RFT up to 0.4.0 name AdamW in their code; verl's `build_optimizer` and the Trainer arrive
at it by default. The patch wraps AdamW's constructor, where the object that the caller is about to get
becomes one of the class that was asked for. Classes that a user chose in a framework's configuration are other
constructors' calls, and `optimizer_cls_and_kwargs` of the Trainer is read in its `create_optimizer`; both are kept.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from fusepatch import settings
from fusepatch.engine import ledger
from fusepatch.engine.callers import calling_module, is_below
from fusepatch.engine.patch import Contract, Patch, Proceed, Site, Slot
from fusepatch.errors import FusepatchError, OptimizerClassError
from fusepatch.patches.frameworks import FRAMEWORKS, own_values
from fusepatch.patches.upstreams import TORCH, TRANSFORMERS

if TYPE_CHECKING:
    from fusepatch.optim.exchange import Accepts, Given, Note

ID = "optimizer.class"

SETTINGS_OF_FRAMEWORKS = frozenset({"lr", "betas", "weight_decay"})
"""What every framework passes from its own configuration, and what carries over to another class."""

STATES = {
    ("transformers", "Adafactor"): (
        frozenset({"step", "exp_avg_sq_row", "exp_avg_sq_col"}),
        frozenset({"step", "exp_avg_sq"}),
    ),
}
"""Of the optimizers of frameworks, what `refusals.STATES` has of others."""

_chosen_by_user: ContextVar[bool] = ContextVar("fusepatch_optimizer_chosen_by_user", default=False)
"""Inside a Trainer whose user gave `optimizer_cls_and_kwargs`."""


def construct(proceed: Proceed, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Handler of AdamW's constructor."""
    path = settings.current().optimizer_class
    caller = calling_module()
    if path is None or is_below(caller, ("torch.optim",)) or not _is_adamw(optimizer):
        return proceed(optimizer, *args, **kwargs)  # a subclass is not what frameworks hard-code
    own = own_values(caller)
    if own is None or _chosen_by_user.get():
        whose = "your own code constructs it (FUSEPATCH_OPTIMIZER_SCOPE=all includes it)"
        if own is not None:
            whose = "the Trainer was given optimizer_cls_and_kwargs"
        ledger.replaced(ID, f"AdamW in {caller} kept: {whose}, and beats FUSEPATCH_OPTIMIZER_CLASS={path}")
        return proceed(optimizer, *args, **kwargs)
    signature = inspect.signature(proceed.target.original)
    try:
        passed = signature.bind(optimizer, *args, **kwargs).arguments
    except TypeError:
        return proceed(optimizer, *args, **kwargs)  # torch says what is wrong with the call
    ledger.count_call(ID)
    try:
        return _exchange(proceed, optimizer, path, caller, own, passed, signature.parameters)
    except FusepatchError:
        raise
    except Exception as error:
        raise OptimizerClassError(
            f"FUSEPATCH_OPTIMIZER_CLASS={path}: the patch itself failed for AdamW in {caller}: {type(error).__name__}: "
            f"{error}; no optimizer was constructed; please report this, and unset the variable for the framework's "
            "own class"
        ) from error


def _exchange(
    proceed: Proceed,
    optimizer: Any,
    path: str,
    caller: str,
    own: Mapping[str, tuple[Any, ...]],
    passed: Mapping[str, Any],
    parameters: Mapping[str, inspect.Parameter],
) -> Any:
    from fusepatch.optim import exchange, groups, refusals

    subject = f"AdamW in {caller}"
    target = exchange.Target(path, "FUSEPATCH_OPTIMIZER_CLASS", "FUSEPATCH_OPTIMIZER_KWARGS")
    kind = exchange.resolve(target)
    takes = exchange.accepts(kind)
    _, (_, params), *arguments = passed.items()
    params = groups.materialise(params)
    members = groups.members(params)
    given = _given(arguments, caller, own, takes, parameters)
    asked = settings.current().optimizer_kwargs
    own_groups = [member.own for member in members if member.own is not None]
    planned = exchange.plan(target, takes, given, asked, own_groups, caller)
    tensors = [tensor for member in members for tensor in member.tensors]
    obstacle = refusals.obstacle(kind, tensors)
    if obstacle is not None:
        raise _refusal(path, subject, obstacle)
    caution = refusals.caution(kind, tensors)
    if caution is not None:
        ledger.warn_once(f"{ID}: {subject}: FUSEPATCH_OPTIMIZER_CLASS={path} is constructed, but {caution}")
    if kind is type(optimizer):
        _tell(subject, planned.notes)
        proceed(optimizer, params, **{**dict(arguments), **planned.kwargs})
        _watch_loading(optimizer, subject)
        return None
    exchange.become(optimizer, target, kind, takes, params, planned.kwargs)
    carried = [name for name in planned.kwargs if name in given and name not in asked]
    arguments_used = ", ".join(["parameters", *carried])
    own_arguments = f" and {', '.join(asked)} from FUSEPATCH_OPTIMIZER_KWARGS" if asked else ""
    ledger.replaced(
        ID,
        f"{subject}: class torch.optim.AdamW -> {path} (FUSEPATCH_OPTIMIZER_CLASS), constructed with the caller's "
        f"{arguments_used}{own_arguments}",
    )
    _tell(subject, planned.notes)
    _watch_loading(optimizer, subject)
    optimizer.register_step_pre_hook(_judged_at_first_step(path, subject))
    return None


def _watch_loading(optimizer: Any, subject: str) -> None:
    # torch adds a key of its own to the defaults later.
    keys = frozenset(optimizer.defaults)
    optimizer.register_load_state_dict_pre_hook(functools.partial(_compare_groups, subject))
    optimizer.register_load_state_dict_post_hook(functools.partial(_look_for_keys, keys))


def _given(
    arguments: Iterable[tuple[str, Any]],
    caller: str,
    own: Mapping[str, tuple[Any, ...]],
    takes: Accepts,
    parameters: Mapping[str, inspect.Parameter],
) -> dict[str, Given]:
    """The arguments of the call with where they come from; None counts as not passed, and so does AdamW's own default
    of what the class does not have."""
    from fusepatch.optim.exchange import Given

    of_framework = caller.partition(".")[0] in FRAMEWORKS
    given = {}
    for name, value in arguments:
        setting = of_framework and name in SETTINGS_OF_FRAMEWORKS
        says_nothing = not setting and takes.parameter(name) is None and value == parameters[name].default
        if value is None or says_nothing:
            continue
        origin = "framework" if setting else "default" if value in own.get(name, ()) else "user"
        given[name] = Given(value, origin)
    return given


def _is_adamw(optimizer: Any) -> bool:
    return type(optimizer) is sys.modules["torch.optim.adamw"].AdamW


def _tell(subject: str, notes: Iterable[Note]) -> None:
    for note in notes:
        _RECORD[note.kind](ID, f"{subject}: {note.text}")


_RECORD: Mapping[str, Callable[[str, str], None]] = {"replaced": ledger.replaced, "refused": ledger.refused}


def _refusal(path: str, subject: str, obstacle: str) -> OptimizerClassError:
    return OptimizerClassError(
        f"{subject}: FUSEPATCH_OPTIMIZER_CLASS={path} cannot train these parameters: {obstacle}. No step was taken; "
        "name another class, or unset the variable for the framework's own."
    )


def _compare_groups(subject: str, optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """`load_state_dict` pre-hook: a checkpoint of another class is found out before its states are taken for this
    one's.

    Returns what is to be loaded: with the flags that tell the class that was asked for from another one with the same
    keys.
    """
    from fusepatch.optim import refusals

    kind = type(optimizer)
    groups = []
    for live, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        missing = sorted(set(live) - set(saved) - _SCHEDULERS_OWN)
        more = sorted(set(saved) - set(live) - _SCHEDULERS_OWN)
        # A release of the same class may have added a flag since; numbers and another class's keys are something else.
        numbers = [name for name in missing if not isinstance(live[name], bool | None)]
        if (numbers and more) or (_FLAGS_OF_TORCH.issubset(more) and not is_below(kind.__module__, ("torch.optim",))):
            raise _refusal_of_checkpoint(
                kind,
                "the checkpoint was written by an optimizer of another class: its param groups have "
                f"{', '.join(more)}, and lack {', '.join(missing) or 'nothing'}. Its states have another meaning "
                "there: training would continue from wrong states or stop at the next step. Nothing was loaded",
            )
        kept = {
            name: live[name] for name in _OF_THE_CLASS if name in live and saved.get(name, live[name]) != live[name]
        }
        groups.append({**saved, **kept})
        for name, value in kept.items():
            ledger.replaced(
                ID,
                f"load_state_dict of {kind.__qualname__}, {subject}: {name}: {saved[name]} in the checkpoint -> "
                f"{value}, the value of the class that was asked for",
            )
    foreign = refusals.foreign_state(optimizer, state_dict["state"].values(), STATES)
    if foreign is not None:
        raise _refusal_of_checkpoint(
            kind, f"{foreign}. Training would continue from wrong states or stop at a later step. Nothing was loaded"
        )
    rest = state_dict["param_groups"][len(groups) :]  # torch says what is wrong with their number
    return {**state_dict, "param_groups": [*groups, *rest]}


def _look_for_keys(keys: Collection[str], optimizer: Any) -> None:
    """`load_state_dict` post-hook: what the class reads in its groups and has not filled in by itself for older
    checkpoints."""
    from fusepatch.optim import refusals

    found = refusals.lost_keys(optimizer, keys)
    if found is not None:
        raise _refusal_of_checkpoint(type(optimizer), f"{found}. A later step would stop. No step was taken")


def _refusal_of_checkpoint(kind: type[Any], found: str) -> OptimizerClassError:
    return OptimizerClassError(
        f"load_state_dict of {kind.__module__}.{kind.__qualname__}: {found}; start without the optimizer's checkpoint, "
        "or set FUSEPATCH_OPTIMIZER_CLASS to the class that wrote it"
    )


_OF_THE_CLASS = ("decoupled_weight_decay",)
"""Keys of a param group that are not hyperparameters but say which class it is: Adam and AdamW differ in nothing
else."""

_SCHEDULERS_OWN = frozenset({"params", "param_names", "initial_lr", "swa_lr"})
"""Keys of a param group that are not the optimizer class's."""

_FLAGS_OF_TORCH = frozenset({"foreach", "capturable", "differentiable"})
"""What the groups of torch's adaptive classes have, AdamW's among them, and those of others do not."""


def _judged_at_first_step(path: str, subject: str) -> Callable[[Any, Any, Any], None]:
    """A step pre-hook that looks once at parameters which were sharded, moved or added after the construction."""
    import torch

    from fusepatch.optim import refusals

    judged = False

    def judge(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal judged
        if not judged:
            tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
            obstacle = refusals.obstacle(type(optimizer), tensors)
            if obstacle is not None:
                raise _refusal(path, f"{subject}, at the first step", obstacle)
            foreign = refusals.foreign_state(optimizer, optimizer.state.values(), STATES)
            if foreign is not None:
                raise _refusal_of_checkpoint(type(optimizer), f"{foreign}. No step was taken")
            judged = True

    uncompiled: Callable[[Any, Any, Any], None] = torch.compiler.disable(judge)  # type: ignore[no-untyped-call]
    return uncompiled


def construct_other(proceed: Proceed, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Handler of the base class's constructor: records of a class that a framework's configuration chose that it
    stands."""
    path = settings.current().optimizer_class
    if path is not None and not _is_adamw(optimizer):
        kind = type(optimizer)
        caller = calling_module(skip=("torch.optim", *(base.__module__ for base in kind.__mro__)))
        name = f"{kind.__module__}.{kind.__qualname__}"
        if caller.partition(".")[0] in FRAMEWORKS and not _is_at(path, kind):
            ledger.replaced(
                ID,
                f"{name} in {caller} kept: the framework's configuration chose it, and beats "
                f"FUSEPATCH_OPTIMIZER_CLASS={path}",
            )
    return proceed(optimizer, *args, **kwargs)


def _is_at(path: str, kind: type[Any]) -> bool:
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), name, None) is kind


def create_optimizer(proceed: Proceed, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Handler of `Trainer.create_optimizer`: `optimizer_cls_and_kwargs` is the user's own choice."""
    token = _chosen_by_user.set(getattr(trainer, "optimizer_cls_and_kwargs", None) is not None)
    try:
        return proceed(trainer, *args, **kwargs)
    finally:
        _chosen_by_user.reset(token)


PATCH = Patch(
    id=ID,
    promise="Use any optimizer class by its import path, also in frameworks that hard-code AdamW.",
    why=(
        "verl up to 0.6.0 and Trinity-RFT up to 0.4.0 construct torch.optim.AdamW whatever the configuration says. The "
        "Trainer accepts a fixed list of names. verl's build_optimizer passes its arguments to any class without "
        "checking that the class accepts them. To train with 8-bit states, or with your own optimizer, you would have "
        "to edit the framework."
    ),
    upstream=(
        "https://github.com/pytorch/ao/issues/1931",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1633",
        "https://github.com/pytorch/ao/issues/1185",
        "https://github.com/pytorch/torchtune/pull/2152",
    ),
    fixed_in="verl 0.6.1 has optimizer and optimizer_impl, without a check of the arguments; the Trainer's "
    "optimizer_cls_and_kwargs needs code",
    remove_when="every framework accepts a class by path and checks its arguments",
    variables=("FUSEPATCH_OPTIMIZER_CLASS", "FUSEPATCH_OPTIMIZER_KWARGS", "FUSEPATCH_OPTIMIZER_SCOPE"),
    requested_by="FUSEPATCH_OPTIMIZER_CLASS",
    changes=(
        "a framework that constructs torch.optim.AdamW gets an object of the class that FUSEPATCH_OPTIMIZER_CLASS "
        "names: type(optimizer) is that class, built by its own constructor",
        "the framework's learning rate, betas, weight decay and param groups are passed on where the class accepts "
        "them; the framework's own constants (fused=True, eps=1e-8) are not. An argument that the class does not "
        "accept is left out and recorded",
        "FUSEPATCH_OPTIMIZER_KWARGS is checked against the constructor's signature before anything is constructed",
        "a class that cannot be imported, is not an optimizer, lacks an argument, or cannot train these parameters "
        "(bitsandbytes on DTensors, torchao on offloaded DTensors, SparseAdam, Muon with biases, a step that needs a "
        "closure) raises an error when it is constructed, with the reason",
        "one of torch's classes then gets fused and foreach as optimizer.flags decides",
    ),
    limits=(
        'optim="adamw_torch" and "adamw_torch_fused" cannot be distinguished from the Trainer\'s default, nor '
        "optimizer=\"AdamW\" from verl's, so they are replaced too; any other choice in a framework's configuration is "
        "kept",
        "if no constructor of the class names the learning rate, its **kwargs get it, and nothing else that you did "
        "not ask for",
        "the constructor runs on an object that was created as an AdamW, so a class whose metaclass creates instances "
        "in its own way is refused",
        "frameworks that pass a configuration to DeepSpeed or Megatron do not construct an optimizer of torch, so the "
        "patch does not apply there",
        "a checkpoint of another optimizer class is refused if its param groups or states show that it is one (for "
        "classes other than those of torch, torchao, bitsandbytes and transformers' Adafactor, only the param groups "
        "are compared). If both have what the class reads (Adam, AdamW, NAdam and RAdam), it is loaded, and "
        "decoupled_weight_decay stays that of the class",
        "the Trainer keeps embeddings in 32 bits for its own adamw_bnb_8bit, but not for a class that is given by its "
        "path",
    ),
    sites=(
        Site(
            upstream=TORCH,
            module="torch.optim.adamw",
            supported=">=2.4",
            slots=(Slot("AdamW.__init__", construct, Contract(parameters=("params", "lr"))),),
        ),
        Site(
            upstream=TORCH,
            module="torch.optim.optimizer",
            supported=">=2.4",
            slots=(Slot("Optimizer.__init__", construct_other, Contract(parameters=("params", "defaults"))),),
        ),
        Site(
            upstream=TRANSFORMERS,
            module="transformers.trainer",
            supported=">=4.47",
            slots=(Slot("Trainer.create_optimizer", create_optimizer, Contract(parameters=("self",))),),
        ),
    ),
)
