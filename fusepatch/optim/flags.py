"""Which of `fused`, `foreach` and `eps` a param group gets: what was passed and what is asked for, weighed.

What the user wrote in code beats what the environment asks for, which beats what a framework passes, which beats the
automatic rule. `fused` and `foreach` are never both true.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fusepatch.optim.capability import Verdict

FLAGS = ("fused", "foreach", "eps")

PLAIN_WORDS: Mapping[str, str] = {flag: flag for flag in FLAGS}


class Request(NamedTuple):
    """What the environment asks for. `fused` is None for the automatic rule; None in the others asks for nothing.

    `words` are the names by which the user knows each of them.
    """

    fused: bool | str | None = None
    foreach: bool | None = None
    eps: float | None = None
    words: Mapping[str, str] = PLAIN_WORDS

    def said(self, flag: str) -> str:
        """A flag that is asked for, with its value, as the user wrote it."""
        value = getattr(self, flag)
        return f"{self.words[flag]}={value:g}" if flag == "eps" else f"{self.words[flag]}={int(value)}"

    @property
    def keeps_everything(self) -> bool:
        return self.fused == "keep" and self.foreach is None and self.eps is None


class Passed(NamedTuple):
    """A value that arrived with the call. `by_user`: somebody wrote it, a framework's own default is nobody's."""

    value: Any
    by_user: bool


NOT_PASSED = Passed(None, False)


class Group(NamedTuple):
    """What is known of one param group before the optimizer is constructed.

    `passed` holds the group's own value of a flag, else the call's; `takes` the flags that the class has; `eps` is the
    class's default. `source` names who passed the values.
    """

    passed: Mapping[str, Passed]
    takes: frozenset[str]
    eps: Any
    verdict: Verdict
    foreach_obstacle: str | None
    class_name: str
    source: str

    def got(self, flag: str) -> Passed:
        return self.passed.get(flag, NOT_PASSED)


class Note(NamedTuple):
    """Something to tell: `kind` is replaced, kept, refused (asked for by the environment, not done), fallback or
    warning."""

    kind: str
    text: str


class Decision(NamedTuple):
    """The flags of one group; None is torch's own default. `chosen`: `fused=True` is ours, the caller had not passed
    it."""

    fused: bool | None
    foreach: bool | None
    eps: Any
    chosen: bool
    notes: tuple[Note, ...]


def decide(group: Group, request: Request) -> Decision:
    """Weigh one group."""
    notes: list[Note] = []
    foreach, foreach_asked = _foreach(group, request, notes)
    fused, foreach, chosen = _fused(group, request, foreach, foreach_asked, notes)
    if fused and foreach and request.fused != "keep":
        fused, foreach = _one_of_both(group)
    eps = _eps(group, request, notes)
    return Decision(fused, foreach, eps, chosen, (*_replacements(group, request, fused, foreach, eps), *notes))


def _one_of_both(group: Group) -> tuple[bool | None, bool | None]:
    """Both arrived true: the user's stays, between two of a framework the multi-tensor form; torch refuses two of a
    user."""
    if not group.got("fused").by_user:
        return None, True
    return True, (True if group.got("foreach").by_user else None)


def _foreach(group: Group, request: Request, notes: list[Note]) -> tuple[bool | None, bool]:
    """The value, and whether it is the environment's."""
    value, by_user = group.got("foreach")
    asked = request.foreach
    if asked is None:
        return value, False
    variable = request.said("foreach")
    passed_fused = group.got("fused")
    if by_user:
        if value != asked:
            notes.append(Note("kept", f"foreach={value} from {group.source} kept (it beats {variable})"))
        return value, False
    if "foreach" not in group.takes:
        if asked:
            notes.append(Note("refused", f"{variable} was not followed: {group.class_name} has no multi-tensor form"))
        return value, False
    if asked and passed_fused.value and (passed_fused.by_user or request.fused == "keep"):
        because = "it beats the variable" if passed_fused.by_user else f"{request.words['fused']}=keep leaves it"
        notes.append(
            Note("refused", f"{variable} was not followed: fused=True from {group.source} excludes it, and {because}")
        )
        return value, False
    if asked and group.foreach_obstacle is not None:
        notes.append(Note("refused", f"{variable} was not followed: {group.foreach_obstacle}; foreach stays {value}"))
        return value, False
    return asked, True


def _fused(
    group: Group, request: Request, foreach: bool | None, foreach_asked: bool, notes: list[Note]
) -> tuple[bool | None, bool | None, bool]:
    """fused, foreach, and whether `fused=True` was chosen here."""
    value, by_user = group.got("fused")
    asked = request.fused
    if asked == "keep":
        return value, foreach, False
    if by_user:
        if isinstance(asked, bool) and value != asked:
            notes.append(Note("kept", f"fused={value} from {group.source} kept (it beats {request.said('fused')})"))
        if value and group.verdict.wrong is not None:
            notes.append(_wrong(group, "pass fused=False"))
        return value, foreach, False
    if foreach_asked and foreach:
        return (None if value else value), foreach, False
    if asked is False:
        # None, not False: False in either flag makes torch loop over the parameters one by one.
        return (None if value else value), foreach, False
    if asked is True:
        return _fused_on_request(group, request, foreach, value, notes)
    return _fused_by_rule(group, request, foreach, foreach_asked, value, notes)


def _fused_on_request(
    group: Group, request: Request, foreach: bool | None, value: bool | None, notes: list[Note]
) -> tuple[bool | None, bool | None, bool]:
    variable = request.said("fused")
    obstacle = f"{group.class_name} has no fused form in this torch" if "fused" not in group.takes else None
    if obstacle is None and foreach and group.got("foreach").by_user:
        notes.append(
            Note("kept", f"foreach={foreach} from {group.source} kept (it excludes fused and beats {variable})")
        )
        return None, foreach, False
    obstacle = obstacle or group.verdict.obstacle or group.verdict.wrong
    if obstacle is not None:
        notes.append(Note("refused", f"{variable} was not followed: {obstacle}; torch's default is used"))
        return None, foreach, False
    if group.verdict.caution is not None:
        notes.append(Note("warning", f"fused=True as {variable} asks, but {group.verdict.caution}"))
    return True, (None if foreach else foreach), value is not True


def _wrong(group: Group, action: str) -> Note:
    """What is said of a `fused=True` that is not ours and stays, where the kernel presumes what does not hold."""
    return Note(
        "warning",
        f"fused=True from {group.source} left as it is, but {group.verdict.wrong}: torch's fused kernel then silently "
        f"trains on wrong numbers, or its step raises; {action}",
    )


def _fused_by_rule(
    group: Group,
    request: Request,
    foreach: bool | None,
    foreach_asked: bool,
    value: bool | None,
    notes: list[Note],
) -> tuple[bool | None, bool | None, bool]:
    variable = request.words["fused"]
    reason = group.verdict.obstacle or group.verdict.wrong or group.verdict.caution
    if value:
        if group.verdict.obstacle is None and group.verdict.wrong is not None:
            notes.append(_wrong(group, f"{variable}=0 removes it"))
        elif reason is not None:
            notes.append(
                Note(
                    "fallback",
                    f"fused=True from {group.source} left as it is ({variable}=0 removes it), but {reason}",
                )
            )
        return value, foreach, False
    if value is not None:
        reason = f"{group.source} passes fused={value}"
    elif "fused" not in group.takes:
        reason = f"{group.class_name} has no fused form in this torch"
    elif foreach is not None and not foreach_asked:
        reason = f"{group.source} passes foreach={foreach}"
    elif reason is not None and reason == group.verdict.caution:
        reason += f"; {variable}=1 fuses it anyway"
    if reason is not None:
        notes.append(Note("fallback", f"not fused: {reason}"))
        return value, foreach, False
    return True, foreach, True


def _eps(group: Group, request: Request, notes: list[Note]) -> Any:
    value, by_user = group.got("eps")
    if request.eps is None:
        return value
    variable = request.said("eps")
    if by_user:
        if value != request.eps:
            notes.append(Note("kept", f"eps={value} from {group.source} kept (it beats {variable})"))
        return value
    if not isinstance(group.eps, float):
        what = "has no eps" if "eps" not in group.takes else f"has {group.eps} for eps, which is not a single number"
        notes.append(Note("refused", f"{variable} was not followed: {group.class_name} {what}"))
        return value
    return request.eps


def _replacements(group: Group, request: Request, fused: bool | None, foreach: bool | None, eps: Any) -> Iterator[Note]:
    after = {"fused": fused, "foreach": foreach, "eps": eps}
    for flag in FLAGS:
        before = group.got(flag).value
        if after[flag] == before:
            continue
        shown = f"{before} from {group.source}" if before is not None else "not passed"
        yield Note("replaced", f"{flag}: {shown} -> {after[flag]} ({_because(flag, fused, foreach, request)})")


def _because(flag: str, fused: bool | None, foreach: bool | None, request: Request) -> str:
    if flag == "eps":
        return request.said("eps")
    asked, other, excluded_by = (
        (request.fused, foreach, "foreach") if flag == "fused" else (request.foreach, fused, "fused")
    )
    if isinstance(asked, bool) and bool(fused if flag == "fused" else foreach) == asked:
        return request.said(flag)
    return f"{excluded_by}=True, which excludes it" if other else "automatic"


def with_flags_of(live: list[dict[str, Any]], saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The param groups of a checkpoint with `fused` and `foreach` of the optimizer that loads it; new dictionaries.

    A group's learning rate, betas, eps and all else stay the checkpoint's. Where the two differ in number of groups,
    the checkpoint's come back unchanged, for torch to refuse.
    """
    if len(live) != len(saved):
        return saved
    return [
        {**there, **{flag: here[flag] for flag in ("fused", "foreach") if flag in here}}
        for here, there in zip(live, saved, strict=True)
    ]
