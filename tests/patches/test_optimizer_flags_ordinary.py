"""What else is done with an optimizer: scaled, saved, loaded, pickled, copied, compared, inspected. All as with an
ordinary one."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kits.optimizer_flags import active, flags, inactive, module  # noqa: E402

AdamW = torch.optim.AdamW
verl = module("verl.workers.config.optimizer")
trainer = module("transformers.trainer")


def parameters(count: int = 2) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(4, 3, generator=generator)) for _ in range(count)]


def train(optimizer: Any, steps: int = 2) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


class ComparesByValue(AdamW):
    """Python makes it unhashable."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ComparesByValue) and self.defaults == other.defaults


class PicklesAll(torch.optim.SGD):
    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


def skips(optimizer: Any, unscale: bool) -> tuple[list[bool], int, float]:
    """Which of four steps AcceleratedOptimizer saw skipped when two overflow, where the schedule stands then, and the
    scale."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler

    Accelerator(cpu=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    wrapped = AcceleratedOptimizer(optimizer, device_placement=True, scaler=scaler)
    schedule = AcceleratedScheduler(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)), wrapped)
    seen = []
    for step in range(4):
        held = [param for group in optimizer.param_groups for param in group["params"]]
        scaler.scale(sum(param.square().sum() for param in held)).backward()
        if step in (0, 2):
            held[-1].grad[0, 0] = float("inf")
        if unscale:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(held, 1.0)
        wrapped.step()
        schedule.step()
        seen.append(wrapped.step_was_skipped)
        wrapped.zero_grad()
    return seen, schedule.scheduler.last_epoch, scaler.get_scale()


@pytest.mark.parametrize("variables", [{}, {"OPTIMIZER_FUSED": 1}])
@pytest.mark.parametrize("how", ["as constructed", "a group added", "loaded", "copied", "pickled"])
def test_skipped_steps_are_seen(variables: dict[str, Any], how: str) -> None:
    """https://github.com/huggingface/accelerate/issues/4242: a fused step that scales by itself is never seen to be
    skipped."""
    pytest.importorskip("accelerate")
    with active(**variables):
        optimizer = trainer.construct(AdamW, parameters(), lr=0.1)
        if how == "a group added":
            optimizer.add_param_group({"params": parameters(1), "foreach": False})
        elif how == "loaded":
            train(optimizer)
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif how == "copied":
            optimizer = copy.deepcopy(optimizer)
        elif how == "pickled":
            optimizer = pickle.loads(pickle.dumps(optimizer))
        for unscale in (False, True):
            assert skips(optimizer, unscale) == ([True, False, True, False], 2, 2.0**8)
        if how in ("as constructed", "loaded"):
            assert flags(optimizer, "fused") == [(True,)]


def test_a_scaler_with_fused_and_unfused_groups() -> None:
    with active():
        optimizer = verl.construct(AdamW, parameters(), lr=0.1)
        optimizer.add_param_group({"params": parameters(1), "foreach": False})
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(2):
            scaler.scale(sum(p.sum() for group in optimizer.param_groups for p in group["params"])).backward()
            scaler.step(optimizer)
            scaler.update()
        assert flags(optimizer) == [(True, None), (None, False)]


def test_a_frameworks_own_fused_scales_as_torchs_does() -> None:
    with active():
        optimizer = trainer.construct(AdamW, parameters(), lr=0.1, fused=True)
    assert optimizer._step_supports_amp_scaling


VARIABLES: list[dict[str, Any]] = [{}, {"OPTIMIZER_FUSED": 1}, {"OPTIMIZER_FUSED": 0}, {"OPTIMIZER_FOREACH": 1}]


@pytest.mark.parametrize("variables", VARIABLES)
@pytest.mark.parametrize("passed", [{}, {"fused": True}, {"foreach": True}])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
def test_flags_of_a_checkpoint_are_those_of_a_run_without_the_patch(
    variables: dict[str, Any], passed: dict[str, Any], name: str
) -> None:
    kind = getattr(torch.optim, name)

    def saved(construct: Any) -> list[tuple[Any, ...]]:
        first, second, third = parameters(3)
        optimizer = construct(kind, [{"params": [first]}, {"params": [second], "fused": False}], lr=0.1, **passed)
        optimizer.add_param_group({"params": [third], "foreach": True})
        states = [optimizer.state_dict()]
        optimizer.load_state_dict(copy.deepcopy(states[0]))
        states.append(optimizer.state_dict())
        states.append({"param_groups": copy.deepcopy(optimizer).param_groups})
        states.append({"param_groups": pickle.loads(pickle.dumps(optimizer)).param_groups})
        return [tuple((group["fused"], group["foreach"]) for group in state["param_groups"]) for state in states]

    with active(**variables):
        patched = saved(trainer.construct)
    with inactive():
        assert patched == saved(lambda kind, *args, **kwargs: kind(*args, **kwargs))


def test_a_run_that_resumes_without_the_patch_is_an_ordinary_one(tmp_path: Path) -> None:
    def run(construct: Any, *load: Any) -> Any:
        optimizer = construct(AdamW, parameters(), lr=0.1)
        for state in load:
            optimizer.load_state_dict(state)
        train(optimizer)
        return optimizer

    def plainly(kind: Any, *args: Any, **kwargs: Any) -> Any:
        return kind(*args, **kwargs)

    with active():
        first = run(verl.construct)
        torch.save(first.state_dict(), tmp_path / "checkpoint")
        assert flags(first) == [(True, None)]
    with inactive():
        state = torch.load(tmp_path / "checkpoint")
        resumed = run(plainly, state)
        assert flags(resumed) == flags(run(plainly)) == [(None, None)]


def test_a_step_that_is_kept_on_the_device_is_saved_where_an_ordinary_run_keeps_it() -> None:
    """float64 stands for the device here: torch keeps the step of an ordinary run in the default dtype, a fused one in
    float32."""
    with active():
        torch.set_default_dtype(torch.float64)
        try:
            optimizer = verl.construct(AdamW, parameters(), lr=0.1)
            train(optimizer)
            held = {state["step"].dtype for state in optimizer.state.values()}
            saved = {state["step"].dtype for state in optimizer.state_dict()["state"].values()}
            copied = {state["step"].dtype for state in copy.deepcopy(optimizer).state.values()}
        finally:
            torch.set_default_dtype(torch.float32)
    assert (held, saved, copied) == ({torch.float32}, {torch.float64}, {torch.float64})


@pytest.mark.gpu
def test_on_cuda_a_checkpoint_holds_its_steps_on_the_cpu() -> None:
    with active():
        optimizer = verl.construct(AdamW, [param.detach().cuda().requires_grad_() for param in parameters()], lr=0.1)
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        optimizer.step()
        assert all(state["step"].is_cuda for state in optimizer.state.values())
        assert all(state["step"].is_cpu for state in optimizer.state_dict()["state"].values())
        assert all(state["step"].is_cpu for state in copy.deepcopy(optimizer).state.values())
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert all(state["step"].is_cuda for state in optimizer.state.values())
        optimizer.step()
        assert {state["step"].item() for state in optimizer.state.values()} == {2.0}


def test_state_dict_and_its_loading_by_keyword() -> None:
    """torch.distributed.checkpoint calls both so."""
    with active():
        optimizer = verl.construct(AdamW, parameters(), lr=0.1)
        train(optimizer)
        state = functools.partial(AdamW.state_dict, self=optimizer)()
        assert state["param_groups"][0]["fused"] is None
        functools.partial(AdamW.load_state_dict, self=optimizer)(state_dict=state)
        optimizer.load_state_dict(state_dict=state)
        assert flags(optimizer) == [(True, None)]


def test_distributed_checkpoint_state_is_an_ordinary_ones() -> None:
    from torch.distributed.checkpoint import state_dict as distributed

    model = torch.nn.Linear(3, 2)
    with active():
        optimizer = verl.construct(AdamW, model.parameters(), lr=0.1)
        train(optimizer)
        state = distributed.get_optimizer_state_dict(model, optimizer)
        assert {group["fused"] for group in state["param_groups"]} == {None}
        distributed.set_optimizer_state_dict(model, optimizer, state)
        assert flags(optimizer) == [(True, None)]


def test_a_hook_that_brings_other_groups_does_not_bring_their_flags() -> None:
    with active():
        optimizer = verl.construct(AdamW, parameters(), lr=0.1)
        train(optimizer)
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.register_load_state_dict_pre_hook(lambda _, given: given["there"])
        optimizer.load_state_dict({"there": state, "param_groups": []})
        assert flags(optimizer) == [(True, None)]


@pytest.mark.parametrize("kind", [ComparesByValue, PicklesAll])
def test_unhashable_ones_and_those_that_pickle_everything(kind: type[Any]) -> None:
    with active():
        optimizer = trainer.construct(kind, parameters(), lr=0.1)
        assert flags(optimizer, "fused") == [(True,)]
        optimizer.add_param_group({"params": parameters(1)})
        train(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        buffer = io.BytesIO()
        torch.save(optimizer, buffer)
        for written in (pickle.dumps(optimizer), buffer.getvalue()):
            assert b"fusepatch" not in written
        for other in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
            assert type(other) is kind
            assert flags(other, "fused") == [(None,), (None,)]
            train(other)
        assert flags(optimizer, "fused") == [(True,), (True,)]


def test_nothing_is_left_on_the_optimizer_and_nothing_is_kept_of_it() -> None:
    from fusepatch.patches import optimizer_flags

    with inactive():
        attributes = set(vars(AdamW(parameters())))
    with active():
        optimizer = verl.construct(AdamW, parameters(), lr=0.1)
        train(optimizer)
        assert set(vars(optimizer)) == attributes
        assert optimizer.defaults["fused"] is None
        assert not any(vars(optimizer)[name] for name in attributes if name.endswith("_hooks"))
        key = id(optimizer)
        assert key in optimizer_flags._managed
        del optimizer
        assert key not in optimizer_flags._managed


def test_deactivating_leaves_ordinary_optimizers() -> None:
    with active():
        ours = verl.construct(AdamW, parameters(), lr=0.1)
        theirs = trainer.construct(AdamW, parameters(), lr=0.1, fused=True)
        train(ours)
    with inactive():
        assert flags(ours) == [(None, None)]
        assert flags(theirs) == [(True, None)]
        train(ours)
        ours.load_state_dict(ours.state_dict())


def test_signatures_are_read_by_the_older_ways_too() -> None:
    with inactive():
        wanted = inspect.getfullargspec(AdamW)
    with active():
        assert inspect.getfullargspec(AdamW) == wanted
        assert inspect.getfullargspec(AdamW.__init__).args[:2] == ["self", "params"]


def test_every_fused_form_of_torch_is_looked_at() -> None:
    from fusepatch.optim import capability
    from fusepatch.patches import optimizer_flags

    has = {
        name for name in optimizer_flags.CLASSES if "fused" in inspect.signature(getattr(torch.optim, name)).parameters
    }
    assert has == capability.KNOWN == optimizer_flags.FUSED
