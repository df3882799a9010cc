"""What a patch declares, as data, and what can become of it.

The data are NamedTuples: creating a frozen dataclass costs each import of this package six times as much.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, Protocol

PASSES = "fusepatch_passes"
"""An exception with this attribute goes to the caller: a signal of whatever runs the handler, not a fault of the
handler."""


class Outcome(enum.Enum):
    """What became of one site."""

    DISABLED = "DISABLED"
    """Switched off by the user."""
    ABSENT = "ABSENT"
    """The library, or the target in it, is not there, or the site has nothing to do in this process."""
    PENDING = "PENDING"
    """A hook waits for the target's module to be imported."""
    GATED = "GATED"
    """The library's version is outside the range that the site is written for."""
    DRIFTED = "DRIFTED"
    """The target is there with another shape; upstream is left alone."""
    APPLIED = "APPLIED"
    """The target is wrapped."""
    SHADOWED = "SHADOWED"
    """Someone replaced the target after it was wrapped."""
    FAILED = "FAILED"
    """Installing raised; everything was rolled back."""
    REMOVED = "REMOVED"
    """It was applied and has been removed."""


class Upstream(NamedTuple):
    """A library that is patched: its import name, every distribution that ships it (a nightly has another name), and a
    version specifier of the releases in which the patches were seen to work."""

    import_name: str
    distributions: tuple[str, ...]
    tested: str


class Contract(NamedTuple):
    """The shape that a target must still have.

    `parameters` are names that must be accepted by keyword; `keywords` says that a `**` parameter is needed too.
    """

    parameters: tuple[str, ...] = ()
    keywords: bool = False


class Target(NamedTuple):
    """One wrapped slot as a handler sees it."""

    module: str
    path: str
    original: Callable[..., Any]

    @property
    def name(self) -> str:
        """The last part of the path: the function's own name."""
        return self.path.rpartition(".")[2]

    @property
    def key(self) -> str:
        """The full dotted name."""
        return f"{self.module}.{self.path}"


class Proceed(Protocol):
    """The first argument of a handler: calls the next handler, or the original."""

    @property
    def target(self) -> Target: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


Handler = Callable[..., Any]
"""`handler(proceed, *args, **kwargs)`: a plain function; it returns what the caller of the slot gets."""


class Slot(NamedTuple):
    """A place in the module that is wrapped.

    `path` is dotted inside the module (`function`, `Class.method`); a `*` in it stands for every function defined in
    that module whose name matches and whose contract holds. `releases` is a version specifier: outside of it the slot
    is not looked for, since upstream gave the target another name there, or has none. Empty: every release that the
    site supports.
    """

    path: str
    handler: Handler
    contract: Contract = Contract()
    releases: str = ""


class Site(NamedTuple):
    """The unit of patching: one defining module of one upstream. Its slots are installed together or not at all.

    `supported` is a version specifier. Outside it nothing is touched; inside it the contracts decide, and a version
    outside the upstream's `tested` is flagged. `mappings` names dictionaries of the module whose values follow the
    wrapped functions. `rebind_holders` allows the engine to rebind names that other modules took before activation.
    `when_late(module)` is called after the site was applied to a module that had been imported before: it looks for
    what can no longer be reached. `unneeded()` is asked after the version ranges, when the module has been imported:
    why the site has nothing to do in this process, such as a device that is not there, or an empty text where it may
    have. Nothing is wrapped then, and the site is ABSENT.
    """

    upstream: Upstream
    module: str
    slots: tuple[Slot, ...]
    supported: str
    mappings: tuple[str, ...] = ()
    rebind_holders: bool = True
    when_late: Callable[[ModuleType], None] | None = None
    unneeded: Callable[[], str] | None = None


class Patch(NamedTuple):
    """One promise. The texts are shown by `explain` and by the generated documentation.

    `requested_by` is the variable without which the patch changes nothing; it is empty where the patch acts by itself.
    `when_removed()` is called by `deactivate` after the wrappers are gone: it undoes what they left on living objects.
    """

    id: str
    promise: str
    why: str
    upstream: tuple[str, ...]
    fixed_in: str
    remove_when: str
    variables: tuple[str, ...]
    requested_by: str
    changes: tuple[str, ...]
    limits: tuple[str, ...]
    sites: tuple[Site, ...]
    when_removed: Callable[[], None] | None = None


class Reason(NamedTuple):
    """Why an outcome is what it is. `str(reason)` is one sentence of what is not empty."""

    found: str
    """What was found."""
    wanted: str = ""
    """What was wanted, where that is not what was found."""
    consequence: str = ""
    """What follows for the training."""
    action: str = ""
    """What the user can do."""

    def __str__(self) -> str:
        parts = [self.found]
        if self.wanted:
            parts.append(f"wanted {self.wanted}")
        if self.consequence:
            parts.append(self.consequence)
        if self.action:
            parts.append(self.action)
        return "; ".join(parts)


class Note(NamedTuple):
    """Something that happened during calls, and how often."""

    text: str
    """What happened, and why."""
    times: int
    """In how many calls."""


class SiteRecord(NamedTuple):
    """What became of one site: one module of one library that a patch changes."""

    patch: str
    """The patch's id."""
    upstream: str
    """The library, by its import name."""
    module: str
    """The module that defines the targets."""
    outcome: Outcome
    """What became of it."""
    reason: Reason
    """Why."""
    version: str | None = None
    """The library's version, where one could be found."""
    flags: tuple[str, ...] = ()
    """`untested` where the version is outside the tested range, `late` where the module was imported before
    fusepatch."""
    holders: tuple[str, ...] = ()
    """Names in other modules that had taken a target before it was wrapped."""
    slots: tuple[str, ...] = ()
    """The functions and methods that are wrapped, as dotted paths inside the module."""
    traceback: str | None = None
    """The traceback, where applying the patch raised."""

    def __str__(self) -> str:
        flags = f" ({', '.join(self.flags)})" if self.flags else ""
        return f"{self.outcome.value}{flags}: {self.reason}"


class PatchRecord(NamedTuple):
    """What became of one patch, and what its calls did.

    A patch is APPLIED as soon as one site is in and none is broken. Sites whose modules this process has not imported
    are PENDING and take nothing from that; where no site is in yet, the patch is PENDING too.
    """

    id: str
    """The patch's id, such as `optimizer.flags`."""
    outcome: Outcome
    """APPLIED or PENDING as said above; otherwise the outcome of the site that fares worst."""
    reason: str
    """Why, in one sentence; where some sites of an applied patch still wait, it names their modules."""
    sites: tuple[SiteRecord, ...]
    """What became of each site."""
    calls: int
    """How many calls went through the patch."""
    replaced: tuple[Note, ...]
    """Values that the patch replaced, with the old one, the new one, and on whose word."""
    fallbacks: tuple[Note, ...]
    """What was left to upstream's code, and why."""

    @property
    def waiting(self) -> tuple[str, ...]:
        """The modules whose import is still waited for."""
        return tuple(site.module for site in self.sites if site.outcome is Outcome.PENDING)
