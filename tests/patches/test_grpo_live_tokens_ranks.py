"""`grpo.live_tokens` on two gloo ranks: whole updates of TRL's GRPOTrainer under DDP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from doors import grpo_update
from kits.forked import forked
from kits.ranks import on_ranks

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

CASE = {"config": {"loss_type": "grpo", "num_iterations": 2, "max_steps": 2, "shuffle_dataset": False}, "dead": "fours"}
DROP = {"FUSEPATCH_GRPO_ZERO_ADVANTAGE": "drop"}


def on_rank(rank: int, env: dict[str, str] | None, case: dict[str, Any]) -> dict[str, Any]:
    import fusepatch

    if env is not None:
        os.environ.update(env)
        fusepatch.activate()
    found = grpo_update.run(**case)
    return {"weights": found["weights"], "forwards": found["forwards"], "logs": found["logs"]}


def test_a_rank_of_which_no_sequence_has_a_gradient_trains_with_the_other() -> None:
    """The first four prompts of each eight are of rank 0, the others, with equal rewards, of rank 1."""
    one = {**CASE, "config": {**CASE["config"], "per_device_train_batch_size": 8}}
    alone = forked(on_rank, 0, None, one, env={"FUSEPATCH": "0"})
    plain = on_ranks(2, on_rank, None, CASE)
    found = on_ranks(2, on_rank, DROP, CASE)
    for rank in (0, 1):
        assert found[rank]["weights"] == pytest.approx(plain[rank]["weights"], rel=1e-5, abs=1e-6)
        assert found[rank]["weights"] == pytest.approx(alone["weights"], rel=1e-5, abs=1e-6)
    for wanted, patched in zip(plain[0]["logs"], found[0]["logs"], strict=True):
        assert patched["loss"] == pytest.approx(wanted["loss"], rel=1e-5, abs=1e-6)
        assert patched["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    assert len(found[0]["forwards"]) == len(found[1]["forwards"])
    rows = [[size for size, *_ in found[rank]["forwards"]] for rank in (0, 1)]
    assert rows[0].count(1) == 0
    assert rows[1].count(1) == 8, "one row in each of the micro-batches of two steps"


def on_one_rank_with_more(rank: int, env: dict[str, str], folder: str) -> dict[str, Any]:
    """One micro-batch under DDP; rank 0 gives the model something that keeps its rows where they are."""
    import fusepatch

    os.environ.update(env)
    fusepatch.activate()
    trainer = grpo_update.trainer(Path(folder) / str(rank), config={"loss_type": "grpo"})
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    model = torch.nn.parallel.DistributedDataParallel(trainer.model)
    wrapped: list[int] = []
    model.register_forward_pre_hook(lambda module, args: wrapped.append(1))
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :3], mask[1, 16:] = 0, 0
    ids = torch.randint(4, grpo_update.VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(rank)) * mask
    inputs = {
        "prompt_ids": ids[:, :8],
        "prompt_mask": mask[:, :8],
        "completion_ids": ids[:, 8:],
        "completion_mask": mask[:, 8:],
        "advantages": torch.tensor([1.0, -1.0]),
    }
    if rank == 0:
        inputs["token_type_ids"] = torch.zeros_like(ids)
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    norms = [float(param.grad.norm()) for param in trainer.model.parameters()]
    return {"norms": norms, "wrapped": len(wrapped)}


def test_the_check_of_one_rank_alone_does_not_wait_for_the_others(tmp_path: Path) -> None:
    found = on_ranks(2, on_one_rank_with_more, {}, str(tmp_path))
    assert [rank["wrapped"] for rank in found] == [1, 1], "DDP sends the buffers at each of its forwards"
    assert found[0]["norms"] == pytest.approx(found[1]["norms"], rel=1e-5)
    assert max(found[0]["norms"]) > 0


def sharded(rank: int, env: dict[str, str] | None, folder: str) -> dict[str, Any]:
    """One micro-batch under FSDP2, of which rank 1 has sequences of advantage 0 only."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import fusepatch

    if env is not None:
        os.environ.update(env)
        fusepatch.activate()
    trainer = grpo_update.trainer(Path(folder) / str(rank), config={"loss_type": "grpo"})
    mesh = init_device_mesh("cpu", (2,))
    for layer in trainer.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(trainer.model, mesh=mesh)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    numbers = torch.Generator().manual_seed(rank)
    columns = torch.arange(20)
    mask = torch.stack([((columns >= 8 - p) & (columns < 8 + c)).long() for p, c in ((3, 12), (8, 2), (5, 7))])
    ids = torch.randint(4, grpo_update.VOCABULARY, (3, 20), generator=numbers) * mask
    inputs = {
        "prompt_ids": ids[:, :8],
        "prompt_mask": mask[:, :8],
        "completion_ids": ids[:, 8:],
        "completion_mask": mask[:, 8:],
        "advantages": torch.zeros(3) if rank else torch.tensor([1.0, 0.0, -0.5]),
    }
    seen: list[list[int]] = []
    trainer.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(list(kwargs["input_ids"].shape)), with_kwargs=True
    )
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = [param.grad.full_tensor().flatten() for param in trainer.model.parameters()]
    return {"loss": float(loss), "gradients": torch.cat(gradients).tolist(), "shapes": seen}


def test_a_sharded_model_is_moved_and_every_rank_runs_it_as_often(tmp_path: Path) -> None:
    plain = on_ranks(2, sharded, None, str(tmp_path / "plain"))
    found = on_ranks(2, sharded, DROP, str(tmp_path / "found"))
    for rank in (0, 1):
        assert found[rank]["loss"] == pytest.approx(plain[rank]["loss"], rel=1e-5, abs=1e-6)
        assert found[rank]["gradients"] == pytest.approx(plain[rank]["gradients"], rel=1e-4, abs=1e-6)
    assert [shapes[-1] for shapes in (run["shapes"] for run in found)] == [[2, 16], [1, 16]]
    assert [len(run["shapes"]) for run in found] == [3, 3], "the check, and the micro-batch"
