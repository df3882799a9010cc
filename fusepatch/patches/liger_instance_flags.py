"""`liger.instance_flags`: granular flags in every application of Liger's layer kernels to a model.

The environment is merged once, in the leaf functions (`apply_liger_kernel_to_<model>`), which every way into Liger
passes: the two dispatchers, the dictionary `MODEL_TYPE_TO_APPLY_LIGER_FN` that axolotl reads, direct calls as in
LLaMA-Factory, and the calls between Liger's own functions for vision-language models. The dispatchers only add the rule
of the framework that called, and merge for a function that the user has registered in that dictionary.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple

from fusepatch import settings
from fusepatch.engine import install, ledger
from fusepatch.engine.callers import calling_module, is_below
from fusepatch.engine.patch import Contract, Patch, Proceed, Site, Slot
from fusepatch.errors import FlagConflictError
from fusepatch.patches import liger_cross_entropy, liger_sft_loss
from fusepatch.patches.liger_sft_loss import LeftWithout
from fusepatch.patches.upstreams import LIGER

ID = "liger.instance_flags"
MODULE = "liger_kernel.transformers.monkey_patch"

CROSS_ENTROPY = "cross_entropy"
FUSED_LINEAR_CROSS_ENTROPY = "fused_linear_cross_entropy"

HARD_CODING = ("verl", "trinity", "llamafactory", "liger_kernel.transformers.monkey_patch")
"""Callers whose arguments no user wrote. What the others pass is a user's: their own code, or a configuration that
reaches Liger unchanged (`liger_kernel_config` of the transformers Trainer, axolotl's `liger_*` keys)."""

OWN_FORWARD = ("verl", "trinity")
"""Callers that install a forward of their own after Liger's call: a fused linear cross-entropy on the instance would
hide it (verl-project/verl#2609, #1720)."""


class Passed(NamedTuple):
    """The flags of one call as they came. `nones` were passed as None: nobody's choice, but off for Liger."""

    flags: Mapping[str, bool]
    caller: str
    automatic: Mapping[str, bool] = MappingProxyType({})
    nones: frozenset[str] = frozenset()

    @property
    def by_user(self) -> bool:
        return not is_below(self.caller, HARD_CODING)


class Merge(NamedTuple):
    """What one leaf call gets: the values to set, what was replaced, and what the environment could not have."""

    values: Mapping[str, bool]
    replaced: tuple[str, ...]
    refused: tuple[str, ...]


class _Application:
    """One outermost application of Liger to a model, with the calls nested in it."""

    def __init__(self, passed: Passed) -> None:
        self.passed = passed
        self.user_flags = frozenset(passed.flags) if passed.by_user else frozenset()
        self.leaves: list[str] = []
        self.taken: set[str] = set()
        self.first_takes: frozenset[str] = frozenset()

    def enter(self, name: str, takes: Mapping[str, bool | None]) -> None:
        if not self.leaves:
            self.first_takes = frozenset(takes)
        self.leaves.append(name)
        self.taken.update(takes)


_application: ContextVar[_Application | None] = ContextVar("fusepatch_liger_application", default=None)


def dispatch(proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
    """Handler of Liger's two dispatchers, which look up the model's function and filter the flags by its signature."""
    caller = calling_module()
    passed = {
        name: value for name, value in kwargs.items() if name not in ("model", "model_type") and value is not None
    }
    automatic: dict[str, bool] = {}
    if is_below(caller, OWN_FORWARD) and FUSED_LINEAR_CROSS_ENTROPY not in passed:
        automatic[FUSED_LINEAR_CROSS_ENTROPY] = False
        kwargs[FUSED_LINEAR_CROSS_ENTROPY] = False
        ledger.replaced(ID, f"{FUSED_LINEAR_CROSS_ENTROPY}: not passed -> False (automatic; called by {caller})")
    known = _all_flags()
    flags = {name: value for name, value in passed.items() if name in known}
    application = _Application(Passed(flags, caller, automatic))
    function = _function_for(args, kwargs)
    registered = None if function is None or _is_wrapped(function) else _merge_registered(function, application)
    if registered is not None:
        kwargs.update(registered.values)
    token = _application.set(application)
    try:
        ledger.count_call(ID)
        result = proceed(*args, **kwargs)
    finally:
        _application.reset(token)
    if registered is not None:
        _record(application.leaves[0], registered.replaced)
        _report_not_taken(application)
    if function is None:
        _nothing_applied(args, kwargs)
    else:
        _report_dropped(application)
    return result


def _merge_registered(function: Callable[..., Any], application: _Application) -> Merge | None:
    """Merge the environment's flags for a function that somebody has registered in Liger's dictionary.

    None where its parameters cannot be read, at which Liger's dispatcher raises.
    """
    try:
        defaults = _defaults(inspect.signature(function), _all_flags())
    except (TypeError, ValueError):
        return None
    bound = function.keywords if isinstance(function, functools.partial) else {}
    own = {flag: bool(value) for flag, value in bound.items() if flag in defaults}
    passed = application.passed._replace(flags={**own, **application.passed.flags})
    merge = merge_flags(
        defaults,
        passed,
        settings.current().liger_flags,
        application.user_flags | (own.keys() - application.passed.flags),
    )
    name = _described(function)
    application.enter(name, defaults)
    for text in merge.refused:
        ledger.refused(ID, f"{name}: {text}")
    return merge


def apply_to_model(proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
    """Handler of `apply_liger_kernel_to_<model>`: merges the environment's flags into the call."""
    name = proceed.target.name
    signature = inspect.signature(proceed.target.original)
    try:
        bound = signature.bind_partial(*args, **kwargs)
    except TypeError:
        return proceed(*args, **kwargs)  # upstream's own error
    outer = _application.get()
    flags = _flags_in(bound.arguments, signature)
    if outer is None:
        ledger.count_call(ID)
    if outer is not None and not outer.leaves:
        passed = Passed(flags, outer.passed.caller, outer.passed.automatic)
    else:
        passed = Passed(flags, calling_module())
    defaults = _defaults(signature)
    passed = passed._replace(nones=frozenset(f for f in defaults if bound.arguments.get(f, 0) is None))
    application = outer or _Application(passed)
    merge = merge_flags(defaults, passed, settings.current().liger_flags, application.user_flags)
    application.enter(name, defaults)
    for text in merge.refused:
        ledger.refused(ID, f"{name}: {text}")
    bound.arguments.update(merge.values)
    token = _application.set(application)
    try:
        result = _call(proceed, bound, merge, defaults)
    finally:
        _application.reset(token)
    became = {flag: bool(bound.arguments.get(flag, default)) for flag, default in defaults.items()}
    model = bound.arguments.get("model")
    first = application.leaves[0] == name
    lost = first and bool(became.get(CROSS_ENTROPY)) and not liger_cross_entropy.acts(model, name)
    taken_back = {flag for flag, value in merge.values.items() if became[flag] != value}
    _record(name, merge.replaced, without=taken_back | ({CROSS_ENTROPY} if lost else set()))
    _note_fused_loss(model, became, merge, passed)
    if first:
        _report_not_taken(application)
    if lost:
        _report_lost_cross_entropy(name, passed)
    return result


def merge_flags(
    defaults: Mapping[str, bool | None],
    passed: Passed,
    environment: Mapping[str, bool],
    user_flags: frozenset[str] = frozenset(),
) -> Merge:
    """Merge one call's flags with the environment's.

    What the user wrote in code beats the environment, which beats what a framework hard-codes, which beats the
    automatic rule. A framework's `fused_linear_cross_entropy=False` is never raised: its own forward depends on it.

    Args:
        defaults: every flag that the model's function takes, with upstream's default.
        passed: the flags of this call and who made it.
        environment: the flags asked for by `FUSEPATCH_LIGER_*`.
        user_flags: flags that the user set in the call around this one (vision-language models).

    Raises:
        FlagConflictError: the environment asks for one of the two cross-entropies and the user's code for the other.
    """
    values: dict[str, bool] = {}
    replaced: list[str] = []
    refused: list[str] = []
    by_user = user_flags | (frozenset(passed.flags) if passed.by_user else frozenset())

    def without(flag: str) -> bool | None:
        return False if flag in passed.nones else defaults[flag]

    def set_flag(flag: str, value: bool, source: str) -> None:
        before = passed.flags.get(flag)
        values[flag] = value
        if before is None and value != without(flag):
            found = "None (off for Liger)" if flag in passed.nones else f"not passed (Liger's default {defaults[flag]})"
            replaced.append(f"{flag}: {found} -> {value} ({source})")
        elif before is not None and value != before:
            replaced.append(f"{flag}: {before} from {passed.caller} -> {value} ({source})")

    for flag, value in environment.items():
        if flag not in defaults:
            continue
        variable = f"{_variable(flag)}={int(value)}"
        if flag in by_user:
            if passed.flags.get(flag) not in (None, value):
                replaced.append(f"{flag}: {passed.flags[flag]} from {passed.caller} kept (it beats {variable})")
            continue
        hard_coded_off = passed.flags.get(flag) is False and flag not in passed.automatic
        if flag == FUSED_LINEAR_CROSS_ENTROPY and value and hard_coded_off:
            refused.append(
                f"{variable} was not followed: {passed.caller} passes {flag}=False because its own forward computes "
                "the loss, so Liger's would be hidden or would hide it; unset the variable"
            )
            continue
        set_flag(flag, value, variable)

    for asked, other in ((CROSS_ENTROPY, FUSED_LINEAR_CROSS_ENTROPY), (FUSED_LINEAR_CROSS_ENTROPY, CROSS_ENTROPY)):
        if not values.get(asked) or other not in defaults or values.get(other) is False:
            continue
        if other in by_user and passed.flags.get(other):
            raise FlagConflictError(
                f"{_variable(asked)}=1 contradicts {other}=True in the code of {passed.caller}: Liger computes the "
                "loss in one of the two ways and would stop with an AssertionError. No kernel was applied by this "
                f"call; unset the variable or remove {other} from the code."
            )
        if passed.flags.get(other, without(other)):
            set_flag(other, False, f"implied by {_variable(asked)}=1")
    return Merge(values, tuple(replaced), tuple(refused))


def _call(proceed: Proceed, bound: inspect.BoundArguments, merge: Merge, defaults: Mapping[str, bool | None]) -> Any:
    """Call upstream; a kernel that the environment asked for and upstream refuses is taken back and reported.

    Upstream's functions may be called again: they assign the same classes and forwards each time.
    """
    asked = [flag for flag, value in merge.values.items() if value and not defaults[flag]]
    while True:
        try:
            return proceed(*bound.args, **bound.kwargs)
        except NotImplementedError as error:
            if not asked:
                raise
            flag = asked.pop()
            bound.arguments[flag] = defaults[flag]
            if flag == FUSED_LINEAR_CROSS_ENTROPY:
                bound.arguments.pop(CROSS_ENTROPY, None)
            ledger.refused(
                ID,
                f"{proceed.target.name}: {_variable(flag)}=1 was not followed: Liger refuses it ({error}); the model "
                f"keeps {flag}={defaults[flag]}; unset the variable",
            )


def _flags_in(arguments: Mapping[str, Any], signature: inspect.Signature) -> dict[str, bool]:
    flags = _defaults(signature)
    return {name: value for name, value in arguments.items() if name in flags and value is not None}


def _defaults(signature: inspect.Signature, known: frozenset[str] = frozenset()) -> dict[str, bool | None]:
    """The flags of a function, with their defaults: parameters whose default is a bool, or that are `known` flags
    (None)."""
    return {
        name: parameter.default if isinstance(parameter.default, bool) else None
        for name, parameter in signature.parameters.items()
        if isinstance(parameter.default, bool) or name in known
    }


def _all_flags() -> frozenset[str]:
    """Every flag that some function of the installed Liger takes, or one that the user has registered there."""
    flags: set[str] = set()
    for function in vars(sys.modules[MODULE])["MODEL_TYPE_TO_APPLY_LIGER_FN"].values():
        try:
            flags.update(_defaults(inspect.signature(function)))
        except (TypeError, ValueError):
            continue
    return frozenset(flags)


def _model_type(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    subject = args[0] if args else kwargs.get("model", kwargs.get("model_type"))
    return subject if isinstance(subject, str) else getattr(getattr(subject, "config", None), "model_type", None)


def _function_for(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """What Liger's dispatchers will call; None where they have nothing for the model."""
    function: Callable[..., Any] | None = vars(sys.modules[MODULE])["MODEL_TYPE_TO_APPLY_LIGER_FN"].get(
        _model_type(args, kwargs)
    )
    return function


def _is_wrapped(function: Callable[..., Any]) -> bool:
    """Whether it is one of Liger's own with this patch's wrapper, which merges at the call."""
    return getattr(function, "__globals__", {}).get("__name__") == install.__name__


def _described(function: Callable[..., Any]) -> str:
    if isinstance(function, functools.partial):
        return f"functools.partial of {_described(function.func)}"
    name = getattr(function, "__qualname__", None)
    return f"{function.__module__}.{name}" if name else f"a {type(function).__module__}.{type(function).__qualname__}"


def _variable(flag: str) -> str:
    return f"FUSEPATCH_LIGER_{flag.upper()}"


def _report_not_taken(application: _Application) -> None:
    """Name the flags of the environment that no function called for this model takes (Liger drops them silently)."""
    names = ", ".join(dict.fromkeys(application.leaves))
    known = _all_flags()
    for flag, value in settings.current().liger_flags.items():
        if flag in application.taken:
            continue
        if flag in known:
            taken = ", ".join(sorted(application.taken))
            ledger.refused(
                ID,
                f"{_variable(flag)}={int(value)} was not followed: {names} has no flag {flag}, it takes {taken}; Liger "
                "is applied without that flag; unset the variable for this model",
            )
        else:
            import difflib

            nearest = difflib.get_close_matches(flag, known, n=1)
            hint = f"did you mean {_variable(nearest[0])}?" if nearest else f"known are {', '.join(sorted(known))}"
            ledger.refused(
                ID,
                f"{_variable(flag)}={int(value)} was not followed: no function of this Liger has a flag {flag}; {hint}",
            )


def _record(name: str, replaced: tuple[str, ...], without: Collection[str] = ()) -> None:
    """Record what was replaced, `without` the flags whose value did not hold."""
    for text in replaced:
        if text.partition(":")[0] not in without:
            ledger.replaced(ID, f"{name}: {text}")


def _note_fused_loss(model: Any, became: Mapping[str, bool], merge: Merge, passed: Passed) -> None:
    """Keep for TRL's SFTTrainer, which asks it by argument, whether the model has Liger's fused linear
    cross-entropy."""
    if model is None or FUSED_LINEAR_CROSS_ENTROPY not in became:
        return
    if became[FUSED_LINEAR_CROSS_ENTROPY]:
        liger_sft_loss.note(model, None)
        return
    environment = settings.current().liger_flags
    if environment.get(FUSED_LINEAR_CROSS_ENTROPY) is False:
        left = LeftWithout(f"{_variable(FUSED_LINEAR_CROSS_ENTROPY)}=0", asked=True)
    elif merge.values.get(FUSED_LINEAR_CROSS_ENTROPY) is False:
        left = LeftWithout(f"{_variable(CROSS_ENTROPY)}=1 implies it", asked=True)
    elif FUSED_LINEAR_CROSS_ENTROPY in passed.flags:
        left = LeftWithout(f"{FUSED_LINEAR_CROSS_ENTROPY}=False from {passed.caller}", asked=False)
    else:
        left = LeftWithout("Liger's default for this model", asked=False)
    liger_sft_loss.note(model, left)


def _report_lost_cross_entropy(name: str, passed: Passed) -> None:
    by_variable = settings.current().liger_flags.get(CROSS_ENTROPY)
    by_user = passed.by_user and bool(passed.flags.get(CROSS_ENTROPY))
    asked = f"{_variable(CROSS_ENTROPY)}=1" if by_variable else f"{CROSS_ENTROPY}=True"
    text = (
        f"{name}: {asked} has no effect: Liger replaces the name CrossEntropyLoss for this model, which the model of "
        f"the installed transformers does not use; torch computes the loss, and {FUSED_LINEAR_CROSS_ENTROPY} is off "
        "too, so neither of Liger's two losses is on"
    )
    if by_variable or by_user:
        ledger.refused(ID, f"{text}; unset it, or ask for {FUSED_LINEAR_CROSS_ENTROPY} instead")
    else:
        ledger.fallback(ID, text)


def _report_dropped(application: _Application) -> None:
    """Name the flags that the caller passed and that Liger dropped on the way, or did not pass on to nested models."""
    first, *nested = application.leaves
    for flag, value in application.passed.flags.items():
        if flag in application.first_takes:
            continue
        if flag in application.taken:
            what = (
                f"Liger does not pass it on: {', '.join(nested)} ran with its own default unless the environment set it"
            )
        else:
            what = "Liger dropped it"
        ledger.fallback(
            ID,
            f"{first}: {flag}={value} from {application.passed.caller} has no effect: it is not a flag of {first}; "
            f"{what}",
        )


def _nothing_applied(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    text = f"nothing was applied: Liger has no kernels for model type {_model_type(args, kwargs)!r}"
    asked = settings.current().liger_flags
    if asked:
        wanted = ", ".join(f"{_variable(flag)}={int(value)}" for flag, value in asked.items())
        ledger.refused(ID, f"{text}; {wanted} was not followed")
    else:
        ledger.fallback(ID, text)


PATCH = Patch(
    id=ID,
    promise="Choose Liger's kernels one by one in every framework, and none hides a framework's own forward.",
    why=(
        "Frameworks apply Liger with one call that is all or nothing. With verl up to 0.7.1 and Liger from 0.6.0 that "
        "call puts a fused linear cross-entropy forward on the model instance, which hides the forward that verl "
        "installs on the class afterwards: its per-token log-probabilities go missing and rewards are wrong, without "
        "an error."
    ),
    upstream=(
        "https://github.com/volcengine/verl/issues/2609",
        "https://github.com/volcengine/verl/issues/1720",
        "https://github.com/modelscope/Trinity-RFT/issues/273",
        "https://github.com/huggingface/transformers/issues/38905",
    ),
    fixed_in="verl 0.8.0 and Trinity-RFT 0.6.0 pass fused_linear_cross_entropy=False themselves; no release has "
    "switches per kernel",
    remove_when="no supported verl is older than 0.8.0, and every framework passes the user's flags to Liger",
    variables=("FUSEPATCH_LIGER_",),
    requested_by="",
    changes=(
        "a call from verl or Trinity-RFT that does not set fused_linear_cross_entropy gets "
        "fused_linear_cross_entropy=False",
        "every flag in the environment reaches the model's function and replaces what a framework hard-codes",
        "FUSEPATCH_LIGER_CROSS_ENTROPY=1 implies fused_linear_cross_entropy=False, because Liger refuses both together",
        "a flag that the model's function does not take, and a kernel that Liger refuses, are reported instead of "
        "silently dropped or raised as an error",
        "a cross_entropy=True that the model's loss does not use (mistral, ministral, gemma3 and others with newer "
        "releases of transformers) is reported as having no effect",
        "a function that you registered in MODEL_TYPE_TO_APPLY_LIGER_FN gets the same flags, those that it has "
        "parameters for",
    ),
    limits=(
        "Liger replaces rope, RMSNorm and MLP in the modeling module for the whole process, and with "
        "cross_entropy=True torch.nn.functional.cross_entropy itself: a later call with the flag off does not undo it, "
        "and other models see it",
        "a framework's fused_linear_cross_entropy=False is never changed to True, whatever the environment says",
        "a flag that a user's configuration passes for a vision-language model reaches Liger's nested text function "
        "only where Liger passes it on; a variable always reaches it",
        "a registered function that your code looks up in the dictionary and calls itself is left alone",
    ),
    sites=(
        Site(
            upstream=LIGER,
            module=MODULE,
            supported=">=0.5.5.dev0",
            mappings=("MODEL_TYPE_TO_APPLY_LIGER_FN",),
            slots=(
                Slot("_apply_liger_kernel_to_instance", dispatch, Contract(parameters=("model",), keywords=True)),
                Slot("_apply_liger_kernel", dispatch, Contract(parameters=("model_type",), keywords=True)),
                Slot("apply_liger_kernel_to_*", apply_to_model, Contract(parameters=("model",))),
            ),
        ),
    ),
)
