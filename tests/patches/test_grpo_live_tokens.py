"""`grpo.live_tokens` in TRL's own trainers: one micro-batch, and whole updates, plain and patched."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from doors import grpo_update
from fusepatch.errors import StrictError
from kits import tiny_types
from kits.forked import forked

torch = pytest.importorskip("torch")
pytest.importorskip("trl")
pytest.importorskip("peft")

PLAIN = {"FUSEPATCH": "0"}
DROP = {"FUSEPATCH_GRPO_ZERO_ADVANTAGE": "drop"}
LOSSES = ("bnpo", "cispo", "dapo", "dr_grpo", "grpo", "luspo", "sapo", "vespo")
PROMPTS, COMPLETIONS = (2, 9, 5, 7), (4, 20, 11, 6)
DEAD = (1, 3)


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {
        kind: grpo_update.trainer(tmp_path_factory.mktemp(kind), kind, {"top_k": 0, "max_completion_length": 24})
        for kind in ("GRPO", "RLOO")
    }


def options(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    loss_type = LOSSES[seed % len(LOSSES)]
    by_token = loss_type in ("cispo", "sapo", "vespo")  # Liger's loss refuses them for whole sequences
    found = {
        "loss_type": loss_type,
        "level": "token" if by_token else draw.choice(("token", "sequence")),
        "beta": draw.choice((0.0, 0.0, 0.1)),
        "old": draw.random() < 0.6,
        "tools": draw.random() < 0.4,
        "truncated": draw.choice((None, 0, 1)),
        "ratio": draw.choice((None, "token", "sequence")),
        "delta": draw.choice((None, 1.5)),
        "off_policy": draw.choice((None, 0.5)),
        "quantile": draw.choice((1.0, 1.0, 0.6)),
        "liger": draw.random() < 0.35,
        "seed": seed,
    }
    plain = {"beta": 0.0, "quantile": 1.0, "liger": False}
    return {**found, **plain} if seed < len(LOSSES) else found


def batch(case: dict[str, Any]) -> dict[str, Any]:
    numbers = torch.Generator().manual_seed(case["seed"])
    border, width = 10, 24
    ids = torch.randint(4, grpo_update.VOCABULARY, (4, border + width), generator=numbers)
    columns = torch.arange(border + width)
    lengths = zip(PROMPTS, COMPLETIONS, strict=True)
    mask = torch.stack([((columns >= border - p) & (columns < border + c)).long() for p, c in lengths])
    ids = ids * mask
    if case.get("truncated") is not None:
        mask[case["truncated"], border:] = 0
    advantages = torch.tensor([0.7, 0.0, -1.2, 0.0])
    found = {
        "prompt_ids": ids[:, :border],
        "prompt_mask": mask[:, :border],
        "completion_ids": ids[:, border:],
        "completion_mask": mask[:, border:],
        "advantages": advantages,
        "num_items_in_batch": mask[:, border:].sum() * 2,
    }
    noise = torch.randn(4, width, generator=numbers) * 0.05
    if case.get("old"):
        found["old_per_token_logps"] = (noise - 4.2) * mask[:, border:]
    if case.get("beta"):
        found["ref_per_token_logps"] = (torch.randn(4, width, generator=numbers) * 0.3 - 4.2) * mask[:, border:]
    if case.get("tools"):
        found["tool_mask"] = (torch.arange(width) % 4 != 2).long().expand(4, width) | (1 - mask[:, border:])
    if case.get("ratio"):
        found["importance_sampling_ratio"] = (noise[:, :1] if case["ratio"] == "sequence" else noise).exp()
    return found


def asked(trainer: Any, case: dict[str, Any]) -> Any:
    trainer.loss_type, trainer.importance_sampling_level = case["loss_type"], case["level"]
    trainer.beta, trainer.args.delta = case["beta"], case["delta"]
    trainer.off_policy_mask_threshold, trainer.top_entropy_quantile = case["off_policy"], case["quantile"]
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = case["ratio"] is not None
    trainer.use_liger_kernel = case["liger"]
    if case["liger"]:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
        from trl.models.utils import _ForwardRedirection

        trainer._forward_redirection = _ForwardRedirection()
        trainer.liger_loss = LigerFusedLinearGRPOLoss(
            beta=trainer.beta,
            epsilon_low=trainer.epsilon_low,
            epsilon_high=trainer.epsilon_high,
            temperature=trainer.temperature,
            use_ref_model=trainer.beta != 0.0,
            loss_type=trainer.loss_type,
            max_completion_length=trainer.max_completion_length,
            importance_sampling_level=trainer.importance_sampling_level,
            delta=trainer.args.delta,
            compiled=False,
        )
    return trainer


def step(trainer: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Loss, gradients and metrics of one micro-batch, and how many rows and tokens the model ran."""
    import fusepatch

    trainer._metrics["train"].clear()
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    trainer.model.zero_grad()
    seen: list[tuple[int, int]] = []
    hook = trainer.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    hook.remove()
    notes = [
        note.text
        for record in fusepatch.status()
        if record.id == "grpo.live_tokens"
        for note in (*record.replaced, *record.fallbacks)
    ]
    return {
        "loss": float(loss),
        "gradients": torch.cat([param.grad.flatten() for param in trainer.model.parameters()]).tolist(),
        "metrics": {name: values[0] for name, values in trainer._metrics["train"].items()},
        "rows": seen[-1][0],
        "tokens": seen[-1][0] * seen[-1][1],
        "notes": notes,
    }


def steps(trainer: Any, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [step(asked(trainer, case), batch(case)) for case in cases]


def assert_same(plain: dict[str, Any], patched: dict[str, Any], but: tuple[str, ...] = ()) -> None:
    assert patched["loss"] == pytest.approx(plain["loss"], rel=1e-5, abs=1e-6)
    wanted, found = torch.tensor(plain["gradients"]), torch.tensor(patched["gradients"])
    assert (found - wanted).norm() <= 1e-5 * max(1.0, float(wanted.norm()))
    assert patched["metrics"].keys() == plain["metrics"].keys()
    for name in plain["metrics"].keys() - set(but):
        assert patched["metrics"][name] == pytest.approx(plain["metrics"][name], rel=1e-5, abs=1e-6, nan_ok=True), name


CASES = [options(seed) for seed in (*range(20), 29)]


def moves(case: dict[str, Any]) -> bool:
    """Liger's luspo averages over padding too, unless it has one value a sequence."""
    single = case["level"] == "sequence" and case["beta"] == 0 and case["ratio"] is None and case["quantile"] == 1.0
    return case["loss_type"] != "luspo" or not case["liger"] or single


@pytest.fixture(scope="module")
def plain_steps(trainers: dict[str, Any]) -> list[dict[str, Any]]:
    return forked(steps, trainers["GRPO"], CASES, env=PLAIN)


def drops(case: dict[str, Any]) -> bool:
    return case["beta"] == 0.0 and case["quantile"] == 1.0


def test_a_micro_batch_gives_loss_gradients_and_metrics_of_upstreams_with_fewer_tokens(
    trainers: dict[str, Any], plain_steps: list[dict[str, Any]]
) -> None:
    for case, wanted, found in zip(CASES, plain_steps, forked(steps, trainers["GRPO"], CASES), strict=True):
        assert_same(wanted, found)
        assert (wanted["rows"], wanted["tokens"]) == (4, 4 * 34), case
        assert found["rows"] == 4
        assert (found["tokens"] < wanted["tokens"]) == moves(case), case
    assert not all(map(moves, CASES))


def test_dropped_sequences_change_nothing_but_the_entropy(
    trainers: dict[str, Any], plain_steps: list[dict[str, Any]]
) -> None:
    seen = set()
    for case, wanted, found in zip(CASES, plain_steps, forked(steps, trainers["GRPO"], CASES, env=DROP), strict=True):
        assert_same(wanted, found, but=("entropy", "vespo/phi_seq_mean") if drops(case) else ())
        assert found["rows"] == (2 if drops(case) else 4), case
        seen.add((case["loss_type"], drops(case), case["liger"]))
    assert {(name, True, False) for name in LOSSES} <= seen


def peaked(trainer: Any, liger: bool) -> dict[str, Any]:
    """Tokens so unlikely that exp(0 - old) is infinite; old is the model's own, so that every ratio is 1."""
    if liger:
        asked(trainer, {**options(4), "ratio": None, "delta": None, "liger": True})
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(60.0)
    inputs = batch({"seed": 1})
    trainer.model.train()
    tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        found = trainer._get_per_token_logps_and_entropies(trainer.model, tokens, mask, 24)[0]
    old = found * inputs["completion_mask"]
    assert float(old[list(DEAD)].min()) < -100
    if "RLOO" in type(trainer).__name__:
        inputs["old_logps"] = old.sum(1)
        del inputs["num_items_in_batch"]
    else:
        inputs["old_per_token_logps"] = old
    return step(trainer, inputs)


@pytest.mark.parametrize("kind", ["GRPO", "RLOO", "Liger"])
def test_what_stands_in_dropped_rows_makes_the_ratio_finite(trainers: dict[str, Any], kind: str) -> None:
    liger, trainer = kind == "Liger", trainers["RLOO" if kind == "RLOO" else "GRPO"]
    plain = forked(peaked, trainer, liger, env=PLAIN)
    # Liger's own loss, which computes rows of advantage 0 too.
    found = forked(peaked, trainer, liger, env={**DROP, "FUSEPATCH_DISABLE": "liger.grpo_loss"})
    assert found["rows"] == 2
    assert_same(plain, found, but=("entropy",))


def entropies(trainer: Any) -> tuple[float, float]:
    """The metric with dropped rows, and the token mean of the entropy over the rows of another advantage."""
    inputs = batch({"seed": 2})
    metric = step(trainer, inputs)["metrics"]["entropy"]
    live = [row for row in range(4) if row not in DEAD]
    alone = {name: value[live] if value.dim() else value for name, value in inputs.items()}
    return metric, step(trainer, alone)["metrics"]["entropy"]


def test_the_entropy_is_the_mean_over_the_sequences_that_ran(trainers: dict[str, Any]) -> None:
    metric, of_live = forked(entropies, trainers["GRPO"], env=DROP)
    assert metric == pytest.approx(of_live, rel=1e-5)


def all_dead(trainer: Any) -> dict[str, Any]:
    inputs = {name: value.flip(0) if value.dim() else value for name, value in batch({"seed": 3}).items()}
    inputs["advantages"] = torch.zeros(4)
    return step(trainer, inputs)


def test_a_micro_batch_without_a_gradient_runs_its_shortest_row(trainers: dict[str, Any]) -> None:
    found = forked(all_dead, trainers["GRPO"], env=DROP)
    assert (found["rows"], found["tokens"]) == (1, 8)
    assert found["loss"] == 0
    assert max(map(abs, found["gradients"])) == 0


def truncated(trainer: Any, advantage: float) -> float:
    """The entropy of a micro-batch whose shortest row, or only live one, is left out of the loss as truncated."""
    case = {"seed": 3, "truncated": 0}
    inputs = batch(case)
    inputs["advantages"] = torch.tensor([advantage, 0.0, 0.0, 0.0])
    return float(step(trainer, inputs)["metrics"]["entropy"])


@pytest.mark.parametrize("advantage", [0.0, 1.0])
def test_the_entropy_is_that_of_a_row_with_tokens_in_the_loss(trainers: dict[str, Any], advantage: float) -> None:
    plain = forked(truncated, trainers["GRPO"], advantage, env=PLAIN)
    assert forked(truncated, trainers["GRPO"], advantage, env=DROP) == pytest.approx(plain, rel=0.2)


def nearly(trainer: Any) -> list[str]:
    inputs = batch({"seed": 4})
    inputs["advantages"] = torch.tensor([1.0, 1e-3, 0.0, 1e-3])
    found = step(trainer, inputs)
    assert found["rows"] == 3
    import fusepatch

    (record,) = [record for record in fusepatch.status() if record.id == "grpo.live_tokens"]
    return [f"{note.times} x {note.text}" for note in record.fallbacks]


def test_an_advantage_of_nearly_zero_is_kept_counted_and_named(trainers: dict[str, Any]) -> None:
    (note,) = [text for text in forked(nearly, trainers["GRPO"], env=DROP) if "nearly 0" in text]
    assert note.startswith("2 x a sequence whose advantage is nearly 0")


def changed(trainer: Any, how: str) -> dict[str, Any]:
    inputs = batch({"seed": 5})
    if how == "a hole in the mask":
        inputs["completion_mask"][1, 3] = 0
    elif how == "no prompt":
        inputs["prompt_mask"][2] = 0
    elif how == "pad_to_multiple_of":
        trainer.pad_to_multiple_of = 8
    elif how == "attention":
        trainer.model.config._attn_implementation = "my_attention"
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register("my_attention", sdpa_attention_forward)
    elif how == "type":
        trainer.model.config.model_type = "qwen9"
    elif how == "router":
        trainer.aux_loss_enabled, trainer.router_aux_loss_coef = True, 0.1
        whole = type(trainer.model).forward
        zero = torch.zeros(())

        def forward(self: Any, *args: Any, output_router_logits: Any = None, **kwargs: Any) -> Any:
            found = whole(self, *args, **kwargs)
            found.aux_loss = zero
            return found

        type(trainer.model).forward = forward
    elif how == "a compiled wrapper":  # as accelerate's prepare() leaves it
        trainer.model_wrapped = torch.compile(trainer.model, backend="eager")
    elif how == "a hook that reads the mask":
        look = lambda module, args, kwargs: kwargs["attention_mask"].sum() and None  # noqa: E731
        trainer.model.register_forward_pre_hook(look, with_kwargs=True)
    elif how == "own class":
        trainer.model.__class__ = type("Mine", (type(trainer.model),), {"__module__": "mine"})
    return step(trainer, inputs)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("a hole in the mask", "tokens that are not one run"),
        ("no prompt", "has no prompt"),
        ("pad_to_multiple_of", "pad_to_multiple_of=8 asks for fixed widths"),
        ("attention", "the attention implementation my_attention is not known here"),
        ("type", "no test has compared moved rows with padded ones for the model type qwen9"),
        ("router", "the auxiliary router loss counts padding where there is no mask"),
        ("a compiled wrapper", "the model is compiled"),
        ("a hook that reads the mask", "the comparison of moved rows with padded ones failed for Qwen3ForCausalLM"),
        ("own class", "Mine is not one of transformers' own classes"),
    ],
)
def test_what_stands_in_the_way_is_recorded_and_upstream_runs(trainers: dict[str, Any], how: str, reason: str) -> None:
    plain = forked(changed, trainers["GRPO"], how, env=PLAIN)
    found = forked(changed, trainers["GRPO"], how)
    assert (found["loss"], found["gradients"], found["tokens"]) == (plain["loss"], plain["gradients"], plain["tokens"])
    assert any("rows are not moved" in note and reason in note for note in found["notes"]), found["notes"]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("beta", "beta=0.04: its KL term has a gradient"),
        ("entropy bonus", "the entropy bonus takes every token's entropy"),
        ("quantile", "top_entropy_quantile=0.5 compares the entropies of all tokens"),
        ("loss type", "loss_type=mine is not known here"),
        ("own loss", "has a _compute_loss of its own"),
        ("own log-probabilities", "has a _get_per_token_logps_and_entropies of its own"),
        ("another patch", "GRPOTrainer._compute_loss is not TRL's own"),
        ("release", "is not a tested release"),
        ("experts", "experts that are a ModuleList run on some ranks only"),
    ],
)
def test_sequences_that_may_have_a_gradient_are_kept_and_the_reason_is_warned_of(
    trainers: dict[str, Any], how: str, reason: str
) -> None:
    assert reason in forked(refused, trainers["GRPO"], how, env=DROP)


def refused(trainer: Any, how: str) -> str:
    import functools
    import importlib.metadata

    import trl

    inputs = batch({"seed": 6, "beta": how == "beta"})
    trainer.loss_type = "dapo"
    if how == "beta":
        trainer.beta = 0.04
    elif how == "entropy bonus":
        trainer._entropy_bonus_enabled, trainer.use_adaptive_entropy, trainer.entropy_coef = True, False, 0.1
    elif how == "quantile":
        trainer.top_entropy_quantile = 0.5
    elif how == "loss type":
        trainer.loss_type = "mine"
    elif how == "own loss":
        own = type(trainer)._compute_loss
        type(trainer)._compute_loss = lambda self, model, inputs: own(self, model, inputs)
    elif how == "own log-probabilities":
        own = type(trainer)._get_per_token_logps_and_entropies
        type(trainer)._get_per_token_logps_and_entropies = lambda *args, **kwargs: own(*args, **kwargs)
    elif how == "another patch":
        theirs = trl.GRPOTrainer._compute_loss
        trl.GRPOTrainer._compute_loss = functools.wraps(theirs)(lambda *args: theirs(*args))
    elif how == "experts":
        trainer.model.add_module("experts", torch.nn.ModuleList())
        type(trainer.accelerator).num_processes = 2
    elif how == "release":
        distribution = importlib.metadata.distribution("trl")
        later = type("Later", (), {"metadata": {"Name": "trl", "Version": "9.0"}, "_path": distribution._path})()
        importlib.metadata.distribution = lambda name: later
    from fusepatch.patches.grpo_live_tokens import handlers

    text = handlers.obstacles.of_dropping(trainer, "trl.trainer.grpo_trainer", "GRPOTrainer")
    if how in ("loss type", "experts"):
        return str(text)  # TRL raises at once, or waits for the other rank
    found = step(trainer, inputs)
    assert found["rows"] == 4
    assert any(f"FUSEPATCH_GRPO_ZERO_ADVANTAGE=drop was not followed: {text}" in note for note in found["notes"])
    return str(text)


def test_strict_makes_it_an_error(trainers: dict[str, Any]) -> None:
    with pytest.raises(StrictError, match="FUSEPATCH_GRPO_ZERO_ADVANTAGE=drop was not followed: beta"):
        forked(refused, trainers["GRPO"], "beta", env={**DROP, "FUSEPATCH_STRICT": "1"})


def evaluated(trainer: Any) -> dict[str, Any]:
    trainer.model.eval()
    with torch.no_grad():
        loss = float(trainer.compute_loss(trainer.model, batch({"seed": 8})))
    return {"loss": loss, **notes()}


def test_an_evaluation_is_moved_and_drops_nothing(trainers: dict[str, Any]) -> None:
    plain, found = (forked(evaluated, trainers["GRPO"], env=env) for env in (PLAIN, DROP))
    assert found["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert any("moved to the left" in note for note in found["replaced"])
    assert not any("advantage 0" in note for note in found["replaced"])


def kept(trainer: Any) -> dict[str, Any]:
    return step(trainer, batch({"seed": 7}))


def test_keep_leaves_upstream_alone(trainers: dict[str, Any]) -> None:
    found = forked(kept, trainers["GRPO"], env={"FUSEPATCH_GRPO_PADDING": "keep"})
    plain = forked(kept, trainers["GRPO"], env=PLAIN)
    assert (found["loss"], found["gradients"], found["notes"]) == (plain["loss"], plain["gradients"], [])


def test_dropping_does_not_need_moving(trainers: dict[str, Any]) -> None:
    found = forked(kept, trainers["GRPO"], env={"FUSEPATCH_GRPO_PADDING": "keep", **DROP})
    assert (found["rows"], found["tokens"]) == (2, 2 * 34)
    assert_same(forked(kept, trainers["GRPO"], env=PLAIN), found, but=("entropy",))


def believed_to_be_movable() -> dict[str, Any]:
    """A GPT-2 that the list of model types lets through: the check is what finds its learned positions."""
    from fusepatch.patches.grpo_live_tokens import obstacles

    obstacles.MOVED, obstacles.NOT_MOVED = obstacles.MOVED | {"gpt2"}, {}
    changes = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return {**grpo_update.run(model=tiny_types.tiny_model("gpt2", **changes), **CHECKED), **notes()}


def notes() -> dict[str, list[str]]:
    import fusepatch

    (record,) = [record for record in fusepatch.status() if record.id == "grpo.live_tokens"]
    return {"fallbacks": [note.text for note in record.fallbacks], "replaced": [note.text for note in record.replaced]}


CHECKED = {"config": {"loss_type": "grpo", "num_iterations": 2, "max_steps": 2}}


def test_a_model_that_gives_something_else_is_left_to_upstream_in_every_pass() -> None:
    upstreams = forked(believed_to_be_movable, env={"FUSEPATCH_GRPO_PADDING": "keep"})
    found = forked(believed_to_be_movable)
    assert found["weights"] == upstreams["weights"]
    # The two rows of the check run both ways, before anything else does.
    assert [masked for *_, masked in found["forwards"][:2]] == [True, False]
    assert found["forwards"][2:] == upstreams["forwards"]
    (note,) = [note for note in found["fallbacks"] if "not moved" in note]
    assert re.search(
        r"GPT2LMHeadModel gives something else for moved rows than for padded ones: "
        r"the row that moves differs by [\d.]+, "
        r"the one that does not by [\de.-]+; [\de.-]+ would be rounding",
        note,
    )


def in_bfloat16() -> dict[str, Any]:
    model = grpo_update.tiny_model(hidden_size=128, num_hidden_layers=12).bfloat16()
    return {**grpo_update.run(model=model, config={"max_steps": 1}), **notes()}


def test_rounding_of_many_layers_in_bfloat16_is_no_difference() -> None:
    found = forked(in_bfloat16)
    assert found["fallbacks"] == []
    (note,) = [note for note in found["replaced"] if "were compared" in note]
    assert "the row that moves differs by 0;" not in note, "nothing was rounded, so nothing was shown"


def with_tf32(trainer: Any) -> dict[str, Any]:
    torch.backends.fp32_precision = "tf32"  # what transformers does for tf32=True with torch 2.9 and later
    return step(trainer, batch({"seed": 7}))


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch 2.9 has the name")
def test_a_run_in_tf32_is_moved(trainers: dict[str, Any]) -> None:
    found = forked(with_tf32, trainers["GRPO"])
    assert found["tokens"] < 4 * 34
    assert not any("failed" in note for note in found["notes"]), found["notes"]


def with_a_reference_beside_a_model_that_stays() -> dict[str, Any]:
    """Tokens so unlikely that the exponential of their negated log-probability is infinite, at padding too. The check
    leaves the model alone: a hook on it reads the mask. The reference has no such hook."""
    model = grpo_update.tiny_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(40.0)
    look = lambda module, args, kwargs: kwargs["attention_mask"].sum() and None  # noqa: E731
    model.register_forward_pre_hook(look, with_kwargs=True)
    config = {"beta": 0.01, "max_steps": 1, "learning_rate": 1e-4, "temperature": 0.3}
    return {**grpo_update.run(model=model, config=config), **notes()}


def test_a_reference_is_not_moved_without_the_model_that_is_trained() -> None:
    plain = forked(with_a_reference_beside_a_model_that_stays, env={"FUSEPATCH_GRPO_PADDING": "keep"})
    found = forked(with_a_reference_beside_a_model_that_stays)
    assert found["weights"] == pytest.approx(plain["weights"], rel=1e-5)
    assert found["logs"][0]["kl"] == pytest.approx(plain["logs"][0]["kl"], abs=1e-6)
    assert any("the comparison of moved rows with padded ones failed" in note for note in found["fallbacks"])


def with_dropout(rate: float) -> dict[str, Any]:
    return {**grpo_update.run(model=grpo_update.tiny_model(attention_dropout=rate), **CHECKED), **notes()}


def test_with_dropout_there_is_nothing_to_compare_and_rows_are_moved() -> None:
    found = forked(with_dropout, 0.1)
    (note,) = found["fallbacks"]
    assert "were not compared with padded ones (attention_dropout)" in note
    assert not any(masked for *_, masked in found["forwards"])
    assert any("were compared" in note for note in forked(with_dropout, 0.0)["replaced"])


UPDATES = [
    {"config": {"loss_type": "grpo", "num_iterations": 2}},
    {"config": {"loss_type": "bnpo", "gradient_accumulation_steps": 2, "steps_per_generation": 4}},
    # The last step of an epoch has two micro-batches.
    {
        "config": {"loss_type": "dapo", "gradient_accumulation_steps": 4, "steps_per_generation": 2, "max_steps": 4},
        "tools": True,
        "prompts": 6,
    },
    {"config": {"loss_type": "cispo", "beta": 0.04, "num_iterations": 2}, "lora": True},
    {"config": {"loss_type": "luspo", "importance_sampling_level": "sequence", "mask_truncated_completions": True}},
    {"config": {"loss_type": "dapo", "num_iterations": 2}, "liger": True},
    {"kind": "RLOO", "config": {"gradient_accumulation_steps": 2, "steps_per_generation": 4}},
    {"config": {"loss_type": "sapo", "gradient_checkpointing": True, "max_steps": 1}},
]


def updates() -> list[dict[str, Any]]:
    import torch._dynamo

    torch._dynamo.config.disable = True  # TRL has Liger's loss compiled, which is the same arithmetic
    return [grpo_update.run(**case) for case in UPDATES]


@pytest.fixture(scope="module")
def plain_updates() -> list[dict[str, Any]]:
    return forked(updates, env=PLAIN)


@pytest.mark.parametrize("env", [{}, DROP], ids=["moved", "dropped"])
def test_whole_updates_end_with_upstreams_weights(plain_updates: list[dict[str, Any]], env: dict[str, str]) -> None:
    for case, plain, patched in zip(UPDATES, plain_updates, forked(updates, env=env), strict=True):
        assert patched["weights"] == pytest.approx(plain["weights"], rel=1e-5, abs=1e-6), case
        assert patched["random"] == plain["random"], "the same random numbers were drawn"
        assert len(plain["logs"]) == len(patched["logs"]) > 0
        for wanted, found in zip(plain["logs"], patched["logs"], strict=True):
            assert found.keys() == wanted.keys()
            for name in {"loss", "grad_norm", "reward"} & wanted.keys():
                assert found[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-6), (case, name)
        tokens = [sum(rows * width for rows, width, _ in run["forwards"]) for run in (plain, patched)]
        assert tokens[1] < tokens[0], case
        assert not any(masked for *_, masked in patched["forwards"][2:]), case
