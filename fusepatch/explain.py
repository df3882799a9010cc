"""The words about patches: the page of one, and the one line at the first patched call.

Nothing here looks at what became of a patch: whoever has the records passes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fusepatch import settings
from fusepatch.engine.patch import Outcome, Patch, PatchRecord
from fusepatch.patches import PATCHES, is_requested


def page(patch: Patch, record: PatchRecord, read: settings.Settings, where: str) -> str:
    """A page of text about one patch: why it is there, what it changes, how to switch it, and what became of it
    `where`."""
    lines = [f"{patch.id}: {patch.promise}", "", f"Why: {patch.why}", "", "What it changes:"]
    lines += [f"  - {change}" for change in patch.changes]
    lines += ["", "Known limits:", *(f"  - {limit}" for limit in patch.limits)]
    lines += ["", "Variables:", *(f"  {line}" for line in _variables(patch, read))]
    if not is_requested(patch, read):
        lines.append(f"  It changes nothing until {patch.requested_by} is set.")
    lines += ["", "Upstream:", *(f"  - {link}" for link in patch.upstream)]
    lines += ["", f"Fixed in: {patch.fixed_in}", f"Can be removed when: {patch.remove_when}"]
    told = f": {record.reason}" if record.outcome is Outcome.APPLIED and record.waiting else ""
    lines += ["", f"{where}: {record.outcome.value}{told}"]
    same: dict[str, list[str]] = {}
    for site in record.sites:
        same.setdefault(str(site), []).append(site.module)
    lines += [f"  {', '.join(modules)}: {text}" for text, modules in same.items()]
    lines += [f"  replaced {note.times}x: {note.text}" for note in record.replaced]
    lines += [f"  not done {note.times}x: {note.text}" for note in record.fallbacks]
    return "\n".join(lines)


def summary(records: Sequence[PatchRecord], read: settings.Settings) -> str:
    """One line: what is applied, what waits for an import, what is not applied, where to look.

    A patch none of whose libraries is installed is left out, and one that changes nothing because nobody asked for it.
    """
    asked_for = {patch.id for patch in PATCHES if is_requested(patch, read)}
    relevant = [record for record in records if record.id in asked_for and _concerns_this_environment(record)]
    applied = [_with_waiting(record) for record in relevant if record.outcome is Outcome.APPLIED]
    waiting = [record.id for record in relevant if record.outcome is Outcome.PENDING]
    told = (Outcome.APPLIED, Outcome.PENDING)
    others = [f"{record.id} {record.outcome.value}" for record in relevant if record.outcome not in told]
    parts = [f"applied {', '.join(applied)}" if applied else "nothing applied yet"]
    if waiting:
        parts.append(f"waiting for their modules to be imported: {', '.join(waiting)}")
    if others:
        parts.append(f"not applied: {', '.join(others)}")
    return f"{'; '.join(parts)}. `python -m fusepatch status` and `fusepatch.status()` say why."


def _with_waiting(record: PatchRecord) -> str:
    return f"{record.id} (waiting: {', '.join(record.waiting)})" if record.waiting else record.id


def _concerns_this_environment(record: PatchRecord) -> bool:
    return record.outcome is not Outcome.ABSENT or any(site.version is not None for site in record.sites)


def _variables(patch: Patch, read: settings.Settings) -> Iterator[str]:
    shown = read.set_by_user
    for name in patch.variables:
        variable = settings.find(name)
        if variable is None:
            continue
        values = [f"{key}={text}" for key, text in shown.items() if settings.find(key) is variable]
        meaning = " ".join(variable.meaning.replace("`", "").split())
        yield f"{variable.shown_name} ({variable.values.replace('`', '')}): {meaning}"
        not_set = f"not set ({variable.default.removeprefix('unset: ')})"
        yield f"    here: {', '.join(values) or not_set}".replace("`", "")
