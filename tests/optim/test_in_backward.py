"""The step inside backward, on torch's own optimizers: equal to the ordinary step, and refused where it would not
be."""

from __future__ import annotations

import copy
import functools
import gc
import io
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from fusepatch.errors import InBackwardError  # noqa: E402
from fusepatch.optim import in_backward  # noqa: E402
from fusepatch.optim.in_backward import InBackward, clips, obstacles, reached_by_several_names, refuse  # noqa: E402

STEPS = 20
MIDDLE = 10


class Network(torch.nn.Module):
    """Matrices and vectors, in two param groups."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(6, 8)
        self.last = torch.nn.Linear(8, 3)

    def forward(self, inputs: Any) -> Any:
        return self.last(torch.tanh(self.first(inputs)))


def groups(model: Any) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]


def matrices_only(model: Any) -> list[Any]:
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim > 1)
    return [p for p in model.parameters() if p.ndim > 1]


CLASSES: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda m: torch.optim.SGD(groups(m), lr=0.1, momentum=0.9),
    "SGD fused": lambda m: torch.optim.SGD(groups(m), lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda m: torch.optim.Adam(groups(m), lr=0.1),
    "AdamW": lambda m: torch.optim.AdamW(groups(m), lr=0.1),
    "AdamW fused": lambda m: torch.optim.AdamW(groups(m), lr=0.1, fused=True),
    "AdamW foreach, amsgrad": lambda m: torch.optim.AdamW(groups(m), lr=0.1, foreach=True, amsgrad=True),
    "AdamW, tensor lr": lambda m: torch.optim.AdamW(groups(m), lr=torch.tensor(0.1)),
    "Adagrad": lambda m: torch.optim.Adagrad(groups(m), lr=0.1, lr_decay=0.1),
    "Adadelta": lambda m: torch.optim.Adadelta(groups(m), lr=0.5),
    "Adafactor": lambda m: torch.optim.Adafactor(groups(m), lr=0.1),
    "Adamax": lambda m: torch.optim.Adamax(groups(m), lr=0.1),
    "ASGD": lambda m: torch.optim.ASGD(groups(m), lr=0.1),
    "NAdam": lambda m: torch.optim.NAdam(groups(m), lr=0.1),
    "RAdam": lambda m: torch.optim.RAdam(groups(m), lr=0.1),
    "RMSprop": lambda m: torch.optim.RMSprop(groups(m), lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.01),
    "Muon": lambda m: torch.optim.Muon(matrices_only(m), lr=0.1),
}
if not hasattr(torch.optim, "Muon"):
    del CLASSES["Muon"]


def hooked(model: Any, optimizer: Any, **options: Any) -> InBackward:
    assert obstacles(optimizer, model) == []
    return InBackward(optimizer, {p: name for name, p in model.named_parameters()}, **options)


def one_backward(model: Any, step: int) -> None:
    batch = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
    model(batch).square().mean().backward()


def schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / (STEPS + 5))


def train(model: Any, optimizer: Any, scheduler: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        one_backward(model, step)
        optimizer.step()
        scheduler.step()


def flat(model: Any) -> Any:
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


def equal(one: Any, other: Any) -> bool:
    return bool((one - other).norm() <= 1e-6 * one.norm())


@pytest.mark.parametrize("name", CLASSES)
def test_twenty_steps_and_a_resume_both_ways(name: str) -> None:
    """Groups, momentum, a learning rate that changes; a checkpoint of either run is loaded into the other."""

    def run(inside: bool, resume: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        model = Network()
        optimizer = CLASSES[name](model)
        scheduler = schedule(optimizer)
        attached = hooked(model, optimizer) if inside else None
        middle = resume
        if resume is None:
            train(model, optimizer, scheduler, range(MIDDLE))
            parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            middle = copy.deepcopy({part: there.state_dict() for part, there in parts.items()})
        else:
            resume = copy.deepcopy(resume)
            model.load_state_dict(resume["model"])
            optimizer.load_state_dict(resume["optimizer"])
            scheduler.load_state_dict(resume["scheduler"])
        assert middle is not None
        train(model, optimizer, scheduler, range(MIDDLE, STEPS))
        if attached is not None:
            attached.remove()
        return flat(model), middle, optimizer.state_dict()

    start = flat(Network())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ordinary, ordinary_middle, ordinary_state = run(False)
        inside, inside_middle, inside_state = run(True)
        resumed_inside, _, _ = run(True, ordinary_middle)
        resumed_ordinary, _, _ = run(False, inside_middle)
    assert (ordinary - start).norm() > 1e-3, "it trained"
    for other in (inside, resumed_inside, resumed_ordinary):
        assert equal(ordinary, other)
    assert shapes(inside_state) == shapes(ordinary_state)
    assert shapes(inside_middle["optimizer"]) == shapes(ordinary_middle["optimizer"])


@pytest.mark.parametrize("name", CLASSES)
def test_each_update_raises_the_version_that_autograd_looks_at(name: str) -> None:
    """torch's fused kernels do not, and what another package's kernels do is their own matter."""
    model = Network()
    optimizer = CLASSES[name](model)
    trained = [p for p in model.parameters() if p.requires_grad]
    hooked(model, optimizer)
    before = [p._version for p in trained]
    one_backward(model, 0)
    assert all(p._version > old for p, old in zip(trained, before, strict=True))


def shapes(state: dict[str, Any]) -> Any:
    """The state's keys with shapes and dtypes; the groups as they are."""
    tensors = {
        index: {
            key: (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value for key, value in own.items()
        }
        for index, own in state["state"].items()
    }
    return tensors, [{key: str(value) for key, value in group.items()} for group in state["param_groups"]]


def test_gradients_are_gone_and_the_frameworks_step_changes_nothing() -> None:
    model = Network()
    optimizer = torch.optim.AdamW(groups(model), lr=0.1)
    hooked(model, optimizer)
    before = flat(model)
    one_backward(model, 0)
    assert all(p.grad is None for p in model.parameters())
    after = flat(model)
    assert not torch.equal(before, after)
    assert [int(state["step"]) for state in optimizer.state.values()] == [1, 1, 1, 1]
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(flat(model), after)
    assert [int(state["step"]) for state in optimizer.state.values()] == [1, 1, 1, 1]


def test_no_two_gradients_are_alive_at_once() -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alive: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in model.parameters()))
        )
    hooked(model, optimizer)
    one_backward(model, 0)
    assert alive == [1, 1, 1, 1]


def test_a_second_backward_raises_before_it_changes_anything() -> None:
    model = Network()
    optimizer = torch.optim.AdamW(groups(model), lr=0.1)
    hooked(model, optimizer)
    one_backward(model, 0)
    once = flat(model)
    with pytest.raises(
        InBackwardError, match=r"the gradient of last\.\w+ arrived a second time before the optimizer's step"
    ):
        one_backward(model, 1)
    assert torch.equal(flat(model), once)
    optimizer.step()


def test_disarmed_and_removed_hooks_leave_backward_alone() -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = hooked(model, optimizer, armed=False)
    before = flat(model)
    for _ in range(2):
        one_backward(model, 0)
    assert all(p.grad is not None for p in model.parameters())
    assert torch.equal(flat(model), before)
    optimizer.step()
    optimizer.zero_grad()
    attached.armed = True
    one_backward(model, 1)
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    attached.remove()
    before = flat(model)
    one_backward(model, 2)
    assert all(p.grad is not None for p in model.parameters())
    assert torch.equal(flat(model), before)
    assert not optimizer._optimizer_step_post_hooks


def test_parameters_that_come_later_are_updated_by_the_ordinary_step() -> None:
    def run(inside: bool) -> Any:
        model = Network()
        late = torch.nn.Parameter(torch.ones(3))
        model.first.weight.requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if inside:
            assert hooked(model, optimizer).number_of_parameters == 3
            assert not model.first.weight._post_accumulate_grad_hooks
        for step in range(6):
            if step == 2:
                model.first.weight.requires_grad_(True)
            if step == 4:
                optimizer.add_param_group({"params": [late], "lr": 0.5})
            optimizer.zero_grad()
            batch = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
            (model(batch) * late).square().mean().backward()
            optimizer.step()
        return torch.cat([flat(model), late.detach().double()])

    assert equal(run(False), run(True))


def test_groups_that_are_replaced_are_the_ones_that_count() -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked(model, optimizer)
    one_backward(model, 0)
    optimizer.step()
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.0
    optimizer.load_state_dict(state)
    before = flat(model)
    one_backward(model, 1)
    assert torch.equal(flat(model), before), "the learning rate of the checkpoint is 0"


def test_post_hooks_of_others_run_once_per_step_and_see_no_gradients() -> None:
    model = Network()
    optimizer = torch.optim.AdamW(groups(model), lr=0.1)
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(sum(p.grad is not None for p in model.parameters())))
    hooked(model, optimizer)
    for step in range(2):
        one_backward(model, step)
        optimizer.step()
    assert seen == [0, 0]


def clip(optimizer: Any, args: Any, kwargs: Any) -> None:
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)


def test_a_step_pre_hook_is_refused_and_ones_of_this_package_are_not() -> None:
    from fusepatch.optim import capability

    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    own = optimizer.register_step_pre_hook(lambda *_: None)
    optimizer._optimizer_step_pre_hooks[own.id] = capability.fused
    assert found(optimizer) == ""
    handle = optimizer.register_step_pre_hook(functools.partial(clip))
    assert "a step pre-hook is registered (clip in" in found(optimizer)
    handle.remove()
    everywhere = register_optimizer_step_pre_hook(clip)
    try:
        assert "Tensor.register_hook" in found(optimizer)
    finally:
        everywhere.remove()


def test_what_is_put_around_the_step_later_is_seen_before_anything_moves() -> None:
    """A scheduler wraps the step and is welcome, also between two steps; others are not."""

    def wrapped(optimizer: Any) -> None:
        step = optimizer.step

        @functools.wraps(step)
        def clipped(*args: Any, **kwargs: Any) -> Any:
            clip(optimizer, (), {})
            return step(*args, **kwargs)

        optimizer.step = clipped

    def replaced(optimizer: Any) -> None:
        optimizer.step = types.MethodType(lambda self, closure=None: None, optimizer)

    for change, text in (
        (lambda optimizer: optimizer.register_step_pre_hook(clip), "a step pre-hook is registered (clip in"),
        (wrapped, "step was replaced on this AdamW (clipped in"),
        (replaced, "step was replaced on this AdamW (<lambda> in"),
    ):
        model = Network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        hooked(model, optimizer)
        one_backward(model, 0)
        optimizer.step()
        scheduler = schedule(optimizer)
        assert found(optimizer) == ""
        one_backward(model, 1)
        optimizer.step()
        scheduler.step()
        before = flat(model)
        change(optimizer)
        with pytest.raises(InBackwardError) as raised:
            one_backward(model, 2)
        assert text in str(raised.value)
        assert "before this step has changed a parameter" in str(raised.value)
        assert torch.equal(flat(model), before)


def test_a_step_that_is_wrapped_on_the_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    step = torch.optim.SGD.step

    @functools.wraps(step)
    def clipped(self: Any, closure: Any = None) -> Any:
        clip(self, (), {})
        return step(self, closure)

    optimizer = torch.optim.SGD(Network().parameters(), lr=0.1)
    assert found(optimizer) == ""
    monkeypatch.setattr(torch.optim.SGD, "step", clipped)
    assert "torch.optim.sgd.SGD.step is wrapped (clipped in" in found(optimizer)


def test_another_optimizer_that_is_stepped_is_seen_before_anything_moves() -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepped = [optimizer]
    hooked(model, optimizer, stepped=lambda: stepped[0])
    one_backward(model, 0)
    optimizer.step()
    stepped[0] = torch.optim.AdamW(model.parameters())
    before = flat(model)
    with pytest.raises(
        InBackwardError, match=r"another optimizer \(torch\.optim\.adamw\.AdamW\) than the torch\.optim\.sgd\.SGD"
    ):
        one_backward(model, 1)
    assert torch.equal(flat(model), before)


def test_copies_and_pickles_carry_no_hooks() -> None:
    model = Network()
    optimizer = torch.optim.AdamW(groups(model), lr=0.1)
    attached = hooked(model, optimizer)
    one_backward(model, 0)
    optimizer.step()
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save((model, optimizer), buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
    for twin, its_optimizer in (copy.deepcopy((model, optimizer)), loaded):
        before = flat(twin)
        assert torch.equal(before, flat(model))
        one_backward(twin, 1)
        assert torch.equal(flat(twin), before)
        assert all(p.grad is not None for p in twin.parameters())
        its_optimizer.step()
        assert not torch.equal(flat(twin), before)
    attached.remove()
    one_backward(model, 1)
    optimizer.step()
    assert torch.equal(flat(model), flat(twin))


class Shared(torch.nn.Module):
    """One weight under two names, used in two checkpointed segments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inlet = torch.nn.Linear(6, 6)
        self.one, self.two = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.reentrant = True

    def forward(self, inputs: Any) -> Any:
        hidden = self.inlet(inputs)
        hidden = checkpoint(self.one, hidden, use_reentrant=self.reentrant)
        return checkpoint(self.two, torch.tanh(hidden), use_reentrant=self.reentrant)


def test_tied_weights_under_checkpointing() -> None:
    def run(inside: bool, reentrant: bool, leave: bool = False) -> Any:
        model = Shared()
        model.reentrant = reentrant
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if inside:
            hooked(model, optimizer, leave=reached_by_several_names(model) if leave else ())
        train(model, optimizer, schedule(optimizer), range(5))
        return flat(model)

    assert reached_by_several_names(Shared())[0].shape == (6, 6)
    assert len(reached_by_several_names(Shared())) == 1
    assert reached_by_several_names(Network()) == []
    ordinary = run(False, True)
    assert equal(ordinary, run(True, False)), "one graph: the gradient comes once"
    with pytest.raises(InBackwardError, match="use_reentrant"):
        run(True, True)
    assert equal(ordinary, run(True, True, leave=True)), "the ordinary step takes it"


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "RMSprop"])
def test_gradients_that_are_not_finite_leave_their_parameter_alone(kind: str, fused: bool) -> None:
    if fused and kind == "RMSprop":
        pytest.skip("RMSprop has no fused form")
    model = Network()
    options = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(
        model.parameters(), lr=0.1, weight_decay=0.1, **({"fused": True} if fused else {}), **options
    )
    told: list[list[str]] = []
    hooked(model, optimizer, on_skipped=told.append)
    one_backward(model, 0)
    optimizer.step()
    assert told == []
    state = copy.deepcopy(optimizer.state_dict()["state"])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.first.weight.register_hook(lambda gradient: gradient * float("nan"))
    one_backward(model, 1)
    optimizer.step()
    assert told == [["first.weight"]]
    for index, (name, parameter) in enumerate(model.named_parameters()):
        assert parameter.grad is None
        same = torch.equal(parameter, before[name])
        assert same == (name == "first.weight"), name
        for key, value in optimizer.state_dict()["state"].get(index, {}).items():
            if name == "first.weight" and isinstance(value, torch.Tensor):
                assert torch.equal(value, state[index][key]), key
    assert not hasattr(optimizer, "found_inf")


def test_without_the_guard_such_a_gradient_does_what_it_always_does() -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked(model, optimizer)
    model.first.weight.register_hook(lambda gradient: gradient * float("nan"))
    one_backward(model, 0)
    assert model.first.weight.isnan().all()


def test_sparse_gradients_of_a_fused_optimizer() -> None:
    def run(inside: bool, fused: bool | None) -> Any:
        torch.manual_seed(0)
        table = torch.nn.Embedding(10, 4, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1, fused=fused)
        if inside:
            hooked(table, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            table(torch.tensor([step, step + 1])).square().sum().backward()
            optimizer.step()
        return flat(table)

    assert equal(run(False, None), run(True, None))
    assert equal(run(False, None), run(True, True)), "the fused form would have raised"


class OwnStep(torch.optim.SGD):
    """A step that looks at all parameters."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.1 / len(group["params"])
        return super().step(closure)


class KeepsStep(torch.optim.AdamW):
    """Another constructor, the same step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)


def found(optimizer: Any, model: Any = None) -> str:
    return "\n".join(map(str, obstacles(optimizer, model or Network())))


def test_optimizers_whose_step_is_not_per_parameter() -> None:
    model = Network()
    assert "torch.optim.lbfgs.LBFGS" in found(torch.optim.LBFGS(model.parameters()))
    assert "OwnStep.step" in found(OwnStep(model.parameters(), lr=0.1))
    assert found(KeepsStep(model.parameters())) == ""
    assert "not a torch.optim.Optimizer" in found(object())
    compiled = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled.step = torch.compile(compiled.step)
    assert "optimizer.step is compiled" in found(compiled)
    assert "differentiable=True" in found(torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True))


def test_a_known_name_in_another_package_is_not_known() -> None:
    class Adam(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        def step(self, closure: Any = None) -> None:
            pass

    Adam.step.__qualname__ = "Adam.step"
    assert "Adam.step" in found(Adam(Network().parameters()))


def test_wrapped_models_and_parameters_that_are_elsewhere() -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert "DataParallel" in found(optimizer, torch.nn.DataParallel(model))
    from torch.distributed.fsdp import FullyShardedDataParallel

    # FSDP1 cannot be constructed without an accelerator: the class alone.
    sharded = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    torch.nn.Module.__init__(sharded)
    assert "FSDP2 (fully_shard)" in found(optimizer, torch.nn.Sequential(sharded))
    engine = type("Engine", (torch.nn.Module,), {"__module__": "own"})()
    assert "in an engine" not in found(optimizer, engine)
    of_caller = in_backward.Caller(wrappers={"own.Engine": ("the model is in an engine", "it steps", "do without")})
    assert "in an engine: it steps" in "\n".join(map(str, obstacles(optimizer, engine, of_caller)))
    meta = torch.optim.SGD([torch.nn.Parameter(torch.empty(2, device="meta"))], lr=0.1)
    assert "offloaded" in found(meta)
    from torch._dynamo import config

    # pytest's own way leaves the attribute deleted.
    with config.patch(compiled_autograd=True):
        assert "compiled autograd" in found(optimizer, model)


def test_a_refusal_names_every_obstacle_and_what_to_change() -> None:
    caller = in_backward.Caller(asked="INSIDE=1", undo="unset INSIDE")
    refuse("a.Trainer", [], caller)
    both = [in_backward.Obstacle("x=1", "it cannot", "set x=0"), in_backward.Obstacle("y=1", "neither", "set y=0")]
    with pytest.raises(InBackwardError) as raised:
        refuse("a.Trainer", both, caller)
    for part in (
        "a.Trainer cannot run inside backward (INSIDE=1)",
        "no parameter was changed",
        "x=1: it cannot; set x=0",
        "y=1: neither; set y=0",
        "or unset INSIDE.",
    ):
        assert part in str(raised.value)


def test_which_maximum_norms_clip() -> None:
    assert list(map(clips, (None, 0, 0.0, -1.0, float("inf"), 1.0, 1e9))) == [False] * 5 + [True] * 2


def test_hooks_run_on_several_threads_without_mixing_groups() -> None:
    """Autograd has a thread per device; here two backward passes of two models share one optimizer."""
    import threading

    def run(inside: bool) -> Any:
        models = [Network(), Network()]
        optimizer = torch.optim.AdamW(
            [{"params": list(m.parameters()), "lr": 0.1 * (i + 1)} for i, m in enumerate(models)]
        )
        if inside:
            InBackward(optimizer, {})
        for step in range(10):
            work = [threading.Thread(target=functools.partial(one_backward, m, step)) for m in models]
            for thread in work:
                thread.start()
            for thread in work:
                thread.join()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([flat(m) for m in models])

    assert equal(run(False), run(True))


def test_a_training_that_is_dropped_leaves_memory() -> None:
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    attached = InBackward(optimizer, {})
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    left = [weakref.ref(thing) for thing in (optimizer, attached, model.first.weight)]
    del model, optimizer, attached
    gc.collect()
    assert [reference() for reference in left] == [None, None, None]
