"""Put wrappers into foreign modules and classes, and take them out again. The only `setattr` on anything foreign.

Each foreign slot has one wrapper, a plain function that runs an ordered chain of handlers and then the original.
Patches that share a slot add a handler to its chain; removing the last one puts the raw slot back, or deletes it where
the name was inherited. wrapt's function wrappers are not used: Dynamo goes round them silently, and they do not pickle.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import inspect
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from fusepatch.engine import contract, holders, ledger
from fusepatch.engine.patch import Handler, Site, Slot, Target
from fusepatch.errors import FusepatchError

lock = threading.RLock()
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)

_MISSING = object()


class TargetAbsentError(Exception):
    """The module has nothing at the slots' paths."""


class ContractBrokenError(Exception):
    """A target has another shape than its slot's contract, or only some of a site's targets are there."""

    def __init__(self, problem: str, wanted: str) -> None:
        super().__init__(problem)
        self.wanted = wanted


class _Place(NamedTuple):
    """One place that holds a function: an attribute of a module or class, or a value in a dictionary."""

    owner: Any
    key: Any
    item: bool = False

    def get(self) -> object:
        return self.owner.get(self.key, _MISSING) if self.item else vars(self.owner).get(self.key, _MISSING)

    def put(self, value: object) -> None:
        if self.item:
            self.owner[self.key] = value
        elif value is _MISSING:
            delattr(self.owner, self.key)
        else:
            setattr(self.owner, self.key, value)


class _Link(NamedTuple):
    patch: str
    handler: Handler
    order: int = 0


class _Installed:
    """A wrapped slot. `raw` is what `vars(owner)` held: a function, a static or class method, or nothing (inherited)."""

    def __init__(self, module: ModuleType, target: Target, raw: object, place: _Place) -> None:
        self.module = module
        self.target = target
        self.raw = raw
        self.wrapper: object = None
        self.places = [place]
        self.links: list[_Link] = []
        self.chain: list[Callable[..., Any]] = []

    def relink(self) -> None:
        call = self.target.original
        for link in reversed(self.links):
            call = _linked(link.patch, link.handler, call, self.target.key)
        self.chain[:] = [call]


_targets: dict[str, Target] = {}
_slots: dict[tuple[int, str], _Installed] = {}
"""By owner and attribute; a slot whose last handler was removed stays, for its wrapper may be held by name somewhere.
The owner's id stays its own, since `places` holds a reference to it."""


class Applied(NamedTuple):
    """What `install` did: the paths that were wrapped, the names rebound in other modules, those that were left."""

    slots: tuple[str, ...]
    rebound: tuple[str, ...]
    left: tuple[str, ...]


def install(patch: str, site: Site, module: ModuleType, late: bool, order: int = 0) -> Applied:
    """Wrap every slot of a site, or none: whatever raises on the way undoes what was done.

    Of the handlers of one slot, those with a lower `order` run first, whenever they were installed.

    Raises TargetAbsentError, ContractBrokenError, or whatever setting an attribute raised.
    """
    with lock:
        resolved = list(_resolve(site, module))
        done: list[_Installed] = []
        try:
            for slot, owner, attribute, path in resolved:
                installed = _wrap(owner, attribute, path, module, site)
                done.append(installed)
                installed.links.append(_Link(patch, slot.handler, order))
                installed.links.sort(key=lambda link: link.order)
                installed.relink()
            rebound, left = _rebind(done, module, site.rebind_holders) if late else ((), ())
            for installed in done:
                if installed.places[0].get() is not installed.wrapper:
                    raise RuntimeError(f"{module.__name__}.{installed.target.path} did not keep what was set")
        except BaseException:
            for installed in done:
                _unlink(patch, installed)
            raise
        return Applied(tuple(path for _, _, _, path in resolved), rebound, left)


def uninstall(patch: str, site: Site) -> tuple[str, ...]:
    """Take a patch's handlers out of a site; returns the places that someone else has replaced and that were left."""
    with lock:
        left: list[str] = []
        for installed in _of(patch, site):
            left.extend(_unlink(patch, installed))
        return tuple(left)


def shadowed(patch: str, site: Site) -> tuple[str, ...]:
    """The wrapped slots of a site that hold something else by now."""
    with lock:
        return tuple(
            installed.target.path
            for installed in _of(patch, site)
            if installed.places[0].get() is not installed.wrapper
        )


def installed_in(patch: str, site: Site, module: ModuleType) -> bool:
    """Whether the patch's handlers are in this very module object (a module can be imported anew)."""
    with lock:
        return any(installed.module is module for installed in _of(patch, site))


def raise_when_used(patch: str, site: Site, module: ModuleType, error: FusepatchError) -> None:
    """Make the first use of each target raise `error`: what strict mode does with a site that could not be applied."""

    def refuse(proceed: Any, *args: Any, **kwargs: Any) -> Any:
        raise error

    with lock:
        for slot in site.slots:
            for owner, attribute, path in _matches(slot, module):
                if callable(_function(owner, attribute)):
                    installed = _wrap(owner, attribute, path, module, site)
                    installed.links.append(_Link(patch, refuse))
                    installed.relink()


def _of(patch: str, site: Site) -> list[_Installed]:
    return [
        installed
        for installed in _slots.values()
        if installed.target.module == site.module and any(link.patch == patch for link in installed.links)
    ]


def _resolve(site: Site, module: ModuleType) -> Iterator[tuple[Slot, Any, str, str]]:
    """Each slot with the owner of its attribute. All absent raises TargetAbsentError, some absent or bent Contract..."""
    absent: list[Slot] = []
    broken: list[tuple[Slot, str, str]] = []
    resolved: list[tuple[Slot, Any, str, str]] = []
    for slot in site.slots:
        matches = list(_matches(slot, module))
        problems = [contract.broken_by(_function(owner, name), slot.contract) for owner, name, _ in matches]
        good = [match for match, problem in zip(matches, problems, strict=True) if problem is None]
        if not matches:
            absent.append(slot)
        elif not good:
            broken.append((slot, matches[0][2], str(problems[0])))
        resolved.extend((slot, *match) for match in good)
    if len(absent) == len(site.slots):
        raise TargetAbsentError(f"{site.module} has no {', '.join(slot.path for slot in absent)}")
    if absent or broken:
        problem = "; ".join(
            [f"{site.module} has no {slot.path}" for slot in absent]
            + [f"{site.module}.{path} {problem}" for _, path, problem in broken]
        )
        wanted = ", ".join(contract.describe(slot) for slot in (*absent, *(slot for slot, _, _ in broken)))
        raise ContractBrokenError(problem, wanted)
    return iter(resolved)


def _matches(slot: Slot, module: ModuleType) -> Iterator[tuple[Any, str, str]]:
    """The owners and attributes that a slot's path names; a `*` stands for functions defined in the module itself."""
    if "*" in slot.path:
        for name, value in list(vars(module).items()):
            own = isinstance(value, FunctionType) and value.__module__ == module.__name__
            if own and fnmatch.fnmatchcase(name, slot.path):
                yield module, name, name
        return
    *classes, attribute = slot.path.split(".")
    owner: Any = module
    for name in classes:
        owner = vars(owner).get(name)
        if not isinstance(owner, type):
            return
    if inspect.getattr_static(owner, attribute, _MISSING) is not _MISSING:
        yield owner, attribute, slot.path


def _function(owner: Any, attribute: str) -> Any:
    raw = inspect.getattr_static(owner, attribute)
    return raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw


def _wrap(owner: Any, attribute: str, path: str, module: ModuleType, site: Site) -> _Installed:
    raw = vars(owner).get(attribute, _MISSING)
    known = _slots.get((id(owner), attribute))
    if known is not None and raw is known.wrapper:
        return known
    if known is not None and raw is known.raw and _function(owner, attribute) is known.target.original:
        # The wrapper of before: modules that took it by name while it was in place are reached again.
        for place in known.places:
            if place is known.places[0] or place.get() is raw:
                place.put(known.wrapper)
        return known
    shape = raw if raw is not _MISSING else inspect.getattr_static(owner, attribute)
    original = _function(owner, attribute)
    installed = _Installed(module, Target(module.__name__, path, original), raw, _Place(owner, attribute))
    _targets[installed.target.key] = installed.target
    wrapper = _wrapper(original, installed.chain)
    installed.wrapper = type(shape)(wrapper) if isinstance(shape, staticmethod | classmethod) else wrapper
    installed.relink()
    for name in site.mappings:
        mapping = vars(module).get(name, {})
        installed.places.extend(_Place(mapping, key, item=True) for key, value in mapping.items() if value is raw)
    _slots[id(owner), attribute] = installed
    for place in installed.places:
        place.put(installed.wrapper)
    return installed


def _wrapper(original: Callable[..., Any], chain: list[Callable[..., Any]]) -> Callable[..., Any]:
    # updated=(): functools.wraps would copy __dict__, with what Dynamo keeps there of the original
    # (pytorch/pytorch#172732).
    @functools.wraps(original, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return chain[0](*args, **kwargs)

    # For inspect.getfullargspec, which does not look behind a wrapper.
    with contextlib.suppress(TypeError, ValueError):
        wrapper.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return wrapper


class _Proceed:
    """What a handler calls to go on; remembers that it was called."""

    __slots__ = ("_call", "_key", "entered")

    def __init__(self, call: Callable[..., Any], key: str) -> None:
        self._call = call
        self._key = key
        self.entered = False

    @property
    def target(self) -> Target:
        return _targets[self._key]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        self.entered = True
        return self._call(*args, **kwargs)


def _linked(patch: str, handler: Handler, call: Callable[..., Any], key: str) -> Callable[..., Any]:
    """One link of a chain: a handler that breaks before it went on is recorded, and the call goes on without it.

    Its closure holds functions and strings only: Dynamo cannot build other objects from the closure of a method whose
    instance was made inside the traced code.
    """

    def linked(*args: Any, **kwargs: Any) -> Any:
        proceed = _Proceed(call, key)
        try:
            return handler(proceed, *args, **kwargs)
        except FusepatchError:
            raise
        except Exception:
            if proceed.entered:
                raise
            _record_broken_handler(patch, key)
        return call(*args, **kwargs)

    return linked


def _record_broken_handler(patch: str, key: str) -> None:
    ledger.refused(
        patch,
        f"the patch itself failed in {key}; the call ran as upstream wrote it; "
        f"please report this: {traceback.format_exc(limit=-3)}",
    )


def _rebind(done: list[_Installed], module: ModuleType, allowed: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    # A method is reached through its class, which keeps its identity: nobody holds the function, and a site with many
    # methods would pay for the search each time.
    functions = {
        id(installed.raw): installed
        for installed in done
        if isinstance(installed.raw, FunctionType) and not isinstance(installed.places[0].owner, type)
    }
    found = holders.find((installed.raw for installed in functions.values()), outside=module)
    rebound: list[str] = []
    left: list[str] = []
    for identity, places in found.items():
        for holder, name in places:
            if allowed:
                place = _Place(holder, name)
                place.put(functions[identity].wrapper)
                if place not in functions[identity].places:
                    functions[identity].places.append(place)
            (rebound if allowed else left).append(f"{holder.__name__}.{name}")
    return tuple(rebound), tuple(left)


def _unlink(patch: str, installed: _Installed) -> list[str]:
    installed.links = [link for link in installed.links if link.patch != patch]
    installed.relink()
    if installed.links:
        return []
    left = []
    for place in installed.places:
        if place.get() is installed.wrapper:
            raw = installed.raw
            place.put(raw if raw is not _MISSING or place is installed.places[0] else installed.target.original)
        else:
            left.append(f"{getattr(place.owner, '__name__', installed.target.module)}.{place.key}")
    return left
