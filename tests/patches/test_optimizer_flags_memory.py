"""`optimizer.flags` where memory is not as torch's fused kernels presume: the numbers are those of torch's own default.

The patched run and the plain one are compared; what a fused kernel does to such memory on the CPU (wrong numbers, other
memory overwritten, a segmentation fault) would show as a difference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kits.optimizer_flags import active, fallbacks, flags, module, replaced  # noqa: E402

verl = module("verl.workers.config.optimizer")
trainer = module("transformers.trainer")
mine = module("user_code")
"""What its `construct` makes is left alone: torch's own default."""

SETTINGS = {
    "Adam": {"lr": 0.1, "amsgrad": True},
    "AdamW": {"lr": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adagrad": {"lr": 0.1},
}
Make = Callable[[], list[Any]]


def numbers(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def train(
    optimizer: Any, steps: int = 3, layout: Callable[[Any], Any] = lambda gradient: gradient, seed: int = 0
) -> None:
    for step in range(steps):
        for place, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            parameter.grad = layout(numbers(*parameter.shape, seed=100 * seed + 10 * step + place).to(parameter.dtype))
        optimizer.step()


def plain(name: str, make: Make, **how: Any) -> list[Any]:
    parameters = make()
    train(mine.construct(getattr(torch.optim, name), parameters, **SETTINGS[name]), **how)
    return parameters


def same(parameters: list[Any], others: list[Any]) -> None:
    for one, other in zip(parameters, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def halves() -> list[Any]:
    return [torch.nn.Parameter(half) for half in numbers(4, 6).chunk(2, dim=1)]


def overlapping() -> list[Any]:
    flat = numbers(9)
    return [torch.nn.Parameter(flat[:5]), torch.nn.Parameter(flat[4:])]


def one_memory_twice() -> list[Any]:
    flat = numbers(6)
    return [torch.nn.Parameter(flat), torch.nn.Parameter(flat.view(2, 3))]


@pytest.mark.parametrize("make", [halves, overlapping, one_memory_twice])
def test_parameters_that_no_fused_kernel_takes_train_as_torchs_default_does(make: Make) -> None:
    with active():
        for name in SETTINGS:
            parameters = make()
            optimizer = verl.construct(getattr(torch.optim, name), parameters, **SETTINGS[name])
            assert flags(optimizer, "fused") == [(None,)]
            assert any(f"{name} in verl" in text and "not fused: " in text for text in fallbacks())
            train(optimizer)
            same(parameters, plain(name, make))


def test_what_lies_between_strided_parameters_is_not_written_to() -> None:
    whole = numbers(4, 6)
    before = whole.clone()
    with active():
        optimizer = verl.construct(torch.optim.AdamW, [torch.nn.Parameter(whole[:, :3])], lr=0.1)
        train(optimizer)
    assert torch.equal(whole[:, 3:], before[:, 3:])


def test_an_expanded_parameter_is_torchs_to_refuse() -> None:
    with active():
        optimizer = verl.construct(torch.optim.AdamW, [torch.nn.Parameter(torch.ones(1, 3).expand(2, 3))], lr=0.1)
        with pytest.raises(RuntimeError, match="single memory location"):
            train(optimizer)


def test_views_of_one_memory_that_lie_apart_are_fused() -> None:
    """Flat parameters of FSDP1, DeepSpeed and Megatron: one memory, cut into parameters."""

    def make() -> list[Any]:
        flat = numbers(12)
        return [torch.nn.Parameter(flat[:4]), torch.nn.Parameter(flat[4:10].view(2, 3)), torch.nn.Parameter(flat[10:])]

    with active():
        for name in SETTINGS:
            parameters = make()
            optimizer = verl.construct(getattr(torch.optim, name), parameters, **SETTINGS[name])
            train(optimizer)
            assert flags(optimizer, "fused") == [(True,)]
            same(parameters, plain(name, make))


def transposed(gradient: Any) -> Any:
    return gradient.t().contiguous().t() if gradient.dim() == 2 else gradient


def expanded(gradient: Any) -> Any:
    return gradient.flatten()[:1].squeeze().expand(gradient.shape)


@pytest.mark.parametrize("layout", [transposed, expanded])
@pytest.mark.parametrize("before", [0, 2])
def test_gradients_of_other_strides_train_as_torchs_default_does(layout: Callable[[Any], Any], before: int) -> None:
    """At the first step and at a later one: gradients are new each time."""

    def run(name: str, construct: Any) -> tuple[Any, list[Any]]:
        parameters = [torch.nn.Parameter(numbers(3, 4)), torch.nn.Parameter(numbers(5))]
        optimizer = construct(getattr(torch.optim, name), parameters, **SETTINGS[name])
        train(optimizer, steps=before)
        fused = flags(optimizer, "fused")
        train(optimizer, seed=1, layout=layout)
        return (fused, flags(optimizer, "fused")), parameters

    with active():
        for name in SETTINGS:
            fused, parameters = run(name, verl.construct)
            assert fused == ([(True,)], [(None,)])
            wanted = (
                f"{name} in verl.workers.config.optimizer, at a step: not fused: a gradient of shape (3, 4) has strides"
            )
            assert any(text.startswith(wanted) for text in fallbacks())
            same(parameters, run(name, mine.construct)[1])


@pytest.mark.parametrize("name", SETTINGS)
def test_a_state_of_other_strides_is_copied_into_its_parameters(name: str) -> None:
    """A checkpoint written while the weight was channels_last: the resumed run goes on as the one that was not
    interrupted."""
    with active():
        first = torch.nn.Parameter(numbers(2, 3, 4, 4).to(memory_format=torch.channels_last))
        optimizer = verl.construct(getattr(torch.optim, name), [first], **SETTINGS[name])
        train(optimizer, layout=lambda gradient: gradient.to(memory_format=torch.channels_last))
        second = torch.nn.Parameter(first.detach().clone().contiguous())
        resumed = verl.construct(getattr(torch.optim, name), [second], **SETTINGS[name])
        resumed.load_state_dict(optimizer.state_dict())
        resumed.state = {  # what was loaded is the first one's own memory
            key: {name: value.clone() for name, value in state.items()} for key, state in resumed.state.items()
        }
        train(optimizer, seed=1, layout=lambda gradient: gradient.to(memory_format=torch.channels_last))
        train(resumed, seed=1)
        assert flags(optimizer, "fused") == flags(resumed, "fused") == [(True,)]
        assert any("copied into the parameter's strides" in text for text in replaced())
        strides = {value.stride() for value in resumed.state[second].values() if value.dim()}
    assert strides == {second.stride()}
    same([first], [second])


def test_parameters_whose_data_is_exchanged_are_looked_at_again() -> None:
    whole = numbers(4, 6)

    def run(construct: Any) -> Any:
        parameter = torch.nn.Parameter(numbers(4, 3))
        optimizer = construct(torch.optim.AdamW, [parameter], lr=0.1)
        train(optimizer)
        parameter.data = whole.clone()[:, :3]
        train(optimizer, seed=1)
        return optimizer, parameter

    with active():
        optimizer, parameter = run(verl.construct)
        assert flags(optimizer, "fused") == [(None,)]
        same([parameter], [run(mine.construct)[1]])


def test_weights_that_are_tied_later_are_looked_at_again() -> None:
    with active():
        one, other = (torch.nn.Parameter(numbers(3)) for _ in range(2))
        optimizer = verl.construct(torch.optim.AdamW, [one, other], lr=0.1)
        train(optimizer)
        one.data = other.data
        train(optimizer)
        assert any("parameters 0 and 1 share memory" in text for text in fallbacks())


def test_a_parameter_that_gets_its_first_gradient_late() -> None:
    """A frozen layer, or an expert that no token reached: torch's own fused SGD stops at its missing momentum
    buffer."""

    def run(name: str, construct: Any) -> list[Any]:
        parameters = [torch.nn.Parameter(numbers(3, seed=place)) for place in range(2)]
        optimizer = construct(getattr(torch.optim, name), parameters, **SETTINGS[name])
        for step in range(4):
            for parameter in parameters[: 1 + step // 2]:
                parameter.grad = numbers(3, seed=step)
            optimizer.step()
        return parameters

    with active():
        for name in SETTINGS:
            same(run(name, verl.construct), run(name, mine.construct))


def test_states_that_a_framework_moved_are_put_back_or_left_to_torch() -> None:
    with active():
        optimizer = verl.construct(torch.optim.AdamW, [torch.nn.Parameter(numbers(3))], lr=0.1)
        train(optimizer)
        (state,) = optimizer.state.values()
        state["step"] = state["step"].double()
        train(optimizer)
        assert state["step"].dtype == torch.float32
        assert flags(optimizer, "fused") == [(True,)]
        state["exp_avg"] = state["exp_avg"].to("meta")
        with pytest.raises(Exception, match="meta"):
            train(optimizer)
        assert flags(optimizer, "fused") == [(None,)], "the fused kernel would read address 0"


def test_one_step_for_several_parameters_is_left_to_torch() -> None:
    def run(construct: Any) -> list[Any]:
        parameters = [torch.nn.Parameter(numbers(3, seed=place)) for place in range(2)]
        optimizer = construct(torch.optim.AdamW, parameters, lr=0.1)
        train(optimizer, 1)
        one, other = optimizer.state.values()
        other["step"] = one["step"]
        train(optimizer)
        return parameters

    with active():
        same(run(verl.construct), run(mine.construct))


@pytest.mark.parametrize("later", ["parameters", "gradients"])
def test_the_steps_counted_so_far_go_on_in_an_unfused_ones_way(later: str) -> None:
    """float64 stands for the device here: an unfused step is counted in torch's default dtype, a fused one in
    float32."""
    torch.set_default_dtype(torch.float64)
    try:
        with active():
            parameter = torch.nn.Parameter(numbers(3, 4))
            optimizer = verl.construct(torch.optim.AdamW, [parameter], lr=0.1)
            train(optimizer, 2)
            if later == "parameters":
                parameter.data = parameter.data.t().contiguous().t()[:, ::2]
                optimizer.state[parameter].update(exp_avg=numbers(3, 2), exp_avg_sq=numbers(3, 2).abs())
            train(optimizer, 1, layout=transposed)
            (state,) = optimizer.state.values()
    finally:
        torch.set_default_dtype(torch.float32)
    assert flags(optimizer, "fused") == [(None,)]
    assert (state["step"].dtype, state["step"].item()) == (torch.float64, 3.0)


def test_groups_that_are_added_are_looked_at_too() -> None:
    with active():
        optimizer = verl.construct(torch.optim.AdamW, [torch.nn.Parameter(numbers(3))], lr=0.1)
        optimizer.add_param_group({"params": halves()})
        assert flags(optimizer, "fused") == [(True,), (None,)]
        train(optimizer)


def test_a_fused_that_is_not_ours_stays_and_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with active():
        optimizer = trainer.construct(torch.optim.AdamW, halves(), lr=0.1, fused=True)
        assert flags(optimizer, "fused") == [(True,)]
        assert "FUSEPATCH_OPTIMIZER_FUSED=0 removes it" in caplog.text
        caplog.clear()
        optimizer = trainer.construct(torch.optim.AdamW, [torch.nn.Parameter(numbers(3, 4))], lr=0.1, fused=True)
        for _ in range(2):
            train(optimizer, layout=transposed)
        assert flags(optimizer, "fused") == [(True,)]
        assert caplog.text.count("silently trains on wrong numbers") == 1
        caplog.clear()
        verl.construct(torch.optim.AdamW, halves(), lr=0.1, fused=True)
        assert "pass fused=False" in caplog.text


@pytest.mark.parametrize("passed", [{"fused": True}, {}], ids=["the framework's", "ours"])
def test_parameters_are_judged_once_and_again_when_their_memory_changes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, passed: dict[str, Any]
) -> None:
    from fusepatch.optim import capability

    judged = []
    judge = capability.fused
    with active():
        parameters = [torch.nn.Parameter(numbers(3, 4)) for _ in range(2)]
        groups = [{"params": [parameter]} for parameter in parameters]
        optimizer = trainer.construct(torch.optim.AdamW, groups, lr=0.1, **passed)
        monkeypatch.setattr(capability, "fused", lambda *given: (judged.append(given), judge(*given))[1])
        for _ in range(3):
            train(optimizer)
        assert len(judged) == 2
        assert flags(optimizer, "fused") == [(True,), (True,)]
        parameters[0].data = torch.zeros(3, 8)[:, ::2]
        parameters[0].grad = torch.zeros(3, 4)
        optimizer.step()
        assert len(judged) == 3
        assert bool(caplog.text.count("fused")) == bool(passed)
        assert flags(optimizer, "fused")[0] == ((True,) if passed else (None,))


def test_a_request_for_fused_is_refused_where_memory_forbids_it(caplog: pytest.LogCaptureFixture) -> None:
    with active(OPTIMIZER_FUSED=1):
        optimizer = trainer.construct(torch.optim.AdamW, halves(), lr=0.1, fused=True)
        assert flags(optimizer, "fused") == [(None,)]
        optimizer = trainer.construct(torch.optim.AdamW, [torch.nn.Parameter(numbers(3, 4))], lr=0.1)
        train(optimizer, layout=transposed)
        assert flags(optimizer, "fused") == [(None,)]
    assert caplog.text.count("FUSEPATCH_OPTIMIZER_FUSED=1 was not followed") == 2


def test_a_fault_in_the_look_is_a_reason_not_to_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusepatch.optim import layout

    def broken(*_: Any) -> Any:
        raise RuntimeError("a fault of ours")

    with active():
        optimizer = verl.construct(torch.optim.AdamW, [torch.nn.Parameter(numbers(3))], lr=0.1)
        monkeypatch.setattr(layout, "seen", broken)
        train(optimizer)
        assert flags(optimizer, "fused") == [(None,)]
        assert any("a fault of ours" in text for text in fallbacks())


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("case", ["parameters", "overlap", "gradients", "states", "size one"])
def test_on_cuda_what_torchs_fused_step_refuses_trains_as_its_default_does(name: str, case: str) -> None:
    def run(construct: Any) -> tuple[Any, list[Any]]:
        kind = getattr(torch.optim, name)
        whole = numbers(4, 6).cuda()
        values = {
            "parameters": list(whole.chunk(2, dim=1)),
            "overlap": [whole.flatten()[:10], whole.flatten()[9:]],
            "size one": [numbers(1, 4).cuda()],
        }.get(case, [whole])
        parameters = [torch.nn.Parameter(value) for value in values]
        optimizer = construct(kind, parameters, **SETTINGS[name])
        for step in range(4):
            for place, parameter in enumerate(parameters):
                gradient = numbers(*parameter.shape, seed=10 * step + place).cuda()
                if step > 1 and case in ("gradients", "size one"):
                    gradient = transposed(gradient)
                parameter.grad = gradient
            if step == 2 and case == "states":
                for state in optimizer.state.values():
                    state.update({key: transposed(value) for key, value in state.items()})
            optimizer.step()
        return optimizer, parameters

    with active():
        optimizer, parameters = run(verl.construct)
        if case != "overlap":  # the multi-tensor kernel updates a shared element from two places, in no fixed order
            same(parameters, run(mine.construct)[1])
    if case in ("parameters", "overlap", "gradients"):
        assert flags(optimizer, "fused") == [(None,)]
        assert all(state["step"].is_cpu for state in optimizer.state.values() if "step" in state)
