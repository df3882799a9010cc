"""The step inside backward on parameters that FSDP2 shards, on one and on two gloo ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from torch.distributed.checkpoint import state_dict as dcp  # noqa: E402

from fusepatch.optim.in_backward import InBackward, obstacles  # noqa: E402
from kits.ranks import on_ranks  # noqa: E402

STEPS = 20
MIDDLE = 10


def sharded() -> Any:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 3))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def step_on(model: Any, rank: int, step: int) -> None:
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    model(batch).square().mean().backward()


def values(model: Any) -> list[float]:
    return [float(x) for p in model.parameters() for x in p.full_tensor().detach().flatten()]


def run(rank: int, inside: bool, fused: bool, resume: Any = None) -> tuple[list[float], Any]:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, fused=fused)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 25)
    if inside:
        assert obstacles(optimizer, model) == []
        InBackward(optimizer, {p: name for name, p in model.named_parameters()})
    middle = resume
    first = 0
    if resume is not None:
        dcp.set_state_dict(model, optimizer, model_state_dict=resume[0], optim_state_dict=resume[1])
        scheduler.load_state_dict(resume[2])
        first = MIDDLE
    for step in range(first, STEPS):
        if step == MIDDLE and resume is None:
            model_state, optimizer_state = dcp.get_state_dict(model, optimizer)
            middle = copy.deepcopy((model_state, optimizer_state, scheduler.state_dict()))
        step_on(model, rank, step)
        if inside:
            assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return values(model), middle


def both_ways(rank: int, fused: bool) -> list[list[float]]:
    ordinary, ordinary_middle = run(rank, False, fused)
    inside, inside_middle = run(rank, True, fused)
    assert ordinary_middle[1]["state"].keys() == inside_middle[1]["state"].keys()
    resumed_inside, _ = run(rank, True, fused, ordinary_middle)
    resumed_ordinary, _ = run(rank, False, fused, inside_middle)
    return [ordinary, inside, resumed_inside, resumed_ordinary]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("number", [1, 2])
def test_twenty_steps_and_a_distributed_checkpoint_both_ways(number: int, fused: bool) -> None:
    for ordinary, *others in on_ranks(number, both_ways, fused):
        assert ordinary[0] != values_at_start()[0]
        for other in others:
            assert other == pytest.approx(ordinary, rel=1e-6, abs=1e-7)


def values_at_start() -> list[float]:
    torch.manual_seed(0)
    return [float(x) for x in torch.nn.Linear(6, 10).weight.detach().flatten()]


def with_a_bad_gradient(rank: int, fused: bool) -> tuple[list[list[str]], list[bool]]:
    """The gradients of the last layer are NaN on rank 0, before the reduction, and nowhere else."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, fused=fused)
    told: list[list[str]] = []
    InBackward(optimizer, {p: name for name, p in model.named_parameters()}, on_skipped=told.append)
    step_on(model, rank, 0)
    optimizer.step()
    before = [p.full_tensor().clone() for p in model.parameters()]
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(rank))
    hidden = torch.tanh(model[0](batch))
    hidden.register_hook(torch.nan_to_num)
    (model[2](hidden).square().mean() * (float("nan") if rank == 0 else 1.0)).backward()
    optimizer.step()
    assert all(p.full_tensor().isfinite().all() for p in model.parameters())
    return told, [torch.equal(p.full_tensor(), old) for p, old in zip(model.parameters(), before, strict=True)]


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_that_are_not_finite_leave_their_parameter_alone(fused: bool) -> None:
    """NaN on one rank is NaN everywhere once it is reduced."""
    for told, same in on_ranks(2, with_a_bad_gradient, fused):
        assert same == [False, False, True, True]
        assert [sorted(names) for names in told] == [["2.bias", "2.weight"]]


def accumulated(rank: int, inside: bool) -> list[float]:
    """Two backward passes per step, the first without reduction: the hooks run once, with the sum."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if inside:
        InBackward(optimizer, {})
    for step in range(4):
        model.set_requires_gradient_sync(False)
        step_on(model, rank, 2 * step)
        model.set_requires_gradient_sync(True)
        step_on(model, rank, 2 * step + 1)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def accumulated_both(rank: int) -> tuple[list[float], list[float]]:
    return accumulated(rank, False), accumulated(rank, True)


def test_accumulation_with_deferred_reduction_is_exact() -> None:
    for ordinary, inside in on_ranks(2, accumulated_both):
        assert inside == pytest.approx(ordinary, rel=1e-6, abs=1e-7)
