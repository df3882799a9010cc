"""`grpo.live_tokens` in verl's real FSDP2 engine (0.7.1 and later) on the CPU, with verl's own ppo_loss, as its actor
runs it."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed here", allow_module_level=True)
VERL = tuple(int(part) for part in importlib.metadata.version("verl").split(".")[:3])
if VERL < (0, 7, 1):
    pytest.skip("the engine divides by the tokens of all micro-batches from verl 0.7.1 on", allow_module_level=True)

import fusepatch  # noqa: E402
from doors import tiny  # noqa: E402
from kits.optimizer_flags import active, inactive  # noqa: E402
from kits.ranks import on_ranks  # noqa: E402
from kits.verl_engine import engine  # noqa: E402

pytestmark = pytest.mark.upstream

ID = "grpo.live_tokens"
PROMPT, RESPONSE = 4, 8
TOLERANCE = 1e-5 if VERL >= (0, 8) else 1e-3
"""Of gradient norms and losses, relative: 0.7.1 computes in bfloat16 whatever the configuration says."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.save_tiny_model("llama", folder)
    return folder


def batch(advantages: list[float], ranks: int, rank: int, **settings: Any) -> Any:
    """Rows as the actor's worker gets them: responses of drawn lengths, one advantage for all tokens of a row."""
    from verl.utils import tensordict_utils

    generator = torch.Generator().manual_seed(rank)
    rows = len(advantages)
    lengths = torch.randint(2, RESPONSE + 1, (rows,), generator=generator).tolist()

    def nested(tensors: list[Any]) -> Any:
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    mask = torch.tensor([[1] * length + [0] * (RESPONSE - length) for length in lengths])
    old = -4 + 0.2 * torch.randn(rows, RESPONSE, generator=generator)
    columns = {
        "input_ids": nested([torch.randint(3, 64, (PROMPT + length,), generator=generator) for length in lengths]),
        "position_ids": nested([torch.arange(PROMPT + length) for length in lengths]),
        "prompts": torch.ones(rows, PROMPT, dtype=torch.long),
        "responses": torch.ones(rows, RESPONSE, dtype=torch.long),
        "attention_mask": torch.cat([torch.ones(rows, PROMPT, dtype=torch.long), mask], dim=1),
        "response_mask": mask,
        "loss_mask": mask,
        "old_log_probs": old,
        "ref_log_prob": old - 0.1,
        "advantages": torch.tensor(advantages)[:, None] * mask,
    }
    return tensordict_utils.get_tensordict(
        tensor_dict=columns,
        non_tensor_dict={
            "use_remove_padding": False,
            "use_dynamic_bsz": False,
            "max_token_len_per_gpu": 2 * (PROMPT + RESPONSE),
            "micro_batch_size_per_gpu": 2,
            "temperature": 1.0,
            "global_batch_size": rows * ranks,
            "pad_mode": "no_padding",
            "pad_token_id": 0,
            "max_response_length": RESPONSE,
            "max_response_len": RESPONSE,
            "max_seq_len": PROMPT + RESPONSE,
            "calculate_entropy": False,
            "use_fused_kernels": False,
            **settings,
        },
    )


class Seen(NamedTuple):
    """One update: its loss, the norm of the gradient, the weights after it, the tokens that entered the model, and what
    fusepatch recorded."""

    loss: float
    norm: float
    weights: list[float]
    tokens: int
    replaced: list[str]
    fallbacks: list[str]


def update(
    rank: int,
    ranks: int,
    folder: Path,
    patched: bool,
    advantages: list[list[float]],
    config: dict[str, Any],
    settings: dict[str, Any],
) -> Seen:
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    values = {
        "strategy": "fsdp2",
        "rollout_n": 1,
        "use_dynamic_bsz": False,
        "ppo_micro_batch_size_per_gpu": 2,
        **config,
    }
    with active(GRPO_ZERO_ADVANTAGE="drop") if patched else inactive():
        built = engine(folder)
        tokens = 0

        def count(_: Any, positional: Any, named: Any) -> None:
            nonlocal tokens
            tokens += int((named["attention_mask"] != 0).sum())

        built.module.register_forward_pre_hook(count, with_kwargs=True)
        loss = functools.partial(ppo_loss, config=ActorConfig(**values))
        with built.train_mode():
            output = built.train_batch(batch(advantages[rank], ranks, rank, **settings), loss_function=loss)
        metrics = output["metrics"]
        (record,) = (record for record in fusepatch.status() if record.id == ID)
        weights = [float(x) for p in built.module.parameters() for x in p.full_tensor().detach().flatten()]
        return Seen(
            float(sum(output["loss"])),
            float(metrics["grad_norm"]),
            weights,
            tokens,
            [note.text for note in record.replaced],
            [note.text for note in record.fallbacks],
        )


def both(folder: Path, advantages: list[list[float]], config: Any = None, settings: Any = None) -> Any:
    """What each rank saw, without fusepatch and with it."""
    ranks = len(advantages)
    return tuple(
        on_ranks(ranks, update, ranks, folder, patched, advantages, config or {}, settings or {})
        for patched in (False, True)
    )


def assert_same_update(plain: list[Seen], patched: list[Seen]) -> None:
    for one, other in zip(plain, patched, strict=True):
        assert other.norm == pytest.approx(one.norm, rel=TOLERANCE)
        # Adam's first step has the size of the learning rate, however small the gradient: its rounding shows in full.
        first, second = (torch.tensor(seen.weights, dtype=torch.float64) for seen in (one, other))
        assert (first - second).norm() <= (1e-6 if TOLERANCE < 1e-4 else 1e-2) * first.norm()
    assert sum(seen.loss for seen in patched) == pytest.approx(sum(seen.loss for seen in plain), rel=TOLERANCE)


HALF = [[0.5, 0.0, 0.0, -1.0, 0.0, 0.3, 0.0, 0.0]]
LEFT_OUT = "an update ran without sequences whose advantages are all 0"


@pytest.mark.parametrize(
    ("config", "dynamic"),
    [
        ({}, True),
        ({"loss_agg_mode": "seq-mean-token-sum-norm", "policy_loss": {"loss_mode": "gspo"}}, False),
        ({"loss_agg_mode": "seq-mean-token-mean", "policy_loss": {"loss_mode": "gpg"}}, False),
    ],
    ids=["vanilla", "gspo", "gpg"],
)
def test_the_update_is_the_same_without_them(config: dict[str, Any], dynamic: bool, model: Path) -> None:
    plain, patched = both(model, HALF, config, {"use_dynamic_bsz": dynamic})
    assert_same_update(plain, patched)
    assert patched[0].tokens < plain[0].tokens
    assert LEFT_OUT in patched[0].replaced[0]
    assert not patched[0].fallbacks


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_rank_that_has_only_such_sequences(dynamic: bool, model: Path) -> None:
    """The other rank needs five rows, which are three micro-batches: this one runs as many."""
    advantages = [[0.0] * 8, [1.0, 0.0, -0.5, 0.25, 0.0, 0.0, 0.5, -1.0]]
    plain, patched = both(model, advantages, {}, {"use_dynamic_bsz": dynamic})
    assert_same_update(plain, patched)
    assert all(seen.tokens < before.tokens for seen, before in zip(patched, plain, strict=True))


def test_a_batch_of_such_sequences_only(model: Path) -> None:
    plain, patched = both(model, [[0.0] * 4])
    assert_same_update(plain, patched)
    assert patched[0].norm == 0
    assert patched[0].tokens < plain[0].tokens


@pytest.mark.parametrize(
    ("config", "settings", "text"),
    [
        ({"entropy_coeff": 0.1}, {"calculate_entropy": True}, "entropy_coeff=0.1"),
        ({"use_kl_loss": True}, {}, "use_kl_loss=True"),
        ({}, {"calculate_entropy": True}, "calculate_entropy is on"),
        ({"policy_loss": {"loss_mode": "geo_mean"}}, {}, "policy_loss.loss_mode=geo_mean"),
    ],
)
def test_where_their_gradient_is_not_0_they_stay(
    config: dict[str, Any], settings: dict[str, Any], text: str, model: Path
) -> None:
    plain, patched = both(model, HALF, config, settings)
    assert_same_update(plain, patched)
    assert patched[0].tokens == plain[0].tokens
    assert text in patched[0].fallbacks[0]
    assert not patched[0].replaced


@pytest.mark.skipif(VERL >= (0, 8), reason="the legacy worker is gone from 0.8 on")
def test_the_legacy_worker_keeps_them_and_says_so() -> None:
    with active(GRPO_ZERO_ADVANTAGE="drop"):
        from verl.workers.actor.dp_actor import DataParallelPPOActor

        # Without its module, configuration and batch it stops in upstream's own code, after the handler has spoken.
        with pytest.raises(AttributeError):
            DataParallelPPOActor.__new__(DataParallelPPOActor).update_policy(data=None)
        (record,) = (record for record in fusepatch.status() if record.id == ID)
        assert "use_legacy_worker_impl=disable" in record.fallbacks[0].text
