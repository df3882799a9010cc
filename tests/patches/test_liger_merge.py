"""The rule of precedence for Liger's flags, on plain data."""

from __future__ import annotations

import pytest

from fusepatch.errors import FlagConflictError
from fusepatch.patches.liger_instance_flags import Merge, Passed, merge_flags

LLAMA = {"rope": True, "cross_entropy": False, "fused_linear_cross_entropy": True, "rms_norm": True, "swiglu": True}
GRANITE = {**LLAMA, "cross_entropy": True, "fused_linear_cross_entropy": False}
PIXTRAL = {"rope": True, "rms_norm": True, "swiglu": True}
USER, VERL, LIGER = "__main__", "verl.workers.engine", "liger_kernel.transformers.monkey_patch"


def values(defaults, passed, environment, user_flags=frozenset()):
    return dict(merge_flags(defaults, passed, environment, user_flags).values)


def test_nothing_asked_changes_nothing() -> None:
    assert merge_flags(LLAMA, Passed({}, USER), {}) == Merge({}, (), ())
    assert merge_flags(LLAMA, Passed({"rope": False}, VERL), {}) == Merge({}, (), ())


@pytest.mark.parametrize("flag", sorted(LLAMA))
@pytest.mark.parametrize("value", [False, True])
def test_the_environment_beats_upstreams_default(flag: str, value: bool) -> None:
    got = values(LLAMA, Passed({}, USER), {flag: value})
    implied = {"fused_linear_cross_entropy": False} if (flag, value) == ("cross_entropy", True) else {}
    assert got == {flag: value, **implied}


def test_the_environment_beats_what_a_framework_hard_codes() -> None:
    merge = merge_flags(LLAMA, Passed({"swiglu": True}, VERL), {"swiglu": False})
    assert merge.values == {"swiglu": False}
    assert merge.replaced == ("swiglu: True from verl.workers.engine -> False (FUSEPATCH_LIGER_SWIGLU=0)",)


def test_the_users_code_beats_the_environment() -> None:
    merge = merge_flags(LLAMA, Passed({"swiglu": True}, USER), {"swiglu": False, "rope": False})
    assert merge.values == {"rope": False}
    assert merge.replaced[0] == "swiglu: True from __main__ kept (it beats FUSEPATCH_LIGER_SWIGLU=0)"


def test_the_environment_beats_the_automatic_rule() -> None:
    passed = Passed({"fused_linear_cross_entropy": False}, VERL, {"fused_linear_cross_entropy": False})
    assert values(LLAMA, passed, {"fused_linear_cross_entropy": True}) == {"fused_linear_cross_entropy": True}


@pytest.mark.parametrize("caller", [VERL, "trinity.trainer.verl.fsdp_workers", LIGER, "llamafactory.model.loader"])
def test_a_frameworks_own_forward_is_never_hidden(caller: str) -> None:
    passed = Passed({"fused_linear_cross_entropy": False}, caller)
    merge = merge_flags(LLAMA, passed, {"fused_linear_cross_entropy": True})
    assert merge.values == {}
    (refused,) = merge.refused
    assert "FUSEPATCH_LIGER_FUSED_LINEAR_CROSS_ENTROPY=1 was not followed" in refused
    assert caller in refused


def test_a_framework_that_passes_true_can_be_lowered() -> None:
    passed = Passed({"fused_linear_cross_entropy": True}, "trinity.trainer.verl.fsdp_workers")
    assert values(LLAMA, passed, {"fused_linear_cross_entropy": False}) == {"fused_linear_cross_entropy": False}
    assert values(LLAMA, passed, {"cross_entropy": True}) == {
        "cross_entropy": True,
        "fused_linear_cross_entropy": False,
    }


def test_cross_entropy_does_not_touch_what_is_off_already() -> None:
    assert values(LLAMA, Passed({"fused_linear_cross_entropy": False}, USER), {"cross_entropy": True}) == {
        "cross_entropy": True
    }
    asked = {"cross_entropy": True, "fused_linear_cross_entropy": False}
    assert values(LLAMA, Passed({}, USER), asked) == asked


@pytest.mark.parametrize(
    ("asked", "written"),
    [("cross_entropy", "fused_linear_cross_entropy"), ("fused_linear_cross_entropy", "cross_entropy")],
)
def test_two_losses_asked_for_is_an_error_that_names_both(asked: str, written: str) -> None:
    with pytest.raises(FlagConflictError) as raised:
        merge_flags(LLAMA, Passed({written: True}, "my_training"), {asked: True})
    text = str(raised.value)
    assert f"FUSEPATCH_LIGER_{asked.upper()}=1" in text
    assert f"{written}=True in the code of my_training" in text


def test_granite_has_the_defaults_the_other_way_round() -> None:
    assert values(GRANITE, Passed({}, USER), {"fused_linear_cross_entropy": True}) == {
        "fused_linear_cross_entropy": True,
        "cross_entropy": False,
    }
    assert values(GRANITE, Passed({}, USER), {"cross_entropy": True}) == {"cross_entropy": True}


def test_flags_the_function_lacks_are_left_out() -> None:
    assert values(PIXTRAL, Passed({}, USER), {"cross_entropy": True, "geglu": False, "rope": False}) == {"rope": False}


def test_none_is_nobodys_choice_and_off_for_liger() -> None:
    passed = Passed({}, "axolotl.integrations.liger.plugin", nones=frozenset(LLAMA))
    assert merge_flags(LLAMA, passed, {}) == Merge({}, (), ())
    merge = merge_flags(LLAMA, passed, {"rope": True, "rms_norm": False})
    assert merge.values == {"rope": True, "rms_norm": False}
    assert merge.replaced == ("rope: None (off for Liger) -> True (FUSEPATCH_LIGER_ROPE=1)",)
    assert values(LLAMA, passed, {"cross_entropy": True}) == {"cross_entropy": True}, "the fused one is off already"


def test_what_the_user_set_around_a_nested_call_stands() -> None:
    passed = Passed({"cross_entropy": False, "fused_linear_cross_entropy": False}, LIGER)
    assert values(LLAMA, passed, {"cross_entropy": True}, frozenset({"cross_entropy"})) == {}
    assert values(LLAMA, passed, {"cross_entropy": True}) == {"cross_entropy": True}
