"""Switch the patches on and off, and say what became of them: ties the engine, the settings and the patches
together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from fusepatch import settings
from fusepatch.engine import install, ledger, sites
from fusepatch.engine.patch import Outcome, Patch, PatchRecord, Reason, Site, SiteRecord
from fusepatch.errors import SettingError
from fusepatch.explain import page, summary
from fusepatch.patches import PATCHES, find, is_requested

REPORT = "FUSEPATCH_REPORT"

_active = False
_disabled: frozenset[str] = frozenset()
_removed: frozenset[str] = frozenset()
_asked_for: tuple[tuple[Patch, Site], ...] = ()
_exported_over: dict[str, str | None] = {}


def activate() -> None:
    """Apply every patch: to what is loaded now, and to what will be imported later. Calling it again changes nothing,
    except that a patch that was removed by its id comes back, and a module that was imported again is patched again.

    Exports `FUSEPATCH=1`, so that child processes are switched on, and makes the path in `FUSEPATCH_REPORT` absolute,
    so that they report to the same place.

    Raises:
        SettingError: a `FUSEPATCH_*` value cannot be read. Nothing has been applied then.
    """
    global _active, _asked_for, _disabled, _removed
    with install.lock:
        if not _active:
            read, _disabled = read_settings(os.environ)
            settings.use(read)
            ledger.reset(read.strict, lambda: summary(status(), read), _lost)
            _asked_for = tuple(
                (patch, site) for patch, site in _sites() if is_requested(patch, read) and _asking(patch, read)
            )
            for name in read.unknown:
                ledger.warn_once(settings.unknown_name(name))
            _exported_over.clear()
            _export(settings.SWITCH, "1")
            if read.report:
                _export(REPORT, read.report)
                _begin_report(read.report)
            _active = True
        _removed = frozenset()
    for patch, site in _sites():
        if patch.id not in _disabled:
            sites.watch(patch.id, site, PATCHES.index(patch), partial(_is_on, patch))
    ledger.changed()


def deactivate(id: str | None = None) -> None:
    """Remove one patch, or all of them and the variables that were set for child processes.

    A target that other code has replaced since is left alone; its site's record says so.

    Raises:
        UnknownPatchError: no patch has this id.
    """
    global _active, _removed
    wanted = {patch.id for patch in PATCHES} if id is None else {find(id).id}
    with install.lock:
        if not _active:
            return
        for patch, site in _sites():
            if patch.id in wanted and patch.id not in _disabled:
                sites.remove(patch.id, site)
        for patch in PATCHES:
            if patch.id in wanted and patch.when_removed is not None:
                patch.when_removed()
        _removed |= wanted
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
            return _switched_off(patch, site, "FUSEPATCH=0 makes the import inert", "unset it")
        return _named_in_disable(patch, site) if patch.id in disabled else sites.preview(patch.id, site)

    return tuple(_patch_record(patch, site_record) for patch in PATCHES)


def read_settings(environ: Mapping[str, str]) -> tuple[settings.Settings, frozenset[str]]:
    """The settings of an environment, and the ids of the patches that it switches off.

    Raises:
        SettingError: a value cannot be read, contradicts another, or names a patch that is not there.
    """
    read = settings.read(environ)
    known = [patch.id for patch in PATCHES]
    unknown = [name for name in read.disable if name not in (*known, "all")]
    if unknown and "all" not in read.disable:
        raise SettingError(
            f"FUSEPATCH_DISABLE names {', '.join(map(repr, unknown))}, and there is no such patch. Accepted are "
            f"{', '.join(known)} and all. Nothing was patched; correct the value or unset the variable."
        )
    return read, frozenset(known if "all" in read.disable else read.disable)


def is_applied(id: str) -> bool:
    """Whether the patch is in at least one of the places that this process uses, and broken in none.

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


def _asking(patch: Patch, read: settings.Settings) -> dict[str, str]:
    """The variables of the patch that the user set, so that it does something that it would not do by itself."""
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
        # Without a look at what is installed, which would cost a training step too much.
        return of_this_process(
            [_patch_record(patch, partial(_site_record, unseen=sites.not_imported)) for patch in PATCHES]
        )

    writer.begin(folder, content)
    ledger.observe(writer.grown)


def _sites() -> Iterator[tuple[Patch, Site]]:
    for patch in PATCHES:
        for site in patch.sites:
            yield patch, site


def _is_on(patch: Patch) -> bool:
    return _active and patch.id not in _disabled | _removed


def _patch_record(patch: Patch, site_record: Callable[[Patch, Site], SiteRecord] | None = None) -> PatchRecord:
    records = tuple((site_record or _site_record)(patch, site) for site in patch.sites)
    outcome, reason = sites.together(records)
    return PatchRecord(
        id=patch.id,
        outcome=outcome,
        reason=reason,
        sites=records,
        calls=ledger.calls(patch.id),
        replaced=ledger.replacements(patch.id),
        fallbacks=ledger.fallbacks(patch.id),
    )


def _site_record(patch: Patch, site: Site, unseen: Callable[[str, Site], SiteRecord] = sites.preview) -> SiteRecord:
    recorded = sites.look_again(patch.id, site)
    if recorded is not None and not (recorded.outcome is Outcome.REMOVED and _is_on(patch)):
        return recorded
    if not _active:
        return _switched_off(patch, site, "fusepatch is not active", "call fusepatch.activate()")
    if patch.id in _disabled:
        return _named_in_disable(patch, site)
    if patch.id in _removed:
        return _switched_off(patch, site, "it was deactivated", "call fusepatch.activate()")
    return unseen(patch.id, site)


def _named_in_disable(patch: Patch, site: Site) -> SiteRecord:
    return _switched_off(patch, site, "FUSEPATCH_DISABLE names it", "remove it from that list")


def _switched_off(patch: Patch, site: Site, found: str, action: str) -> SiteRecord:
    return sites.record(patch.id, site, Outcome.DISABLED, Reason(found, action=action))


def _lost() -> Iterator[tuple[str, str]]:
    """What was asked for, was wrapped, and is not reached any more: the patch and why."""
    for patch, site in _asked_for:
        reason = sites.lost(patch.id, site)
        if reason is not None:
            asked = ", ".join(f"{name}={text}" for name, text in _asking(patch, settings.current()).items())
            yield patch.id, f"{asked} was set, and is lost: {reason}"
