"""What the report of a process holds: who it is, and the records of its patches as plain data; written here, and
checked here when it is read."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fusepatch import settings
from fusepatch._version import __version__
from fusepatch.engine import hooks, ledger, notice
from fusepatch.engine.patch import Outcome, PatchRecord, Reason
from fusepatch.reporting import role

FORMAT = 1
"""Changes when a reader of the old form would misread the new one."""

_BEFORE_THE_IMPORT = (Outcome.PENDING.value, Outcome.DISABLED.value)
"""Outcomes that a site in the ledger can have while its module is not imported; any other one says that it has been."""

_NOTES = [{"text": str, "times": int}]

_SITES = [
    {
        "patch": str,
        "upstream": str,
        "module": str,
        "outcome": Outcome,
        "reason": dict.fromkeys(Reason._fields, str),
        "version": (str,),
        "flags": [str],
        "holders": [str],
        "slots": [str],
        "traceback": (str,),
        "loaded": bool,
    }
]

_FORM: Mapping[str, Any] = {
    "format": int,
    "fusepatch": str,
    "host": str,
    "pid": int,
    "parent": int,
    "rank": (int,),
    "world_size": (int,),
    "role": str,
    "python": str,
    "upstreams": {None: str},
    "settings": {None: str},
    "started": str,
    "written": str,
    "patches": [
        {
            "id": str,
            "outcome": Outcome,
            "reason": str,
            "sites": _SITES,
            "calls": int,
            "replaced": _NOTES,
            "fallbacks": _NOTES,
        }
    ],
}
"""The report's form: a type, `Outcome` for the name of one, `[form]` for a list, `(type,)` for a value that may be
null, an object of names, and `{None: form}` for an object of any names."""

_JSON_NAMES: Mapping[type, str] = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "a whole number",
    float: "a number",
    type(None): "null",
}

_started = time.time()


def of_this_process(records: Sequence[PatchRecord]) -> dict[str, Any]:
    """The report of this process as it is now. Command lines and foreign variables stay out of it: they hold secrets.

    Of each site `loaded` says whether its module has been imported here; of the upstreams only those count.
    """
    patches = [as_data(record) for record in records]
    sites = [site for patch in patches for site in patch["sites"]]
    for site in sites:
        # The hook that records an outcome runs while its module is still being imported; a preview is in no ledger.
        recorded = ledger.site(site["patch"], site["module"]) is not None
        site["loaded"] = (recorded and site["outcome"] not in _BEFORE_THE_IMPORT) or hooks.is_loaded(site["module"])
    return {
        "format": FORMAT,
        "fusepatch": __version__,
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "rank": notice.rank(os.environ),
        "world_size": role.world_size(os.environ),
        "role": role.role(),
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


def checked(record: Any, seen: dict[str, Any]) -> dict[str, Any]:
    """The report that someone read from JSON, with the fields of `FORMAT` and no other ones.

    `seen` is for the caller to keep while it reads many reports: what many processes say alike is then checked and held
    once.

    Raises:
        ValueError: it is not a report, or is one of another format, or a field is missing or holds something else.
    """
    if not isinstance(record, dict) or not {"format", "fusepatch"} <= set(record):
        raise ValueError("not a report of fusepatch: JSON of another kind")
    if record["format"] != FORMAT:
        raise ValueError(
            f"written by fusepatch {_shown(record['fusepatch'])} in format {_shown(record['format'])}; this one reads "
            f"{FORMAT}"
        )
    found: dict[str, Any] = _checked(record, _FORM, "", seen)
    return found


def _checked(value: Any, form: Any, where: str, seen: dict[str, Any]) -> Any:
    if isinstance(form, list):
        _want(value, list, where)
        if form is _SITES:
            same = repr(value)  # two values of JSON's types that look alike are alike
            if same not in seen:
                seen[same] = [_checked(item, form[0], f"{where}[{index}]", seen) for index, item in enumerate(value)]
            return seen[same]
        return [_checked(item, form[0], f"{where}[{index}]", seen) for index, item in enumerate(value)]
    if isinstance(form, tuple):
        return None if value is None else _checked(value, form[0], where, seen)
    if form is Outcome:
        _want(value, str, where)
        if value not in Outcome.__members__:
            raise ValueError(f"{where} is {_shown(value)}; wanted one of {', '.join(Outcome.__members__)}")
        return value
    if isinstance(form, Mapping):
        _want(value, dict, where or "it")
        inside = f"{where}." if where else ""
        if None in form:
            return {name: _checked(item, form[None], inside + name, seen) for name, item in value.items()}
        missing = [name for name in form if name not in value]
        if missing:
            raise ValueError(f"incomplete: {inside}{missing[0]} is missing")
        return {name: _checked(value[name], wanted, inside + name, seen) for name, wanted in form.items()}
    _want(value, form, where)
    return value


def _want(value: Any, kind: type, where: str) -> None:
    found = type(value)  # True is not a whole number here
    if found is not kind:
        raise ValueError(f"{where} is {_JSON_NAMES[found]}; wanted {_JSON_NAMES[kind]}")
    if kind is int and not 0 <= value < 1 << 63:
        raise ValueError(
            f"{where} is {'negative' if value < 0 else 'too large'}; wanted a count, a rank or a process id"
        )


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, str) else value
    return text if len(text) <= 40 else f"{text[:40]}..."


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _in_child() -> None:
    global _started
    _started = time.time()


os.register_at_fork(after_in_child=_in_child)
