"""Put wrappers into foreign modules and classes, and remove them. The only `setattr` on anything foreign.

Each foreign slot has one wrapper, a plain function that runs an ordered chain of handlers and then the original.
Patches that share a slot add a handler to its chain; removing the last one puts the raw slot back, or deletes it where
the name was inherited. wrapt's function wrappers are not used: Dynamo silently bypasses them, and they do not pickle.
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from fusepatch.engine import contract, holders, ledger
from fusepatch.engine.patch import PASSES, Handler, Site, Slot, Target
from fusepatch.errors import FusepatchError

lock = threading.RLock()
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)

_MISSING = object()


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
    """A wrapped slot. `raw` is what `vars(owner)` held: a function, a static or class method, or nothing
    (inherited)."""

    def __init__(self, module: ModuleType, target: Target, raw: object, place: _Place) -> None:
        self.module = module
        self.target = target
        self.raw = raw
        # A module that ran anew has a second target of the same name, and the wrapper of the first may still be held
        # somewhere.
        self.key = target.key if target.key not in _targets else f"{target.key} (wrapper {len(_targets) + 1})"
        self.wrapper: object = None
        self.places = [place]
        self.links: list[_Link] = []
        self.chain: list[Callable[..., Any]] = []

    @property
    def is_in_place(self) -> bool:
        """Whether the target's path still leads to the wrapper, in what is imported now."""
        return (
            sys.modules.get(self.target.module) is self.module
            and _owner(self.module, self.target.path) is self.places[0].owner
            and self.places[0].get() is self.wrapper
        )

    def linked_by(self, patch: str) -> bool:
        return any(link.patch == patch for link in self.links)

    def relink(self) -> None:
        call = self.target.original
        for link in reversed(self.links):
            call = _linked(link.patch, link.handler, call, self.key)
        self.chain[:] = [call]


_targets: dict[str, Target] = {}
"""By the key of what wraps them."""
_slots: dict[str, list[_Installed]] = {}
"""By the target's module, the newest last. A slot whose last handler was removed stays, and so does one that a module
has left behind by running again: their wrappers may be held by name somewhere."""


def look(site: Site, module: ModuleType) -> tuple[contract.Seen, ...]:
    """What each slot's path leads to in the loaded module; changes nothing."""
    return tuple(
        contract.Seen(slot, {path: _broken_by(slot, owner, name) for owner, name, path in _matches(slot, module)})
        for slot in site.slots
    )


class Applied(NamedTuple):
    """What `install` did: the paths that were wrapped, the names rebound in other modules, those that were left."""

    slots: tuple[str, ...]
    rebound: tuple[str, ...]
    left: tuple[str, ...]


def install(patch: str, site: Site, module: ModuleType, late: bool, order: int = 0) -> Applied:
    """Wrap what `look` finds to fit in every slot of a site, or nothing: whatever raises on the way undoes what was
    done.

    Of the handlers of one slot, those with a lower `order` run first, whenever they were installed.

    Raises whatever setting an attribute raised.
    """
    with lock:
        places = [(slot, *match) for slot in site.slots for match in _matches(slot, module)]
        done: list[_Installed] = []
        try:
            for slot, owner, attribute, path in places:
                if _broken_by(slot, owner, attribute) is not None or _was_replaced(patch, owner, attribute):
                    continue
                installed = _wrap(owner, attribute, path, module, site)
                done.append(installed)
                link = _Link(patch, slot.handler, order)
                if link not in installed.links:
                    installed.links.append(link)
                installed.links.sort(key=lambda link: link.order)
                installed.relink()
            rebound, left = _rebind(done, module, site.rebind_holders) if late else ((), ())
            for installed in done:
                if installed.places[0].get() is not installed.wrapper:
                    raise RuntimeError(f"{module.__name__}.{installed.target.path} kept its old value when it was set")
        except BaseException:
            for installed in done:
                _unlink(patch, installed)
            raise
        return Applied(tuple(installed.target.path for installed in done), rebound, left)


def uninstall(patch: str, site: Site) -> tuple[str, ...]:
    """Remove a patch's handlers from a site; returns the places that other code has replaced, which are left alone."""
    with lock:
        left: list[str] = []
        for installed in _of(patch, site):
            left.extend(_unlink(patch, installed))
        return tuple(left)


class Shadowed(NamedTuple):
    """The paths of a site that do not lead to its wrappers any more, by what is there now.

    `replaced` are paths where other code put something else; `passing` are those of them whose replacement holds the
    wrapper, and so may call it. `anew` are paths to upstream's original: the module was reloaded or imported again, or
    the original was restored.
    """

    replaced: tuple[str, ...] = ()
    passing: tuple[str, ...] = ()
    anew: tuple[str, ...] = ()


def shadowed(patch: str, site: Site) -> Shadowed:
    """What became of a site's wrapped slots in the module that is imported now; where it is not imported, nothing is
    shadowed."""
    wrapped = _of(patch, site)
    module = sys.modules.get(site.module)
    if module is None or all(installed.is_in_place for installed in wrapped):
        return Shadowed()
    with lock:
        found: dict[str, list[str]] = {name: [] for name in Shadowed._fields}
        for path in dict.fromkeys(installed.target.path for installed in wrapped):
            own = [installed for installed in wrapped if installed.target.path == path]
            owner, attribute = _owner(module, path), path.rpartition(".")[2]
            now = _MISSING if owner is None else inspect.getattr_static(owner, attribute, _MISSING)
            if any(now is installed.wrapper for installed in own):
                continue
            passing = any(_holds(now, installed.wrapper, owner) for installed in own)
            if not passing and any(_is_upstreams(now, installed.target.original) for installed in own):
                found["anew"].append(path)
                continue
            found["replaced"].append(path)
            if passing:
                found["passing"].append(path)
        return Shadowed(**{name: tuple(paths) for name, paths in found.items()})


def is_installed(patch: str, site: Site) -> bool:
    """Whether the patch's handlers are in the module that is imported now, wherever no other code has replaced a
    target."""
    return bool(_of(patch, site)) and not shadowed(patch, site).anew


def _was_replaced(patch: str, owner: Any, attribute: str) -> bool:
    """Whether other code has replaced the slot since this patch wrapped it: the replacement is left alone."""
    known = [installed for installed in _at(owner, attribute) if installed.linked_by(patch)]
    now = _function(owner, attribute)
    return bool(known) and not any(
        now is _inner(installed.wrapper) or _is_upstreams(now, installed.target.original) for installed in known
    )


def _is_upstreams(value: Any, original: Any) -> bool:
    """Whether `value` is the original, or a function made again from the same lines of source, wrapped for another
    patch or not."""
    value = _inner(value)
    for wrapped in _slots.values():
        for installed in wrapped:
            if value is _inner(installed.wrapper):
                value = installed.target.original
    if value is original or not (isinstance(value, FunctionType) and isinstance(original, FunctionType)):
        return value is original
    made = [(function.__code__.co_filename, function.__qualname__) for function in (value, original)]
    return made[0] == made[1]


def _holds(value: Any, wrapper: Any, owner: Any) -> bool:
    """Whether a replacement holds the wrapper where it can call it: wrapped, in its closure, or under a name that it
    uses."""
    seen: set[int] = set()
    candidates = [value]
    while candidates:
        candidate = _inner(candidates.pop())
        if candidate is _inner(wrapper):
            return True
        if id(candidate) in seen or not callable(candidate) or isinstance(candidate, type):
            continue
        seen.add(id(candidate))
        for name in ("__wrapped__", "__func__", "func"):
            with suppress(Exception):  # an attribute of a foreign object may be any code
                candidates.append(getattr(candidate, name))
        if isinstance(candidate, FunctionType):
            for cell in candidate.__closure__ or ():
                with suppress(ValueError):  # an empty cell
                    candidates.append(cell.cell_contents)
            candidates += [*(candidate.__defaults__ or ()), *(candidate.__kwdefaults__ or {}).values()]
            named = _names(candidate.__code__)
            spaces = (candidate.__globals__, vars(owner))
            if any(_inner(space.get(name)) is _inner(wrapper) for space in spaces for name in named):
                return True
    return False


def _names(code: CodeType) -> set[str]:
    nested = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*nested)


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
    return [installed for installed in _slots.get(site.module, ()) if installed.linked_by(patch)]


def _at(owner: Any, attribute: str) -> list[_Installed]:
    return [
        installed
        for wrapped in _slots.values()
        for installed in wrapped
        if installed.places[0].owner is owner and installed.places[0].key == attribute
    ]


def _matches(slot: Slot, module: ModuleType) -> Iterator[tuple[Any, str, str]]:
    """The owners and attributes that a slot's path names; a `*` stands for functions defined in the module itself."""
    if "*" in slot.path:
        for name, value in list(vars(module).items()):
            own = isinstance(value, FunctionType) and value.__module__ == module.__name__
            if own and fnmatch.fnmatchcase(name, slot.path):
                yield module, name, name
        return
    owner, attribute = _owner(module, slot.path), slot.path.rpartition(".")[2]
    if owner is not None and inspect.getattr_static(owner, attribute, _MISSING) is not _MISSING:
        yield owner, attribute, slot.path


def _broken_by(slot: Slot, owner: Any, attribute: str) -> str | None:
    return contract.broken_by(_function(owner, attribute), slot.contract)


def _owner(module: ModuleType, path: str) -> Any:
    """The module, or the class in it, whose attribute a path names; None where there is no such class."""
    owner: Any = module
    for name in path.split(".")[:-1]:
        owner = vars(owner).get(name)
        if not isinstance(owner, type):
            return None
    return owner


def _function(owner: Any, attribute: str) -> Any:
    return _inner(inspect.getattr_static(owner, attribute))


def _inner(raw: Any) -> Any:
    return raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw


def _wrap(owner: Any, attribute: str, path: str, module: ModuleType, site: Site) -> _Installed:
    raw = vars(owner).get(attribute, _MISSING)
    for known in _at(owner, attribute):
        if raw is known.wrapper:
            return known
        if raw is known.raw and _function(owner, attribute) is known.target.original:
            # The wrapper of before: modules that took it by name while it was in place are reached again.
            for place in known.places:
                if place is known.places[0] or place.get() is raw:
                    place.put(known.wrapper)
            return known
    shape = raw if raw is not _MISSING else inspect.getattr_static(owner, attribute)
    original = _function(owner, attribute)
    installed = _Installed(module, Target(module.__name__, path, original), raw, _Place(owner, attribute))
    _targets[installed.key] = installed.target
    wrapper = _wrapper(original, installed.chain)
    if raw is _MISSING:  # found under the subclass's name, as by pickle
        wrapper.__module__, wrapper.__qualname__ = owner.__module__, f"{owner.__qualname__}.{attribute}"
    installed.wrapper = type(shape)(wrapper) if isinstance(shape, staticmethod | classmethod) else wrapper
    installed.relink()
    for name in site.mappings:
        mapping = vars(module).get(name, {})
        installed.places.extend(_Place(mapping, key, item=True) for key, value in mapping.items() if value is raw)
    _slots.setdefault(module.__name__, []).append(installed)
    for place in installed.places:
        place.put(installed.wrapper)
    return installed


def _wrapper(original: Callable[..., Any], chain: list[Callable[..., Any]]) -> Callable[..., Any]:
    # updated=(): functools.wraps would copy __dict__, with what Dynamo keeps there of the original
    # (pytorch/pytorch#172732).
    @functools.wraps(original, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return chain[0](*args, **kwargs)

    with suppress(TypeError, ValueError):  # inspect.getfullargspec does not follow __wrapped__
        wrapper.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return wrapper


class _Proceed:
    """What a handler calls to go on; remembers what became of the last call."""

    __slots__ = ("_call", "_key", "entered", "raised", "result")

    def __init__(self, call: Callable[..., Any], key: str) -> None:
        self._call = call
        self._key = key
        self.entered = False
        self.raised: BaseException | None = None
        self.result: Any = None

    @property
    def target(self) -> Target:
        return _targets[self._key]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        self.entered = True
        self.raised = self.result = None
        try:
            result = self._call(*args, **kwargs)
        except BaseException as error:
            self.raised = error
            raise
        self.result = result
        return result


def _linked(patch: str, handler: Handler, call: Callable[..., Any], key: str) -> Callable[..., Any]:
    """One link of a chain: what a handler breaks is recorded, and the caller gets what upstream gives.

    A handler that breaks before it called upstream is left out. If it breaks afterwards, the caller gets upstream's
    last result or error, and upstream is not run again. Errors that are raised on purpose pass: ours, upstream's own,
    and one that a handler raises from upstream's.

    Its closure holds functions and strings only: Dynamo cannot build other objects from the closure of a method whose
    instance was made inside the traced code.
    """

    def linked(*args: Any, **kwargs: Any) -> Any:
        proceed = _Proceed(call, key)
        raised: list[BaseException] = []
        try:
            return handler(proceed, *args, **kwargs)
        except FusepatchError:
            raise
        except Exception as error:
            if _passes(error):
                raise
            if proceed.raised is not None:
                if _comes_from(error, proceed.raised):
                    raise
                raised.append(proceed.raised)
            _record_broken_handler(patch, key, error, proceed)
        finally:
            proceed.raised = None  # it would keep its own frames alive, and the tensors in them
        if raised:
            raise raised.pop()
        return proceed.result if proceed.entered else call(*args, **kwargs)

    return linked


def _passes(error: Exception) -> bool:
    with suppress(Exception):  # an exception's class can make any attribute of it raise
        return bool(vars(error).get(PASSES))
    return False


def _comes_from(error: Exception, upstreams: BaseException) -> bool:
    """Whether the error is upstream's, or was raised from it on purpose."""
    with suppress(Exception):  # an exception's class can make any attribute of it raise
        return error is upstreams or error.__cause__ is upstreams
    return False


def _record_broken_handler(patch: str, key: str, error: Exception, proceed: _Proceed) -> None:
    became = "the call ran as upstream wrote it"
    if proceed.entered:
        became = f"upstream's code had run, and the caller gets its {'error' if proceed.raised else 'result'}"
    key = _targets[key].key
    kind = f"broken: {key} {type(error).__name__}"
    try:
        trace = traceback.format_exc(limit=-3)
    except Exception:
        trace = f"{type(error).__name__}, which cannot be printed"
    text = f"the patch itself failed in {key}; {became}; please report this: {trace}"
    if proceed.raised is None:
        ledger.refused(patch, text, kind)
    else:
        ledger.fallback(patch, text)  # what upstream raised must not be hidden by an error of strict mode
        ledger.warn_once(f"{patch}: {text}", f"{patch}: {kind}")


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
                if not any(known.owner is holder and known.key == name for known in functions[identity].places):
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
        elif not _is_upstreams(place.get(), installed.target.original):
            left.append(f"{getattr(place.owner, '__name__', installed.target.module)}.{place.key}")
    return left
