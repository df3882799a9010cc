"""What became of every site, and what its calls did. Thread-safe; one ledger per process."""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable

from fusepatch.engine import notice
from fusepatch.engine.patch import Note, SiteRecord
from fusepatch.errors import StrictError

MAXIMUM_NOTES = 200
"""Distinct notes kept per patch; what comes later is counted under one heading, so that a long run holds no more."""

_lock = threading.RLock()
_sites: dict[tuple[str, str], SiteRecord] = {}
_calls: Counter[str] = Counter()
_replaced: dict[str, Counter[str]] = {}
_fallbacks: dict[str, Counter[str]] = {}
_warned: set[str] = set()
_first_use: Callable[[], str] | None = None
_lost: Callable[[], Iterable[tuple[str, str]]] | None = None
_strict = False
_observer: Callable[[int], None] | None = None


def _in_child() -> None:
    """The outcomes that a forked child inherits are true of it too; the calls were its parent's."""
    for table in (_calls, _replaced, _fallbacks):
        table.clear()
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_child)


def reset(
    strict: bool, first_use: Callable[[], str], lost: Callable[[], Iterable[tuple[str, str]]] | None = None
) -> None:
    """Begin a new activation: forget what was recorded.

    `first_use` makes the line shown at the first patched call. `lost` gives the patch and the reason of everything that
    was asked for, was in place, and is not any more.
    """
    global _first_use, _lost, _strict, _observer
    with _lock:
        _observer = None
        _strict = strict
        _first_use, _lost = first_use, lost
        for table in (_sites, _calls, _replaced, _fallbacks, _warned):
            table.clear()


def observe(observer: Callable[[int], None]) -> None:
    """Call `observer(times)` in this activation whenever the ledger has changed: `times` is how often what was recorded
    has happened by then, 1 for an outcome. No lock of the ledger is held during the call."""
    global _observer
    _observer = observer


def changed(times: int = 1) -> None:
    """Tell the observer, if there is one; for changes that the ledger does not see, such as a patch that was
    removed."""
    if _observer is not None:
        _observer(times)


def strict() -> bool:
    """Whether `FUSEPATCH_STRICT=1` holds in this activation."""
    return _strict


def record(site: SiteRecord) -> None:
    """Store what became of a site, replacing what was known of it."""
    with _lock:
        _sites[site.patch, site.module] = site
    changed()


def site(patch: str, module: str) -> SiteRecord | None:
    """The last record of a site; None before anything became of it."""
    with _lock:
        return _sites.get((patch, module))


def count_call(patch: str) -> None:
    """Count one call that went through a patch; the first one in the process tells the user what is applied.

    Raises:
        StrictError: what `tell_of_lost` raises.
    """
    global _first_use
    with _lock:
        _calls[patch] += 1
        times = _calls[patch]
        first_use, _first_use = _first_use, None
    changed(times)
    if first_use is not None:
        notice.tell(logging.INFO, _summary(first_use))
    tell_of_lost()


def _summary(first_use: Callable[[], str]) -> str:
    # Made of what is installed, which is read here for the first time: metadata can be broken, and sources unreadable.
    try:
        return first_use()
    except Exception:
        return f"what is applied could not be read; please report this: {traceback.format_exc(limit=-3)}"


def tell_of_lost() -> None:
    """Warn once of each patch that was asked for and whose wrapper is not reached any more. A call that misses its
    wrapper cannot say so, but the next call that reaches another wrapper can. A handler that counts no call calls this
    instead.

    Raises:
        StrictError: something has been lost, and `FUSEPATCH_STRICT=1` makes that an error.
    """
    if _lost is None:
        return
    for patch, text in _lost():
        refused(patch, text)


def calls(patch: str) -> int:
    """How many calls went through a patch."""
    with _lock:
        return _calls[patch]


def replaced(patch: str, text: str) -> None:
    """Record a value that the patch replaced: what, by what, on whose word."""
    with _lock:
        times = _count(_replaced.setdefault(patch, Counter()), text)
    changed(times)


def fallback(patch: str, text: str) -> None:
    """Record that a call was left to upstream, and why. Nobody had asked for the patch there, so nobody is warned."""
    with _lock:
        times = _count(_fallbacks.setdefault(patch, Counter()), text)
    changed(times)


def refused(patch: str, text: str, kind: str = "") -> None:
    """Record that something the user asked for could not be done in one call.

    Warns once per `kind`, which is the text where it is not given; under `FUSEPATCH_STRICT=1` raises StrictError
    instead.
    """
    fallback(patch, text)
    if _strict:
        raise StrictError(f"{patch}: {text} (an error because FUSEPATCH_STRICT=1)")
    warn_once(f"{patch}: {text}", f"{patch}: {kind}" if kind else "")


def warn_once(text: str, kind: str = "") -> None:
    """Warn the user, once per kind and activation; a text that varies from call to call (numbers, names) needs a `kind`
    that does not. After `MAXIMUM_NOTES` kinds one last line says that no more are shown."""
    with _lock:
        if (kind or text) in _warned or len(_warned) > MAXIMUM_NOTES:
            return
        _warned.add(kind or text)
        if len(_warned) > MAXIMUM_NOTES:
            text = f"more than {MAXIMUM_NOTES} different warnings; `fusepatch.status()` has the rest"
    notice.tell(logging.WARNING, text)


def replacements(patch: str) -> tuple[Note, ...]:
    """The replaced values of a patch with their counts, in the order of their first appearance."""
    return _notes(_replaced, patch)


def fallbacks(patch: str) -> tuple[Note, ...]:
    """The fallbacks of a patch with their counts, in the order of their first appearance."""
    return _notes(_fallbacks, patch)


def _count(notes: Counter[str], text: str) -> int:
    if text not in notes and len(notes) >= MAXIMUM_NOTES:
        text = f"(further notes, beyond the first {MAXIMUM_NOTES} distinct ones)"
    notes[text] += 1
    return notes[text]


def _notes(table: dict[str, Counter[str]], patch: str) -> tuple[Note, ...]:
    with _lock:
        return tuple(Note(text, count) for text, count in table.get(patch, Counter()).items())
