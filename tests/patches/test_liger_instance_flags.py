"""`liger.instance_flags` on the installed Liger: what ends up on real models, seen on the model."""

from __future__ import annotations

import inspect
import logging
import sys
import types
from pathlib import Path

import pytest

import fusepatch
from fusepatch.errors import FlagConflictError, StrictError
from kits.forked import forked
from kits.liger_models import (
    ALL_ON,
    ID,
    KINDS,
    MLP_FLAG,
    PREFIX,
    apply_and_look,
    build,
    build_llava,
    called_from,
    has_fused_loss,
    kernels,
    needs,
    on_model,
    text_model,
)

transformers = pytest.importorskip("transformers", reason="the models are transformers'")
monkey_patch = pytest.importorskip("liger_kernel.transformers.monkey_patch", reason="Liger is what is patched")


@pytest.mark.parametrize("kind", KINDS)
def test_unset_leaves_upstreams_defaults(kind: str) -> None:
    unpatched = forked(apply_and_look, kind, "my_training", env={"FUSEPATCH": "0"})
    patched = forked(apply_and_look, kind, "my_training")
    assert on_model(unpatched) == on_model(patched) == ALL_ON
    assert patched["calls"] == 1
    assert patched["replaced"] == patched["fallbacks"] == []


@pytest.mark.parametrize("flag", ["rope", "rms_norm", "mlp", "fused_linear_cross_entropy"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kernel_can_be_switched_off_alone(kind: str, flag: str) -> None:
    name = MLP_FLAG[kind] if flag == "mlp" else flag
    off = forked(apply_and_look, kind, "my_training", env={f"{PREFIX}{name.upper()}": "0"})
    assert on_model(off) == {**ALL_ON, flag: False}
    assert off["replaced"] == [
        f"apply_liger_kernel_to_{kind}: {name}: not passed (Liger's default True) -> False ({PREFIX}{name.upper()}=0)"
    ]
    on = forked(apply_and_look, kind, "my_training", env={f"{PREFIX}{name.upper()}": "1"})
    assert on_model(on) == ALL_ON


def test_cross_entropy_implies_that_the_fused_one_is_off() -> None:
    got = forked(apply_and_look, "qwen2", "my_training", env={f"{PREFIX}CROSS_ENTROPY": "1"})
    assert on_model(got) == {**ALL_ON, "cross_entropy": True, "fused_linear_cross_entropy": False}


def test_cross_entropy_against_the_users_fused_one_is_an_error_before_anything_is_replaced() -> None:
    def attempt():
        model = build("llama")
        apply = called_from(
            "my_training", "from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance as apply"
        )
        try:
            apply(model, fused_linear_cross_entropy=True)
        except FlagConflictError as error:
            return str(error), kernels(model, "llama")
        return None

    text, seen = forked(attempt, env={f"{PREFIX}CROSS_ENTROPY": "1"})
    assert f"{PREFIX}CROSS_ENTROPY=1" in text
    assert "fused_linear_cross_entropy=True in the code of my_training" in text
    assert not any(seen.values())


@pytest.mark.parametrize("caller", ["verl.workers.fsdp_workers", "trinity.trainer.verl.fsdp_workers"])
def test_a_framework_with_its_own_forward_keeps_it(caller: str) -> None:
    assert forked(apply_and_look, "qwen2", caller, env={"FUSEPATCH": "0"})["fused_linear_cross_entropy"] is True
    patched = forked(apply_and_look, "qwen2", caller)
    assert on_model(patched) == {**ALL_ON, "fused_linear_cross_entropy": False}
    assert patched["replaced"] == [f"fused_linear_cross_entropy: not passed -> False (automatic; called by {caller})"]
    asked = forked(apply_and_look, "qwen2", caller, env={f"{PREFIX}FUSED_LINEAR_CROSS_ENTROPY": "1"})
    assert asked["fused_linear_cross_entropy"] is True, (
        "who asks for it by name gets it where the framework does not say"
    )


def test_none_is_left_to_upstream_unless_somebody_asks() -> None:
    def attempt():
        return apply_and_look("qwen2", "axolotl.integrations.liger.plugin", rope=None, rms_norm=True, swiglu=None)

    unpatched = forked(attempt, env={"FUSEPATCH": "0"})
    assert on_model(unpatched) == {**ALL_ON, "rope": False, "mlp": False}
    assert on_model(forked(attempt)) == on_model(unpatched)
    asked = forked(attempt, env={f"{PREFIX}ROPE": "1", f"{PREFIX}RMS_NORM": "0"})
    assert on_model(asked) == {**ALL_ON, "mlp": False}, "None counts as not passed, True is the user's"
    told = "apply_liger_kernel_to_qwen2: rope: None (off for Liger) -> True (FUSEPATCH_LIGER_ROPE=1)"
    assert told in asked["replaced"]


def test_none_for_the_fused_loss_gets_the_automatic_rule() -> None:
    def attempt():
        return apply_and_look("qwen2", "verl.workers.engine", fused_linear_cross_entropy=None)

    assert on_model(forked(attempt)) == {**ALL_ON, "fused_linear_cross_entropy": False}


def test_hard_coded_flags_are_beaten_and_the_hard_coded_forward_is_not() -> None:
    def attempt():
        return apply_and_look("qwen2", "verl.workers.engine.fsdp", fused_linear_cross_entropy=False, swiglu=True)

    got = forked(attempt, env={f"{PREFIX}SWIGLU": "0", f"{PREFIX}FUSED_LINEAR_CROSS_ENTROPY": "1"})
    assert on_model(got) == {**ALL_ON, "mlp": False, "fused_linear_cross_entropy": False}
    (refused,) = got["fallbacks"]
    assert "its own forward computes the loss" in refused


def test_the_users_code_beats_the_environment() -> None:
    def attempt():
        return apply_and_look("qwen2", "transformers.integrations.liger", rope=False, swiglu=True)

    got = forked(attempt, env={f"{PREFIX}ROPE": "1", f"{PREFIX}SWIGLU": "0", f"{PREFIX}RMS_NORM": "0"})
    assert on_model(got) == {**ALL_ON, "rope": False, "rms_norm": False}


def test_model_by_position_and_by_keyword() -> None:
    def by_keyword():
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        model = build("llama")
        _apply_liger_kernel_to_instance(model=model)
        return kernels(model, "llama")

    assert forked(by_keyword, env={f"{PREFIX}ROPE": "0"}) == {**ALL_ON, "rope": False}


def test_direct_calls_and_the_dictionary_are_reached() -> None:
    def through(way: str):
        from liger_kernel.transformers import monkey_patch

        function = {
            "module": monkey_patch.apply_liger_kernel_to_llama,
            "package": __import__("liger_kernel.transformers", fromlist=["x"]).apply_liger_kernel_to_llama,
            "dictionary": monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN["llama"],
        }[way]
        model = build("llama")
        function(model=model)
        return kernels(model, "llama")

    for way in ("module", "package", "dictionary"):
        assert forked(through, way, env={f"{PREFIX}RMS_NORM": "0"}) == {**ALL_ON, "rms_norm": False}, way


def test_a_direct_call_by_position_is_merged_too() -> None:
    def attempt():
        from liger_kernel.transformers.monkey_patch import apply_liger_kernel_to_llama as apply

        parameters = list(inspect.signature(apply).parameters)
        assert parameters[:3] == ["rope", "cross_entropy", "fused_linear_cross_entropy"]
        model = build("llama")
        apply(False, False, False, model=model)
        return kernels(model, "llama")

    got = forked(attempt, env={f"{PREFIX}ROPE": "1", f"{PREFIX}RMS_NORM": "0"})
    assert got == {**ALL_ON, "rope": False, "rms_norm": False, "fused_linear_cross_entropy": False}


def test_a_wrong_call_gets_upstreams_own_error() -> None:
    def attempt():
        from liger_kernel.transformers.monkey_patch import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(no_such_flag=True)

    with pytest.raises(TypeError, match="no_such_flag"):
        forked(attempt)


def test_auto_liger_model_is_reached(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)

    def attempt():
        from liger_kernel.transformers import AutoLigerKernelForCausalLM

        model = AutoLigerKernelForCausalLM.from_pretrained(tmp_path, rms_norm=True)
        modeling = sys.modules["transformers.models.llama.modeling_llama"]
        return type(model.model.norm).__name__, modeling.apply_rotary_pos_emb.__module__

    assert forked(attempt, env={f"{PREFIX}ROPE": "0", f"{PREFIX}RMS_NORM": "0"}) == (
        "LigerRMSNorm",
        "transformers.models.llama.modeling_llama",
    )


def test_a_flag_the_model_lacks_is_named_and_the_rest_holds() -> None:
    got = forked(apply_and_look, "gemma2", "my_training", env={f"{PREFIX}SWIGLU": "0", f"{PREFIX}ROPE": "0"})
    assert on_model(got) == {**ALL_ON, "rope": False}
    (text,) = got["fallbacks"]
    assert f"{PREFIX}SWIGLU=0 was not followed: apply_liger_kernel_to_gemma2 has no flag swiglu" in text


def test_a_flag_no_model_has_is_named_with_the_nearest() -> None:
    (text,) = forked(apply_and_look, "llama", "my_training", env={f"{PREFIX}RMSNORM": "0"})["fallbacks"]
    assert f"did you mean {PREFIX}RMS_NORM?" in text


def test_strict_makes_a_flag_the_model_lacks_an_error() -> None:
    with pytest.raises(StrictError, match="has no flag swiglu"):
        forked(apply_and_look, "gemma2", "my_training", env={f"{PREFIX}SWIGLU": "0", "FUSEPATCH_STRICT": "1"})


def test_what_the_framework_passes_in_vain_is_recorded() -> None:
    def attempt():
        return apply_and_look("gemma2", "verl.workers.engine.fsdp", fused_linear_cross_entropy=False, swiglu=True)

    (text,) = forked(attempt)["fallbacks"]
    assert text == (
        "apply_liger_kernel_to_gemma2: swiglu=True from verl.workers.engine.fsdp has no effect: it is not a flag of "
        "apply_liger_kernel_to_gemma2; Liger dropped it"
    )


def test_a_kernel_upstream_refuses_is_reported_and_the_rest_is_applied() -> None:
    needs("glm4")

    def attempt(env_caller: str):
        model = build("glm4")
        called_from(
            env_caller, "from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance as apply"
        )(model)
        (record,) = [record for record in fusepatch.status() if record.id == ID]
        return has_fused_loss(model), "forward" in vars(model.model.norm), [n.text for n in record.fallbacks]

    flce, norm, fallbacks = forked(attempt, "my_training", env={f"{PREFIX}ROPE": "1"})
    assert flce
    assert norm
    (text,) = fallbacks
    assert f"{PREFIX}ROPE=1 was not followed: Liger refuses it (liger_rotary_pos_emb is not available" in text


def test_granite_refuses_the_fused_loss_and_keeps_its_own() -> None:
    needs("granite")

    def attempt():
        import torch
        from liger_kernel.transformers.functional import liger_cross_entropy

        called_from(
            "my_training", "from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance as apply"
        )(build("granite"))
        (record,) = [record for record in fusepatch.status() if record.id == ID]
        return torch.nn.functional.cross_entropy is liger_cross_entropy, [note.text for note in record.fallbacks]

    liger_loss, (text,) = forked(attempt, env={f"{PREFIX}FUSED_LINEAR_CROSS_ENTROPY": "1"})
    assert liger_loss, "Granite's default, cross_entropy=True, is back"
    assert "not available for Granite models" in text


def test_what_the_user_asks_upstream_for_and_upstream_refuses_is_upstreams_error() -> None:
    needs("glm4")

    def attempt():
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(build("glm4"), rope=True)

    with pytest.raises(NotImplementedError):
        forked(attempt)


def test_a_model_type_liger_does_not_know_is_not_called_patched() -> None:
    def attempt(*asked: object):
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64))
        _apply_liger_kernel_to_instance(model=model)
        (record,) = [record for record in fusepatch.status() if record.id == ID]
        return [note.text for note in record.fallbacks]

    assert forked(attempt) == ["nothing was applied: Liger has no kernels for model type 'gpt2'"]
    (text,) = forked(attempt, env={f"{PREFIX}ROPE": "0"})
    assert text.endswith(f"{PREFIX}ROPE=0 was not followed")


def test_nested_text_models_are_reached_by_variables() -> None:
    needs("llava")

    def attempt(flags: dict[str, bool]):
        model = build_llava()
        called_from(
            "my_training", "from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance as apply"
        )(model, **flags)
        text = text_model(model)
        (record,) = [record for record in fusepatch.status() if record.id == ID]
        return {
            "rms_norm": "forward" in vars(text.norm),
            "mlp": "forward" in vars(text.layers[0].mlp) or "Liger" in repr(text.layers[0].mlp),
            "fallbacks": [note.text for note in record.fallbacks],
        }

    assert forked(attempt, {}) == {"rms_norm": True, "mlp": True, "fallbacks": []}
    assert forked(attempt, {}, env={f"{PREFIX}RMS_NORM": "0"}) == {"rms_norm": False, "mlp": True, "fallbacks": []}
    dropped = forked(attempt, {"rms_norm": False})
    assert dropped["rms_norm"] is True, "Liger drops it on the way"
    (text,) = dropped["fallbacks"]
    assert "rms_norm=False from my_training has no effect" in text
    assert "Liger does not pass it on: apply_liger_kernel_to_llama" in text


def test_every_application_is_rewritten_not_only_the_first() -> None:
    def attempt():
        first, second = build("qwen2"), build("qwen2")
        plain = type(first).forward
        apply = called_from(
            "verl.workers.fsdp_workers",
            "from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance as apply",
        )
        apply(model=first)
        untouched = vars(second).keys() & {"forward"}
        apply(model=second)
        return has_fused_loss(first), untouched, has_fused_loss(second), type(first).forward is plain

    assert forked(attempt) == (False, set(), False, True)


def test_signatures_are_upstreams() -> None:
    def signatures():
        from liger_kernel.transformers import monkey_patch

        names = [n for n in vars(monkey_patch) if n.startswith(("apply_liger_kernel_to", "_apply_liger"))]
        functions = {name: vars(monkey_patch)[name] for name in names}
        assert all(type(function) is types.FunctionType for function in functions.values())
        return {name: str(inspect.signature(function)) for name, function in functions.items()}

    patched = forked(signatures)
    assert patched == forked(signatures, env={"FUSEPATCH": "0"})
    assert len(patched) > 10


def test_every_entry_of_the_dictionary_is_the_wrapped_function() -> None:
    def entries():
        from liger_kernel.transformers import monkey_patch

        table = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
        return [key for key, value in table.items() if value is not vars(monkey_patch)[value.__name__]], len(table)

    unlike, size = forked(entries)
    assert unlike == []
    assert size > 10


def test_peft_wrapped_models_are_forwarded_unchanged() -> None:
    peft = pytest.importorskip("peft", reason="a PEFT model is wrapped")

    def attempt():
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        model = peft.get_peft_model(build("llama"), peft.LoraConfig(target_modules=["q_proj"], r=2))
        try:
            _apply_liger_kernel_to_instance(model=model)
        except AttributeError as error:  # Liger 0.8 takes the wrapper for the model
            return str(error)
        return "forward" in vars(model.get_base_model().model.norm), "forward" in vars(model)

    assert forked(attempt) == forked(attempt, env={"FUSEPATCH": "0"})


def test_the_user_is_warned_once_about_what_was_asked_in_vain(caplog: pytest.LogCaptureFixture) -> None:
    def attempt():
        records: list[str] = []

        class Keep(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                records.append(f"{record.levelname} {record.getMessage()}")

        logging.getLogger("fusepatch").addHandler(Keep())
        logging.getLogger("fusepatch").setLevel(logging.INFO)
        for _ in range(2):
            apply_and_look("gemma2", "my_training")
        return records

    lines = forked(attempt, env={f"{PREFIX}SWIGLU": "0"})
    assert len([line for line in lines if line.startswith("WARNING")]) == 1
    assert next(line for line in lines if line.startswith("INFO")).startswith("INFO applied liger.instance_flags")
