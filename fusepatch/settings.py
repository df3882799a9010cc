"""Every `FUSEPATCH_*` variable: one typed table, parsed once per activation. The documentation is generated from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from fusepatch.errors import SettingError


class Settings(NamedTuple):
    """The values in force. A field that is None was not set, which means the automatic rule.

    `set_by_user` holds the raw text of every variable that was set and read.
    """

    switch: bool | None = None
    strict: bool = False
    disable: tuple[str, ...] = ()
    liger_flags: Mapping[str, bool] = MappingProxyType({})
    set_by_user: Mapping[str, str] = MappingProxyType({})
    unknown: tuple[str, ...] = ()


class Variable(NamedTuple):
    """One row of the table. `name` ends in `_` where it is a prefix that stands for a family of variables."""

    name: str
    field: str
    values: str
    default: str
    meaning: str
    read_by: str
    parse: Callable[[str], Any]

    @property
    def is_family(self) -> bool:
        return self.name.endswith("_")

    @property
    def shown_name(self) -> str:
        return f"{self.name}<FLAG>" if self.is_family else self.name


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError
    return text == "1"


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


TABLE: tuple[Variable, ...] = (
    Variable(
        name="FUSEPATCH",
        field="switch",
        values="`0`, `1`",
        default="unset: the import activates this process",
        meaning="`0` makes the import inert (an explicit `activate()` still works). `1`, which an active process exports, "
        "switches child processes on.",
        read_by="start-up",
        parse=_switch,
    ),
    Variable(
        name="FUSEPATCH_STRICT",
        field="strict",
        values="`0`, `1`",
        default="`0`",
        meaning="`1` turns a request that one call cannot take into an error, and raises at the first use of a target "
        "that could not be patched.",
        read_by="every patch",
        parse=_switch,
    ),
    Variable(
        name="FUSEPATCH_DISABLE",
        field="disable",
        values="patch ids, comma separated; `all`",
        default="none",
        meaning="Patches that are not applied.",
        read_by="start-up",
        parse=_names,
    ),
    Variable(
        name="FUSEPATCH_LIGER_",
        field="liger_flags",
        values="`0`, `1`",
        default="automatic",
        meaning="One kernel of Liger, by the name that its `apply_liger_kernel_to_<model>` functions give it: ROPE, "
        "RMS_NORM, LAYER_NORM, SWIGLU, GEGLU, RELU_SQUARED, CROSS_ENTROPY, FUSED_LINEAR_CROSS_ENTROPY, or any other that "
        "the installed Liger has. Checked at the call. CROSS_ENTROPY=1 implies FUSED_LINEAR_CROSS_ENTROPY=0.",
        read_by="`liger.instance_flags`",
        parse=_switch,
    ),
)


_current = Settings()


def current() -> Settings:
    """The settings of the last activation."""
    return _current


def use(settings: Settings) -> None:
    """Make `settings` the ones in force."""
    global _current
    _current = settings


def read(environ: Mapping[str, str]) -> Settings:
    """Read every `FUSEPATCH*` variable of `environ`; an empty value counts as unset.

    Raises:
        SettingError: a value cannot be read or two values contradict each other. Nothing has been changed then.
    """
    values: dict[str, Any] = {"liger_flags": {}, "set_by_user": {}}
    unknown = []
    for name in sorted(environ):
        text = environ[name].strip()
        if not text or (name != "FUSEPATCH" and not name.startswith("FUSEPATCH_")):
            continue
        variable = find(name)
        if variable is None:
            unknown.append(name)
            continue
        value = _parse(variable, name, text)
        values["set_by_user"][name] = text
        if variable.is_family:
            values[variable.field][name.removeprefix(variable.name).lower()] = value
        else:
            values[variable.field] = value
    settings = Settings(**values, unknown=tuple(unknown))
    _check(settings)
    return settings


def find(name: str) -> Variable | None:
    """The row of a variable's name; a family's row for its members."""
    for variable in TABLE:
        if name == variable.name or (variable.is_family and name.startswith(variable.name) and name != variable.name):
            return variable
    return None


def unknown_name(name: str) -> str:
    """What to tell the user who has set `name`, which is in no row of the table."""
    import difflib

    nearest = difflib.get_close_matches(name, [variable.shown_name for variable in TABLE], n=1)
    hint = f"the nearest known one is {nearest[0]}" if nearest else "`python -m fusepatch env` lists the known ones"
    return f"the variable {name} is set but means nothing to fusepatch, so it changes nothing; {hint}"


def _parse(variable: Variable, name: str, text: str) -> Any:
    try:
        return variable.parse(text)
    except ValueError as error:
        detail = f" ({error})" if str(error) else ""
        raise SettingError(
            f"{name}={text!r} cannot be read{detail}: accepted is {variable.values.replace('`', '')}. "
            f"Nothing was patched; correct the value or unset the variable."
        ) from None


def _check(settings: Settings) -> None:
    flags = settings.liger_flags
    if flags.get("cross_entropy") and flags.get("fused_linear_cross_entropy"):
        raise SettingError(
            "FUSEPATCH_LIGER_CROSS_ENTROPY=1 and FUSEPATCH_LIGER_FUSED_LINEAR_CROSS_ENTROPY=1 contradict each other: "
            "Liger computes the loss in one of the two ways. Nothing was patched; set one of them to 0 or unset it."
        )
