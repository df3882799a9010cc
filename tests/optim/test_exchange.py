"""The class at a path, what its constructor takes, what carries over, and the construction in another class's place."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fusepatch.errors import OptimizerClassError  # noqa: E402
from fusepatch.optim import exchange, refusals  # noqa: E402
from fusepatch.optim.exchange import Given, Target  # noqa: E402

NAME = "optimizers_of_a_user"


class Plain(torch.optim.Optimizer):
    """No `**kwargs`, one argument by keyword only, one of several numbers."""

    def __init__(
        self, params: Any, lr: float = 0.1, decays: tuple[float, ...] = (0.9,), *, sharp: bool = False
    ) -> None:
        super().__init__(params, {"lr": lr, "decays": decays, "sharp": sharp})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(param.grad, alpha=-group["lr"])


class Open(torch.optim.Optimizer):
    """Takes any keyword."""

    def __init__(self, params: Any, beta: float = 0.5, **options: Any) -> None:
        self.options = options
        super().__init__(params, {"lr": options.get("lr", 7.0), "beta": beta})


class Forwarding(torch.optim.AdamW):
    """Hands its keywords on to AdamW."""

    def __init__(self, params: Any, extra: int = 1, **kwargs: Any) -> None:
        self.extra = extra
        self.forwarded = dict(kwargs)
        super().__init__(params, **kwargs)


class KeywordParams(torch.optim.Optimizer):
    def __init__(self, *, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})


class Made(torch.optim.Optimizer):
    """Sets something in `__new__`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        made.made_with = kwargs.get("lr")
        return made

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})


class Needy(torch.optim.Optimizer):
    def __init__(self, params: Any, rank: int, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "rank": rank})


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


class Wrapper(torch.optim.Optimizer):
    def __init__(self, optimizer: Any, lr: float = 0.1) -> None:
        raise AssertionError("not reached")


class Closing(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any) -> None:  # type: ignore[override]
        raise AssertionError("not reached")


class Meta(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class OfItsOwnKind(torch.optim.Optimizer, metaclass=Meta):
    pass


def make_plain(params: Any) -> Plain:
    return Plain(params)


@pytest.fixture(autouse=True)
def of_a_user() -> Iterator[None]:
    """The classes above as attributes of a module that a path can name."""
    module = types.ModuleType(NAME)
    classes = (
        Plain,
        Open,
        Forwarding,
        KeywordParams,
        Made,
        Needy,
        WithoutRate,
        Wrapper,
        Closing,
        OfItsOwnKind,
        make_plain,
    )
    for value in classes:
        setattr(module, value.__name__, value)
    module.number = 3  # type: ignore[attr-defined]
    sys.modules[NAME] = module
    yield
    del sys.modules[NAME]


def params(*shapes: tuple[int, ...]) -> list[Any]:
    return [torch.nn.Parameter(torch.ones(shape)) for shape in shapes or ((4, 3), (3,))]


def plan(kind: Any, given: dict[str, Given], asked: dict[str, Any] | None = None, groups: Any = ()) -> exchange.Plan:
    target = Target(f"{NAME}.{kind.__name__}", "CLASS", "KWARGS")
    return exchange.plan(target, exchange.accepts(kind), given, asked or {}, groups, "verl.worker")


RATE = {"lr": Given(0.5, "framework")}
ADAMW = {**RATE, "betas": Given((0.8, 0.9), "framework"), "weight_decay": Given(0.2, "framework")}
TRAINER = {**ADAMW, "eps": Given(1e-8, "default"), "fused": Given(True, "default")}


@pytest.mark.parametrize(
    ("path", "kind"),
    [("torch.optim.SGD", torch.optim.SGD), ("torch.optim.adamw.AdamW", torch.optim.AdamW), (f"{NAME}.Plain", Plain)],
)
def test_the_class_at_a_path(path: str, kind: Any) -> None:
    assert exchange.resolve(Target(path)) is kind


@pytest.mark.parametrize(
    ("path", "found", "action"),
    [
        ("not_installed_here.optim.AdamW", "there is no module not_installed_here", "`pip install not-installed-here`"),
        ("torch.optimizers.AdamW", "torch has no module optimizers", "correct the path"),
        ("torch.optim.Adamw", "torch.optim has no Adamw; the nearest is AdamW", "correct the path"),
        ("torch.optim.Nothing", "torch.optim has no Nothing", "It has the optimizers ASGD, "),
        (f"{NAME}.make_plain", "is a function; wanted a class derived from torch.optim.Optimizer", "name the class"),
        (f"{NAME}.number", "is an object of int", "name the class"),
        ("torch.nn.Linear", "is not an optimizer: it derives from Linear, Module", "name another class"),
        (f"{NAME}.OfItsOwnKind", "its metaclass Meta", "name a class that is created in the ordinary way"),
    ],
)
def test_no_class_at_a_path(path: str, found: str, action: str) -> None:
    with pytest.raises(OptimizerClassError) as raised:
        exchange.resolve(Target(path))
    assert found in str(raised.value)
    assert action in str(raised.value)


def test_a_module_that_fails_at_its_import(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaks_here.py").write_text("raise OSError('libsomething.so is missing')")
    (tmp_path / "needs_more.py").write_text("import not_installed_here.deeper")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OptimizerClassError, match=r"importing breaks_here raised OSError: libsomething\.so is missing"):
        exchange.resolve(Target("breaks_here.Own"))
    with pytest.raises(OptimizerClassError, match="needs the module not_installed_here, which is not installed"):
        exchange.resolve(Target("needs_more.Own"))


def test_what_a_constructor_takes() -> None:
    assert str(exchange.accepts(Plain)) == "lr, decays, sharp"
    assert str(exchange.accepts(Open)) == "beta and any other keyword"
    forwarding = exchange.accepts(Forwarding)
    assert str(forwarding).startswith("extra, lr, betas, eps, weight_decay, amsgrad")
    assert not forwarding.any_keyword
    assert "fused" not in str(forwarding), "a flag that it does not name"
    assert forwarding.parameter("betas") is not None
    assert forwarding.parameter("fused") is None
    assert exchange.accepts(torch.optim.SGD).parameter("fused") is not None
    assert exchange.accepts(KeywordParams).first.kind is inspect.Parameter.KEYWORD_ONLY
    assert str(exchange.accepts(WithoutRate)) == "no argument besides the parameters"


def test_the_settings_of_a_framework_carry_over_and_its_own_constants_do_not() -> None:
    planned = plan(torch.optim.NAdam, TRAINER)
    assert planned.kwargs == {"lr": 0.5, "betas": (0.8, 0.9), "weight_decay": 0.2}
    texts = [note.text for note in planned.notes]
    assert any("eps=1e-08, which verl.worker passes by itself, left out" in text for text in texts)
    assert any("fused=True from verl.worker left out" in text for text in texts)
    assert {note.kind for note in planned.notes} == {"replaced"}


def test_what_the_user_wrote_for_one_argument_carries_over_and_stands() -> None:
    given = {**RATE, "eps": Given(1e-5, "user")}
    assert plan(torch.optim.NAdam, given).kwargs == {"lr": 0.5, "eps": 1e-5}
    planned = plan(torch.optim.NAdam, given, {"eps": 1e-6, "lr": 0.25})
    assert planned.kwargs == {"lr": 0.25, "eps": 1e-5}
    assert "lr: 0.5 from verl.worker -> 0.25 (KWARGS)" in planned.notes[0].text
    assert "eps=1e-05 from verl.worker kept (it beats 1e-06" in planned.notes[1].text


def test_what_the_user_wrote_and_the_class_does_not_take_is_refused() -> None:
    (note,) = plan(Plain, {**RATE, "maximize": Given(True, "user")}).notes
    assert note.kind == "refused"
    assert f"maximize=True from verl.worker left out: {NAME}.Plain does not take it" in note.text


def test_weight_decay_that_is_lost_is_refused() -> None:
    (note,) = plan(Plain, {**RATE, "weight_decay": Given(0.1, "framework")}).notes
    assert note.kind == "refused"
    (note,) = plan(Plain, {**RATE, "weight_decay": Given(0.0, "framework")}).notes
    assert note.kind == "replaced", "nothing is lost"
    (note,) = plan(Plain, RATE, groups=[{"weight_decay": 0.1}, {"weight_decay": 0.0}]).notes
    assert note.kind == "refused"
    assert "takes no weight_decay, so 0.1 in the param groups from verl.worker has no effect" in note.text


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (torch.optim.Adafactor, "eps", 1e-5),
        (Plain, "decays", (0.8, 0.9)),
        (Plain, "decays", 0.9),
    ],
)
def test_a_value_of_another_kind_than_the_class_has_there_does_not_carry_over(kind: Any, name: str, value: Any) -> None:
    planned = plan(kind, {**RATE, name: Given(value, "user")})
    assert planned.kwargs == {"lr": 0.5}
    assert "which is a different kind of value" in planned.notes[0].text


def test_a_class_that_takes_any_keyword_gets_the_learning_rate_and_no_flag() -> None:
    planned = plan(Open, {**TRAINER, "foreach": Given(True, "user")})
    assert planned.kwargs == {"lr": 0.5}
    assert {note.text.split("=")[0]: note.kind for note in planned.notes} == {
        "betas": "replaced",
        "weight_decay": "refused",
        "eps": "replaced",
        "fused": "replaced",
        "foreach": "refused",
    }
    assert plan(Open, RATE, {"whatever": 1, "fused": True}).kwargs == {"lr": 0.5, "whatever": 1, "fused": True}


def test_a_class_that_forwards_its_keywords_gets_what_the_next_constructor_names() -> None:
    planned = plan(Forwarding, {**TRAINER, "foreach": Given(True, "user")}, {"extra": 2, "amsgrad": True})
    assert planned.kwargs == {"lr": 0.5, "betas": (0.8, 0.9), "weight_decay": 0.2, "extra": 2, "amsgrad": True}


def test_a_sequence_of_a_configuration_counts_as_the_tuple_that_it_stands_for() -> None:
    from collections import UserList

    given = {**RATE, "betas": Given(UserList([0.8, 0.9]), "framework")}
    assert plan(torch.optim.NAdam, given).kwargs == {"lr": 0.5, "betas": (0.8, 0.9)}


def test_json_lists_become_the_tuples_that_the_class_has() -> None:
    asked = {"betas": [0.7, 0.8]}
    assert plan(torch.optim.NAdam, TRAINER, asked).kwargs["betas"] == (0.7, 0.8)
    options = {"options": {"a": [1]}}
    planned = plan(Open, RATE, options)
    planned.kwargs["options"]["a"].append(2)
    assert options == {"options": {"a": [1]}}, "the environment's own value is not handed out"


@pytest.mark.parametrize(
    ("kind", "asked", "found"),
    [
        (Plain, {"sharpp": True}, r"names 'sharpp', which .*Plain does not take \('sharpp' is nearest to 'sharp'\)"),
        (Plain, {"sharpp": True}, r"Plain accepts lr, decays, sharp\."),
        (Plain, {"params": []}, "names 'params', the first argument"),
        (Forwarding, {"momentum": 1}, "names 'momentum'"),
        (Needy, {}, r"needs 'rank', which no framework passes.*give it in KWARGS"),
        (Wrapper, {}, "the first argument of its constructor is 'optimizer'"),
    ],
)
def test_arguments_that_do_not_fit(kind: Any, asked: dict[str, Any], found: str) -> None:
    with pytest.raises(OptimizerClassError, match=found):
        plan(kind, RATE, asked)


def test_an_argument_that_the_class_needs_may_be_given() -> None:
    assert plan(Needy, RATE, {"rank": 4}).kwargs == {"lr": 0.5, "rank": 4}


def exchanged(kind: Any, kwargs: dict[str, Any], parameters: Any = None) -> Any:
    optimizer = torch.optim.AdamW.__new__(torch.optim.AdamW)
    exchange.become(
        optimizer, Target(f"{NAME}.{kind.__name__}"), kind, exchange.accepts(kind), parameters or params(), kwargs
    )
    return optimizer


@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
        (Plain, {"lr": 0.5, "sharp": True}),
        (Open, {"lr": 0.5}),
        (Forwarding, {"lr": 0.5, "betas": (0.8, 0.9), "extra": 2}),
        (KeywordParams, {"lr": 0.5}),
        (Made, {"lr": 0.5}),
    ],
)
def test_the_object_is_what_the_class_itself_would_have_made(kind: Any, kwargs: dict[str, Any]) -> None:
    optimizer = exchanged(kind, kwargs)
    by_hand = kind(params=params(), **kwargs) if kind is KeywordParams else kind(params(), **kwargs)
    assert type(optimizer) is kind
    assert vars(optimizer).keys() == vars(by_hand).keys()
    assert optimizer.defaults == by_hand.defaults
    assert optimizer.state_dict() == by_hand.state_dict()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(other) is kind
        assert other.state_dict() == by_hand.state_dict()


def test_what_new_sets_is_there() -> None:
    assert exchanged(Made, {"lr": 0.5}).made_with == 0.5


def test_steps_schedules_and_hooks_are_those_of_the_class() -> None:
    parameters = params()
    optimizer = exchanged(Plain, {"lr": 0.5}, parameters)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    for param in parameters:
        param.grad = torch.ones_like(param)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert called == [1]
    assert all(torch.equal(param, torch.full_like(param, 0.5)) for param in parameters)


def test_what_the_class_raises_is_said_with_the_arguments() -> None:
    with pytest.raises(
        OptimizerClassError, match=r"SGD\(params, lr=-1\) raised ValueError: Invalid learning rate"
    ) as raised:
        exchanged(torch.optim.SGD, {"lr": -1})
    assert isinstance(raised.value.__cause__, ValueError)


def test_a_class_without_a_learning_rate_in_its_groups() -> None:
    with pytest.raises(OptimizerClassError, match="its param groups have no 'lr'"):
        exchanged(WithoutRate, {})


@pytest.mark.parametrize(
    ("kind", "parameters", "found"),
    [
        (Closing, params(), r"its step\(\) needs closure, and frameworks call step\(\) without"),
        (torch.optim.LBFGS, params(), r"its step\(\) needs closure"),
        (torch.optim.SparseAdam, params(), "it takes sparse gradients only"),
        (torch.optim.Muon, params(), r"it takes matrices only, and 1 of 2 parameters are not"),
        (torch.optim.Muon, params((4, 3)), None),
        (torch.optim.SGD, params(), None),
        (Plain, params(), None),
    ],
)
def test_parameters_that_a_class_cannot_train(kind: Any, parameters: list[Any], found: str | None) -> None:
    obstacle = refusals.obstacle(kind, parameters)
    assert (obstacle is None) == (found is None)
    if found is not None:
        assert re.search(found, obstacle)


def test_what_is_refused_would_fail_at_the_first_step_or_before() -> None:
    for kind in (torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Muon):
        parameters = params()
        for param in parameters:
            param.grad = torch.ones_like(param)
        with pytest.raises((TypeError, RuntimeError, ValueError)):
            kind(parameters).step()
        assert all(torch.equal(param, torch.ones_like(param)) for param in parameters)
