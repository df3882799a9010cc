"""`optimizer.in_backward` in verl's real FSDP2 engine (0.6.0 and later) on the CPU, as `sft_trainer` runs it."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed here", allow_module_level=True)

import fusepatch  # noqa: E402
from doors import tiny  # noqa: E402
from fusepatch.errors import InBackwardError  # noqa: E402
from kits.optimizer_flags import active, inactive  # noqa: E402
from kits.ranks import on_ranks  # noqa: E402

pytestmark = pytest.mark.upstream

ID = "optimizer.in_backward"
VERL = importlib.metadata.version("verl")
STEPS = 20
MIDDLE = 10
LENGTH = 8
FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}

if VERL >= "0.9":  # this verl takes its device from a registry, where the doors register a CPU
    os.environ.update({"VERL_USE_EXTERNAL_MODULES": "doors.cpu_platform", "VERL_PLATFORM": "cpu"})
try:
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
except ImportError as error:
    pytest.skip(f"verl {VERL} has no FSDP engine, or cannot be imported here ({error})", allow_module_level=True)


def record() -> Any:
    return next(record for record in fusepatch.status() if record.id == ID)


def on() -> Any:
    return active(OPTIMIZER_IN_BACKWARD=1, OPTIMIZER_FUSED="keep")


def engine(folder: Path, clip_grad: float = float("inf"), **changes: Any) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    contents = ["model", "optimizer"]  # torch.cpu has no random states to save
    return FSDPEngineWithLMHead(
        model_config=HFModelConfig(
            path=str(folder), use_remove_padding=False, override_config={"attn_implementation": "eager"}
        ),
        engine_config=FSDPEngineConfig(
            **{
                "strategy": "fsdp2",
                "use_torch_compile": False,
                "model_dtype": "fp32",
                "mixed_precision": FLOAT32,
                "wrap_policy": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
                **changes,
            }
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=1e-2,
            weight_decay=0.1,
            clip_grad=clip_grad,
            total_training_steps=STEPS,
            lr_warmup_steps=2,
            **({"lr_scheduler_type": "cosine"} if hasattr(FSDPOptimizerConfig, "lr_scheduler_type") else {}),
        ),
        checkpoint_config=CheckpointConfig(save_contents=contents, load_contents=contents),
    )


def batch(step: int, rank: int = 0, micro: int = 4, tokens: int = 0) -> Any:
    """Four rows as the SFT dataset makes them, and what the trainer adds about micro-batches (`tokens`: dynamic
    ones)."""
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(100 * rank + step)
    rows = [torch.randint(3, 64, (LENGTH,), generator=generator) for _ in range(4)]

    def nested(tensors: list[Any]) -> Any:
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    columns = {
        "input_ids": nested(rows),
        "position_ids": nested([torch.arange(LENGTH)] * 4),
        "loss_mask": nested([torch.ones(LENGTH, dtype=torch.long)] * 4),
    }
    settings = {
        "use_remove_padding": False,
        "use_dynamic_bsz": bool(tokens),
        "max_token_len_per_gpu": tokens,
        "micro_batch_size_per_gpu": micro,
        "temperature": 1.0,
        "global_batch_size": 4,
        "pad_mode": "no_padding",
        "pad_token_id": 0,
        "max_response_length": LENGTH,
        "use_fused_kernels": False,
    }
    return tu.get_tensordict(tensor_dict=columns, non_tensor_dict=settings)


class Seen(NamedTuple):
    """The weights at the end, the sums of gradients that the steps found, and what fusepatch recorded."""

    weights: list[float]
    norms: list[float]
    replaced: list[str]
    fallbacks: list[str]


def train(built: Any, steps: range, rank: int, **how: Any) -> list[float]:
    sft_loss = importlib.import_module(
        "verl.workers.utils.losses" if VERL >= "0.7" else "verl.workers.roles.utils.losses"
    ).sft_loss
    norms = []
    with built.train_mode():
        for step in steps:
            output = built.train_batch(batch(step, rank, **how), loss_function=functools.partial(sft_loss, config=None))
            norms.append(output["metrics"]["grad_norm"])
            built.lr_scheduler_step()
    return norms


def weights(built: Any) -> list[float]:
    return [float(x) for p in built.module.parameters() for x in p.full_tensor().detach().flatten()]


def run(
    rank: int, folder: Path, inside: bool, resume: Path | None, save: Path | None, steps: int = STEPS, **how: Any
) -> Seen:
    with on() if inside else inactive():
        built = engine(folder)
        built.initialize()
        if resume is not None:
            built.checkpoint_manager.load_checkpoint(local_path=str(resume), del_local_after_load=False)
            # Later releases save the schedule with the random states, which the CPU does not have.
            while built.lr_scheduler.last_epoch < MIDDLE:
                built.lr_scheduler.step()
        norms = train(built, range(MIDDLE if resume else 0, min(MIDDLE, steps)), rank, **how)
        if save is not None:
            built.checkpoint_manager.save_checkpoint(local_path=str(save), global_step=MIDDLE)
        norms += train(built, range(MIDDLE, steps), rank, **how)
        if inside:
            assert record().calls == 1
        notes = record()
        return Seen(weights(built), norms, [n.text for n in notes.replaced], [n.text for n in notes.fallbacks])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.save_tiny_model("llama", folder)
    return folder


def close(one: list[float], other: list[float]) -> bool:
    first, second = torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64)
    return bool((first - second).norm() <= 1e-6 * first.norm())


@pytest.mark.parametrize("ranks", [1, 2])
def test_twenty_steps_and_a_resume_both_ways(ranks: int, model: Path, tmp_path: Path) -> None:
    def on_each(inside: bool, resume: str | None, save: str | None) -> Seen:
        found = on_ranks(
            ranks, run, model, inside, tmp_path / resume if resume else None, tmp_path / save if save else None
        )
        assert all(seen.weights == found[0].weights for seen in found)
        return found[0]

    ordinary = on_each(False, None, "ordinary")
    inside = on_each(True, None, "inside")
    resumed_inside = on_each(True, "ordinary", None)
    resumed_ordinary = on_each(False, "inside", None)
    assert all(norm > 0 for norm in ordinary.norms)
    assert set(inside.norms) == {0.0}, "no gradient was left for the engine's own step"
    assert "updates 21 parameters inside backward" in inside.replaced[0]
    for other in (inside, resumed_inside, resumed_ordinary):
        assert close(ordinary.weights, other.weights)


def test_several_dynamic_micro_batches_take_the_ordinary_step(model: Path) -> None:
    """Two rows fill a micro-batch; a run whose batches fit into one is inside backward, this one is ordinary."""
    (ordinary,) = on_ranks(1, functools.partial(run, tokens=2 * LENGTH), model, False, None, None, 3)
    (inside,) = on_ranks(1, functools.partial(run, tokens=2 * LENGTH), model, True, None, None, 3)
    assert inside.norms == pytest.approx(ordinary.norms)
    assert all(norm > 0 for norm in inside.norms)
    assert close(ordinary.weights, inside.weights)
    assert any("batches of several micro-batches took the ordinary step" in text for text in inside.fallbacks)
    (fits,) = on_ranks(1, functools.partial(run, tokens=4 * LENGTH), model, True, None, None, 3)
    assert set(fits.norms) == {0.0}
    assert not fits.fallbacks


def refused_in_training(rank: int, folder: Path) -> tuple[str, bool]:
    with on():
        built = engine(folder)
        built.initialize()
        before = weights(built)
        try:
            train(built, range(1), rank, micro=2)
        except InBackwardError as error:
            return str(error), weights(built) == before
    raise AssertionError("it was not refused")


def test_fixed_micro_batches_are_refused_before_anything_moves(model: Path) -> None:
    ((message, same),) = on_ranks(1, refused_in_training, model)
    assert "a batch has 2 micro-batches on each rank" in message
    assert "set data.micro_batch_size_per_gpu=4" in message
    assert same


def refused_at_setup(rank: int, folder: Path, clip_grad: float, changes: dict[str, Any]) -> tuple[str, bool]:
    with on():
        built = engine(folder, clip_grad, **changes)
        try:
            built.initialize()
        except InBackwardError as error:
            return str(error), hasattr(built, "module")
    raise AssertionError("it was not refused")


@pytest.mark.parametrize(
    ("clip_grad", "changes", "texts"),
    [
        (1.0, {}, ["optim.clip_grad=1.0 (1.0 is verl's default)", "set optim.clip_grad=inf"]),
        (float("inf"), {"strategy": "fsdp"}, ["engine.strategy=fsdp:", "set engine.strategy=fsdp2"]),
        (float("inf"), {"param_offload": True}, ["set engine.param_offload=False"]),
        (float("inf"), {"optimizer_offload": True}, ["set engine.optimizer_offload=False"]),
        (float("inf"), {"offload_policy": True}, ["set engine.offload_policy=False"]),
        (0.5, {"strategy": "fsdp"}, ["optim.clip_grad=0.5", "engine.strategy=fsdp"]),
    ],
)
def test_settings_that_are_refused(clip_grad: float, changes: dict[str, Any], texts: list[str], model: Path) -> None:
    ((message, built),) = on_ranks(1, refused_at_setup, model, clip_grad, changes)
    for text in texts:
        assert text in message
    assert not built, "before the model is loaded: no parameter exists yet"


def with_a_bad_gradient(rank: int, folder: Path) -> tuple[list[str], list[bool], list[str]]:
    with on():
        built = engine(folder)
        built.initialize()
        train(built, range(1), rank)
        names = [name for name, _ in built.module.named_parameters()]
        before = [p.full_tensor().clone() for p in built.module.parameters()]
        built.module.model.norm.register_full_backward_pre_hook(
            lambda module, gradients: tuple(gradient * float("nan") for gradient in gradients)
        )
        train(built, range(1, 2), rank)
        after = [p.full_tensor() for p in built.module.parameters()]
        assert all(p.isfinite().all() for p in after)
        moved = [name for name, p, old in zip(names, after, before, strict=True) if not torch.equal(p, old)]
        return moved, [p.grad is None for p in built.module.parameters()], [n.text for n in record().fallbacks]


def test_the_guard_against_a_norm_that_is_not_finite_is_kept_for_each_gradient(model: Path) -> None:
    ((moved, gone, notes),) = on_ranks(1, with_a_bad_gradient, model)
    assert moved == ["lm_head.weight"], "its gradient was made before the one that is not finite"
    assert all(gone)
    assert "the gradient of model.norm.weight was not finite; the parameter was left as it was in that step" in notes


def ordinary_outside(rank: int, folder: Path) -> bool:
    with on():
        built = engine(folder)
        built.initialize()
        before = weights(built)
        ids = torch.randint(3, 64, (2, LENGTH))
        for _ in range(2):
            built.module(input_ids=ids, use_cache=False).logits.float().square().mean().backward()
        assert all(p.grad is not None for p in built.module.parameters())
        return weights(built) == before


def test_a_backward_outside_the_engines_own_is_an_ordinary_one(model: Path) -> None:
    assert on_ranks(1, ordinary_outside, model) == [True]
