"""A weight that backward reads after its update: what autograd sees, what the look at recomputation sees, and what
neither does.

Whatever the way of reading, the weights are those of the ordinary step or an error is raised.
"""

from __future__ import annotations

import functools
import gc
import random
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.autograd.graph import saved_tensors_hooks  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import fusepatch  # noqa: E402
from fusepatch.errors import InBackwardError  # noqa: E402
from fusepatch.optim import in_backward, recomputation  # noqa: E402
from fusepatch.optim.in_backward import InBackward  # noqa: E402

SIZE = 4
MODIFIED = "modified by an inplace operation"
AGAIN = "a recomputed checkpointed region reads"
UNPACKED = "autograd unpacks a saved tensor that lies in"

FORMS: dict[str, dict[str, Any]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


class Dense(torch.nn.Module):
    """A matrix, and what reads another one's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(SIZE, SIZE))
        self.other: list[Any] = []

    def forward(self, inputs: Any) -> Any:
        return torch.tanh(inputs @ self.weight)

    def half(self, inputs: Any) -> Any:
        return torch.tanh(inputs @ self.weight)

    def through_other(self, inputs: Any) -> Any:
        return torch.tanh(inputs @ self.other[0].weight.detach())


@pytest.fixture(autouse=True, scope="module")
def active() -> Iterator[None]:
    """torch's checkpointing is wrapped by `optimizer.in_backward`; without hooks it stays what it is."""
    fusepatch.activate()
    yield
    fusepatch.deactivate()


def layers(number: int = 3) -> torch.nn.ModuleList:
    torch.manual_seed(0)
    return torch.nn.ModuleList(Dense() for _ in range(number))


def outcome(forward: Callable[[Any, Any], Any], inside: bool, form: str = "loop", number: int = 3) -> Any:
    """The weights after three steps, or the error."""
    model = layers(number)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **FORMS[form])
    if inside:
        attached = InBackward(optimizer, {p: name for name, p in model.named_parameters()})
    generator = torch.Generator().manual_seed(1)
    try:
        for _ in range(3):
            inputs = torch.randn(3, SIZE, generator=generator).requires_grad_()
            forward(model, inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except (RuntimeError, InBackwardError) as error:
        return error
    finally:
        if inside:
            attached.remove()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def through(function: Callable[..., Any], inputs: Any, reentrant: bool = False) -> Any:
    return checkpoint(function, inputs, use_reentrant=reentrant)


LAST: list[Any] = []


def named(inputs: Any) -> Any:
    return torch.tanh(inputs @ LAST[0].detach())


def by_global(model: Any, inputs: Any) -> Any:
    LAST[:] = [model[-1].weight]
    return through(named, inputs)


def by_default(model: Any, inputs: Any) -> Any:
    return through(lambda x, w=model[-1].weight: torch.tanh(x @ w.data), inputs)


def by_attribute(model: Any, inputs: Any) -> Any:
    model[0].other = [model[-1]]
    return through(model[0].through_other, inputs)


def by_object(model: Any, inputs: Any) -> Any:
    class Block:
        weight = None

        def __call__(self, x: Any) -> Any:
            return torch.tanh(x @ self.weight.detach())

    block = Block()
    block.weight = model[-1].weight
    return through(block, inputs)


def by_method(model: Any, inputs: Any) -> Any:
    holder = types.SimpleNamespace(model=model)
    method = types.MethodType(lambda self, x: torch.tanh(x @ self.model[-1].weight.detach()), holder)
    return through(method, inputs)


def by_argument(model: Any, inputs: Any) -> Any:
    return checkpoint(lambda x, w: torch.tanh(x @ w), inputs, model[-1].weight.detach(), use_reentrant=False)


def both_in_one_region(model: Any, inputs: Any) -> Any:
    """Computed again before the update; what it then saved lies in the weight's memory."""
    last = model[-1]
    return through(lambda x: torch.tanh(x @ last.weight.detach()) @ last.weight, inputs)


def requires_grad_off(model: Any, inputs: Any) -> Any:
    model[-1].requires_grad_(False)
    result = model[-1](inputs)
    model[-1].requires_grad_(True)
    return result


EARLY: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "detached": (lambda model, x: torch.tanh(x @ model[-1].weight.detach()), MODIFIED),
    "a transposed view": (lambda model, x: torch.tanh(x @ model[-1].weight.detach().t()), MODIFIED),
    "requires_grad off": (requires_grad_off, MODIFIED),
    "checkpoint, closure": (lambda model, x: through(lambda y: torch.tanh(y @ model[-1].weight.detach()), x), AGAIN),
    "checkpoint, re-entrant": (
        lambda model, x: through(lambda y: torch.tanh(y @ model[-1].weight.detach()), x, reentrant=True),
        AGAIN,
    ),
    "checkpoint, partial": (
        lambda model, x: through(functools.partial(lambda m, y: torch.tanh(y @ m.weight.detach()), model[-1]), x),
        AGAIN,
    ),
    "checkpoint, global": (by_global, AGAIN),
    "checkpoint, default": (by_default, AGAIN),
    "checkpoint, attribute of the module": (by_attribute, AGAIN),
    "checkpoint, callable object": (by_object, AGAIN),
    "checkpoint, method of an object": (by_method, AGAIN),
    "checkpoint, argument": (by_argument, ""),
    "checkpoint, both": (both_in_one_region, UNPACKED),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", EARLY)
def test_a_weight_that_is_read_too_late_is_an_error(way: str, form: str) -> None:
    read, text = EARLY[way]

    def forward(model: Any, inputs: Any) -> Any:
        return model[-1](read(model, model[0](inputs)))

    assert isinstance(outcome(forward, False, form), torch.Tensor)
    error = outcome(forward, True, form)
    assert isinstance(error, Exception), "it trained on other weights"
    assert text in str(error)
    if text in (AGAIN, UNPACKED):
        assert "2.weight" in str(error)
        assert "weight.detach().clone()" in str(error)


def offloaded(model: Any, inputs: Any) -> Any:
    """Hooks that keep weights as they are, as an offloading of activations does."""
    keep = saved_tensors_hooks(lambda tensor: tensor, recomputation.unpacked(lambda tensor: tensor))
    with keep:
        hidden = torch.tanh(model[0](inputs) @ model[-1].weight.detach())
    return model[-1](hidden)


def test_what_hooks_have_saved_is_looked_at_when_it_is_unpacked() -> None:
    assert UNPACKED in str(outcome(offloaded, True))
    assert isinstance(outcome(lambda model, x: model[-1](model[0](x)), True), torch.Tensor)


def blocks(model: Any, inputs: Any, reentrant: bool) -> Any:
    for layer in model:
        inputs = through(layer, inputs, reentrant)
    return inputs


def halves_of_one(model: Any, inputs: Any) -> Any:
    """Regions that are methods of one module, each with weights of its own: only what is read counts."""
    holder = torch.nn.Module()
    holder.layers = model
    for index in range(len(model)):
        inputs = through(types.MethodType(lambda self, x, i=index: self.layers[i](x), holder), inputs)
    return inputs


def copied(model: Any, inputs: Any) -> Any:
    hidden = torch.tanh(model[0](inputs) @ model[-1].weight.detach().clone())
    return model[-1](hidden)


def shared(model: Any, inputs: Any) -> Any:
    """One weight in two regions of one graph: its gradient is complete when both have been computed again."""
    return through(model[1], through(model[0], through(model[1], inputs)))


SERVED: dict[str, Callable[[Any, Any], Any]] = {
    "blocks": functools.partial(blocks, reentrant=False),
    "blocks, re-entrant": functools.partial(blocks, reentrant=True),
    "methods of one module": halves_of_one,
    "a copy": copied,
    "one module in two regions": shared,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", SERVED)
def test_what_is_read_in_time_is_served(way: str, form: str) -> None:
    ordinary = outcome(SERVED[way], False, form)
    inside = outcome(SERVED[way], True, form)
    assert isinstance(inside, torch.Tensor), inside
    assert torch.equal(inside, ordinary)


def test_parameters_in_one_buffer_are_told_apart() -> None:
    """Views of one flat tensor: a neighbour that is updated is not a weight that is read."""

    def run(inside: bool) -> Any:
        torch.manual_seed(0)
        buffer = torch.randn(3, SIZE, SIZE)
        model = torch.nn.ModuleList(Dense() for _ in range(3))
        for layer, part in zip(model, buffer, strict=True):
            layer.weight = torch.nn.Parameter(part)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=False)
        if inside:
            InBackward(optimizer, {})
        region = types.SimpleNamespace(whole=buffer[:2], layers=model)
        inputs = torch.randn(3, SIZE, requires_grad=True)
        for _ in range(2):
            hidden = through(types.MethodType(lambda self, x: self.layers[0](x) + self.whole[0].sum(), region), inputs)
            blocks(model[1:], hidden, reentrant=False).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return buffer

    assert torch.equal(run(True), run(False))


def test_a_backward_of_ones_own_before_the_step_is_left_alone() -> None:
    """Disarmed, as the Trainer's callbacks before the step find it: the new weights are the ones to compute with."""
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = InBackward(optimizer, {})
    inputs = torch.randn(3, SIZE, requires_grad=True)
    blocks(model, inputs, reentrant=False).sum().backward()
    attached.armed = False
    blocks(model, inputs, reentrant=False).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_without_hooks_checkpoints_are_those_of_torch() -> None:
    def region(inputs: Any) -> Any:
        return inputs.exp()

    gc.collect()
    result = through(region, torch.ones(2, requires_grad=True), reentrant=True)
    assert result.grad_fn.run_function is region
    attached = InBackward(torch.optim.SGD(layers().parameters(), lr=0.1), {})
    result = through(region, torch.ones(2, requires_grad=True), reentrant=True)
    assert result.grad_fn.run_function is not region
    attached.remove()
    assert not in_backward.any_live()


def sampled(choice: random.Random) -> Callable[[Any, Any], Any]:
    """A network of some layers, each plain or a region, that may read a weight of any layer detached."""
    plan = []
    for _ in range(choice.randint(2, 5)):
        plan.append(
            (
                choice.randrange(3),
                choice.choice([None, None, None, 0, 1, 2]),
                choice.choice(["plain", "plain", "region", "reentrant", "outer"]),
                choice.choice(["detach", "view", "clone"]),
                choice.random() < 0.3,
            )
        )

    def forward(model: Any, inputs: Any) -> Any:
        def block(own: int, other: int | None, how: str, skip: bool, x: Any) -> Any:
            result = model[own](x)
            if other is not None:
                weight = model[other].weight.detach()
                weight = {"detach": weight, "view": weight.t()[:, :], "clone": weight.clone()}[how]
                result = torch.tanh(result @ weight)
            return result + x if skip else result

        total = 0
        for own, other, kind, how, skip in plan:
            run = functools.partial(block, own, other, how, skip)
            if kind == "outer":
                inputs = through(lambda x, run=run: through(run, x), inputs)
            elif kind == "plain":
                inputs = run(inputs)
            else:
                inputs = through(run, inputs, kind == "reentrant")
            total = total + inputs.mean()
        return total + inputs

    return forward


def test_sampled_networks_train_as_ordinarily_or_raise() -> None:
    counted: Counter[str] = Counter()
    for seed in range(100):
        choice = random.Random(seed)
        forward, form = sampled(choice), choice.choice([*FORMS])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ordinary, inside = outcome(forward, False, form), outcome(forward, True, form)
        if isinstance(inside, Exception):
            assert isinstance(inside, InBackwardError) or MODIFIED in str(inside), (seed, inside)
            counted[type(inside).__name__] += 1
        else:
            assert torch.equal(inside, ordinary), seed
            counted["equal"] += 1
    assert min(counted["equal"], counted["InBackwardError"], counted["RuntimeError"]) >= 8, counted


def test_a_dtensor_and_its_part_of_this_rank() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        optimizer = torch.optim.AdamW([weight], fused=True)
        attached = InBackward(optimizer, {})
        before = weight._version, weight._local_tensor._version
        weight.sum().backward()
        assert weight._version > before[0]
        assert weight._local_tensor._version > before[1]
        assert attached.updated_in(weight.detach()._local_tensor) is weight
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("form", FORMS)
def test_on_cuda(form: str) -> None:
    model = layers().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **FORMS[form])
    InBackward(optimizer, {p: name for name, p in model.named_parameters()})
    inputs = torch.randn(3, SIZE, device="cuda", requires_grad=True)
    blocks(model, inputs, reentrant=False).sum().backward()
    optimizer.step()
    hidden = torch.tanh(model[0](inputs) @ model[-1].weight.detach())
    with pytest.raises(RuntimeError, match=MODIFIED):
        model[-1](hidden).sum().backward()
    optimizer.step()
    region = through(lambda x: torch.tanh(x @ model[-1].weight.detach()), inputs)
    with pytest.raises(InBackwardError, match=AGAIN):
        model[-1](region).sum().backward()
