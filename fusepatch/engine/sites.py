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
    FITS = "fits"
    """Every slot leads to a function that its contract accepts."""


class Verdict(NamedTuple):
    """What a look at a site found. `unclear` are the slots of which the source does not show what only an import can."""

    kind: Kind
    reason: Reason
    version: str | None = None
    flags: tuple[str, ...] = ()
    unclear: tuple[str, ...] = ()


def judge(site: Site, module: ModuleType | None = None) -> Verdict:
    """Whether a site can be patched: asked of the loaded module, or else of its source. Imports and changes nothing."""
    found = versions.find(site.upstream)
    if found is None and module is None:
        return Verdict(Kind.NO_MODULE, Reason(f"{' or '.join(site.upstream.distributions)} is not installed"))
    found = found or versions.Found(None, None)
    gate = versions.gate(site, found.version)
    if not gate.supported:
        reason = Reason(
            f"{found}",
            wanted=f"{site.upstream.import_name} {site.supported}",
            consequence="upstream is left as it is",
            action="install a version in that range to have this patch",
        )
        return Verdict(Kind.GATED, reason, found.version)
    slots = contract.in_source(site) if module is None else install.look(site, module)
    if slots is None:
        return Verdict(Kind.NO_MODULE, Reason(f"{found}: there is no module {site.module}"), found.version)
    absent = [slot for slot, functions, unclear in slots if not functions and not unclear]
    if len(absent) == len(slots):
        missing = f"{site.module} has no {', '.join(slot.path for slot in absent)}"
        reason = Reason(f"{found}: {missing}", consequence="there is nothing to patch in this version")
        return Verdict(Kind.TARGET_ABSENT, reason, found.version)
    open_slots = [seen for seen in slots if None not in seen.functions.values()]
    broken = [seen for seen in open_slots if seen.functions and not seen.unclear]
    if absent or broken:
        problems = [f"{site.module} has no {slot.path}" for slot in absent]
        for seen in broken:
            path, problem = next(iter(seen.functions.items()))
            problems.append(f"{site.module}.{path} {problem}")
        reason = Reason(
            f"{found}: {'; '.join(problems)}",
            wanted=", ".join(map(contract.describe, [*absent, *(seen.slot for seen in broken)])),
            consequence="upstream is left as it is",
            action=f"use a tested version ({site.upstream.tested}) or a newer fusepatch",
        )
        return Verdict(Kind.CONTRACT_BROKEN, reason, found.version)
    flags = () if gate.tested else ("untested",)
    told = f"{found}" if gate.tested else f"{found}, which is untested (tested: {site.upstream.tested})"
    return Verdict(Kind.FITS, Reason(told), found.version, flags, tuple(seen.slot.path for seen in open_slots))


def preview(patch: str, site: Site) -> SiteRecord:
    """What an import of the site's module would make of it, from metadata and source; imports nothing."""
    verdict = judge(site)
    if verdict.kind is not Kind.FITS:
        return _left(patch, site, verdict)
    consequence = "it is applied when the module is imported"
    if verdict.unclear:
        consequence += f", if that shows {', '.join(verdict.unclear)} in the known shape"
    reason = verdict.reason._replace(consequence=consequence)
    return record(patch, site, Outcome.PENDING, reason, verdict.version, flags=verdict.flags)


def watch(patch: str, site: Site, order: int, wanted: Callable[[], bool]) -> None:
    """Install the site whenever its module has been imported, and now where it is loaded, as long as `wanted()` holds.

    Handlers with a lower `order` run first in the slots that they share. Outcomes go to the ledger.
    """

    def imported(module: ModuleType, late: bool) -> None:
        with install.lock:
            if wanted() and not install.is_installed(patch, site):
                ledger.record(_install(patch, site, order, module, late))

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
            return _answered(_left(patch, site, verdict), site, module)
        applied = install.install(patch, site, module, late, order)
        if late and site.when_late is not None:
            site.when_late(module)
    except Exception:
        install.uninstall(patch, site)
        return _answered(_failed(patch, site, version, traceback.format_exc()), site, module)
    told = verdict.reason.found
    if applied.rebound:
        told += f"; replaced under names that other modules had imported: {', '.join(applied.rebound)}"
    if applied.left:
        told += f"; not replaced under names that other modules had imported: {', '.join(applied.left)}"
    return record(
        patch,
        site,
        Outcome.APPLIED,
        Reason(told),
        version,
        flags=(*verdict.flags, "late") if late else verdict.flags,
        holders=(*applied.rebound, *applied.left),
        slots=applied.slots,
    )


def _answered(left: SiteRecord, site: Site, module: ModuleType) -> SiteRecord:
    """Under STRICT, make the first use of a target that should have been patched raise."""
    if ledger.strict() and left.outcome in (Outcome.DRIFTED, Outcome.FAILED):
        error = StrictError(f"{left.patch}: {left} (an error because FUSEPATCH_STRICT=1)")
        install.raise_when_used(left.patch, site, module, error)
    return left


def look_again(patch: str, site: Site) -> SiteRecord | None:
    """What became of a site, as it is by now; None before anything has."""
    recorded = ledger.site(patch, site.module)
    if recorded is None or recorded.outcome is not Outcome.APPLIED:
        return recorded
    shadowed = install.shadowed(patch, site)
    if shadowed.replaced or shadowed.anew:
        return record(patch, site, Outcome.SHADOWED, shadowed_by(site, shadowed), recorded.version)
    if sys.modules.get(site.module) is None:
        reason = Reason(
            f"{site.module} was wrapped, and is not in sys.modules any more",
            consequence="what other modules hold of it is wrapped; it is wrapped again when it is imported again",
        )
        return record(patch, site, Outcome.PENDING, reason, recorded.version)
    return recorded


def shadowed_by(site: Site, shadowed: install.Shadowed) -> Reason:
    """Why calls of these targets do not reach the patch."""
    if shadowed.anew:
        return Reason(
            f"{', '.join(shadowed.anew)} of {site.module} is upstream's original again: the module was reloaded or imported "
            f"again, or the original was restored",
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

    A site whose module this process has not imported waits, and takes nothing from those that are in. PENDING means that
    nothing is in yet, or that a module is in use here and its site is not in. Any other outcome outranks APPLIED.
    """
    waiting = [site for site in records if site.outcome is Outcome.PENDING and not hooks.is_loaded(site.module)]
    decided = [site for site in records if site not in waiting and site.outcome is not Outcome.ABSENT]
    first = min(decided or waiting or records, key=lambda site: _SEVERITY.index(site.outcome))
    if waiting and first.outcome is Outcome.APPLIED:
        places = len(decided) + len(waiting)
        modules = ", ".join(site.module for site in waiting)
        return first.outcome, f"applied in {len(decided)} of {places} places; waiting: {modules}"
    return first.outcome, str(first.reason)


_OUTCOMES = {
    Kind.NO_MODULE: Outcome.ABSENT,
    Kind.TARGET_ABSENT: Outcome.ABSENT,
    Kind.CONTRACT_BROKEN: Outcome.DRIFTED,
    Kind.GATED: Outcome.GATED,
}


def _left(patch: str, site: Site, verdict: Verdict) -> SiteRecord:
    return record(patch, site, _OUTCOMES[verdict.kind], verdict.reason, verdict.version)


def _failed(patch: str, site: Site, version: str | None, trace: str) -> SiteRecord:
    last = trace.strip().rpartition("\n")[2]
    reason = Reason(
        f"installing raised {last}",
        consequence="everything was rolled back and upstream is as it was",
        action="please report this with the traceback in `status --json`",
    )
    return record(patch, site, Outcome.FAILED, reason, version, trace=trace)


def record(
    patch: str,
    site: Site,
    outcome: Outcome,
    reason: Reason,
    version: str | None = None,
    flags: tuple[str, ...] = (),
    holders: tuple[str, ...] = (),
    slots: tuple[str, ...] = (),
    trace: str | None = None,
) -> SiteRecord:
    """The record of a site."""
    upstream = site.upstream.import_name
    return SiteRecord(patch, upstream, site.module, outcome, reason, version, flags, holders, slots, trace)
