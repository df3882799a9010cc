"""Every `FUSEPATCH_*` variable: one typed table, parsed once per activation. The documentation is generated from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from fusepatch.errors import SettingError

SWITCH = "FUSEPATCH"
"""The variable that switches fusepatch on or off; the names of all others begin with it and an underscore."""


class Settings(NamedTuple):
    """The values in force. A field that is None was not set, which means the automatic rule.

    `set_by_user` holds the raw text of every variable that was set and read.
    """

    switch: bool | None = None
    strict: bool = False
    disable: tuple[str, ...] = ()
    report: str | None = None
    liger_flags: Mapping[str, bool] = MappingProxyType({})
    optimizer_fused: bool | str | None = None
    optimizer_foreach: bool | None = None
    optimizer_eps: float | None = None
    optimizer_scope: str = "frameworks"
    optimizer_in_backward: bool = False
    optimizer_class: str | None = None
    optimizer_kwargs: Mapping[str, Any] = MappingProxyType({})
    head: str = "auto"
    head_prefer: str = "speed"
    head_chunk_mib: float = 256.0
    grpo_padding: str = "auto"
    grpo_zero_advantage: str = "keep"
    set_by_user: Mapping[str, str] = MappingProxyType({})
    unknown: tuple[str, ...] = ()


class Variable(NamedTuple):
    """One row of the table. `name` ends in `_` where it is a prefix that stands for a family of variables."""

    name: str
    field: str
    values: str
    default: str
    meaning: str
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


def _auto_switch(text: str) -> bool | str:
    return text if text in ("auto", "keep") else _switch(text)


def _kept_switch(text: str) -> bool | None:
    return None if text == "keep" else _switch(text)


def _positive(text: str) -> float:
    if not text.isascii() or "_" in text:  # float() takes digits of any script, and 1_0 for 10
        raise ValueError
    try:
        value = float(text)
    except ValueError:
        raise ValueError from None  # Python's own message repeats the value
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def _mebibytes(text: str) -> float:
    value = _positive(text)
    if value > 1 << 40:
        raise ValueError("that is more memory than any machine has")
    return value


def _scope(text: str) -> str:
    if text not in ("frameworks", "all"):
        raise ValueError
    return text


def _class_path(text: str) -> str | None:
    if text == "keep":
        return None
    parts = text.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ValueError("not the dotted path of a class")
    return text


def _json_object(text: str) -> Mapping[str, Any]:
    import json  # here, since every training script imports this module

    try:
        text.encode()
        value = json.loads(
            text, object_pairs_hook=_without_doubles, parse_constant=_no_number, parse_float=_finite, parse_int=_integer
        )
    except UnicodeEncodeError:  # os.environ stands for bytes that it cannot decode by lone surrogates
        raise ValueError("it is not UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is a JSON {_JSON_NAMES.get(type(value), 'number')}")
    return MappingProxyType(value)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has {_shown(double)} more than once")
    return values


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # Python's limit, whose message is about Python
        raise ValueError(f"it has an integer of {len(text)} digits") from None


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{_cut(text)} is more than a float can hold")
    return value


_JSON_NAMES: Mapping[type, str] = {list: "array", str: "string", bool: "boolean", type(None): "null"}


def _loss(text: str) -> str:
    if text not in ("auto", "triton", "torch", "keep"):
        raise ValueError
    return text


def _padding(text: str) -> str:
    if text not in ("auto", "keep"):
        raise ValueError
    return text


def _zero_advantage(text: str) -> str:
    if text not in ("keep", "drop"):
        raise ValueError
    return text


def _preference(text: str) -> str:
    if text not in ("speed", "memory"):
        raise ValueError
    return text


def _directory(text: str) -> str:
    path = os.path.expanduser(text)
    try:
        return os.path.abspath(path)
    except FileNotFoundError:  # the working directory is gone: the report cannot be written, and says so itself
        return path


def names(text: str) -> tuple[str, ...]:
    """The names in a list with commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


TABLE: tuple[Variable, ...] = (
    Variable(
        name="FUSEPATCH",
        field="switch",
        values="`0`, `1`",
        default="unset: the import activates this process",
        meaning="`0` makes the import inert (an explicit `activate()` still works). `1`, which an active process "
        "exports, switches child processes on.",
        parse=_switch,
    ),
    Variable(
        name="FUSEPATCH_STRICT",
        field="strict",
        values="`0`, `1`",
        default="`0`",
        meaning="`1` raises an error where something you asked for cannot be done in a call, and at the first use of a "
        "target that could not be patched.",
        parse=_switch,
    ),
    Variable(
        name="FUSEPATCH_DISABLE",
        field="disable",
        values="patch ids, comma separated; `all`",
        default="none",
        meaning="Patches that are not applied.",
        parse=names,
    ),
    Variable(
        name="FUSEPATCH_REPORT",
        field="report",
        values="a directory",
        default="none",
        meaning="Every process writes a JSON file to this directory that says which patches are applied in it and what "
        "they did. `status --report` and `check --report` read these files. The directory is created if it is missing. "
        "A relative path counts from where the first process was started.",
        parse=_directory,
    ),
    Variable(
        name="FUSEPATCH_LIGER_",
        field="liger_flags",
        values="`0`, `1`",
        default="automatic",
        meaning="Switches one of Liger's kernels, by its argument's name in the `apply_liger_kernel_to_<model>` "
        "functions, in upper or lower case: ROPE, RMS_NORM, LAYER_NORM, SWIGLU, GEGLU, RELU_SQUARED, CROSS_ENTROPY, "
        "FUSED_LINEAR_CROSS_ENTROPY, or any other that the installed Liger has. The name is checked when Liger is "
        "called. CROSS_ENTROPY=1 implies FUSED_LINEAR_CROSS_ENTROPY=0.",
        parse=_switch,
    ),
    Variable(
        name="FUSEPATCH_OPTIMIZER_FUSED",
        field="optimizer_fused",
        values="`auto`, `0`, `1`, `keep`",
        default="`auto`",
        meaning="The `fused` argument of optimizers that frameworks construct. `auto` sets it where neither you nor "
        "the framework did, and class, device, dtype and mesh allow it. `1` sets it wherever it can run and replaces a "
        "framework's own value; where it cannot run, one warning says why. `0` removes a framework's `fused=True`, so "
        "that torch's default applies (multi-tensor on accelerators). `keep` leaves the argument alone.",
        parse=_auto_switch,
    ),
    Variable(
        name="FUSEPATCH_OPTIMIZER_FOREACH",
        field="optimizer_foreach",
        values="`0`, `1`, `keep`",
        default="`keep`",
        meaning="The `foreach` argument (the multi-tensor form) of the same optimizers. `1` excludes `fused`, so it "
        "removes a framework's or the automatic `fused=True`. `0` only rules out the multi-tensor form.",
        parse=_kept_switch,
    ),
    Variable(
        name="FUSEPATCH_OPTIMIZER_EPS",
        field="optimizer_eps",
        values="a finite number > 0",
        default="unset: as the framework passes it",
        meaning="The `eps` of the same optimizers, in every param group. It replaces a framework's default.",
        parse=_positive,
    ),
    Variable(
        name="FUSEPATCH_OPTIMIZER_SCOPE",
        field="optimizer_scope",
        values="`frameworks`, `all`",
        default="`frameworks`",
        meaning="Which optimizers the `FUSEPATCH_OPTIMIZER_*` variables and the automatic rule apply to: those that a "
        "framework constructs, or also those of your own code (the arguments that it passes are kept).",
        parse=_scope,
    ),
    Variable(
        name="FUSEPATCH_OPTIMIZER_CLASS",
        field="optimizer_class",
        values="a dotted path such as `torchao.optim.AdamW8bit`, `keep`",
        default="`keep`",
        meaning="The class to use where a framework constructs `torch.optim.AdamW`: a subclass of "
        "`torch.optim.Optimizer`, imported when the first of them is constructed. The framework's learning rate, "
        "betas, weight decay and param groups are passed on where the class accepts them. A class that cannot be "
        "imported, or that cannot train the parameters, is an error at that call.",
        parse=_class_path,
    ),
    Variable(
        name="FUSEPATCH_OPTIMIZER_KWARGS",
        field="optimizer_kwargs",
        values='a JSON object such as `{"bf16_stochastic_round": true}`',
        default="none",
        meaning="Arguments for the class that `FUSEPATCH_OPTIMIZER_CLASS` names. They replace what the framework "
        "passes, and are checked against the class's signature before the optimizer is constructed.",
        parse=_json_object,
    ),
    Variable(
        name="FUSEPATCH_OPTIMIZER_IN_BACKWARD",
        field="optimizer_in_backward",
        values="`0`, `1`",
        default="`0`",
        meaning="`1` runs the optimizer inside backward in the transformers Trainer, the trainers derived from it, and "
        "verl's SFT: each gradient is used and freed as soon as it is complete. Settings that do not work with it "
        "(gradient accumulation, gradient clipping, fp16, DDP, FSDP1, DeepSpeed, offload) raise an error before "
        "training starts, which names the setting to change.",
        parse=_switch,
    ),
    Variable(
        name="FUSEPATCH_HEAD",
        field="head",
        values="`auto`, `triton`, `torch`, `keep`",
        default="`auto`",
        meaning="How Liger's GRPO loss is computed. `auto`: Triton kernels on NVIDIA GPUs, the torch form of the same "
        "steps on the CPU. `triton`: the same, and an error at the call where they cannot run. `torch`: the torch form "
        "everywhere. `keep`: upstream's own code.",
        parse=_loss,
    ),
    Variable(
        name="FUSEPATCH_HEAD_PREFER",
        field="head_prefer",
        values="`speed`, `memory`",
        default="`speed`",
        meaning="`memory` computes the gradient of a trainable head in that gradient's own memory, without a float32 "
        "sum of the head's size. It costs about half of one more matrix product. A frozen head is not affected.",
        parse=_preference,
    ),
    Variable(
        name="FUSEPATCH_HEAD_CHUNK_MIB",
        field="head_chunk_mib",
        values="a finite number > 0",
        default="`256`",
        meaning="MiB for the logits of one chunk of tokens. A chunk is the largest multiple of 128 tokens that fits, "
        "and at least 128 tokens.",
        parse=_mebibytes,
    ),
    Variable(
        name="FUSEPATCH_GRPO_PADDING",
        field="grpo_padding",
        values="`auto`, `keep`",
        default="`auto`",
        meaning="Padding in the updates of TRL's GRPOTrainer and RLOOTrainer. `auto`: rows are moved to the left and "
        "regrouped by length where that is known to give what upstream gives, so that padding columns do not enter the "
        "model. `keep` leaves rows and micro-batches as upstream makes them.",
        parse=_padding,
    ),
    Variable(
        name="FUSEPATCH_GRPO_ZERO_ADVANTAGE",
        field="grpo_zero_advantage",
        values="`keep`, `drop`",
        default="`keep`",
        meaning="`drop` leaves sequences whose advantage is exactly 0 out of the model in training, where the gradient "
        "is exactly the same without them; where it is not, or not known to be, one warning says why. The metric "
        "`entropy` is then the mean over the sequences that enter.",
        parse=_zero_advantage,
    ),
)


_SOUGHT_AS = {f"{SWITCH}_GRPO_LOSS": f"{SWITCH}_HEAD"}
"""Names that no variable has, with the one that whoever writes them looks for; by spelling alone another one is
nearer."""

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
    spelled: dict[tuple[str, str], str] = {}
    for name in sorted(environ):
        text = environ[name].strip()
        if not text or not is_own(name):
            continue
        variable = find(name)
        if variable is None or is_unknown(name):
            unknown.append(name)
            continue
        value = _parse(variable, name, text)
        if variable.is_family:
            member = name.removeprefix(variable.name).lower()
            other = spelled.setdefault((variable.name, member), name)
            if value != values[variable.field].setdefault(member, value):
                raise SettingError(
                    f"{other}={_cut(values['set_by_user'][other])} and {name}={_cut(text)} contradict each other: "
                    "upper and lower case name the same flag. Nothing was patched; unset one of them."
                )
        else:
            values[variable.field] = value
        values["set_by_user"][name] = text
    settings = Settings(**values, unknown=tuple(unknown))
    _check(settings)
    return settings


def is_own(name: str) -> bool:
    """Whether the name of a variable is one that fusepatch looks at."""
    return name == SWITCH or name.startswith(f"{SWITCH}_")


def find(name: str) -> Variable | None:
    """The row of a variable's name; a family's row for its members."""
    for variable in TABLE:
        if name == variable.name or (variable.is_family and name.startswith(variable.name) and name != variable.name):
            return variable
    return None


def is_unknown(name: str) -> bool:
    """Whether a variable of that name means nothing: it is in no row, or a family's prefix with nothing behind it."""
    variable = find(name)
    return variable is None or (variable.is_family and name == variable.name)


def unknown_name(name: str) -> str:
    """What to tell the user who has set `name`, which is in no row of the table."""
    import difflib

    known = {**_SOUGHT_AS, **{variable.shown_name: variable.shown_name for variable in TABLE}}
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = (
        f"the nearest known one is {known[nearest[0]]}" if nearest else "`python -m fusepatch env` lists the known ones"
    )
    return f"the variable {_printable(name)} is set but fusepatch has no such variable, so it has no effect; {hint}"


def _parse(variable: Variable, name: str, text: str) -> Any:
    try:
        return variable.parse(text)
    except ValueError as error:
        detail = f" ({error})" if str(error) else ""
        raise SettingError(
            f"{_printable(name)}={_shown(text)} cannot be read{detail}: wanted {variable.values.replace('`', '')}. "
            "Nothing was patched; correct the value or unset the variable."
        ) from None


LONGEST_SHOWN = 200
"""Characters of a value that a message shows."""


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}... ({len(text)} characters)"


def _shown(text: str) -> str:
    """The value quoted, what cannot be printed escaped, and cut where it is long."""
    return repr(text) if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]!r}... ({len(text)} characters)"


def _printable(name: str) -> str:
    return _cut(name if name.isprintable() else ascii(name)[1:-1])


def _check(settings: Settings) -> None:
    flags = settings.liger_flags
    if flags.get("cross_entropy") and flags.get("fused_linear_cross_entropy"):
        raise SettingError(
            "FUSEPATCH_LIGER_CROSS_ENTROPY=1 and FUSEPATCH_LIGER_FUSED_LINEAR_CROSS_ENTROPY=1 contradict each other: "
            "Liger computes the loss in one of the two ways. Nothing was patched; set one of them to 0 or unset it."
        )
    if settings.optimizer_fused is True and settings.optimizer_foreach:
        raise SettingError(
            "FUSEPATCH_OPTIMIZER_FUSED=1 and FUSEPATCH_OPTIMIZER_FOREACH=1 contradict each other: torch's optimizers "
            "run in one form or the other. Nothing was patched; set one of them to 0 or unset it."
        )
    if settings.optimizer_class is None and "FUSEPATCH_OPTIMIZER_KWARGS" in settings.set_by_user:
        raise SettingError(
            "FUSEPATCH_OPTIMIZER_KWARGS is set, but FUSEPATCH_OPTIMIZER_CLASS names no class to pass them to. Nothing "
            "was patched; set FUSEPATCH_OPTIMIZER_CLASS (torch.optim.AdamW for the frameworks' own class) or unset "
            "FUSEPATCH_OPTIMIZER_KWARGS."
        )
    for flag, asked in (
        ("fused", settings.optimizer_fused),
        ("foreach", settings.optimizer_foreach),
        ("eps", settings.optimizer_eps),
    ):
        if asked not in (None, "auto", "keep") and settings.optimizer_kwargs.get(flag, asked) != asked:
            variable = f"FUSEPATCH_OPTIMIZER_{flag.upper()}"
            raise SettingError(
                f"{variable}={_cut(settings.set_by_user[variable])} and {flag!r} in FUSEPATCH_OPTIMIZER_KWARGS "
                "contradict each other. Nothing was patched; keep one of them."
            )
