"""`liger.instance_flags` where Liger's cross-entropy is asked for and the model does not compute its loss with it."""

from __future__ import annotations

from typing import Any

import pytest

import fusepatch
from fusepatch.errors import StrictError
from fusepatch.patches import liger_cross_entropy
from kits.forked import forked
from kits.liger_models import SIZES, called_from, needs, transformers

torch = pytest.importorskip("torch")

ID = "liger.instance_flags"
ASKED = {"FUSEPATCH_LIGER_CROSS_ENTROPY": "1"}
APPLY = "from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance as apply"
OTHERS = ("rope", "rms_norm", "swiglu", "geglu", "layer_norm", "relu_squared")


def build(kind: str) -> Any:
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **SIZES))


def notes() -> tuple[list[str], list[str]]:
    (record,) = [record for record in fusepatch.status() if record.id == ID]
    return [note.text for note in record.replaced], [note.text for note in record.fallbacks]


def apply_and_train(kind: str, caller: str = "my_training", **flags: bool) -> tuple[bool, list[str], list[str]]:
    """Whether Liger's kernel computes the loss, which a CPU cannot, and what is recorded of it."""
    model = build(kind)
    called_from(caller, APPLY)(model, **dict.fromkeys(OTHERS, False), **flags)
    ids = torch.arange(3, 11).unsqueeze(0)
    try:
        assert model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids)).loss.isfinite()
    except (RuntimeError, ValueError) as error:
        if "riton" not in str(error) and "driver" not in str(error):
            raise
        return True, *notes()
    return False, *notes()


def lost(fallbacks: list[str]) -> list[str]:
    return [text for text in fallbacks if "has no effect: Liger replaces the name CrossEntropyLoss" in text]


def claimed(replaced: list[str]) -> list[str]:
    return [text for text in replaced if ": cross_entropy: " in text]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2", "mistral", "ministral", "nemotron"])
def test_what_is_said_is_what_computes_the_loss(kind: str) -> None:
    needs(kind)
    used, replaced, fallbacks = forked(apply_and_train, kind, env=ASKED)
    assert bool(claimed(replaced)) is used
    assert (lost(fallbacks) == []) is used
    if not used:
        (text,) = lost(fallbacks)
        assert text.startswith(f"apply_liger_kernel_to_{kind}: FUSEPATCH_LIGER_CROSS_ENTROPY=1 has no effect")
        assert "neither of Liger's two losses is on" in text
        assert any("fused_linear_cross_entropy: not passed" in line for line in replaced), "that one did go off"


def test_the_installed_transformers_has_both_kinds() -> None:
    assert forked(apply_and_train, "llama", env=ASKED)[0] is True
    newer = tuple(map(int, transformers.__version__.split(".")[:2])) >= (4, 48)
    assert forked(apply_and_train, "mistral", env=ASKED)[0] is not newer


def test_strict_makes_it_an_error() -> None:
    with pytest.raises(StrictError, match="FUSEPATCH_LIGER_CROSS_ENTROPY=1 has no effect"):
        forked(apply_and_train, "mistral", env={**ASKED, "FUSEPATCH_STRICT": "1"})


def test_what_the_user_passes_in_vain_is_said_and_what_a_framework_passes_is_recorded() -> None:
    flags = {"cross_entropy": True, "fused_linear_cross_entropy": False}

    def attempt(caller: str) -> list[str]:
        return lost(apply_and_train("mistral", caller, **flags)[2])

    for caller in ("my_training", "llamafactory.model.loader"):
        (text,) = forked(attempt, caller)
        assert text.startswith("apply_liger_kernel_to_mistral: cross_entropy=True has no effect")
    with pytest.raises(StrictError):
        forked(attempt, "my_training", env={"FUSEPATCH_STRICT": "1"})
    assert len(forked(attempt, "llamafactory.model.loader", env={"FUSEPATCH_STRICT": "1"})) == 1


def test_without_a_model_the_classes_of_the_modeling_module_decide() -> None:
    def attempt(kind: str) -> tuple[list[str], list[str]]:
        monkey_patch = __import__("liger_kernel.transformers.monkey_patch", fromlist=["x"])
        vars(monkey_patch)[f"apply_liger_kernel_to_{kind}"]()
        return notes()

    replaced, fallbacks = forked(attempt, "mistral", env=ASKED)
    assert claimed(replaced) == []
    assert len(lost(fallbacks)) == 1
    replaced, fallbacks = forked(attempt, "llama", env=ASKED)
    assert len(claimed(replaced)) == 1
    assert lost(fallbacks) == []


def test_a_model_of_the_users_own_that_uses_the_replaced_name_has_it() -> None:
    def attempt() -> tuple[bool, bool]:
        import transformers.models.mistral.modeling_mistral as modeling

        code = "def forward(self, x):\n    def loss():\n        return CrossEntropyLoss()\n    return loss()"
        namespace = vars(modeling)
        exec(code, namespace)
        own = type("Own", (modeling.MistralForCausalLM,), {"forward": namespace.pop("forward")})
        plain = type("Plain", (modeling.MistralForCausalLM,), {})
        return tuple(
            liger_cross_entropy.acts(cls.__new__(cls), "apply_liger_kernel_to_mistral") for cls in (own, plain)
        )

    assert forked(attempt) == (True, False)


def test_what_a_refusal_took_back_is_not_recorded_as_replaced() -> None:
    needs("granite")

    def attempt() -> list[str]:
        called_from("my_training", APPLY)(build("granite"))
        return notes()[0]

    assert forked(attempt, env={"FUSEPATCH_LIGER_FUSED_LINEAR_CROSS_ENTROPY": "1"}) == []
