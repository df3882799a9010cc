"""What a model does to its logits reaches the loss in TRL's `compute_liger_loss`; what the loss leaves out is said."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
importlib.import_module("torch._dynamo")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
pytest.importorskip("liger_kernel.chunked_loss")

import fusepatch  # noqa: E402
from demo import tiny  # noqa: E402
from fusepatch.patches.liger_grpo_loss import model_logits  # noqa: E402
from kits.liger_grpo import patched, record  # noqa: E402
from kits.liger_grpo_trainer import WITHOUT_PEFT, trainer  # noqa: E402

TRAINER = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer
BATCH, PROMPT, COMPLETION = 3, 4, 5
VOCABULARY = len(tiny.tokenizer())

pytestmark = pytest.mark.skipif(
    not hasattr(TRAINER, "compute_liger_loss"), reason="this TRL has no fused loss of Liger's"
)


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    fusepatch.deactivate()
    os.environ.pop("FUSEPATCH", None)
    # Upstream compiles its policy, which is the same arithmetic and takes a minute here.
    with torch._dynamo.config.patch(disable=True):
        yield
    fusepatch.deactivate()


SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": tiny.tokenizer().pad_token_id,
    "bos_token_id": None,
    "eos_token_id": tiny.tokenizer().eos_token_id,
    "tie_word_embeddings": False,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", {"final_logit_softcapping": 3.0, "sliding_window": 8}),
    "cohere": ("Cohere", {"logit_scale": 0.3}),
    "cohere2": ("Cohere2", {"logit_scale": 0.3, "sliding_window": 8}),
    "granite": ("Granite", {"logits_scaling": 4.0}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", {}),
}


def model(family: str, **changes: Any) -> Any:
    name, own = FAMILIES[family]
    torch.manual_seed(3)
    shape = {key: value for key, value in SHAPE.items() if not (key == "head_dim" and name in ("Cohere", "Granite"))}
    config = getattr(transformers, f"{name}Config")(**{**shape, **own, **changes})
    made = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        # Large enough for a cap to bend and a scale to show.
        made.lm_head.weight.normal_(std=3.0)
    return made.eval()


def inputs() -> dict[str, Any]:
    made = torch.Generator().manual_seed(5)
    completion_mask = torch.ones(BATCH, COMPLETION, dtype=torch.int64)
    completion_mask[1, 3:] = 0
    return {
        "prompt_ids": torch.randint(3, VOCABULARY, (BATCH, PROMPT), generator=made),
        "prompt_mask": torch.ones(BATCH, PROMPT, dtype=torch.int64),
        "completion_ids": torch.randint(3, VOCABULARY, (BATCH, COMPLETION), generator=made),
        "completion_mask": completion_mask,
        "advantages": torch.tensor([1.0, -0.5, 0.7]),
        # On-policy, the value of the loss does not show the log-probabilities; old ones do.
        "old_per_token_logps": torch.full((BATCH, COMPLETION), -5.5),
        "ref_per_token_logps": None,
    }


def loss_by_hand(trained: Any) -> torch.Tensor:
    """The loss from the logits that the model itself gives."""
    given = inputs()
    ids = torch.cat([given["prompt_ids"], given["completion_ids"]], dim=1)
    logits = trained(input_ids=ids).logits[:, PROMPT - 1 : -1].float() / 0.8
    values = logits.log_softmax(-1).gather(-1, given["completion_ids"].unsqueeze(-1)).squeeze(-1)
    ratio = (values - given["old_per_token_logps"]).exp()
    advantages = given["advantages"].unsqueeze(1)
    each = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (each * given["completion_mask"]).sum() / given["completion_mask"].sum()


def fused(folder: Path, trained: Any, given: Any = None, adapted: Any = None) -> torch.Tensor:
    """The loss in a real trainer of this model; `adapted` is what the trainer's model became since."""
    made = trainer(folder, lora=False, model=trained, beta=0.0, loss_type="bnpo", temperature=0.8, epsilon=0.2)
    made.model.eval()
    made.current_gradient_accumulation_steps = 1
    return made.compute_liger_loss(adapted or made.model, given or inputs())


@pytest.mark.parametrize("family", ["gemma2", "cohere", "cohere2", "granite", "qwen3"])
def test_the_loss_is_that_of_the_models_own_logits(tmp_path: Path, family: str) -> None:
    trained = model(family)
    by_hand = loss_by_hand(trained)
    by_hand.backward()
    wanted = {
        name: parameter.grad.clone() for name, parameter in trained.named_parameters() if parameter.grad is not None
    }
    trained.zero_grad()
    theirs = fused(tmp_path, trained)
    if family == "qwen3":
        torch.testing.assert_close(theirs, by_hand, rtol=1e-5, atol=1e-6)
    else:
        assert abs(float((theirs - by_hand).detach())) > 1e-2
    with patched():
        ours = fused(tmp_path, trained)
        ours.backward()
        assert [note.times for note in record().replaced] == ([] if family == "qwen3" else [1])
    torch.testing.assert_close(ours, by_hand, rtol=1e-4, atol=1e-5)
    for name, parameter in trained.named_parameters():
        if name in wanted:
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-3, atol=1e-5)


def test_the_map_does_not_outlive_the_call(tmp_path: Path) -> None:
    with patched():
        fused(tmp_path, model("granite"))
        assert model_logits.model_logits() == model_logits.ModelLogits()
        with pytest.raises(KeyError):
            fused(tmp_path, model("granite"), {"nothing": None})
        assert model_logits.model_logits() == model_logits.ModelLogits()


def test_a_configuration_without_a_cap_is_plain() -> None:
    assert model_logits.read(model("gemma2", final_logit_softcapping=None)) == model_logits.ModelLogits()
    assert model_logits.read(model("gemma2")).final_logit_softcapping == 3.0
    assert model_logits.read(model("cohere")).scale == 0.3
    assert model_logits.read(model("granite")).scale == 0.25


def test_a_cap_that_upstream_would_drop_is_said_when_it_takes_the_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with patched():
        fused(tmp_path, model("gemma2"), inputs() | {"advantages": torch.ones(BATCH, COMPLETION)})
    assert "the model's final_logit_softcapping of 3 is left out of the loss" in caplog.text


def test_keep_reads_no_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained = model("gemma2")
    theirs = fused(tmp_path, trained)
    with patched(FUSEPATCH_GRPO_LOSS="keep"):
        torch.testing.assert_close(fused(tmp_path, trained), theirs, rtol=0, atol=0)
        assert record().replaced == ()
    assert "left out" not in caplog.text


def test_a_scale_of_an_unknown_kind_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained = model("granite")
    theirs = fused(tmp_path, trained)
    trained.config.model_type = "something_new"
    with patched():
        torch.testing.assert_close(fused(tmp_path, trained), theirs, rtol=1e-5, atol=1e-6)
    assert "uses logits_scaling in its forward, in a way that is not known here" in caplog.text


def with_adapter(trained: Any, targets: list[str]) -> Any:
    peft = pytest.importorskip("peft")
    if WITHOUT_PEFT:
        pytest.skip("this TRL refuses PEFT with Liger's loss")
    return peft.get_peft_model(trained, peft.LoraConfig(r=2, target_modules=targets))


def test_an_adapter_on_the_head_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # The trainer of TRL 1.12 refuses one that is there when it is constructed.
    trained = model("qwen3")
    with patched():
        made = trainer(tmp_path, lora=False, model=trained, beta=0.0, loss_type="bnpo")
        made.current_gradient_accumulation_steps = 1
        adapted = with_adapter(trained, ["lm_head", "q_proj"])
        made.compute_liger_loss(adapted, inputs()).backward()
        made.compute_liger_loss(adapted, inputs())
        assert "lm_head of Qwen3ForCausalLM carries an adapter" in record().fallbacks[0].text
    assert caplog.text.count("gets no gradient") == 1
    # As it is said; the other adapter has one.
    without = [
        name for name, parameter in adapted.named_parameters() if parameter.requires_grad and parameter.grad is None
    ]
    assert len(without) == 2
    assert all("lm_head" in name for name in without)


def test_an_adapter_elsewhere_is_fine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with patched():
        fused(tmp_path, with_adapter(model("qwen3"), ["q_proj"]))
    assert "adapter" not in caplog.text


@pytest.mark.skipif("router_aux_loss_coef" not in inspect.signature(trl.GRPOConfig).parameters, reason="TRL is older")
@pytest.mark.parametrize("coefficient", [0.001, 0.0])
def test_an_enabled_router_loss_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture, coefficient: float) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1}
    with patched():
        made = trainer(
            tmp_path,
            lora=False,
            model=model("qwen3_moe", **experts),
            beta=0.0,
            loss_type="bnpo",
            router_aux_loss_coef=coefficient,
        )
        made.current_gradient_accumulation_steps = 1
        for _ in range(2):
            made.compute_liger_loss(made.model, inputs())
    said = caplog.text.count("the auxiliary router loss of Qwen3MoeForCausalLM is enabled")
    assert said == (1 if coefficient else 0)


def test_strict_mode_raises_instead(tmp_path: Path) -> None:
    trained = model("qwen3")
    with patched(FUSEPATCH_STRICT="1"):
        made = trainer(tmp_path, lora=False, model=trained, beta=0.0, loss_type="bnpo")
        made.current_gradient_accumulation_steps = 1
        with pytest.raises(fusepatch.StrictError, match="carries an adapter"):
            made.compute_liger_loss(with_adapter(trained, ["lm_head"]), inputs())
