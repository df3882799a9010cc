"""Who wins: every pair of what was passed and what is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from fusepatch.optim.capability import Verdict
from fusepatch.optim.flags import Decision, Group, Passed, Request, decide, with_flags_of

CAN = Verdict()
CANNOT = Verdict(obstacle="it cannot")
CAREFUL = Verdict(caution="it should not")


def framework(**flags: Any) -> dict[str, Passed]:
    return {flag: Passed(value, False) for flag, value in flags.items()}


def user(**flags: Any) -> dict[str, Passed]:
    return {flag: Passed(value, True) for flag, value in flags.items()}


def group(passed: dict[str, Passed] | None = None, verdict: Verdict = CAN, **changes: Any) -> Group:
    values: dict[str, Any] = {
        "passed": passed or {},
        "takes": frozenset({"fused", "foreach", "eps"}),
        "eps": 1e-8,
        "verdict": verdict,
        "foreach_obstacle": None,
        "class_name": "AdamW",
        "source": "somewhere",
        **changes,
    }
    return Group(**values)


def kinds(decision: Decision) -> set[str]:
    return {note.kind for note in decision.notes}


@pytest.mark.parametrize(
    ("passed", "request_", "verdict", "fused", "foreach", "told"),
    [
        # the automatic rule
        ({}, Request(), CAN, True, None, {"replaced"}),
        ({}, Request(), CANNOT, None, None, {"fallback"}),
        ({}, Request(), CAREFUL, None, None, {"fallback"}),
        (framework(fused=True), Request(), CAN, True, None, set()),
        (framework(fused=True), Request(), CANNOT, True, None, {"fallback"}),
        (framework(fused=False), Request(), CAN, False, None, {"fallback"}),
        (framework(foreach=True), Request(), CAN, None, True, {"fallback"}),
        (framework(foreach=False), Request(), CAN, None, False, {"fallback"}),
        (user(fused=False), Request(), CAN, False, None, set()),
        (user(foreach=True), Request(), CAN, None, True, {"fallback"}),
        (framework(fused=True, foreach=True), Request(), CAN, None, True, {"replaced"}),
        (framework(fused=True) | user(foreach=True), Request(), CAN, None, True, {"replaced"}),
        (user(fused=True) | framework(foreach=True), Request(), CAN, True, None, {"replaced"}),
        (user(fused=True, foreach=True), Request(), CAN, True, True, set()),
        # FUSED=1
        ({}, Request(fused=True), CAN, True, None, {"replaced"}),
        ({}, Request(fused=True), CAREFUL, True, None, {"replaced", "warning"}),
        ({}, Request(fused=True), CANNOT, None, None, {"refused"}),
        (framework(fused=True), Request(fused=True), CANNOT, None, None, {"replaced", "refused"}),
        (framework(fused=False), Request(fused=True), CAN, True, None, {"replaced"}),
        (framework(foreach=True), Request(fused=True), CAN, True, None, {"replaced"}),
        (framework(foreach=False), Request(fused=True), CAN, True, False, {"replaced"}),
        (user(fused=False), Request(fused=True), CAN, False, None, {"kept"}),
        (user(foreach=True), Request(fused=True), CAN, None, True, {"kept"}),
        # FUSED=0: None, which leaves torch's default, not False, which makes it loop
        ({}, Request(fused=False), CAN, None, None, set()),
        (framework(fused=True), Request(fused=False), CAN, None, None, {"replaced"}),
        (framework(fused=False), Request(fused=False), CAN, False, None, set()),
        (user(fused=True), Request(fused=False), CAN, True, None, {"kept"}),
        # keep
        ({}, Request(fused="keep"), CAN, None, None, set()),
        (framework(fused=True), Request(fused="keep"), CANNOT, True, None, set()),
        # FOREACH=1
        ({}, Request(foreach=True), CAN, None, True, {"replaced"}),
        (framework(fused=True), Request(foreach=True), CAN, None, True, {"replaced"}),
        (framework(fused=True), Request("keep", True), CAN, True, None, {"refused"}),
        (framework(), Request("keep", True), CAN, None, True, {"replaced"}),
        (framework(fused=True), Request(False, True), CAN, None, True, {"replaced"}),
        (user(fused=True), Request(foreach=True), CAN, True, None, {"refused"}),
        (user(foreach=False), Request(foreach=True), CAN, None, False, {"kept", "fallback"}),
        # FOREACH=0
        ({}, Request(foreach=False), CAN, True, False, {"replaced"}),
        ({}, Request(foreach=False), CANNOT, None, False, {"replaced", "fallback"}),
        ({}, Request(True, False), CAN, True, False, {"replaced"}),
        (framework(foreach=True), Request(foreach=False), CAN, True, False, {"replaced"}),
        (user(foreach=True), Request(foreach=False), CAN, None, True, {"kept", "fallback"}),
    ],
)
def test_fused_and_foreach(
    passed: dict[str, Passed],
    request_: Request,
    verdict: Verdict,
    fused: bool | None,
    foreach: bool | None,
    told: set[str],
) -> None:
    decision = decide(group(passed, verdict), request_)
    assert (decision.fused, decision.foreach) == (fused, foreach)
    assert kinds(decision) == told


def test_never_both_whatever_is_passed_and_asked() -> None:
    values = (None, True, False)
    for by_user in (True, False):
        for fused in values:
            for foreach in values:
                if by_user and fused and foreach:
                    continue  # the user's own contradiction is torch's to refuse
                passed = {
                    flag: Passed(value, by_user)
                    for flag, value in (("fused", fused), ("foreach", foreach))
                    if value is not None
                }
                for asked_fused in (None, True, False, "keep"):
                    for asked_foreach in values:
                        if asked_fused is True and asked_foreach:
                            continue  # refused when the settings are read
                        if asked_fused == "keep" and fused and foreach:
                            continue  # left alone, both
                        for verdict in (CAN, CANNOT, CAREFUL):
                            decision = decide(group(passed, verdict), Request(asked_fused, asked_foreach))
                            assert not (decision.fused and decision.foreach), (passed, asked_fused, asked_foreach)


def test_foreach_that_torch_would_refuse_is_refused_here() -> None:
    decision = decide(group(foreach_obstacle="a tensor"), Request("keep", True))
    assert (decision.fused, decision.foreach) == (None, None)
    assert kinds(decision) == {"refused"}


def test_a_class_without_the_flags() -> None:
    bare = group(takes=frozenset({"foreach"}), eps=None, class_name="Rprop")
    assert kinds(decide(bare, Request())) == {"fallback"}
    assert kinds(decide(bare, Request(fused=True, eps=1e-6))) == {"refused"}
    assert kinds(decide(bare, Request(fused=False))) == set()
    none = group(takes=frozenset(), class_name="Muon", eps=None)
    assert kinds(decide(none, Request("keep", True))) == {"refused"}
    assert kinds(decide(none, Request("keep", False))) == set()


@pytest.mark.parametrize(
    ("passed", "eps", "told"),
    [
        ({}, 1e-6, {"replaced"}),
        (framework(eps=1e-8), 1e-6, {"replaced"}),
        (framework(eps=1e-6), 1e-6, set()),
        (user(eps=1e-5), 1e-5, {"kept"}),
        (user(eps=1e-6), 1e-6, set()),
    ],
)
def test_eps(passed: dict[str, Passed], eps: float, told: set[str]) -> None:
    decision = decide(group(passed), Request("keep", eps=1e-6))
    assert decision.eps == eps
    assert kinds(decision) == told


def test_eps_of_two_numbers_is_left() -> None:
    decision = decide(group(eps=(None, 1e-3), class_name="Adafactor"), Request("keep", eps=1e-6))
    assert decision.eps is None
    assert kinds(decision) == {"refused"}


def test_without_a_request_eps_is_as_passed() -> None:
    assert decide(group(framework(eps=1e-8)), Request()).eps == 1e-8
    assert decide(group(), Request()).eps is None


def test_texts_name_value_source_and_cause() -> None:
    request = Request(False, eps=1e-6, words={"fused": "FUSED", "foreach": "FOREACH", "eps": "EPS"})
    decision = decide(group(framework(fused=True, eps=1e-8), source="transformers.trainer"), request)
    assert [note.text for note in decision.notes] == [
        "fused: True from transformers.trainer -> None (FUSED=0)",
        "eps: 1e-08 from transformers.trainer -> 1e-06 (EPS=1e-06)",
    ]
    (note,) = decide(group(framework(fused=True)), Request(foreach=True)).notes[:1]
    assert note.text.endswith("(foreach=True, which excludes it)")


def test_a_checkpoints_groups_take_the_live_flags_and_nothing_else() -> None:
    live = [{"lr": 1.0, "eps": 1.0, "fused": True, "foreach": None, "params": [object()]}]
    saved = [{"lr": 2.0, "eps": 2.0, "fused": None, "params": [0]}]
    assert with_flags_of(live, saved) == [{"lr": 2.0, "eps": 2.0, "fused": True, "foreach": None, "params": [0]}]
    assert saved[0]["fused"] is None, "the caller's own dictionaries are not written to"
    assert with_flags_of([], saved) is saved
    assert "fused" not in with_flags_of([{"lr": 1.0}], [{"lr": 2.0}])[0]
