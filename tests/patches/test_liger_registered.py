"""`liger.instance_flags` and functions that a user has registered in Liger's own dictionary."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

import fusepatch
from fusepatch.errors import FlagConflictError, StrictError
from kits.forked import forked
from kits.liger_models import called_from, kernels

transformers = pytest.importorskip("transformers")
pytest.importorskip("liger_kernel.transformers.monkey_patch")

ID = "liger.instance_flags"
OFF = {"FUSEPATCH_LIGER_ROPE": "0"}
APPLY = "from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance as apply"
got: list[dict[str, Any]] = []


def mine(rope: bool = True, rms_norm: bool = True, cross_entropy: bool = False, model: Any = None) -> None:
    got.append({"rope": rope, "rms_norm": rms_norm})


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, rope: bool = True, model: Any = None, rms_norm: bool = True) -> None:
        mine(rope, rms_norm, model=model)


class Bound:
    def method(self, rope: bool = True, rms_norm: bool = True, model: Any = None) -> None:
        mine(rope, rms_norm, model=model)


FUNCTIONS: dict[str, Callable[..., None]] = {
    "function": mine,
    "partial": functools.partial(mine),
    "unhashable": Unhashable(),
    "method": Bound().method,
    "lambda": lambda rope=True, rms_norm=True, model=None: mine(rope, rms_norm),
    "none for no choice": lambda model, rope=None, rms_norm=True: mine(True if rope is None else rope, rms_norm),
}


class Config:
    model_type = "mine"


class Model:
    config = Config()


def dispatch(function: Any, late: bool = False, caller: str = "my_training", **flags: Any) -> dict[str, Any]:
    """Register `function` for a model type of its own and let Liger's dispatcher call it."""
    from liger_kernel.transformers import monkey_patch

    if late:
        fusepatch.deactivate()
    monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN["mine"] = function
    if late:
        fusepatch.activate()
    called_from(caller, APPLY)(Model(), **flags)
    (record,) = [record for record in fusepatch.status() if record.id == ID]
    return {
        "got": got,
        "replaced": [note.text for note in record.replaced],
        "fallbacks": [note.text for note in record.fallbacks],
        "calls": record.calls,
        "outcome": record.outcome.value,
    }


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_it_is_served_as_ligers_own(kind: str) -> None:
    function = FUNCTIONS[kind]
    plain = forked(lambda: dispatch(function)["got"], env={"FUSEPATCH": "0"})
    assert plain == [{"rope": True, "rms_norm": True}]
    unset = forked(dispatch, function)
    assert unset["got"] == plain
    assert unset["replaced"] == unset["fallbacks"] == []
    for env in ({**OFF}, {**OFF, "FUSEPATCH_STRICT": "1"}):
        merged = forked(dispatch, function, env=env)
        assert merged["got"] == [{"rope": False, "rms_norm": True}]
        assert merged["calls"] == 1
        assert merged["fallbacks"] == []
        (text,) = merged["replaced"]
        assert text.endswith("-> False (FUSEPATCH_LIGER_ROPE=0)")


def test_the_name_says_which_function_it_was() -> None:
    said = {kind: forked(dispatch, FUNCTIONS[kind], env=OFF)["replaced"][0] for kind in FUNCTIONS}
    assert said["function"].startswith(f"{__name__}.mine: rope: not passed")
    assert said["partial"].startswith(f"functools.partial of {__name__}.mine: rope")
    assert said["unhashable"].startswith(f"a {__name__}.Unhashable: rope")
    assert said["method"].startswith(f"{__name__}.Bound.method: rope")


def test_registered_before_fusepatch_is_no_different() -> None:
    got = forked(lambda: dispatch(mine, late=True), env=OFF)
    assert got["got"] == [{"rope": False, "rms_norm": True}]
    assert got["outcome"] == "APPLIED"


def test_what_a_partial_binds_is_the_users_word() -> None:
    bound = functools.partial(mine, rope=False)
    found = forked(dispatch, bound, env={"FUSEPATCH_LIGER_ROPE": "1", "FUSEPATCH_LIGER_RMS_NORM": "0"})
    assert found["got"] == [{"rope": False, "rms_norm": False}]
    assert any("rope: False" in text and "kept (it beats FUSEPATCH_LIGER_ROPE=1)" in text for text in found["replaced"])


def test_what_the_call_passes_beats_a_partial_and_the_environment() -> None:
    bound = functools.partial(mine, rope=False)
    found = forked(lambda: dispatch(bound, rope=True), env=OFF)
    assert found["got"] == [{"rope": True, "rms_norm": True}]


def test_two_losses_are_an_error_before_it_runs() -> None:
    def both(cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, model: Any = None) -> None:
        raise AssertionError("it ran")

    def attempt() -> None:
        dispatch(both, fused_linear_cross_entropy=True)

    with pytest.raises(FlagConflictError, match="No kernel was applied by this call"):
        forked(attempt, env={"FUSEPATCH_LIGER_CROSS_ENTROPY": "1"})


def test_a_flag_that_it_does_not_take_is_named_and_what_it_took_holds() -> None:
    env = {**OFF, "FUSEPATCH_LIGER_SWIGLU": "0"}
    found = forked(dispatch, mine, env=env)
    assert found["got"] == [{"rope": False, "rms_norm": True}]
    (text,) = found["fallbacks"]
    assert f"FUSEPATCH_LIGER_SWIGLU=0 was not followed: {__name__}.mine has no flag swiglu" in text
    with pytest.raises(StrictError, match="has no flag swiglu"):
        forked(dispatch, mine, env={**env, "FUSEPATCH_STRICT": "1"})


def test_what_the_caller_passes_in_vain_is_recorded() -> None:
    (text,) = forked(lambda: dispatch(mine, geglu=True))["fallbacks"]
    assert f"{__name__}.mine: geglu=True from my_training has no effect" in text
    assert "Liger dropped it" in text


def test_the_rule_for_frameworks_with_a_forward_of_their_own_holds() -> None:
    def taking(model: Any = None, fused_linear_cross_entropy: bool = True) -> None:
        got.append({"flce": fused_linear_cross_entropy})

    found = forked(lambda: dispatch(taking, caller="verl.workers.fsdp_workers"))
    assert found["got"] == [{"flce": False}]


def test_a_flag_of_its_own_has_a_variable() -> None:
    def taking(model: Any = None, my_kernel: bool = True) -> None:
        got.append({"my_kernel": my_kernel})

    found = forked(dispatch, taking, env={"FUSEPATCH_LIGER_MY_KERNEL": "0"})
    assert found["got"] == [{"my_kernel": False}]
    assert found["fallbacks"] == []


def test_around_one_of_ligers_own_the_code_of_both_stands() -> None:
    def around(model: Any = None) -> None:
        from liger_kernel.transformers import monkey_patch

        monkey_patch.apply_liger_kernel_to_llama(rms_norm=True, model=model)

    def attempt() -> Any:
        from liger_kernel.transformers import monkey_patch

        from kits.liger_models import build

        model = build("llama")
        monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN["llama"] = around
        monkey_patch._apply_liger_kernel_to_instance(model=model)
        (record,) = [record for record in fusepatch.status() if record.id == ID]
        return kernels(model, "llama"), [note.text for note in record.fallbacks], record.calls

    found, fallbacks, calls = forked(attempt, env={**OFF, "FUSEPATCH_LIGER_RMS_NORM": "0"})
    assert found["rope"] is False, "nobody wrote a rope in code, so the environment decides"
    assert found["rms_norm"] is True, "the user wrote this one"
    assert found["mlp"] is True
    assert fallbacks == []
    assert calls == 1


@pytest.mark.parametrize("value", [print, 3, type], ids=["builtin", "no function", "no signature"])
def test_what_liger_cannot_call_gets_ligers_own_error_or_call(value: Any) -> None:
    def attempt() -> str:
        try:
            dispatch(value)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "called"

    patched, plain = forked(attempt, env=OFF), forked(attempt, env={"FUSEPATCH": "0"})
    assert patched == plain.replace("'rope', ", "") or patched == plain


def test_one_such_entry_leaves_the_other_models_as_they_were() -> None:
    def attempt() -> Any:
        from liger_kernel.transformers import monkey_patch

        from kits.liger_models import build

        for key, value in {"a": Unhashable(), "b": 3, "c": type}.items():
            monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN[key] = value
        model = build("llama")
        monkey_patch._apply_liger_kernel_to_instance(model=model)
        (record,) = [record for record in fusepatch.status() if record.id == ID]
        return kernels(model, "llama")["rope"], [note.text for note in record.fallbacks]

    assert forked(attempt, env=OFF) == (False, [])


def test_by_the_name_of_the_model_type_too() -> None:
    def attempt() -> Any:
        from liger_kernel.transformers import monkey_patch

        monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN["mine"] = mine
        monkey_patch._apply_liger_kernel("mine")
        monkey_patch._apply_liger_kernel(model_type="mine", rms_norm=False)
        return got

    assert forked(attempt, env=OFF) == [{"rope": False, "rms_norm": True}, {"rope": False, "rms_norm": False}]


def test_it_stays_what_the_user_registered() -> None:
    def attempt() -> bool:
        from liger_kernel.transformers import monkey_patch

        dispatch(mine)
        return monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN["mine"] is mine and "wraps" not in str(inspect.signature(mine))

    assert forked(attempt)
