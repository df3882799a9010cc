"""Switch the patches on and off, and say what became of them: ties the engine, the settings and the patches together."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from fusepatch import settings
from fusepatch.engine import contract, hooks, install, ledger, versions
from fusepatch.engine.patch import Outcome, Patch, PatchRecord, Reason, Site, SiteRecord
from fusepatch.errors import SettingError, StrictError
from fusepatch.explain import describe_site, page, summary
from fusepatch.patches import PATCHES, find, is_requested

REPORT = "FUSEPATCH_REPORT"

_active = False
_disabled: frozenset[str] = frozenset()
_taken_out: frozenset[str] = frozenset()
_asked_for: tuple[tuple[Patch, Site], ...] = ()
_exported_over: dict[str, str | None] = {}


def activate() -> None:
    """Apply every patch: to what is loaded now, and to what will be imported later. Calling it again changes nothing,
    except that what was taken out by its id comes back, and a module imported anew since is patched too.

    Exports `FUSEPATCH=1`, so that child processes are switched on, and makes the path in `FUSEPATCH_REPORT` absolute, so
    that they report to the same place.

    Raises:
        SettingError: a `FUSEPATCH_*` value cannot be read. Nothing has been applied then.
    """
    global _active, _asked_for, _disabled, _taken_out
    with install.lock:
        if not _active:
            read, _disabled = read_settings(os.environ)
            settings.use(read)
            ledger.reset(read.strict, lambda: summary(status(), read), _lost)
            _asked_for = tuple((patch, site) for patch, site in _sites() if is_asked_for(patch, read))
            _warn_of_unknown(read)
            _exported_over.clear()
            _export(settings.SWITCH, "1")
            if read.report:
                _export(REPORT, read.report)
                _begin_report(read.report)
            _active = True
        _taken_out = frozenset()
    for patch, site in _sites():
        if patch.id not in _disabled:
            _watch(patch, site)
    ledger.changed()


def deactivate(id: str | None = None) -> None:
    """Take one patch out, or all of them; the last restores the environment for child processes.

    A target that someone else has replaced since is left as it is; its site's record says so.

    Raises:
        UnknownPatchError: no patch has this id.
    """
    global _active, _taken_out
    wanted = {patch.id for patch in PATCHES} if id is None else {find(id).id}
    with install.lock:
        if not _active:
            return
        for patch, site in _sites():
            if patch.id in wanted and patch.id not in _disabled:
                _remove(patch, site)
        for patch in PATCHES:
            if patch.id in wanted and patch.when_removed is not None:
                patch.when_removed()
        _taken_out |= wanted
        if id is None:
            _active = False
            for name, before in _exported_over.items():
                if before is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = before
    ledger.changed()


def status() -> tuple[PatchRecord, ...]:
    """What became of every patch in this process; imports nothing."""
    return tuple(_patch_record(patch) for patch in PATCHES)


def planned(environ: Mapping[str, str]) -> tuple[PatchRecord, ...]:
    """What would become of every patch if a fresh process with this environment imported fusepatch; imports nothing.

    Raises:
        SettingError: that import would raise it.
    """
    read, disabled = read_settings(environ)

    def site_record(patch: Patch, site: Site) -> SiteRecord:
        if read.switch is False:
            return _record(
                patch, site, Outcome.DISABLED, Reason("FUSEPATCH=0 makes the import inert", action="unset it")
            )
        return _named_in_disable(patch, site) if patch.id in disabled else preview(patch, site)

    return tuple(_patch_record(patch, site_record) for patch in PATCHES)


def read_settings(environ: Mapping[str, str]) -> tuple[settings.Settings, frozenset[str]]:
    """The settings of an environment, and the ids of the patches that it switches off.

    Raises:
        SettingError: a value cannot be read, contradicts another, or names a patch that is not there.
    """
    read = settings.read(environ)
    return read, _ids_to_disable(read)


def is_applied(id: str) -> bool:
    """Whether every site of the patch whose library is there is applied.

    Raises:
        UnknownPatchError: no patch has this id.
    """
    return _patch_record(find(id)).outcome is Outcome.APPLIED


def explain(id: str) -> str:
    """A page of text about one patch: why it is there, what it changes, how to switch it, what became of it here.

    Raises:
        UnknownPatchError: no patch has this id.
    """
    patch = find(id)
    return page(patch, _patch_record(patch), settings.current(), "In this process")


def is_asked_for(patch: Patch, read: settings.Settings) -> bool:
    """Whether the user set a variable of the patch, so that it is to do something that it would not do by itself."""
    return is_requested(patch, read) and bool(_asking(patch, read))


def _asking(patch: Patch, read: settings.Settings) -> dict[str, str]:
    own = [settings.find(name) for name in patch.variables]
    return {name: text for name, text in read.set_by_user.items() if text != "keep" and settings.find(name) in own}


def _export(name: str, value: str) -> None:
    _exported_over[name] = os.environ.get(name)
    os.environ[name] = value


def _begin_report(folder: str) -> None:
    # Imported here: a process that keeps no report loads nothing for it.
    from fusepatch.reporting import writer
    from fusepatch.reporting.record import of_this_process

    def content() -> dict[str, Any]:
        return of_this_process([_patch_record(patch, _site_so_far) for patch in PATCHES])

    writer.begin(folder, content)
    ledger.observe(writer.grown)


def _sites() -> Iterator[tuple[Patch, Site]]:
    for patch in PATCHES:
        for site in patch.sites:
            yield patch, site


def _ids_to_disable(read: settings.Settings) -> frozenset[str]:
    known = [patch.id for patch in PATCHES]
    if "all" in read.disable:
        return frozenset(known)
    unknown = [name for name in read.disable if name not in known]
    if unknown:
        raise SettingError(
            f"FUSEPATCH_DISABLE names {', '.join(map(repr, unknown))}, which is no patch: accepted are {', '.join(known)} "
            f"and all. Nothing was patched; correct the value or unset the variable."
        )
    return frozenset(read.disable)


def _warn_of_unknown(read: settings.Settings) -> None:
    for name in read.unknown:
        ledger.warn_once(settings.unknown_name(name))


def _watch(patch: Patch, site: Site) -> None:
    def imported(module: ModuleType, late: bool) -> None:
        with install.lock:
            wanted = _active and patch.id not in _disabled | _taken_out
            if wanted and not install.is_installed(patch.id, site):
                ledger.record(_install(patch, site, module, late))

    def failed(name: str, trace: str) -> None:
        ledger.record(_failure(patch, site, trace))

    hooks.watch(site.module, imported, failed, patch.id)


def _install(patch: Patch, site: Site, module: ModuleType, late: bool) -> SiteRecord:
    found = versions.find(site.upstream)
    version = found.version if found is not None else None
    gate = versions.gate(site, version)
    if not gate.supported:
        return _gated(patch, site, version, found)
    site = versions.in_release(site, version)
    if late and hooks.is_being_imported(module):
        reason = Reason(
            f"{site.module} was still being imported when fusepatch was activated",
            consequence="it is not patched",
            action="call fusepatch.activate() once more when it has been imported",
        )
        return _record(patch, site, Outcome.PENDING, reason, version)
    try:
        applied = install.install(patch.id, site, module, late, PATCHES.index(patch))
    except install.TargetAbsentError as problem:
        reason = Reason(f"{found}: {problem}", consequence="there is nothing to patch in this version")
        return _record(patch, site, Outcome.ABSENT, reason, version)
    except install.ContractBrokenError as problem:
        return _answered(_drifted(patch, site, version, found, str(problem), problem.wanted), site, module)
    except Exception:
        return _answered(_failure(patch, site, traceback.format_exc(), version), site, module)
    flags = [] if gate.tested else ["untested"]
    if late:
        flags.append("late")
        if site.when_late is not None:
            site.when_late(module)
    told = f"{found or site.upstream.import_name}"
    if not gate.tested:
        told += f"; tested with {site.upstream.tested}, the shape of the target is the known one"
    if applied.rebound:
        told += f"; rebound where it had been taken before: {', '.join(applied.rebound)}"
    if applied.left:
        told += f"; still the old one where it had been taken before: {', '.join(applied.left)}"
    return SiteRecord(
        patch=patch.id,
        upstream=site.upstream.import_name,
        module=site.module,
        outcome=Outcome.APPLIED,
        reason=Reason(told),
        version=version,
        flags=tuple(flags),
        holders=(*applied.rebound, *applied.left),
        slots=applied.slots,
    )


def _answered(record: SiteRecord, site: Site, module: ModuleType) -> SiteRecord:
    """Under STRICT, make the first use of a target that could not be patched raise."""
    if ledger.strict():
        error = StrictError(f"{record.patch}: {describe_site(record)} (an error because FUSEPATCH_STRICT=1)")
        install.raise_when_used(record.patch, site, module, error)
    return record


def _remove(patch: Patch, site: Site) -> None:
    record = ledger.site(patch.id, site.module)
    left = install.uninstall(patch.id, site)
    if record is None or record.outcome not in (Outcome.APPLIED, Outcome.DRIFTED):
        return
    reason = Reason("taken out again")
    if left:
        reason = Reason(
            f"taken out again, but {', '.join(left)} had been replaced by someone else and stay as they are",
            consequence="what replaced them may still call the wrapper, which does nothing by now",
        )
    ledger.record(_record(patch, site, Outcome.REMOVED, reason, record.version))


def _patch_record(patch: Patch, site_record: Callable[[Patch, Site], SiteRecord] | None = None) -> PatchRecord:
    sites = tuple((site_record or _site_record)(patch, site) for site in patch.sites)
    outcome, reason = _worst(sites)
    return PatchRecord(
        id=patch.id,
        outcome=outcome,
        reason=reason,
        sites=sites,
        calls=ledger.calls(patch.id),
        replaced=ledger.replacements(patch.id),
        fallbacks=ledger.fallbacks(patch.id),
    )


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


def _worst(sites: tuple[SiteRecord, ...]) -> tuple[Outcome, str]:
    worst = min(sites, key=lambda site: _SEVERITY.index(site.outcome))
    return worst.outcome, str(worst.reason)


def _site_so_far(patch: Patch, site: Site) -> SiteRecord:
    """The record of a site without a look at what is installed, which would cost a training step too much."""
    return _site_record(patch, site, _waiting)


def _waiting(patch: Patch, site: Site) -> SiteRecord:
    loaded = sys.modules.get(site.module) is not None
    found = "is loaded, but the hook on its import has not run" if loaded else "has not been imported in this process"
    return _record(patch, site, Outcome.PENDING, Reason(f"{site.module} {found}"))


def _site_record(patch: Patch, site: Site, unseen: Callable[[Patch, Site], SiteRecord] | None = None) -> SiteRecord:
    recorded = ledger.site(patch.id, site.module)
    if recorded is not None and recorded.outcome is Outcome.APPLIED:
        return _still(patch, site, recorded)
    if recorded is not None:
        return recorded
    if not _active:
        return _record(
            patch, site, Outcome.DISABLED, Reason("fusepatch is not active", action="call fusepatch.activate()")
        )
    if patch.id in _disabled:
        return _named_in_disable(patch, site)
    if patch.id in _taken_out:
        return _record(patch, site, Outcome.DISABLED, Reason("deactivated", action="call fusepatch.activate()"))
    return (unseen or preview)(patch, site)


def _named_in_disable(patch: Patch, site: Site) -> SiteRecord:
    return _record(
        patch, site, Outcome.DISABLED, Reason("FUSEPATCH_DISABLE names it", action="take it out of that list")
    )


def _still(patch: Patch, site: Site, recorded: SiteRecord) -> SiteRecord:
    shadowed = install.shadowed(patch.id, site)
    if shadowed.replaced or shadowed.anew:
        return _record(patch, site, Outcome.SHADOWED, _shadowed_by(site, shadowed), recorded.version)
    if sys.modules.get(site.module) is None:
        reason = Reason(
            f"{site.module} was wrapped and is not in sys.modules any more",
            consequence="what others hold of it is wrapped; it will be wrapped again when it is imported anew",
        )
        return _record(patch, site, Outcome.PENDING, reason, recorded.version)
    return recorded


def _shadowed_by(site: Site, shadowed: install.Shadowed) -> Reason:
    if shadowed.anew:
        return Reason(
            f"{', '.join(shadowed.anew)} of {site.module} is upstream's own again: the module was reloaded or imported anew, or the "
            f"original was put back",
            consequence="calls of it are not patched",
            action="call fusepatch.activate()",
        )
    return Reason(
        f"someone replaced {', '.join(shadowed.replaced)} of {site.module} after it was wrapped",
        consequence="their replacement is left alone, and calls that do not pass through to ours are not patched",
        action="import fusepatch after whatever replaced it",
    )


def _lost() -> Iterator[tuple[str, str]]:
    """What was asked for, was wrapped, and is not reached any more: the patch and why. A replacement that holds our wrapper is
    taken to call it."""
    for patch, site in _asked_for:
        shadowed = install.shadowed(patch.id, site)
        replaced = tuple(path for path in shadowed.replaced if path not in shadowed.passing)
        if replaced or shadowed.anew:
            asked = ", ".join(f"{name}={text}" for name, text in _asking(patch, settings.current()).items())
            reason = _shadowed_by(site, install.Shadowed(replaced, anew=shadowed.anew))
            yield patch.id, f"{asked} was set, and is lost: {reason}"


def preview(patch: Patch, site: Site) -> SiteRecord:
    """What would become of a site whose module is not imported yet, read from metadata and source; imports nothing."""
    found = versions.find(site.upstream)
    if found is None:
        names = " or ".join(site.upstream.distributions)
        return _record(patch, site, Outcome.ABSENT, Reason(f"{names} is not installed"))
    gate = versions.gate(site, found.version)
    if not gate.supported:
        return _gated(patch, site, found.version, found)
    site = versions.in_release(site, found.version)
    problem, inherited = contract.in_source(site)
    if problem is not None and problem.endswith(site.module):
        return _record(patch, site, Outcome.ABSENT, Reason(f"{found}: {problem}"), found.version)
    if problem is not None:
        return _drifted(patch, site, found.version, found, problem, ", ".join(map(contract.describe, site.slots)))
    flags = () if gate.tested else ("untested",)
    known = f"{found} is {'tested' if gate.tested else f'supported, tested is {site.upstream.tested}'}"
    reason = Reason(f"{known}; the target has the known shape", consequence="will be applied when it is imported")
    if inherited:
        reason = Reason(
            f"{known}; {', '.join(inherited)} is left to a base class",
            consequence="will be applied when it is imported, if the import shows that the base class has it",
        )
    return _record(patch, site, Outcome.PENDING, reason, found.version, flags)


def _gated(patch: Patch, site: Site, version: str | None, found: versions.Found | None) -> SiteRecord:
    reason = Reason(
        f"{found}",
        wanted=f"{site.upstream.import_name} {site.supported}",
        consequence="upstream is left as it is",
        action="install a version in that range to have this patch",
    )
    return _record(patch, site, Outcome.GATED, reason, version)


def _drifted(
    patch: Patch, site: Site, version: str | None, found: versions.Found | None, problem: str, wanted: str
) -> SiteRecord:
    reason = Reason(
        f"{found}: {problem}",
        wanted=wanted,
        consequence="upstream is left as it is",
        action=f"use a tested version ({site.upstream.tested}) or a newer fusepatch",
    )
    return _record(patch, site, Outcome.DRIFTED, reason, version)


def _failure(patch: Patch, site: Site, trace: str, version: str | None = None) -> SiteRecord:
    last = trace.strip().rpartition("\n")[2]
    reason = Reason(
        f"installing raised {last}",
        consequence="everything was rolled back and upstream is as it was",
        action="please report this with the traceback in `status --json`",
    )
    return _record(patch, site, Outcome.FAILED, reason, version, trace=trace)


def _record(
    patch: Patch,
    site: Site,
    outcome: Outcome,
    reason: Reason,
    version: str | None = None,
    flags: tuple[str, ...] = (),
    trace: str | None = None,
) -> SiteRecord:
    return SiteRecord(
        patch=patch.id,
        upstream=site.upstream.import_name,
        module=site.module,
        outcome=outcome,
        reason=reason,
        version=version,
        flags=flags,
        traceback=trace,
    )
