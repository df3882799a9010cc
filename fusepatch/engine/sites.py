"""A site's life: it is watched, judged when its module is imported, installed, looked at again, and removed."""

from __future__ import annotations

import enum
import sys
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

from fusepatch.engine import contract, hooks, install, ledger, versions
from fusepatch.engine.patch import Outcome, Reason, Site, SiteRecord
from fusepatch.errors import StrictError


class Kind(enum.Enum):
    """Whether a site can be patched."""

    NO_MODULE = "no module"
    """The library is not installed, or its version has no such module."""
    TARGET_ABSENT = "target absent"
    """The module has nothing at any slot's path."""
    CONTRACT_BROKEN = "contract broken"
    """A target has another shape than its slot's contract, or only some of the targets are there."""
    GATED = "gated"
    """The version is outside the supported range."""
    NOT_NEEDED = "not needed"
    """The site has nothing to do in this process."""
    FITS = "fits"
    """Every slot leads to a function that its contract accepts."""


class Verdict(NamedTuple):
    """What a look at a site found. `unclear` are the slots of which the source does not show what only an import
    can."""

    kind: Kind
    reason: Reason
    version: str | None = None
    flags: tuple[str, ...] = ()
    unclear: tuple[str, ...] = ()


_OUTCOMES = {
    Kind.NO_MODULE: Outcome.ABSENT,
    Kind.TARGET_ABSENT: Outcome.ABSENT,
    Kind.CONTRACT_BROKEN: Outcome.DRIFTED,
    Kind.GATED: Outcome.GATED,
    Kind.NOT_NEEDED: Outcome.ABSENT,
    Kind.FITS: Outcome.PENDING,
}


def judge(site: Site, module: ModuleType | None = None) -> Verdict:
    """Whether a site can be patched: asked of the loaded module, or else of its source. Imports and changes nothing."""
    found = versions.find(site.upstream)
    if found is None and module is None:
        return Verdict(Kind.NO_MODULE, Reason(f"{' or '.join(site.upstream.distributions)} is not installed"))
    found = found or versions.Found(None, None)
    version, gate = found.version, versions.gate(site, found.version)
    if not gate.supported:
        reason = Reason(
            f"{found}",
            wanted=f"{site.upstream.import_name} {site.supported}",
            consequence="upstream is left as it is",
            action="install a version in that range to have this patch",
        )
        return Verdict(Kind.GATED, reason, version)
    site = versions.in_release(site, version)
    unneeded = site.unneeded() if module is not None and site.unneeded is not None else ""
    if unneeded:
        return Verdict(Kind.NOT_NEEDED, Reason(unneeded, consequence="there is nothing to patch here"), version)
    slots = contract.in_source(site) if module is None else install.look(site, module)
    if slots is None:
        return Verdict(Kind.NO_MODULE, Reason(f"{found}: there is no module {site.module}"), version)
    absent = [slot for slot, functions, unclear in slots if not functions and not unclear]
    if len(absent) == len(slots):
        missing = f"{site.module} has no {', '.join(slot.path for slot in absent)}"
        reason = Reason(f"{found}: {missing}", consequence="there is nothing to patch in this version")
        return Verdict(Kind.TARGET_ABSENT, reason, version)
    unfit = [seen for seen in slots if None not in seen.functions.values()]
    broken = {seen.slot: next(iter(seen.functions.items())) for seen in unfit if seen.functions and not seen.unclear}
    if absent or broken:
        problems = [f"{site.module} has no {slot.path}" for slot in absent]
        problems += [f"{site.module}.{path} {problem}" for path, problem in broken.values()]
        reason = Reason(
            f"{found}: {'; '.join(problems)}",
            wanted=", ".join(map(contract.describe, (*absent, *broken))),
            consequence="upstream is left as it is",
            action=f"use a tested version ({site.upstream.tested}) or a newer fusepatch",
        )
        return Verdict(Kind.CONTRACT_BROKEN, reason, version)
    unclear = tuple(seen.slot.path for seen in unfit)
    if gate.tested:
        return Verdict(Kind.FITS, Reason(f"{found}"), version, unclear=unclear)
    told = f"{found}; not tested (tested: {site.upstream.tested}), but the targets have the known shape"
    return Verdict(Kind.FITS, Reason(told), version, ("untested",), unclear)


def preview(patch: str, site: Site) -> SiteRecord:
    """What an import of the site's module would make of it, from metadata and source; imports nothing."""
    verdict = judge(site)
    reason = verdict.reason
    if verdict.kind is Kind.FITS:
        condition = f", if {', '.join(verdict.unclear)} then has the known shape" if verdict.unclear else ""
        if site.unneeded is not None:
            condition += ", if this process can need it"
        reason = reason._replace(consequence=f"it is applied when the module is imported{condition}")
    return record(patch, site, _OUTCOMES[verdict.kind], reason, verdict.version)._replace(flags=verdict.flags)


def not_imported(patch: str, site: Site) -> SiteRecord:
    """The record of a site of which nothing is known yet, without a look at what is installed."""
    found = "is loaded, but its import hook has not run" if hooks.is_loaded(site.module) else "has not been imported"
    return record(patch, site, Outcome.PENDING, Reason(f"{site.module} {found}"))


def watch(patch: str, site: Site, order: int, wanted: Callable[[], bool]) -> None:
    """Install the site whenever its module has been imported, and now where it is loaded, as long as `wanted()` holds.

    Handlers with a lower `order` run first in the slots that they share. Outcomes go to the ledger. Under STRICT, the
    first use of a target that should have been patched and could not be raises.
    """

    def imported(module: ModuleType, late: bool) -> None:
        with install.lock:
            if wanted() and not install.is_installed(patch, site):
                became = _install(patch, site, order, module, late)
                if ledger.strict() and became.outcome in (Outcome.DRIFTED, Outcome.FAILED):
                    error = StrictError(f"{patch}: {became} (an error because FUSEPATCH_STRICT=1)")
                    install.raise_when_used(patch, versions.in_release(site, became.version), module, error)
                ledger.record(became)

    def failed(name: str, trace: str) -> None:
        ledger.record(_failed(patch, site, None, trace))

    hooks.watch(site.module, imported, failed, patch)


def _install(patch: str, site: Site, order: int, module: ModuleType, late: bool) -> SiteRecord:
    version = None
    try:
        verdict = judge(site, module)
        version = verdict.version
        if late and verdict.kind is not Kind.GATED and hooks.is_being_imported(module):
            reason = Reason(
                f"{site.module} was still being imported when fusepatch was activated",
                consequence="it is not patched",
                action="call fusepatch.activate() once more when it has been imported",
            )
            return record(patch, site, Outcome.PENDING, reason, version)
        if verdict.kind is not Kind.FITS:
            return record(patch, site, _OUTCOMES[verdict.kind], verdict.reason, version)
        applied = install.install(patch, versions.in_release(site, version), module, late, order)
        if late and site.when_late is not None:
            site.when_late(module)
    except Exception:
        install.uninstall(patch, site)
        return _failed(patch, site, version, traceback.format_exc())
    told = verdict.reason.found
    for names, done in ((applied.rebound, "replaced"), (applied.left, "not replaced")):
        if names:
            told += f"; {done} in modules that had imported it before: {', '.join(names)}"
    return record(patch, site, Outcome.APPLIED, Reason(told), version)._replace(
        flags=(*verdict.flags, "late") if late else verdict.flags,
        holders=(*applied.rebound, *applied.left),
        slots=applied.slots,
    )


def look_again(patch: str, site: Site) -> SiteRecord | None:
    """What became of a site, as it is by now; None before anything has."""
    recorded = ledger.site(patch, site.module)
    if recorded is None or recorded.outcome is not Outcome.APPLIED:
        return recorded
    shadowed = install.shadowed(patch, site)
    if shadowed.replaced or shadowed.anew:
        return record(patch, site, Outcome.SHADOWED, _shadowed_by(site, shadowed), recorded.version)
    if sys.modules.get(site.module) is None:
        reason = Reason(
            f"{site.module} was wrapped, and is not in sys.modules any more",
            consequence="what other modules hold of it is wrapped; it is wrapped again when it is imported again",
        )
        return record(patch, site, Outcome.PENDING, reason, recorded.version)
    return recorded


def lost(patch: str, site: Site) -> Reason | None:
    """Why calls of a site that was wrapped do not reach the patch any more; None where they do. A replacement that
    holds the wrapper is assumed to call it."""
    shadowed = install.shadowed(patch, site)
    replaced = tuple(path for path in shadowed.replaced if path not in shadowed.passing)
    return _shadowed_by(site, shadowed._replace(replaced=replaced)) if replaced or shadowed.anew else None


def _shadowed_by(site: Site, shadowed: install.Shadowed) -> Reason:
    if shadowed.anew:
        return Reason(
            f"{', '.join(shadowed.anew)} of {site.module} is upstream's original again: the module was reloaded or "
            "imported again, or the original was restored",
            consequence="calls of it are not patched",
            action="call fusepatch.activate()",
        )
    return Reason(
        f"other code replaced {', '.join(shadowed.replaced)} of {site.module} after it was wrapped",
        consequence="the replacement is left alone, and only calls that it passes on are patched",
        action="import fusepatch after whatever replaced it",
    )


def remove(patch: str, site: Site) -> None:
    """Unwrap a site and record that; what other code has replaced since is left alone, and named."""
    recorded = ledger.site(patch, site.module)
    left = install.uninstall(patch, site)
    if recorded is None or recorded.outcome not in (Outcome.APPLIED, Outcome.DRIFTED):
        return
    reason = Reason("removed")
    if left:
        reason = Reason(
            f"removed, except that other code had replaced {', '.join(left)}, which was left alone",
            consequence="the replacement may still call the wrapper, which does nothing now",
        )
    ledger.record(record(patch, site, Outcome.REMOVED, reason, recorded.version))


_SEVERITY = (
    Outcome.FAILED,
    Outcome.DRIFTED,
    Outcome.SHADOWED,
    Outcome.GATED,
    Outcome.PENDING,
    Outcome.REMOVED,
    Outcome.DISABLED,
    Outcome.APPLIED,
    Outcome.ABSENT,
)


def together(records: Sequence[SiteRecord]) -> tuple[Outcome, str]:
    """What became of a patch, and why, from what became of its sites.

    A site whose module this process has not imported is waiting, or of an unsupported version. It changes nothing about
    the sites that are in: with one of them, the patch is APPLIED. A PENDING site whose module is loaded is not waiting,
    since calls go past it.
    """
    unused = [
        site
        for site in records
        if site.outcome in (Outcome.PENDING, Outcome.GATED) and not hooks.is_loaded(site.module)
    ]
    waiting = [site for site in unused if site.outcome is Outcome.PENDING]
    decided = [site for site in records if site not in unused and site.outcome is not Outcome.ABSENT]
    first = min(decided or unused or records, key=lambda site: _SEVERITY.index(site.outcome))
    if waiting and first.outcome is Outcome.APPLIED:
        modules = ", ".join(site.module for site in waiting)
        places = len(decided) + len(waiting)
        return first.outcome, f"applied in {len(decided)} of {places} places; waiting: {modules}"
    return first.outcome, str(first.reason)


def _failed(patch: str, site: Site, version: str | None, trace: str) -> SiteRecord:
    last = trace.strip().rpartition("\n")[2]
    reason = Reason(
        f"installing raised {last}",
        consequence="everything was rolled back and upstream is as it was",
        action="please report this with the traceback in `status --json`",
    )
    return record(patch, site, Outcome.FAILED, reason, version)._replace(traceback=trace)


def record(patch: str, site: Site, outcome: Outcome, reason: Reason, version: str | None = None) -> SiteRecord:
    """The record of a site."""
    return SiteRecord(patch, site.upstream.import_name, site.module, outcome, reason, version)
