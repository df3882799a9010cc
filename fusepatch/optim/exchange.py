"""Replaces the optimizer class that a caller names by another one: found by its path, checked, constructed.

Every argument is decided before the class is constructed, from its signature: what the caller passes carries over where
the class takes it, what was asked for by name must be taken. An optimizer is constructed once, in the object that the
caller is about to get, so whatever holds that object holds the class that was asked for.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fusepatch.errors import OptimizerClassError

if TYPE_CHECKING:
    from torch.optim import Optimizer

FORMS = ("fused", "foreach")
"""Arguments that choose how torch's own classes compute: they reach a class that names them, and no `**kwargs`."""

NOT_PARAMS = frozenset({"model", "module", "optimizer", "base_optimizer", "named_parameters", "named_params"})
"""Names of a first argument that is something else than parameters or param groups."""


class Target(NamedTuple):
    """The dotted path of the class that was asked for, and the names by which the user knows it and its arguments."""

    path: str
    class_word: str = "class"
    arguments_word: str = "arguments"

    def __str__(self) -> str:
        return f"{self.class_word}={self.path}"


class Accepts(NamedTuple):
    """What a class's constructor takes beside its first argument, the parameters.

    `named` are its own arguments; `forwarded` those of the constructors that its `**kwargs` reach, by the usual
    `super().__init__(params, **kwargs)`; `any_keyword` says that it takes every name.
    """

    first: inspect.Parameter | None
    named: Mapping[str, inspect.Parameter]
    forwarded: Mapping[str, inspect.Parameter]
    any_keyword: bool

    def parameter(self, name: str) -> inspect.Parameter | None:
        found = self.named.get(name)
        return found if found is not None or name in FORMS else self.forwarded.get(name)

    def __str__(self) -> str:
        listed = ", ".join(name for name in (*self.named, *self.forwarded) if name not in FORMS or name in self.named)
        return f"{listed or 'no argument besides the parameters'}{' and any other keyword' if self.any_keyword else ''}"


class Given(NamedTuple):
    """An argument that arrived with the call.

    `origin` is `user` (written in code or in a framework's configuration for this argument alone), `framework` (its own
    settings: learning rate, betas, weight decay) or `default` (a framework's own constant, which nobody wrote).
    """

    value: Any
    origin: str


class Note(NamedTuple):
    """Something to tell: `kind` is replaced or refused (somebody wanted it, and it is not so)."""

    kind: str
    text: str


class Plan(NamedTuple):
    """The arguments of the construction, and what there is to say about them."""

    kwargs: Mapping[str, Any]
    notes: tuple[Note, ...]


def resolve(target: Target) -> type[Optimizer]:
    """The optimizer class that was asked for, imported now.

    Raises:
        OptimizerClassError: there is no such module or attribute, importing it fails, or it is not an optimizer class.
    """
    import torch

    module_name, _, name = target.path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise OptimizerClassError(_not_found(target, module_name, error.name or module_name)) from error
    except Exception as error:
        raise OptimizerClassError(
            f"{target}: importing {module_name} raised {type(error).__name__}: {error}; the optimizer cannot "
            "be constructed; repair that package, or unset the variable for the framework's own class"
        ) from error
    found = getattr(module, name, None)
    if found is None:
        raise OptimizerClassError(_no_attribute(target, module, name))
    if not isinstance(found, type):
        kind = "a function" if inspect.isroutine(found) else f"an object of {type(found).__name__}"
        raise OptimizerClassError(
            f"{target} is {kind}; wanted a class derived from torch.optim.Optimizer, so that type(optimizer) "
            f"is what was asked for; name the class that it makes, and put its arguments into {target.arguments_word}"
        )
    if not issubclass(found, torch.optim.Optimizer):
        bases = ", ".join(base.__qualname__ for base in found.__mro__[:-1])
        raise OptimizerClassError(
            f"{target} is not an optimizer: it derives from {bases}, wanted torch.optim.Optimizer, which "
            "schedulers and frameworks require; name another class"
        )
    if inspect.isabstract(found) or type(found).__call__ is not type.__call__:
        raise OptimizerClassError(
            f"{target} cannot be constructed in another class's place: it is abstract, or its metaclass "
            f"{type(found).__qualname__} creates instances in its own way; name a class that is created in the "
            "ordinary way"
        )
    return found


def _not_found(target: Target, module: str, missing: str) -> str:
    top = module.partition(".")[0]
    if missing == top:
        return (
            f"{target}: there is no module {top} in this Python; the optimizer cannot be constructed; install "
            f"it (`pip install {top.replace('_', '-')}`, if the package is called that), or correct the path"
        )
    if module == missing or module.startswith(f"{missing}."):
        return (
            f"{target}: {missing.rpartition('.')[0]} has no module {missing.rpartition('.')[2]}; the "
            f"optimizer cannot be constructed; correct the path, or install a version of {top} that has it"
        )
    return (
        f"{target}: importing {module} needs the module {missing}, which is not installed; the optimizer "
        f"cannot be constructed; install {missing.partition('.')[0]}"
    )


def _no_attribute(target: Target, module: Any, name: str) -> str:
    import torch

    optimizers = [
        key
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and not key.startswith("_")
    ]
    known = optimizers or [key for key in vars(module) if not key.startswith("_")]
    folded = {key.lower(): key for key in known}
    nearest = difflib.get_close_matches(name.lower(), folded, n=1)
    hint = f"; the nearest is {folded[nearest[0]]}" if nearest else ""
    has = f" It has the optimizers {', '.join(sorted(optimizers))}." if optimizers else ""
    return (
        f"{target}: {module.__name__} has no {name}{hint}; the optimizer cannot be constructed; correct the path.{has}"
    )


def accepts(kind: type[Optimizer]) -> Accepts:
    """Read a class's constructor, and the ones that its `**kwargs` go on to."""
    import torch

    first: inspect.Parameter | None = None
    named: dict[str, inspect.Parameter] | None = None
    forwarded: dict[str, inspect.Parameter] = {}
    any_keyword = False
    for constructor in _constructors(kind):
        if constructor is torch.optim.Optimizer.__init__ and named is not None:
            break  # its `defaults` is for subclasses
        parameters = list(inspect.signature(constructor).parameters.values())[1:]
        first = first or _first(parameters)
        found = {
            parameter.name: parameter
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            and (first is None or parameter.name != first.name)
        }
        if named is None:
            named = found
        else:
            forwarded.update({name: found[name] for name in found if name not in named and name not in forwarded})
        any_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        if not any_keyword:
            break
    return Accepts(first, named or {}, forwarded, any_keyword)


def _constructors(kind: type[Optimizer]) -> Iterator[Any]:
    return (vars(base)["__init__"] for base in kind.__mro__ if base is not object and "__init__" in vars(base))


def _first(parameters: Sequence[inspect.Parameter]) -> inspect.Parameter | None:
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) or parameter.name == "params":
            return parameter
    return None


def plan(
    target: Target,
    takes: Accepts,
    given: Mapping[str, Given],
    asked: Mapping[str, Any],
    groups: Collection[Mapping[str, Any]],
    source: str,
) -> Plan:
    """Decide the arguments of the class that was asked for.

    Args:
        target: the class's dotted path and its names, for the texts.
        takes: what its constructor takes.
        given: the arguments of the call whose class is exchanged, without the parameters.
        asked: the arguments that the environment asks for, by name.
        groups: the param groups of the call that are dictionaries.
        source: who makes the call, for the texts.

    Raises:
        OptimizerClassError: an argument that was asked for is not taken, or one that the class needs is missing.
    """
    _check_asked(target, takes, asked)
    kwargs: dict[str, Any] = {}
    notes: list[Note] = []
    for name, (value, origin) in given.items():
        wanted = takes.parameter(name)
        if name in asked and (origin != "user" or wanted is None):
            if value != asked[name]:
                notes.append(
                    Note(
                        "replaced",
                        f"{name}: {_shown(value)} from {source} -> {_shown(asked[name])} ({target.arguments_word})",
                    )
                )
        elif wanted is None and name == "lr" and takes.any_keyword:
            kwargs[name] = value
        elif wanted is None or not _fits(value, wanted.default):
            notes.append(_dropped(target, name, value, origin, wanted, source))
        elif origin == "default":
            notes.append(
                Note(
                    "replaced",
                    f"{name}={_shown(value)}, which {source} passes by itself, left out: the class's own default is "
                    "used",
                )
            )
        else:
            kwargs[name] = tuple(value) if wanted is not None and isinstance(wanted.default, tuple) else value
            if name in asked and value != asked[name]:
                text = (
                    f"{name}={_shown(value)} from {source} kept (it beats {_shown(asked[name])} in "
                    f"{target.arguments_word})"
                )
                notes.append(Note("replaced", text))
    for name, value in asked.items():
        if name not in kwargs:
            wanted = takes.parameter(name) or takes.forwarded.get(name)
            listed = isinstance(value, list) and wanted is not None and isinstance(wanted.default, tuple)
            kwargs[name] = tuple(value) if listed else copy.deepcopy(value)
    _check_complete(target, takes, kwargs)
    decay = sorted({group["weight_decay"] for group in groups if group.get("weight_decay")})
    if decay and takes.parameter("weight_decay") is None and "weight_decay" not in kwargs:
        text = (
            f"the class takes no weight_decay, so {', '.join(map(str, decay))} in the param groups from {source} has "
            "no effect"
        )
        notes.append(Note("refused", text))
    return Plan(kwargs, tuple(notes))


def _check_asked(target: Target, takes: Accepts, asked: Mapping[str, Any]) -> None:
    if takes.first is None or takes.first.name in NOT_PARAMS:
        wanted = f"is {takes.first.name!r}" if takes.first is not None else "is missing"
        raise OptimizerClassError(
            f"{target}: the first argument of its constructor {wanted}, but a framework passes parameters or "
            "param groups there; name a class that takes those"
        )
    if takes.first.name in asked:
        raise OptimizerClassError(
            f"{target.arguments_word} names {takes.first.name!r}, the first argument of {target.path}: the parameters "
            f"come from the framework; remove it. {target.path} accepts {takes}."
        )
    unknown = [name for name in asked if name not in takes.named and name not in takes.forwarded]
    if unknown and not takes.any_keyword:
        nearest = difflib.get_close_matches(unknown[0], [*takes.named, *takes.forwarded], n=1)
        hint = f" ({unknown[0]!r} is nearest to {nearest[0]!r})" if nearest else ""
        raise OptimizerClassError(
            f"{target.arguments_word} names {', '.join(map(repr, unknown))}, which {target.path} does not take{hint}; "
            f"the optimizer is not constructed; correct or remove it. {target.path} accepts {takes}."
        )


def _check_complete(target: Target, takes: Accepts, kwargs: Mapping[str, Any]) -> None:
    missing = [
        name
        for name, parameter in takes.named.items()
        if parameter.default is inspect.Parameter.empty and name not in kwargs
    ]
    if missing:
        raise OptimizerClassError(
            f"{target}: its constructor needs {', '.join(map(repr, missing))}, which no framework passes; the "
            f"optimizer is not constructed; give {'it' if len(missing) == 1 else 'them'} in {target.arguments_word}, a "
            f"JSON object. {target.path} accepts {takes}."
        )


def _dropped(target: Target, name: str, value: Any, origin: str, wanted: inspect.Parameter | None, source: str) -> Note:
    why = f"{target.path} does not take it"
    if wanted is not None:
        why = f"{target.path} has {_shown(wanted.default)} there, which is a different kind of value"
    missed = origin == "user" or name == "lr" or (name == "weight_decay" and bool(value))
    act = f"; set it in {target.arguments_word}" if missed else ""
    return Note("refused" if missed else "replaced", f"{name}={_shown(value)} from {source} left out: {why}{act}")


def _fits(value: Any, default: Any) -> bool:
    """Whether a value is of the kind of the default that it would take the place of: a number, or as many of them."""
    if default is None or default is inspect.Parameter.empty:
        return True
    if isinstance(default, list | tuple):
        return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == len(default)
    if isinstance(default, int | float):
        return not isinstance(value, Sequence)
    return True


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def become(
    optimizer: Any, target: Target, kind: type[Optimizer], takes: Accepts, params: Any, kwargs: Mapping[str, Any]
) -> None:
    """Make `optimizer`, an object that is under construction and has nothing yet, an instance of `kind`.

    Raises:
        OptimizerClassError: the class refuses the arguments or the parameters, or makes something else.
    """
    by_name = takes.first is not None and takes.first.kind is inspect.Parameter.KEYWORD_ONLY
    args = () if by_name else (params,)
    keywords = {**({takes.first.name: params} if by_name and takes.first is not None else {}), **kwargs}
    try:
        if kind.__new__ is not object.__new__:
            made = kind.__new__(kind, *args, **keywords)
            if type(made) is not kind:
                raise TypeError(f"its __new__ returned an object of {type(made).__qualname__}")
            vars(optimizer).update(vars(made))
        optimizer.__class__ = kind
        kind.__init__(optimizer, *args, **keywords)
    except OptimizerClassError:
        raise
    except Exception as error:
        shown = ", ".join(f"{name}={_shown(value)}" for name, value in kwargs.items())
        raise OptimizerClassError(
            f"{target}: {kind.__qualname__}(params{', ' if shown else ''}{shown}) raised {type(error).__name__}: "
            f"{error}; no step was taken; change {target.arguments_word}, or name a class that can serve these "
            f"parameters. {target.path} accepts {takes}."
        ) from error
    if not all("lr" in group for group in optimizer.param_groups):
        raise OptimizerClassError(
            f"{target}: its param groups have no 'lr', so a framework's learning rate schedule cannot set it; "
            "no step was taken; name a class that keeps its learning rate there"
        )
