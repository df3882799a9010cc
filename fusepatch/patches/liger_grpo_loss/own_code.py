"""Whether a policy loss is still the one that its library's own source defines.

What the driver assumes about a policy was found for Liger's own. Names say little about that: `__module__` and
`__qualname__` are copied by wrappers, and a helper can be replaced before or after fusepatch came. So the source of the
modules is executed once more, beside the loaded ones, and compared with them: code, defaults, closures and constants
of every function that the loss reaches.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from fusepatch.engine import install
from fusepatch.engine.patch import Target

CONSTANTS = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset)


class _Pair(NamedTuple):
    """A module as it is loaded, and as its source defines it."""

    name: str
    loaded: dict[str, Any]
    own: dict[str, Any]


class _Evidence(NamedTuple):
    """What a comparison looked at, so that the next call sees whether any of it is another thing by now."""

    policy: Any
    original: Any
    places: list[tuple[Mapping[str, Any], str, Any]]
    functions: dict[FunctionType, tuple[Any, Any, Any]]
    classes: set[type]
    sizes: list[tuple[Mapping[str, Any], int]]

    def holds(self, kind: Any, original: Any) -> bool:
        return (
            kind.ppo_loss_fn is self.policy
            and original is self.original
            and all(mapping.get(name) is value for mapping, name, value in self.places)
            and all(len(mapping) == size for mapping, size in self.sizes)
            and all(_state(function) == state for function, state in self.functions.items())
        )


class _DifferenceError(Exception):
    """What was found to differ, as words for a sentence."""


_found: dict[type, _Evidence] = {}


def replaced_in(kind: Any, forward: Target) -> str | None:
    """What `kind`, a subclass of the base that `forward` is a method of, takes from elsewhere than from its library's
    own source.

    None where the base, the policy and all that they reach are the source's own.
    """
    evidence = _found.get(kind)
    if evidence is not None and evidence.holds(kind, forward.original):
        return None
    try:
        _found[kind] = _compare(kind, forward)
    except _DifferenceError as difference:
        return str(difference)
    return None


def is_own(target: Target) -> bool:
    """Whether the original of a wrapped method is the one that the source of its module defines."""
    name, attribute = target.path.split(".")
    try:
        pair = _pair(target.module)
        _function(
            target.path,
            target.original,
            _plain(vars(pair.own[name])[attribute]),
            pair,
            _Evidence(None, None, [], {}, set(), []),
        )
    except _DifferenceError:
        return False
    return True


def _compare(kind: Any, forward: Target) -> _Evidence:
    name, attribute = forward.path.split(".")
    pair = _pair(forward.module)
    base, own_base = pair.loaded.get(name), pair.own[name]
    seen = _Evidence(kind.ppo_loss_fn, forward.original, [], {}, set(), [])
    _class(name, base, own_base, pair, seen, besides=(attribute,))
    _function(forward.path, forward.original, _plain(vars(own_base)[attribute]), pair, seen)
    for member, value in vars(own_base).items():
        if isinstance(value, staticmethod | FunctionType) and member not in ("forward", "backward", "ppo_loss_fn"):
            definer = _definer(kind, member)
            if definer is not base:
                raise _DifferenceError(f"{definer.__name__} has a {member} of its own")
    own_parents = kind.__mro__[: kind.__mro__.index(base)]
    seen.sizes.extend((vars(parent), len(vars(parent))) for parent in own_parents)
    definer = _definer(kind, "ppo_loss_fn")
    package = forward.module.rpartition(".")[0]
    if definer.__module__.rpartition(".")[0] != package:
        raise _DifferenceError(f"the ppo_loss_fn of {_described(definer)} is not {package}'s own")
    pair = _pair(definer.__module__)
    own_definer = pair.own.get(definer.__name__)
    if pair.loaded.get(definer.__name__) is not definer or not isinstance(own_definer, type):
        raise _DifferenceError(f"{_described(definer)} is not what its module defines")
    path = f"{definer.__name__}.ppo_loss_fn"
    _value(path, vars(definer)["ppo_loss_fn"], vars(own_definer).get("ppo_loss_fn"), pair, seen)
    return seen


def _definer(kind: type, name: str) -> type:
    return next(parent for parent in kind.__mro__ if name in vars(parent))


def _pair(name: str) -> _Pair:
    module = sys.modules.get(name)
    own = None if module is None else _from_source(module)
    if module is None or own is None:
        raise _DifferenceError(f"the source of {name} cannot be read")
    return _Pair(name, vars(module), own)


@functools.lru_cache(maxsize=8)
def _from_source(module: ModuleType) -> dict[str, Any] | None:
    loader: Any = None if module.__spec__ is None else module.__spec__.loader
    namespace = {name: vars(module).get(name) for name in ("__name__", "__package__", "__file__", "__spec__")}
    try:
        exec(loader.get_code(module.__name__), namespace)
    except Exception:
        return None
    return namespace


def _value(path: str, loaded: Any, own: Any, pair: _Pair, seen: _Evidence) -> None:
    if loaded is own:
        return
    if isinstance(own, staticmethod | classmethod) and type(loaded) is type(own):
        loaded, own = _plain(loaded), _plain(own)
    if isinstance(own, FunctionType):
        _function(path, loaded, own, pair, seen)
    elif isinstance(own, type) and own.__module__ == pair.name:
        _class(path, loaded, own, pair, seen)
    elif not (isinstance(own, CONSTANTS) and type(loaded) is type(own) and loaded == own):
        raise _DifferenceError(f"{pair.name}.{path} has been replaced (by {_described(loaded)})")


def _function(path: str, loaded: Any, own: FunctionType, pair: _Pair, seen: _Evidence) -> None:
    loaded = _without_our_wrapper(loaded)
    if isinstance(loaded, FunctionType) and loaded in seen.functions:
        return
    same = (
        isinstance(loaded, FunctionType)
        and loaded.__code__ == own.__code__
        and loaded.__defaults__ == own.__defaults__
        and loaded.__kwdefaults__ == own.__kwdefaults__
        and loaded.__globals__ is (pair.loaded if own.__globals__ is pair.own else own.__globals__)
        and len(loaded.__closure__ or ()) == len(own.__closure__ or ())
    )
    if not same:
        raise _DifferenceError(f"{pair.name}.{path} has been replaced (by {_described(loaded)})")
    seen.functions[loaded] = _state(loaded)
    for mine, theirs in zip(loaded.__closure__ or (), own.__closure__ or (), strict=True):
        # What else a decorator of a library keeps there (a context manager) is made anew for each function.
        if isinstance(theirs.cell_contents, FunctionType):
            _function(path, mine.cell_contents, theirs.cell_contents, pair, seen)
    if own.__globals__ is pair.own:
        # A name that is added later may hide a builtin.
        seen.sizes.append((pair.loaded, len(pair.loaded)))
        for name in _names(own.__code__):
            if name in pair.own or name in pair.loaded:
                seen.places.append((pair.loaded, name, pair.loaded.get(name)))
                _value(name, pair.loaded.get(name), pair.own.get(name), pair, seen)


def _class(path: str, loaded: Any, own: type, pair: _Pair, seen: _Evidence, besides: tuple[str, ...] = ()) -> None:
    if loaded in seen.classes:
        return
    if not isinstance(loaded, type) or vars(loaded).keys() != vars(own).keys():
        raise _DifferenceError(f"{pair.name}.{path} has been replaced or changed")
    seen.classes.add(loaded)
    seen.sizes.append((vars(loaded), len(vars(loaded))))
    for name, value in vars(own).items():
        if name not in besides and isinstance(value, (FunctionType, staticmethod, classmethod, *CONSTANTS)):
            seen.places.append((vars(loaded), name, vars(loaded)[name]))
            _value(f"{path}.{name}", vars(loaded)[name], value, pair, seen)


def _state(function: FunctionType) -> tuple[Any, Any, Any]:
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _plain(method: Any) -> Any:
    return method.__func__ if isinstance(method, staticmethod | classmethod) else method


def _without_our_wrapper(function: Any) -> Any:
    code = getattr(function, "__code__", None)
    if code is not None and code.co_filename == install.__file__:
        return function.__wrapped__
    return function


@functools.lru_cache(maxsize=256)
def _names(code: CodeType) -> frozenset[str]:
    """Every global, attribute or import that the code or a function within it names."""
    within = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*map(_names, within))


def _described(thing: Any) -> str:
    thing = thing if hasattr(thing, "__qualname__") else type(thing)
    name = f"{thing.__module__}.{thing.__qualname__}"
    code = getattr(thing, "__code__", None)
    # A wrapper has the name of what it wraps.
    return name if code is None else f"{name} of {code.co_filename}:{code.co_firstlineno}"
