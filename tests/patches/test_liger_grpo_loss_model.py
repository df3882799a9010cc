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
from fusepatch.engine import ledger  # noqa: E402
from fusepatch.patches.liger_grpo_loss import left_out, model_logits, model_tail  # noqa: E402
from fusepatch.patches.liger_grpo_loss.model_tail import Map  # noqa: E402
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
    "recurrent_gemma": (
        "RecurrentGemma",
        {"logits_soft_cap": 3.0, "lru_width": 16, "attention_window_size": 8, "block_types": ["attention"]},
    ),
    "xlstm": ("xLSTM", {"output_logit_soft_cap": 3.0, "num_heads": 2, "num_blocks": 1}),
    "minicpm3": ("MiniCPM3", {"dim_model_base": 4}),
    "falcon_h1": ("FalconH1", {"lm_head_multiplier": 0.3}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", {}),
}


def model(family: str, **changes: Any) -> Any:
    name, own = FAMILIES[family]
    torch.manual_seed(3)
    shape = {key: value for key, value in SHAPE.items() if not (key == "head_dim" and name in ("Cohere", "Granite"))}
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"this transformers has no {name}")
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


@pytest.mark.parametrize("family", ["gemma2", "cohere", "cohere2", "granite", "recurrent_gemma", "qwen3"])
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


def test_the_model_does_not_outlive_the_call(tmp_path: Path) -> None:
    with patched():
        fused(tmp_path, model("granite"))
        assert model_logits._current.get() is None
        with pytest.raises(KeyError):
            fused(tmp_path, model("granite"), {"nothing": None})
        assert model_logits._current.get() is None


def inkling2() -> Any:
    configuration = pytest.importorskip("transformers.models.inkling2.configuration_inkling2")
    modeling = importlib.import_module("transformers.models.inkling2.modeling_inkling2")
    shape = {**SHAPE, "num_key_value_heads": 1, "final_logit_softcapping": 3.0}
    made = modeling.Inkling2ForCausalLM(configuration.Inkling2TextConfig(**shape))
    torch.nn.init.normal_(made.lm_head.weight)
    return made


@pytest.mark.parametrize(
    ("family", "scale", "cap"),
    [
        ("gemma2", 1.0, 3.0),
        ("cohere", 0.3, None),
        ("granite", 0.25, None),
        ("falcon_h1", 0.3, None),
        ("minicpm3", 0.25, None),
        ("xlstm", 1.0, 3.0),
        ("inkling2", 1.0, 3.0),
        ("qwen3", 1.0, None),
        ("qwen3_moe", 1.0, None),
    ],
)
def test_what_is_between_the_head_and_the_logits_is_found_by_asking(
    family: str, scale: float, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_logits, "by_name", lambda _: Map())
    trained = inkling2() if family == "inkling2" else model(family)
    for dtype in (torch.float32, torch.bfloat16):
        found = model_logits.read(trained.to(dtype))
        assert (found.map.scale, found.map.cap) == (scale, cap)
        assert found.understood
        assert bool(found.replaced) == bool(found.described)
        assert not found.refused + found.unchecked


def test_a_configuration_without_a_cap_is_plain() -> None:
    assert model_logits.read(model("gemma2", final_logit_softcapping=None)).map == Map()
    assert model_logits.by_name(model("gemma2")).cap == 3.0
    assert model_logits.by_name(model("cohere")).scale == 0.3
    assert model_logits.by_name(model("granite")).scale == 0.25


def test_a_name_that_the_model_does_not_follow_is_not_believed() -> None:
    trained = model("qwen3")
    trained.config.model_type, trained.config.logit_scale = "cohere", 0.3
    assert model_logits.by_name(trained).scale == 0.3
    assert model_logits.read(trained) == model_logits.ModelLogits()


def test_asking_changes_nothing() -> None:
    trained = with_other_logits(lambda logits: torch.nn.functional.dropout(logits, 0.5))
    calls: list[Any] = []
    trained.register_forward_hook(lambda *given: calls.append(given))
    trained.model.register_forward_hook(lambda *given: calls.append(given))
    before, modules, state = dict(vars(trained)), dict(trained._modules), torch.get_rng_state()
    assert model_logits.read(trained).refused
    assert vars(trained) == before
    assert trained._modules == modules
    assert torch.equal(torch.get_rng_state(), state)
    assert not calls
    assert all(parameter.grad is None for parameter in trained.parameters())


def test_a_model_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    compare = model_tail.compare
    monkeypatch.setattr(model_tail, "compare", lambda *given: (compared.append(given), compare(*given))[1])
    trained = model("gemma2")
    with patched():
        made = trainer(tmp_path, lora=False, model=trained, beta=0.0, loss_type="bnpo")
        made.current_gradient_accumulation_steps = 1
        for _ in range(2):
            made.compute_liger_loss(made.model, inputs())
        assert len(compared) == 1
        assert [note.times for note in ledger.replacements("liger.grpo_loss")] == [2]
        trained.lm_head = torch.nn.Linear(SHAPE["hidden_size"], VOCABULARY, bias=False)
        made.compute_liger_loss(made.model, inputs())
        assert len(compared) == 2


def with_other_logits(change: Any) -> Any:
    """A Qwen3 whose forward changes its logits in a way that its configuration does not name."""
    trained = model("qwen3")

    class Changed(type(trained)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = change(output.logits)
            return output

    trained.__class__ = Changed
    return trained


def masked(logits: torch.Tensor) -> torch.Tensor:
    return logits.index_fill(-1, torch.tensor([7]), -torch.inf)


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: 7.31 * (logits / 7.31).tanh(),
        lambda logits: 1.37 * logits,
        lambda logits: logits[..., :-1],
        masked,
    ],
    ids=["cap", "scale", "shape", "mask"],
)
def test_logits_that_nothing_explains_are_said(change: Any) -> None:
    found = model_logits.read(with_other_logits(change))
    if found.unchecked:
        assert "its logits have shape" in found.unchecked
    else:
        assert not found.understood
        assert (
            "the logits of Changed are not what its lm_head gives: for 8 rows of hidden states they differ"
            in found.refused
        )


def test_a_model_that_is_not_understood_is_left_to_upstream(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained = with_other_logits(lambda logits: 1.37 * logits)
    theirs = fused(tmp_path, trained)
    with patched():
        torch.testing.assert_close(fused(tmp_path, trained), theirs, rtol=0, atol=0)
        fused(tmp_path, trained)
        notes = {note.text: note.times for note in ledger.fallbacks("liger.grpo_loss")}
    assert notes["upstream's own forward: the model's logits are not what its lm_head gives"] == 2
    assert caplog.text.count("which no soft cap or scale in its configuration explains") == 1
    with patched(FUSEPATCH_STRICT="1"), pytest.raises(fusepatch.StrictError, match="not what its lm_head gives"):
        fused(tmp_path, trained)


class InAGroup:
    """A group of processes, which makes hooks on the head a place where they may communicate."""

    def __enter__(self) -> None:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

    def __exit__(self, *_: Any) -> None:
        torch.distributed.destroy_process_group()


def unchecked(trained: Any) -> str:
    found = model_logits.read(trained)
    assert found.understood
    return found.unchecked.partition("lm_head's: ")[2]


def test_a_model_that_cannot_be_asked_is_taken_by_its_names() -> None:
    trained = model("gemma2")
    trained.forward = lambda **given: type(trained).forward(trained, **given)
    assert unchecked(trained) == "its forward has been replaced by one that is bound to something else"
    assert model_logits.read(trained).map == Map(1.0, 3.0, "", "final_logit_softcapping")
    assert "known by its name" in model_logits.read(trained).replaced
    del trained.forward
    trained.lm_head.register_forward_hook(lambda *_: None)
    assert not unchecked(trained)
    with InAGroup():
        assert unchecked(trained) == "its Linear has hooks, which may communicate"
    trained.lm_head.weight.ds_id = 3
    assert unchecked(trained) == "its head is sharded"
    compiled = model("gemma2")
    compiled.lm_head.compile()
    assert unchecked(compiled) == "its Linear is compiled"
    other = model("gemma2")
    found = model_logits.read(other, torch.zeros(1, 1, 16), other.lm_head.weight + 1, None)
    assert "was not given the weight" in found.unchecked
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert "its head gives zeros" in unchecked(other)


def test_a_field_that_is_not_known_is_said_where_the_model_cannot_be_asked() -> None:
    trained = model("granite")
    trained.forward = lambda **given: type(trained).forward(trained, **given)
    assert not model_logits.read(trained).refused
    trained.config.model_type = "something_new"
    assert (
        "sets logits_scaling, which fusepatch does not know, and its logits could not be compared"
        in model_logits.read(trained).refused
    )
    plain = model("qwen3")
    plain.forward = lambda **given: type(plain).forward(plain, **given)
    assert not model_logits.read(plain).refused


def test_fsdp2_is_asked_while_its_head_is_whole() -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this torch has no fully_shard")
    trained = model("gemma2")
    found = []
    with InAGroup():
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for layer in trained.model.layers:
            fsdp.fully_shard(layer, mesh=mesh)
        fsdp.fully_shard(trained, mesh=mesh)
        assert unchecked(trained) in ("its head is sharded", "the loss was not given the weight of its lm_head")
        # As TRL computes its loss, inside of the root's forward; this one asks once and then goes on.
        forward = type(trained).forward

        def asking(self: Any, **given: Any) -> Any:
            type(trained).forward = forward
            found.append(model_logits.read(self))
            return forward(self, **given)

        type(trained).forward = asking
        trained(input_ids=inputs()["prompt_ids"])
    assert [(one.unchecked, one.map.cap) for one in found] == [("", 3.0)]


def test_a_cap_that_upstream_would_drop_is_said_when_it_takes_the_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with patched():
        fused(tmp_path, model("gemma2"), inputs() | {"advantages": torch.ones(BATCH, COMPLETION)})
    assert "the model's final_logit_softcapping of 3 is left out of the loss" in caplog.text


def test_keep_reads_no_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained = model("gemma2")
    theirs = fused(tmp_path, trained)
    with patched(FUSEPATCH_HEAD="keep"):
        torch.testing.assert_close(fused(tmp_path, trained), theirs, rtol=0, atol=0)
        assert record().replaced == ()
    assert "left out" not in caplog.text


@pytest.mark.parametrize("autocast", [False, True])
def test_a_float32_head_beside_half_precision_is_multiplied_as_the_model_does(tmp_path: Path, autocast: bool) -> None:
    if "cast_lm_head_to_fp32" not in inspect.signature(trl.GRPOConfig).parameters:
        pytest.skip("TRL is older")
    trained = model("qwen3").to(torch.bfloat16)
    made = trainer(tmp_path, lora=False, model=trained, beta=0.0, loss_type="bnpo", cast_lm_head_to_fp32=True)
    made.model.eval()
    made.current_gradient_accumulation_steps = 1
    with torch.no_grad():
        trained.lm_head.weight.normal_(std=3.0)  # no longer what bfloat16 can hold
    given = inputs() | {"old_per_token_logps": None}
    made.temperature = made.liger_loss.temperature = 1.0
    made.use_liger_kernel = False
    context = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with context:
        native = made._compute_loss(made.model, given)
    native.backward()
    wanted = trained.lm_head.weight.grad.clone()
    trained.zero_grad()
    with patched(), context:
        ours = made.compute_liger_loss(made.model, given)
        said = [note.text for note in ledger.replacements("liger.grpo_loss")]
    ours.backward()
    assert trained.lm_head.weight.dtype == torch.float32
    assert ["the loss takes the model's product in float32" in text for text in said] == [True] * (not autocast)
    if not autocast:
        torch.testing.assert_close(ours, native, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(trained.lm_head.weight.grad, wanted, rtol=1e-3, atol=1e-5)


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


def vision_trainer(folder: Path) -> Any:
    pytest.importorskip("transformers.models.qwen2_5_vl")
    text = {
        **SHAPE,
        "vocab_size": VOCABULARY + 2,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [0],
    }
    ids = {"image_token_id": VOCABULARY, "video_token_id": VOCABULARY + 1}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    made = trainer(
        folder,
        lora=False,
        model=transformers.Qwen2_5_VLForConditionalGeneration(config),
        beta=0.0,
        loss_type="bnpo",
    )
    made.current_gradient_accumulation_steps = 1
    return made


@pytest.mark.skipif(
    "mm_token_type_ids" not in inspect.signature(TRAINER._get_per_token_logps_and_entropies).parameters
    if hasattr(TRAINER, "_get_per_token_logps_and_entropies")
    else True,
    reason="this TRL passes no token types",
)
def test_inputs_that_the_fused_path_drops_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with patched():
        made = vision_trainer(tmp_path)
        made.compute_liger_loss(made.model, inputs() | {"num_images": [0] * BATCH, "mm_token_type_ids": None})
        assert "leaves" not in caplog.text
        types = torch.zeros(BATCH, PROMPT + COMPLETION, dtype=torch.int64)
        for _ in range(2):
            made.compute_liger_loss(made.model, inputs() | {"mm_token_type_ids": types})
    assert (
        caplog.text.count("TRL's Liger path leaves mm_token_type_ids of this batch out of its call of Qwen2_5_VL") == 1
    )

    class Mended(TRAINER):  # type: ignore[misc, valid-type]
        def _get_last_hidden_state(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            return {"mm_token_type_ids": None}

    made.__class__ = Mended
    assert left_out.dropped_inputs(made, {"mm_token_type_ids": types}) == []


def test_an_objective_of_a_subclass_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class WithBonus(TRAINER):  # type: ignore[misc, valid-type]
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return super()._compute_loss(model, inputs) + 1

    class WithFusedBonus(WithBonus):
        def compute_liger_loss(self, model: Any, inputs: Any) -> Any:
            return super().compute_liger_loss(model, inputs) + 1

    with patched():
        made = trainer(tmp_path, lora=False, model=model("qwen3"), beta=0.0, loss_type="bnpo")
        made.current_gradient_accumulation_steps = 1
        plain = made.compute_loss(made.model, inputs())
        made.__class__ = WithFusedBonus
        torch.testing.assert_close(made.compute_loss(made.model, inputs()), plain + 1)
        assert "of its own" not in caplog.text
        made.__class__ = WithBonus
        for _ in range(2):
            torch.testing.assert_close(made.compute_loss(made.model, inputs()), plain)
        assert caplog.text.count("WithBonus has a _compute_loss of its own, which TRL does not call") == 1
        made.__class__ = TRAINER
        made._compute_loss = lambda model, inputs: None
        made.compute_loss(made.model, inputs())
        assert "GRPOTrainer has a _compute_loss of its own" in caplog.text
