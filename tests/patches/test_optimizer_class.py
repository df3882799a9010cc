"""`optimizer.class`: who is reached, who wins, what is recorded, and what is an error before any step.

The callers are stand-ins, since only their place on the stack tells who constructs; the frameworks themselves are in
`test_optimizer_class_trainers.py` and `test_optimizer_class_verl.py`.
"""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import fusepatch  # noqa: E402
from fusepatch.errors import OptimizerClassError, SettingError, StrictError  # noqa: E402
from kits.helpers import fresh  # noqa: E402
from kits.optimizer_flags import active, flags, inactive, module  # noqa: E402

ID = "optimizer.class"
CHECKOUT = Path(fusepatch.__file__).parents[1]
verl = module("verl.workers.config.optimizer")
trainer = module("transformers.trainer")
mine = module("my_script")
TRAINER = {"lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-8, "fused": True}


class Own(torch.optim.Optimizer):
    """A user's class: it counts its constructions and keeps what it was given."""

    constructed = 0

    def __init__(self, params: Any, lr: float = 0.1, *, weight_decay: float = 0.0, fused: bool = False) -> None:
        type(self).constructed += 1
        self.given = {"lr": lr, "weight_decay": weight_decay, "fused": fused}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["steps"] = self.state[param].get("steps", 0) + 1
                param.data.add_(param.grad, alpha=-group["lr"])


class OfAdamW(torch.optim.AdamW):
    """A subclass with a constructor of its own."""

    def __init__(self, params: Any, lr: float = 0.1, **kwargs: Any) -> None:
        self.forwarded = kwargs
        super().__init__(params, lr, **kwargs)


class OwnStates(torch.optim.SGD):
    """A subclass with a step and states of its own."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["mine"] = group["momentum"]


class Failing(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        raise RuntimeError("no memory for the states")


@pytest.fixture(autouse=True)
def of_a_user() -> Iterator[None]:
    made = types.ModuleType("optimizers_of_mine")
    for kind in (Own, OfAdamW, OwnStates, Failing):
        setattr(made, kind.__name__, kind)
    sys.modules[made.__name__] = made
    yield
    del sys.modules[made.__name__]


def wanting(path: str, kwargs: str | None = None, **variables: object) -> Any:
    asked = {"OPTIMIZER_KWARGS": kwargs} if kwargs is not None else {}
    return active(OPTIMIZER_CLASS=path, **asked, **variables)


def record() -> Any:
    return next(record for record in fusepatch.status() if record.id == ID)


def replaced() -> str:
    return "\n".join(note.text for note in record().replaced)


def fallbacks() -> str:
    return "\n".join(note.text for note in record().fallbacks)


def parameters() -> list[Any]:
    return [torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(3))]


def built(by: Any = trainer, **changes: Any) -> Any:
    return by.construct(torch.optim.AdamW, parameters(), **{**TRAINER, **changes})


def test_unset_and_keep_change_nothing() -> None:
    for variables in ({}, {"OPTIMIZER_CLASS": "keep"}):
        with active(**variables):
            assert type(built()) is torch.optim.AdamW
            assert (record().calls, replaced(), fallbacks()) == (0, "", "")


@pytest.mark.parametrize("by", [trainer, verl], ids=lambda by: by.__name__)
def test_the_class_is_the_one_that_was_asked_for(by: Any) -> None:
    with wanting("torch.optim.SGD", '{"momentum": 0.9}'):
        groups = [
            {"params": parameters(), "weight_decay": 0.1},
            {"params": parameters(), "weight_decay": 0.0, "lr": 2.0},
        ]
        optimizer = by.construct(torch.optim.AdamW, groups, **TRAINER)
        assert type(optimizer) is torch.optim.SGD
        assert flags(optimizer, "lr", "momentum", "weight_decay") == [(0.5, 0.9, 0.1), (2.0, 0.9, 0.0)]
        assert optimizer.param_groups[0] is groups[0], "torch keeps the caller's dictionaries"
        assert record().calls == 1
        assert "class torch.optim.AdamW -> torch.optim.SGD (FUSEPATCH_OPTIMIZER_CLASS)" in replaced()
        assert "and momentum from FUSEPATCH_OPTIMIZER_KWARGS" in replaced()
        assert f"betas=(0.8, 0.9) from {by.__name__} left out: torch.optim.SGD does not take it" in replaced()
        assert fallbacks() == ""


def test_a_generator_of_parameters_is_read_once() -> None:
    with wanting("torch.optim.SGD"):
        optimizer = verl.construct(torch.optim.AdamW, (param for param in parameters()), lr=0.5)
        assert [len(group["params"]) for group in optimizer.param_groups] == [2]


def test_arguments_by_position() -> None:
    with wanting("torch.optim.NAdam"):
        optimizer = verl.construct(torch.optim.AdamW, parameters(), 0.5, (0.8, 0.9), 1e-5, 0.2)
        assert flags(optimizer, "lr", "betas", "eps", "weight_decay") == [(0.5, (0.8, 0.9), 1e-5, 0.2)]


def test_torchs_own_classes_are_then_fused_as_the_flags_decide() -> None:
    with wanting("torch.optim.SGD"):
        assert flags(built()) == [(True, None)]
        assert flags(built(verl)) == [(True, None)]
    with wanting("torch.optim.SGD", OPTIMIZER_FUSED=0):
        assert flags(built()) == [(None, None)]
    with wanting("torch.optim.RMSprop", OPTIMIZER_FOREACH=1, OPTIMIZER_EPS=1e-5):
        assert flags(built(), "foreach", "eps") == [(True, 1e-5)]
    with wanting("torch.optim.SGD", '{"foreach": true}'):
        assert flags(built(verl, fused=None)) == [(None, True)]


def test_a_users_class_gets_no_flag_of_the_framework() -> None:
    with wanting("optimizers_of_mine.Own", '{"weight_decay": 0.3}'):
        optimizer = built()
        assert type(optimizer) is Own
        assert optimizer.given == {"lr": 0.5, "weight_decay": 0.3, "fused": False}
        assert "fused" not in optimizer.param_groups[0]
    with wanting("optimizers_of_mine.OfAdamW"):
        optimizer = built()
        assert type(optimizer) is OfAdamW
        assert optimizer.forwarded == {"betas": (0.8, 0.9)}
        assert flags(optimizer) == [(None, None)], "code of its own module constructs AdamW, not the framework"


def test_constructed_once_and_the_object_is_the_callers() -> None:
    before = Own.constructed
    with wanting("optimizers_of_mine.Own"):
        optimizer = built()
        assert Own.constructed == before + 1
        reference = weakref.ref(optimizer)
        assert type(copy.deepcopy(optimizer)) is Own
        del optimizer
        gc.collect()
        assert reference() is None, "nothing here keeps it"


def test_it_trains_saves_loads_and_follows_a_schedule_as_the_class_does_by_itself() -> None:
    def trained(make: Any, resume: bool) -> Any:
        params = parameters()
        optimizer = make(params)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 6)
        for step in range(6):
            if step == 3 and resume:
                state = pickle.loads(pickle.dumps((optimizer.state_dict(), scheduler.state_dict())))
                params = [torch.nn.Parameter(param.detach().clone()) for param in params]
                optimizer = make(params)
                scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 6)
                optimizer.load_state_dict(state[0])
                scheduler.load_state_dict(state[1])
            for param in params:
                param.grad = torch.full_like(param, float(step) - 2.0)
            optimizer.step()
            scheduler.step()
        return torch.cat([param.detach().flatten() for param in params]), optimizer.state_dict()["param_groups"]

    with inactive():
        weights, groups = trained(lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9), False)
    for resume in (False, True):
        with wanting("torch.optim.SGD", '{"momentum": 0.9}', OPTIMIZER_FUSED="keep"):
            other, own_groups = trained(lambda params: verl.construct(torch.optim.AdamW, params, lr=0.5), resume)
            assert torch.equal(other, weights)
            assert own_groups == groups


def test_adamw_itself_with_arguments_of_its_own() -> None:
    with wanting("torch.optim.AdamW", '{"amsgrad": true, "eps": 1e-5, "betas": [0.7, 0.8]}'):
        optimizer = built()
        assert type(optimizer) is torch.optim.AdamW
        assert flags(optimizer, "lr", "amsgrad", "eps", "betas", "fused") == [(0.5, True, 1e-5, (0.7, 0.8), True)]
        assert "eps: 1e-08 from transformers.trainer -> 1e-05 (FUSEPATCH_OPTIMIZER_KWARGS)" in replaced()


def test_the_environment_beats_the_framework_and_what_the_user_wrote_stands() -> None:
    with wanting("torch.optim.NAdam", '{"lr": 0.125, "eps": 1e-4}'):
        optimizer = built(verl, fused=None, eps=1e-6)
        assert flags(optimizer, "lr", "eps") == [(0.125, 1e-6)]
        assert "lr: 0.5 from verl.workers.config.optimizer -> 0.125" in replaced()
        assert "eps=1e-06 from verl.workers.config.optimizer kept (it beats 0.0001" in replaced()
        assert flags(built(), "lr", "eps") == [(0.125, 1e-4)], "1e-8 is what the Trainer passes by itself"


def test_what_the_user_wrote_for_adamw_and_the_class_lacks() -> None:
    with wanting("torch.optim.SGD"):
        optimizer = built(verl, fused=None, amsgrad=True, capturable=False)
        assert type(optimizer) is torch.optim.SGD
        assert "amsgrad=True from verl.workers.config.optimizer left out" in fallbacks()
        assert "capturable" not in fallbacks() + replaced(), "AdamW's own default says nothing"
    with wanting("torch.optim.SGD", STRICT=1), pytest.raises(StrictError, match="amsgrad=True"):
        built(verl, fused=None, amsgrad=True)


def test_code_of_the_users_own_is_left_alone() -> None:
    with wanting("torch.optim.SGD"):
        assert type(built(mine)) is torch.optim.AdamW
        assert "AdamW in my_script kept: your own code constructs it (FUSEPATCH_OPTIMIZER_SCOPE=all" in replaced()
        assert record().calls == 0


def test_scope_all_reaches_it_and_what_it_passes_stands() -> None:
    with wanting("torch.optim.NAdam", '{"lr": 0.125, "momentum_decay": 0.01}', OPTIMIZER_SCOPE="all"):
        optimizer = built(mine, fused=None)
        assert type(optimizer) is torch.optim.NAdam
        assert flags(optimizer, "lr", "momentum_decay") == [(0.5, 0.01)]
        assert "lr=0.5 from my_script kept (it beats 0.125" in replaced()


def test_a_class_that_a_frameworks_configuration_chose_stands() -> None:
    with wanting("optimizers_of_mine.Own"):
        for kind in (torch.optim.SGD, torch.optim.Adam, OfAdamW):
            assert type(verl.construct(kind, parameters(), lr=0.5)) is kind
        assert (
            "torch.optim.sgd.SGD in verl.workers.config.optimizer kept: the framework's configuration chose it"
            in replaced()
        )
        assert "OfAdamW in verl.workers.config.optimizer kept" in replaced()
        assert type(mine.construct(torch.optim.SGD, parameters(), lr=0.5)) is torch.optim.SGD
        assert "my_script" not in replaced()
        assert type(verl.construct(Own, parameters())) is Own
        assert "Own in verl" not in replaced(), "it is the class that was asked for"


@pytest.mark.parametrize(
    ("path", "kwargs", "found"),
    [
        ("not_installed_here.AdamW", None, "there is no module not_installed_here"),
        ("torch.optim.SGDD", None, "the nearest is SGD"),
        ("torch.nn.Linear", None, "is not an optimizer"),
        ("torch.optim.SGD", '{"momentun": 0.9}', "'momentun', which torch.optim.SGD does not take"),
        ("torch.optim.SGD", '{"momentun": 0.9}', "SGD accepts lr, momentum, dampening, weight_decay, nesterov"),
        ("torch.optim.SGD", '{"momentum": -1}', "raised ValueError: Invalid momentum value"),
        ("torch.optim.Muon", None, "it takes matrices only, and 1 of 2 parameters are not"),
        ("torch.optim.SparseAdam", None, "it takes sparse gradients only"),
        ("torch.optim.LBFGS", None, "its step() needs closure"),
        ("optimizers_of_mine.Failing", None, "raised RuntimeError: no memory for the states"),
    ],
)
def test_what_cannot_be_built_is_an_error_at_that_call(path: str, kwargs: str | None, found: str) -> None:
    params = parameters()
    with wanting(path, kwargs):
        with pytest.raises(OptimizerClassError) as raised:
            trainer.construct(torch.optim.AdamW, params, **TRAINER)
        assert found in str(raised.value)
        assert f"{path}" in str(raised.value)
    assert all(torch.equal(param, torch.ones_like(param)) for param in params)


def test_a_fault_of_ours_is_no_silent_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusepatch.optim import exchange

    with wanting("torch.optim.SGD"):
        monkeypatch.setattr(exchange, "plan", lambda *_: 1 / 0)
        with pytest.raises(OptimizerClassError, match=r"the patch itself failed .* ZeroDivisionError"):
            built()


def test_a_call_that_torch_refuses_is_left_to_torch() -> None:
    with wanting("torch.optim.SGD"), pytest.raises(TypeError, match="unexpected keyword argument 'learning_rate'"):
        verl.construct(torch.optim.AdamW, parameters(), learning_rate=0.1)


def test_the_checkpoint_of_another_class_is_refused_before_it_is_loaded() -> None:
    with inactive():
        of_adamw = torch.optim.AdamW(parameters(), lr=0.25).state_dict()
        of_sgd = torch.optim.SGD(parameters(), lr=0.25, momentum=0.9).state_dict()
    with wanting("torch.optim.SGD"):
        optimizer = built()
        with pytest.raises(OptimizerClassError) as raised:
            optimizer.load_state_dict(copy.deepcopy(of_adamw))
        assert "amsgrad, betas, capturable" in str(raised.value)
        assert "lack dampening, momentum, nesterov" in str(raised.value)
        assert flags(optimizer, "lr", "momentum") == [(0.5, 0)], "nothing was loaded"
        optimizer.load_state_dict(copy.deepcopy(of_sgd))
        assert flags(optimizer, "lr", "momentum") == [(0.25, 0.9)]
        del of_sgd["param_groups"][0]["fused"], of_sgd["param_groups"][0]["nesterov"]
        optimizer.load_state_dict(of_sgd)  # an older torch's
    with wanting("optimizers_of_mine.Own"):
        optimizer = built()
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        built().load_state_dict(optimizer.state_dict())  # what a scheduler adds says nothing
        with pytest.raises(OptimizerClassError, match="another class"):
            optimizer.load_state_dict(of_adamw)


FAMILY = [
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
]  # fmt: skip


def one_step(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.full_like(param, 0.5)
    optimizer.step()


def matrix() -> list[Any]:
    return [torch.nn.Parameter(torch.ones(4, 3))]  # Muon takes nothing else


MOMENTUM = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9}}


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    """A checkpoint of each class, after one step."""
    checkpoints = {}
    for name in FAMILY:
        if hasattr(torch.optim, name):
            optimizer = getattr(torch.optim, name)(matrix(), lr=0.1, **MOMENTUM.get(name, {}))
            one_step(optimizer)
            checkpoints[name] = optimizer.state_dict()
    return checkpoints


@pytest.mark.parametrize("asked", [name for name in FAMILY if hasattr(torch.optim, name)])
def test_a_class_of_torch_loads_any_ones_checkpoint_as_itself_or_refuses(asked: str, written: dict[str, Any]) -> None:
    """As itself: the flags that make it the class, every key and state that its step reads, and its own arithmetic."""
    kind, trained = getattr(torch.optim, asked), {}
    with wanting(f"torch.optim.{asked}", OPTIMIZER_FUSED="keep"):
        for writer, saved in written.items():
            params = matrix()
            optimizer = trainer.construct(torch.optim.AdamW, params, lr=0.1)
            assert type(optimizer) is kind
            fresh = copy.deepcopy(optimizer.state_dict())
            try:
                optimizer.load_state_dict(copy.deepcopy(saved))
            except OptimizerClassError:
                assert str(optimizer.state_dict()) == str(fresh), "nothing was loaded"
                continue
            one_step(optimizer)
            trained[writer] = params[0].detach()
    assert asked in trained
    assert set(trained) <= ({"Adam", "AdamW", "NAdam", "RAdam"} if "Adam" in trained else {asked})
    for writer, weights in trained.items():
        params = matrix()
        by_hand = kind(params, lr=0.1)
        own = {name: by_hand.param_groups[0][name] for name in ("decoupled_weight_decay",) if name in by_hand.defaults}
        group = {**by_hand.param_groups[0], **written[writer]["param_groups"][0], **own}
        by_hand.load_state_dict({"state": written[writer]["state"], "param_groups": [group]})
        one_step(by_hand)
        assert torch.equal(params[0], weights), writer


def test_adam_that_resumes_from_adamw_is_adam() -> None:
    def params() -> list[Any]:
        return [torch.nn.Parameter(torch.ones(3))]

    with inactive():
        by_adamw = torch.optim.AdamW(params(), lr=0.1, weight_decay=0.5)
        one_step(by_adamw)
        saved = by_adamw.state_dict()
    for kwargs, flag in ((None, False), ('{"decoupled_weight_decay": true}', True)):
        with wanting("torch.optim.Adam", kwargs):
            optimizer = trainer.construct(torch.optim.AdamW, params(), **TRAINER)
            before = copy.deepcopy(saved)
            optimizer.load_state_dict(saved)
            assert flags(optimizer, "decoupled_weight_decay") == [(flag,)]
            assert saved["param_groups"] == before["param_groups"], "the caller's checkpoint is left as it is"
            text = "decoupled_weight_decay: True in the checkpoint -> False, the value of the class that was asked for"
            assert (text in replaced()) == (not flag)
    with wanting("torch.optim.Adam"):
        in_code = mine.construct(torch.optim.Adam, params(), lr=0.1)
        in_code.load_state_dict(saved)
        assert flags(in_code, "decoupled_weight_decay") == [(True,)], "torch's own way, which the user's code has"


def test_adamw_that_was_asked_for_refuses_states_that_it_cannot_read() -> None:
    with inactive():
        by_adamax = torch.optim.Adamax(parameters(), lr=0.25)
        one_step(by_adamax)
        saved = by_adamax.state_dict()
    with wanting("torch.optim.AdamW"):
        optimizer = built()
        with pytest.raises(OptimizerClassError, match=r"have exp_avg, exp_inf, step; wanted exp_avg, exp_avg_sq, step"):
            optimizer.load_state_dict(saved)


def test_a_class_of_the_users_own_is_judged_by_its_groups_alone() -> None:
    """Its states may have any names, whatever class it derives from."""
    with wanting("optimizers_of_mine.OwnStates"):
        optimizer = built()
        one_step(optimizer)
        resumed = built()
        resumed.load_state_dict(optimizer.state_dict())
        assert {"mine"} == {name for state in resumed.state.values() for name in state}
        saved = optimizer.state_dict()
        del saved["param_groups"][0]["momentum"]
        with pytest.raises(OptimizerClassError, match="the param groups that were loaded have no momentum"):
            built().load_state_dict(saved)


def test_parameters_that_change_before_the_first_step_are_judged_again() -> None:
    from torch.optim import Muon

    params = [torch.nn.Parameter(torch.ones(4, 3))]
    with wanting("torch.optim.Muon"):
        optimizer = trainer.construct(torch.optim.AdamW, params, **TRAINER)
        assert type(optimizer) is Muon
        optimizer.param_groups[0]["params"][0] = late = torch.nn.Parameter(torch.ones(12))
        late.grad = torch.ones(12)
        with pytest.raises(OptimizerClassError, match=r"at the first step: .* it takes matrices only"):
            optimizer.step()
        assert torch.equal(late, torch.ones(12))


def test_parameters_are_judged_before_the_first_update_inside_backward_too() -> None:
    from fusepatch.optim.in_backward import InBackward

    with wanting("torch.optim.Muon"):
        optimizer = trainer.construct(torch.optim.AdamW, matrix(), **TRAINER)
        optimizer.param_groups[0]["params"][0] = late = torch.nn.Parameter(torch.ones(12))
        InBackward(optimizer, {})
        with pytest.raises(OptimizerClassError, match=r"at the first step: .* it takes matrices only"):
            late.sum().backward()
        assert torch.equal(late, torch.ones(12))


def test_taken_out_and_put_back_the_order_is_the_same() -> None:
    with wanting("torch.optim.NAdam"):
        for patch in (ID, "optimizer.flags", ID):
            fusepatch.deactivate(patch)
            fusepatch.activate()
            assert type(built(verl, fused=None)) is torch.optim.NAdam
            assert "fused" not in fallbacks() + replaced(), "decided for AdamW, before the exchange"


@pytest.mark.parametrize("first", ["import torch.optim\nimport fusepatch", "import fusepatch\nimport torch.optim"])
@pytest.mark.parametrize("disable", ["", "optimizer.flags", "optimizer.class"])
def test_either_patch_alone_and_in_any_order_of_imports(first: str, disable: str) -> None:
    code = f"""
{first}
import torch, types
caller = types.ModuleType("verl.worker")
exec("def construct(kind, *args, **kwargs): return kind(*args, **kwargs)", vars(caller))
made = caller.construct(torch.optim.AdamW, [torch.nn.Parameter(torch.ones(3))], lr=0.5)
print(type(made).__name__, made.param_groups[0]["fused"])
"""
    env = {"PYTHONPATH": str(CHECKOUT), "FUSEPATCH_OPTIMIZER_CLASS": "torch.optim.SGD", "FUSEPATCH_DISABLE": disable}
    done = fresh(code, env=env, check=True)
    name = "AdamW" if disable == ID else "SGD"
    assert done.stdout.split() == [name, str(None if disable == "optimizer.flags" else True)]


def test_both_patches_hold_in_the_modules_that_they_share() -> None:
    code = """
        import fusepatch
        import torch
        both = [patch for patch in fusepatch.status() if patch.id in ("optimizer.class", "optimizer.flags")]
        sites = [site for patch in both for site in patch.sites]
        print(sorted((site.patch, site.outcome.value) for site in sites if site.module == "torch.optim.adamw"))
    """
    done = fresh(code, env={"PYTHONPATH": str(CHECKOUT)}, check=True)
    assert done.stdout.strip() == "[('optimizer.class', 'APPLIED'), ('optimizer.flags', 'APPLIED')]"


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"CLASS": "AdamW8bit"}, "FUSEPATCH_OPTIMIZER_CLASS='AdamW8bit' cannot be read (not the dotted path of"),
        ({"CLASS": "torch..SGD"}, "wanted a dotted path such as torchao.optim.AdamW8bit, keep"),
        ({"CLASS": "torch.optim.SGD()"}, "cannot be read"),
        (
            {"CLASS": "torch.optim.SGD", "KWARGS": "momentum=0.9"},
            "FUSEPATCH_OPTIMIZER_KWARGS='momentum=0.9' cannot be read",
        ),
        ({"CLASS": "torch.optim.SGD", "KWARGS": "[1]"}, "(it is a JSON array): wanted a JSON object such as"),
        ({"CLASS": "torch.optim.SGD", "KWARGS": "0.9"}, "(it is a JSON number)"),
        ({"KWARGS": '{"momentum": 0.9}'}, "FUSEPATCH_OPTIMIZER_CLASS names no class"),
        ({"CLASS": "keep", "KWARGS": "{}"}, "FUSEPATCH_OPTIMIZER_CLASS names no class"),
        ({"CLASS": "torch.optim.SGD", "KWARGS": '{"fused": true}', "FUSED": "0"}, "contradict each other"),
        ({"CLASS": "torch.optim.NAdam", "KWARGS": '{"eps": 1e-5}', "EPS": "1e-6"}, "contradict each other"),
    ],
)
def test_values_that_cannot_be_read_are_errors_at_the_import(variables: dict[str, str], found: str) -> None:
    with (
        pytest.raises(SettingError) as raised,
        active(**{f"OPTIMIZER_{name}": value for name, value in variables.items()}),
    ):
        pass
    assert found in str(raised.value)
    assert "Nothing was patched" in str(raised.value)


def test_the_import_itself_loads_neither_the_class_nor_json() -> None:
    code = (
        "import fusepatch, sys; print([name for name in ('torch', 'json', 'optimizers_of_mine') if name in "
        "sys.modules])"
    )
    env = {"PYTHONPATH": str(CHECKOUT), "FUSEPATCH_OPTIMIZER_CLASS": "optimizers_of_mine.Own"}
    assert fresh(code, env=env, check=True).stdout.strip() == "[]"
