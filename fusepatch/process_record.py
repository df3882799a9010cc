"""What the report of a process holds: who it is, and the records of its patches as plain data."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import fusepatch
from fusepatch import settings
from fusepatch.engine import hooks
from fusepatch.engine.patch import Outcome, PatchRecord
from fusepatch.patches import roles

FORMAT = 1
"""Changes when a reader of the old form would misread the new one."""

_BEFORE_THE_IMPORT = (Outcome.PENDING.value, Outcome.DISABLED.value)
"""Outcomes that a site can have before its module is imported; any other one says that it has been."""

_started = time.time()


def of_this_process(records: Sequence[PatchRecord]) -> dict[str, Any]:
    """The report of this process as it is now. Command lines and foreign variables stay out of it: they hold secrets.

    Of each site `loaded` says whether its module has been imported here; of the upstreams only those count.
    """
    patches = [as_data(record) for record in records]
    sites = [site for patch in patches for site in patch["sites"]]
    for site in sites:
        # The hook that records an outcome runs while the import of its module is still under way.
        site["loaded"] = site["outcome"] not in _BEFORE_THE_IMPORT or _is_loaded(site["module"])
    return {
        "format": FORMAT,
        "fusepatch": fusepatch.__version__,
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "rank": roles.rank(os.environ),
        "world_size": roles.world_size(os.environ),
        "role": roles.role(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "upstreams": {site["upstream"]: site["version"] for site in sites if site["loaded"] and site["version"]},
        "settings": dict(settings.current().set_by_user),
        "started": _utc(_started),
        "written": _utc(time.time()),
        "patches": patches,
    }


def as_data(record: PatchRecord) -> dict[str, Any]:
    """A patch's record in the types of JSON."""
    sites = [
        {**site._asdict(), "outcome": site.outcome.value, "reason": site.reason._asdict()} for site in record.sites
    ]
    notes = {name: [note._asdict() for note in getattr(record, name)] for name in ("replaced", "fallbacks")}
    return {**record._asdict(), "outcome": record.outcome.value, "sites": sites, **notes}


def _is_loaded(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not hooks.is_being_imported(module)


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _in_child() -> None:
    global _started
    _started = time.time()


os.register_at_fork(after_in_child=_in_child)
