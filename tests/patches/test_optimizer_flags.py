"""`optimizer.flags` on torch's own classes: what goes in, what comes out, and what stays as it was."""

from __future__ import annotations

import copy
import inspect
import io
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import fusepatch  # noqa: E402
from fusepatch.engine.patch import Outcome  # noqa: E402
from fusepatch.patches.optimizer_flags import CLASSES, PATCH  # noqa: E402
from kits.helpers import run as run_process  # noqa: E402
from kits.optimizer_flags import active, fallbacks, flags, inactive, module, record, replaced  # noqa: E402

AdamW = torch.optim.AdamW
verl = module("verl.workers.config.optimizer")
trainer = module("transformers.trainer")


def parameters(count: int = 3, dtype: Any = torch.float32) -> list[Any]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(4, 3, dtype=dtype)) for _ in range(count)]


def train(optimizer: Any, steps: int = 3, scaler: Any = None) -> None:
    if scaler is not None:
        scaler.scale(torch.ones(()))
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
                if scaler is not None:
                    param.grad *= scaler.get_scale()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


def test_every_site_is_applied() -> None:
    with active():
        assert record().outcome is Outcome.APPLIED
        assert {site.module for site in record().sites} == {*CLASSES.values(), "torch.optim.optimizer"}


def test_every_class_of_torch_that_has_a_flag_is_covered() -> None:
    for name in dir(torch.optim):
        kind = getattr(torch.optim, name)
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            has = {"fused", "foreach"} & set(inspect.signature(kind).parameters)
            assert bool(has) == (name in CLASSES), f"{name} has {has or 'none of the flags'}"


@pytest.mark.parametrize("name", CLASSES)
def test_each_class_is_fused_where_it_has_that_form(name: str) -> None:
    with active():
        optimizer = verl.construct(getattr(torch.optim, name), parameters(), lr=0.1)
        has = "fused" in inspect.signature(type(optimizer)).parameters
        assert flags(optimizer, "fused") == [(True,)] if has else [(None,)]
        assert record().calls == 1
        assert (replaced() != [], fallbacks() != []) == (has, not has)
        train(optimizer)


@pytest.mark.parametrize("name", CLASSES)
def test_each_class_takes_foreach(name: str) -> None:
    with active(OPTIMIZER_FOREACH=1):
        optimizer = verl.construct(getattr(torch.optim, name), parameters(), lr=0.1)
        assert flags(optimizer, "foreach") == [(True,)]
        assert not optimizer.param_groups[0].get("fused")
        train(optimizer)


@pytest.mark.parametrize("scope", ["frameworks", "all"])
def test_adamw_calling_adams_constructor_is_one_optimizer(scope: str) -> None:
    with active(OPTIMIZER_SCOPE=scope):
        verl.construct(AdamW, parameters())
        assert record().calls == 1
        assert [note.times for note in record().replaced] == [1]


def test_user_code_is_left_alone_unless_asked() -> None:
    mine = module("__main__")
    with active():
        assert flags(mine.construct(AdamW, parameters())) == [(None, None)]
        assert record().calls == 0
    with active(OPTIMIZER_SCOPE="all", OPTIMIZER_EPS=1e-6):
        assert flags(mine.construct(AdamW, parameters()), "fused", "eps") == [(True, 1e-6)]
        assert flags(mine.construct(AdamW, parameters(), fused=False, eps=1e-8), "fused", "eps") == [(False, 1e-8)]
        assert any("eps=1e-08 from __main__ kept" in text for text in replaced())


def test_a_package_whose_name_only_begins_like_a_frameworks_is_user_code() -> None:
    with active():
        assert flags(module("verlx.train").construct(AdamW, parameters())) == [(None, None)]


def test_a_subclass_with_its_own_constructor_belongs_to_the_module_that_wrote_it() -> None:
    class Mine(AdamW):
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, lr=lr)

    with active():
        assert flags(verl.construct(Mine, parameters())) == [(None, None)]
        assert record().calls == 0


def test_a_subclass_without_one_belongs_to_who_constructs_it() -> None:
    class Mine(AdamW):
        pass

    with active():
        optimizer = verl.construct(Mine, parameters())
        assert flags(optimizer) == [(True, None)]
        assert type(optimizer) is Mine


@pytest.mark.parametrize(
    ("variables", "passed", "expected"),
    [
        ({}, {"fused": True, "eps": 1e-8}, (True, None, 1e-8)),
        ({"FUSED": "auto"}, {"eps": 1e-8}, (True, None, 1e-8)),
        ({"FUSED": 0}, {"fused": True, "eps": 1e-8}, (None, None, 1e-8)),
        ({"FUSED": 1}, {"eps": 1e-8}, (True, None, 1e-8)),
        ({"FUSED": "keep"}, {"fused": True, "eps": 1e-8}, (True, None, 1e-8)),
        ({"FUSED": "keep"}, {"eps": 1e-8}, (None, None, 1e-8)),
        ({"FOREACH": 1}, {"fused": True}, (None, True, 1e-8)),
        ({"FOREACH": 0}, {"fused": True}, (True, False, 1e-8)),
        ({"FOREACH": 0, "FUSED": "keep"}, {}, (None, False, 1e-8)),
        ({"EPS": 1e-6}, {"fused": True, "eps": 1e-8}, (True, None, 1e-6)),
        ({"EPS": 1e-6}, {"eps": 1e-5}, (True, None, 1e-5)),
        ({"FUSED": 1}, {"fused": False}, (False, None, 1e-8)),
    ],
)
def test_what_the_trainer_passes_against_the_environment(
    variables: dict[str, object], passed: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    with active(**{f"OPTIMIZER_{name}": value for name, value in variables.items()}):
        optimizer = trainer.construct(AdamW, parameters(), lr=0.1, **passed)
        assert flags(optimizer, "fused", "foreach", "eps") == [expected]


def test_what_the_user_wrote_in_verls_configuration_beats_the_environment() -> None:
    """verl passes none of the flags itself, so what arrives is `override_optimizer_config`."""
    with active(OPTIMIZER_FUSED=1, OPTIMIZER_EPS=1e-6):
        optimizer = verl.construct(AdamW, parameters(), lr=0.1, fused=False, eps=1e-8)
    assert flags(optimizer, "fused", "eps") == [(False, 1e-8)]


def test_eps_in_its_place_among_positional_arguments() -> None:
    with active(OPTIMIZER_EPS=1e-6):
        optimizer = trainer.construct(AdamW, parameters(), 0.1, (0.8, 0.9), 1e-8, 0.2)
    assert flags(optimizer, "lr", "betas", "eps", "weight_decay") == [(0.1, (0.8, 0.9), 1e-6, 0.2)]


def test_none_counts_as_not_passed() -> None:
    with active():
        assert flags(verl.construct(AdamW, parameters(), fused=None, foreach=None)) == [(True, None)]


def test_groups_stay_the_callers_own_dictionaries_in_their_order() -> None:
    one, two, three = parameters()
    groups = [{"params": [one], "lr": 0.5}, {"params": iter([two, three]), "mine": "kept"}]
    with active():
        optimizer = verl.construct(AdamW, groups, lr=0.1)
        assert all(live is own for live, own in zip(optimizer.param_groups, groups, strict=True))
        assert [group["params"] for group in optimizer.param_groups] == [[one], [two, three]]
        assert flags(optimizer, "lr", "mine", "fused") == [(0.5, None, True), (0.1, "kept", True)]


@pytest.mark.parametrize("form", ["generator", "tuple", "named", "groups of generators", "generator of groups"])
def test_every_form_of_parameters_arrives_whole(form: str) -> None:
    model = torch.nn.Linear(3, 2)
    forms: dict[str, Any] = {
        "generator": model.parameters(),
        "tuple": tuple(model.parameters()),
        "named": model.named_parameters(),
        "groups of generators": [{"params": model.parameters()}],
        "generator of groups": ({"params": [param]} for param in model.parameters()),
    }
    with active():
        optimizer = verl.construct(AdamW, forms[form])
        held = [param for group in optimizer.param_groups for param in group["params"]]
        assert [id(param) for param in held] == [id(param) for param in model.parameters()]
        assert set(flags(optimizer)) == {(True, None)}


@pytest.mark.parametrize("bad", [[], iter(()), torch.ones(2), 3, [3], [{"params": {1}}], [{"lr": 1.0}]])
def test_torchs_own_errors_stay_torchs(bad: Any) -> None:
    def error() -> tuple[type, str]:
        with pytest.raises(Exception) as caught:
            verl.construct(AdamW, copy.copy(bad))
        return caught.type, str(caught.value)

    with active():
        patched = error()
        assert not any("the patch itself failed" in text for text in fallbacks())
    with inactive():
        assert patched == error()
    with active(), pytest.raises(TypeError, match="unexpected keyword"):
        verl.construct(AdamW, parameters(), no_such_argument=1)


def test_what_the_constructor_checks_is_checked_in_what_the_caller_passed() -> None:
    groups = [{"params": parameters(1)}, {"params": parameters(1), "foreach": False}]
    with active(), pytest.raises(ValueError, match="lr as a Tensor"):
        verl.construct(AdamW, groups, lr=torch.tensor(0.1), foreach=True)


def test_constructing_is_done_once() -> None:
    built = []

    class Counting(AdamW):
        def add_param_group(self, param_group: Any) -> None:
            built.append(param_group)
            super().add_param_group(param_group)

    with active():
        verl.construct(Counting, parameters())
    assert len(built) == 1


def test_one_group_that_cannot_leaves_the_others_fused() -> None:
    odd = torch.nn.Parameter(torch.randn(2, dtype=torch.complex64))
    groups = [{"params": parameters()}, {"params": [odd], "lr": 0.2}]
    with active():
        optimizer = verl.construct(AdamW, groups, lr=0.1)
        assert flags(optimizer) == [(True, None), (None, None)]
        assert optimizer.defaults["fused"] is None
        assert not getattr(optimizer, "_step_supports_amp_scaling", False), "GradScaler has to unscale the other group"
        assert any("param group 1: not fused" in text and "complex64" in text for text in fallbacks())
        for param in (*groups[0]["params"], odd):
            param.grad = torch.ones_like(param)
        optimizer.step()


def test_a_frameworks_fused_is_taken_from_the_call_where_one_group_cannot() -> None:
    odd = torch.nn.Parameter(torch.randn(2, dtype=torch.complex64))
    with active(OPTIMIZER_FUSED=1):
        optimizer = trainer.construct(AdamW, [{"params": parameters()}, {"params": [odd]}], lr=0.1, fused=True)
    assert flags(optimizer) == [(True, None), (None, None)]
    assert optimizer.defaults["fused"] is None
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)


def test_a_group_without_parameters_changes_nothing() -> None:
    """The Trainer passes an empty group where no parameter is without weight decay."""
    with active():
        optimizer = trainer.construct(AdamW, [{"params": parameters()}, {"params": []}], lr=0.1)
        assert flags(optimizer) == [(True, None), (True, None)]
    assert flags(optimizer) == [(None, None), (None, None)], "deactivating gives both back"


def test_flags_in_the_groups_count_too() -> None:
    one, two, three = parameters()
    groups = [{"params": [one], "fused": False}, {"params": [two], "foreach": True}, {"params": [three], "eps": 1e-8}]
    with active(OPTIMIZER_EPS=1e-6):
        optimizer = trainer.construct(AdamW, groups, fused=True, eps=1e-8)
    assert flags(optimizer, "fused", "foreach", "eps") == [
        (False, None, 1e-6),
        (None, True, 1e-6),
        (True, None, 1e-6),
    ], "the groups' own flags are the user's: the Trainer writes none; an eps of 1e-8 is its default"


def test_requests_that_cannot_be_followed_are_said_once_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    odd = [torch.nn.Parameter(torch.randn(2, dtype=torch.complex64))]
    with active(OPTIMIZER_FUSED=1):
        for _ in range(2):
            optimizer = trainer.construct(AdamW, odd, lr=0.1, fused=True)
            odd[0].grad = torch.ones_like(odd[0])
            optimizer.step()
    said = [message for message in caplog.messages if "was not followed" in message]
    assert len(said) == 1
    assert "FUSEPATCH_OPTIMIZER_FUSED=1 was not followed" in said[0]
    assert "complex64" in said[0]


def test_requests_that_cannot_be_followed_raise_under_strict() -> None:
    with active(OPTIMIZER_FUSED=1, STRICT=1), pytest.raises(fusepatch.StrictError, match="RMSprop has no fused form"):
        verl.construct(torch.optim.RMSprop, parameters())
    with active(OPTIMIZER_EPS=1e-6, STRICT=1), pytest.raises(fusepatch.StrictError, match="SGD has no eps"):
        verl.construct(torch.optim.SGD, parameters(), lr=0.1)
    with active(STRICT=1):
        verl.construct(torch.optim.RMSprop, parameters())


def test_classes_with_none_of_the_flags_are_named() -> None:
    class Other(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

    with active():
        verl.construct(Other, parameters())
        verl.construct(torch.optim.LBFGS, parameters())
        assert [text.partition(" in verl")[0].rpartition(".")[2] for text in fallbacks()] == ["Other", "LBFGS"]
        Other(parameters())
        assert len(fallbacks()) == 2, "user code's is not our business"
    with active(OPTIMIZER_FUSED=1, STRICT=1), pytest.raises(fusepatch.StrictError, match="FUSED=1 was not followed"):
        verl.construct(Other, parameters())
    with active(OPTIMIZER_FUSED=0):
        verl.construct(Other, parameters())
        assert fallbacks() == []


def test_a_tensor_learning_rate_works_with_every_request() -> None:
    for variables in ({}, {"OPTIMIZER_FOREACH": 1}, {"OPTIMIZER_FOREACH": 0}, {"OPTIMIZER_FUSED": 1}):
        with active(**variables):
            optimizer = verl.construct(AdamW, parameters(), lr=torch.tensor(0.1))
            train(optimizer)
    with active(OPTIMIZER_FOREACH=1):
        optimizer = verl.construct(AdamW, [{"params": parameters(), "lr": torch.tensor(0.1)}])
        assert flags(optimizer) == [(True, None)] or flags(optimizer) == [(None, None)]
        train(optimizer)
        assert any("FOREACH=1 was not followed" in text for text in fallbacks())


def test_eps_that_vanishes_in_the_parameters_dtype_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with active(OPTIMIZER_FUSED=0, OPTIMIZER_EPS=1e-9):
        verl.construct(AdamW, parameters(dtype=torch.float16))
    assert "1e-09 is 0 in float16" in caplog.text
    caplog.clear()
    with active(OPTIMIZER_EPS=1e-9):
        verl.construct(AdamW, parameters(dtype=torch.float16))
    assert "is 0 in" not in caplog.text, "the fused kernel computes in float32"


def test_adafactors_two_epsilons_are_left() -> None:
    with active(OPTIMIZER_EPS=1e-6):
        optimizer = verl.construct(torch.optim.Adafactor, parameters())
        assert flags(optimizer, "eps") == [((None, 1e-3),)]
        assert any("not a single number" in text for text in fallbacks())


def test_groups_that_are_added_later_are_judged_too() -> None:
    odd = torch.nn.Parameter(torch.randn(2, dtype=torch.complex64))
    more, last = parameters(2)
    with active(OPTIMIZER_EPS=1e-6):
        optimizer = trainer.construct(AdamW, parameters(1), lr=0.1, eps=1e-8)
        for group in ({"params": [more]}, {"params": odd}, {"params": iter([last]), "foreach": True, "eps": 1e-8}):
            optimizer.add_param_group(group)
        assert flags(optimizer, "fused", "foreach", "eps") == [
            (True, None, 1e-6),
            (True, None, 1e-6),
            (None, None, 1e-6),
            (None, True, 1e-6),
        ]
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        optimizer.step()


def test_what_user_code_adds_to_its_own_optimizer_is_left() -> None:
    with active():
        optimizer = AdamW(parameters(1), foreach=True)
        optimizer.add_param_group({"params": parameters(1)})
    assert flags(optimizer) == [(None, True), (None, True)]


@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_sparse_gradients_are_found_at_the_first_step(name: str) -> None:
    def rows(patched: bool) -> Any:
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(5, 3, sparse=True)
        make = verl.construct if patched else (lambda kind, *args, **kwargs: kind(*args, **kwargs))
        optimizer = make(getattr(torch.optim, name), embedding.parameters(), lr=0.1)
        assert flags(optimizer, "fused") == [(True if patched else None,)]
        for _ in range(3):
            optimizer.zero_grad()
            embedding(torch.tensor([1, 2])).square().sum().backward()
            optimizer.step()
        assert flags(optimizer, "fused") == [(None,)]
        return embedding.weight.detach()

    with active():
        patched = rows(True)
        assert any("at a step: not fused" in text for text in fallbacks())
    with inactive():
        assert torch.equal(patched, rows(False))


@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
@pytest.mark.parametrize("by_keyword", [False, True])
def test_sparse_gradients_are_found_where_a_closure_makes_them(name: str, by_keyword: bool) -> None:
    """torch's own test_rosenbrock_sparse does so: before the first step there is no gradient to look at."""

    def rows(make: Any) -> Any:
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(5, 3, sparse=True)
        optimizer = make(getattr(torch.optim, name), embedding.parameters(), lr=0.1)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = embedding(torch.tensor([1, 2])).square().sum()
            loss.backward()
            return loss

        losses = [optimizer.step(closure=closure) if by_keyword else optimizer.step(closure) for _ in range(3)]
        assert flags(optimizer, "fused") == [(None,)]
        return torch.stack([loss.detach() for loss in losses]), embedding.weight.detach()

    with active():
        patched = rows(verl.construct)
        assert len([text for text in fallbacks() if "at a step: not fused" in text]) == 1
    with inactive():
        assert all(map(torch.equal, patched, rows(lambda kind, *args, **kwargs: kind(*args, **kwargs))))


@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_sparse_gradients_are_found_where_they_come_after_the_first_step(name: str) -> None:
    with active():
        embedding, other = torch.nn.Embedding(5, 3, sparse=True), torch.nn.Parameter(torch.ones(3))
        optimizer = verl.construct(getattr(torch.optim, name), [embedding.weight, other], lr=0.1)
        other.sum().backward()
        optimizer.step()
        assert flags(optimizer, "fused") == [(True,)]
        before = embedding.weight.detach().clone()
        (embedding(torch.tensor([1])).sum() + other.sum()).backward()
        optimizer.step()
        assert flags(optimizer, "fused") == [(None,)]
    assert not torch.equal(embedding.weight, before)


def test_meta_parameters_are_settled_by_the_first_step() -> None:
    model = torch.nn.Linear(3, 2, device="meta")
    with active():
        optimizer = verl.construct(AdamW, model.parameters(), lr=0.1)
        assert flags(optimizer) == [(True, None)]
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        assert flags(optimizer) == [(None, None)], "torch has no fused step on meta parameters, and an ordinary one"
        assert any("meta" in text for text in fallbacks())

        model = torch.nn.Linear(3, 2, device="meta")
        optimizer = verl.construct(AdamW, model.parameters(), lr=0.1)
        model.to_empty(device="cpu")
        optimizer.param_groups[0]["params"] = list(model.parameters())
        train(optimizer)
        assert flags(optimizer) == [(True, None)]
        assert {state["step"].item() for state in optimizer.state.values()} == {3.0}


def test_identity_pickle_copy_signature_and_isinstance_are_as_before() -> None:
    with inactive():
        signature, name, document = inspect.signature(AdamW), AdamW.__init__.__qualname__, AdamW.__doc__
    with active():
        optimizer = verl.construct(AdamW, parameters())
        assert type(optimizer) is AdamW
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert (inspect.signature(AdamW), AdamW.__init__.__qualname__, AdamW.__doc__) == (signature, name, document)
        assert pickle.loads(pickle.dumps(AdamW)) is AdamW
        train(optimizer)
        for other in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
            assert type(other) is AdamW
            assert flags(other) == [(None, None)], "a copy is the ordinary optimizer that the framework constructed"
            train(other)
            other.load_state_dict(optimizer.state_dict())
        assert record().calls == 1, "neither calls the constructor"


def test_step_is_the_same_function() -> None:
    with inactive():
        AdamW(parameters())  # torch puts its profiling wrapper on the class
        before = AdamW.step
    with active():
        optimizer = verl.construct(AdamW, parameters())
        assert AdamW.step is before
        assert "step" not in vars(optimizer)
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks


def test_schedulers_see_an_ordinary_optimizer(recwarn: pytest.WarningsRecorder) -> None:
    with active():
        optimizer = verl.construct(AdamW, parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        for expected in (0.05, 0.025):
            train(optimizer, 1)
            scheduler.step()
            assert optimizer.param_groups[0]["lr"] == expected
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_compiled_and_eager_steps_agree(name: str) -> None:
    """A step that is compiled is left to the compiler, as it was constructed."""
    from torch._dynamo.testing import CompileCounter

    results = []
    with active():
        for compiled in (False, True):
            params = parameters()
            optimizer = verl.construct(getattr(torch.optim, name), params, lr=0.1)
            assert flags(optimizer, "fused") == [(True,)]
            graphs = CompileCounter()
            step = torch.compile(optimizer.step, backend=graphs) if compiled else optimizer.step
            for count in range(4):
                generator = torch.Generator().manual_seed(count)
                for param in params:
                    param.grad = torch.randn(param.shape, generator=generator)
                step()
            assert flags(optimizer, "fused") == [(None if compiled else True,)]
            assert bool(graphs.op_count) == compiled, "torch traces no fused SGD: its step would not be compiled at all"
            results.append(torch.cat([param.detach().flatten() for param in params]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize(("saved_fused", "live_fused"), [(False, True), (True, False)])
def test_a_checkpoint_brings_everything_but_the_flags(name: str, saved_fused: bool, live_fused: bool) -> None:
    kind = getattr(torch.optim, name)
    with active(OPTIMIZER_FUSED=int(saved_fused)):
        saved = verl.construct(kind, parameters(), lr=0.25)
        train(saved)
        buffer = io.BytesIO()
        torch.save(saved.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer)
    with active(OPTIMIZER_FUSED=int(live_fused)):
        live = verl.construct(kind, [param.detach().clone().requires_grad_() for param in parameters()], lr=0.5)
        own = flags(live)
        live.load_state_dict(state)
        assert flags(live) == own == [(True if live_fused else None, None)]
        assert live.param_groups[0]["lr"] == 0.25
        for before, after in zip(saved.state.values(), live.state.values(), strict=True):
            for key, value in before.items():
                assert torch.equal(value, after[key]) if value is not None else after[key] is None
        train(live)
    assert state["param_groups"][0]["fused"] is None, "a flag that no caller passed is in no checkpoint"


def test_a_checkpoint_without_the_keys_at_all() -> None:
    with active():
        optimizer = verl.construct(AdamW, parameters())
        state = optimizer.state_dict()
        for group in state["param_groups"]:
            del group["fused"], group["foreach"]
        optimizer.load_state_dict(state)
        assert flags(optimizer) == [(True, None)]


def test_a_checkpoint_of_another_shape_is_torchs_to_refuse() -> None:
    with active():
        optimizer = verl.construct(AdamW, parameters())
        with pytest.raises(ValueError, match="number of parameter groups"):
            optimizer.load_state_dict({"state": {}, "param_groups": []})


def test_unpatched_torch_loses_the_flag_and_the_scaler_stops() -> None:
    """The fault that the hook cures."""
    with inactive():
        plain, fused = AdamW(parameters()), AdamW(parameters(), fused=True)
        fused.load_state_dict(plain.state_dict())
        assert flags(fused) == [(None, None)]
        with pytest.raises(AssertionError, match="grad_scale"):
            train(fused, 1, torch.amp.GradScaler("cpu", init_scale=4.0))


def test_the_scaler_goes_on_across_a_checkpoint() -> None:
    with inactive():
        plain = AdamW(parameters())
        train(plain)
        saved = copy.deepcopy(plain.state_dict())
        train(plain)
    with active():
        fused = verl.construct(AdamW, [param.detach().clone().requires_grad_() for param in parameters()])
        train(fused, 3)
        fused.load_state_dict(saved)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        train(fused, 3, scaler)
        assert scaler.get_scale() == 4.0
    held = [torch.cat([p.detach().flatten() for p in o.param_groups[0]["params"]]) for o in (plain, fused)]
    torch.testing.assert_close(held[0], held[1], rtol=1e-6, atol=1e-7)


def test_state_dtypes_never_change() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with inactive():
            plain = AdamW(parameters(dtype=dtype))
            train(plain)
        with active():
            fused = verl.construct(AdamW, parameters(dtype=dtype))
            train(fused)
        for before, after in zip(plain.state.values(), fused.state.values(), strict=True):
            assert {key: value.dtype for key, value in before.items()} == {
                key: value.dtype for key, value in after.items()
            }


def test_an_eps_that_the_checkpoint_replaces_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with inactive():
        state = AdamW(parameters()).state_dict()
    with active(OPTIMIZER_EPS=1e-6):
        optimizer = verl.construct(AdamW, parameters())
        optimizer.load_state_dict(state)
        assert flags(optimizer, "eps") == [(1e-8,)]
    assert "is not kept: eps=" in caplog.text


def test_keep_leaves_construction_and_loading_alone() -> None:
    with inactive():
        state = AdamW(parameters(), fused=True).state_dict()
    with active(OPTIMIZER_FUSED="keep"):
        optimizer = verl.construct(AdamW, parameters())
        assert flags(optimizer) == [(None, None)]
        assert not optimizer._optimizer_load_state_dict_pre_hooks
        optimizer.load_state_dict(state)
        assert flags(optimizer) == [(True, None)]
        assert record().calls == 1


def test_a_fault_in_the_patch_leaves_the_call_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusepatch.optim import capability

    def broken(*_: Any) -> Any:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(capability, "fused", broken)
    with active():
        optimizer = verl.construct(AdamW, (param for param in parameters()), lr=0.3)
        assert flags(optimizer, "lr", "fused") == [(0.3, None)]
        assert len(optimizer.param_groups[0]["params"]) == 3
        assert any("a fault of ours" in text for text in fallbacks())


def test_deactivating_puts_the_constructors_back() -> None:
    with inactive():
        before = {name: vars(getattr(torch.optim, name))["__init__"] for name in CLASSES}
    with active():
        optimizer = verl.construct(AdamW, parameters())
    with inactive():
        assert {name: vars(getattr(torch.optim, name))["__init__"] for name in CLASSES} == before
        assert flags(verl.construct(AdamW, parameters())) == [(None, None)]
        train(optimizer)
        assert flags(optimizer) == [(None, None)], "nothing looks at its steps any more"


@pytest.mark.parametrize("value", ["2", "yes", "True"])
def test_unreadable_values_raise_before_anything_is_patched(value: str) -> None:
    for name in ("FUSED", "FOREACH", "SCOPE"):
        with (
            pytest.raises(fusepatch.SettingError, match=f"FUSEPATCH_OPTIMIZER_{name}"),
            active(**{f"OPTIMIZER_{name}": value}),
        ):
            pass


@pytest.mark.parametrize("value", ["0", "-1e-8", "nan", "inf", "small"])
def test_eps_has_to_be_a_positive_number(value: str) -> None:
    with pytest.raises(fusepatch.SettingError, match="a finite number > 0"), active(OPTIMIZER_EPS=value):
        pass


def test_fused_and_foreach_together_are_refused_at_the_import() -> None:
    with pytest.raises(fusepatch.SettingError, match="contradict"), active(OPTIMIZER_FUSED=1, OPTIMIZER_FOREACH=1):
        pass
    with active(OPTIMIZER_FUSED=1, OPTIMIZER_FOREACH=0):
        assert flags(verl.construct(AdamW, parameters())) == [(True, False)]


def test_the_page_names_every_variable() -> None:
    with active(OPTIMIZER_EPS=1e-6):
        page = fusepatch.explain("optimizer.flags")
    assert all(variable in page for variable in PATCH.variables)
    assert "FUSEPATCH_OPTIMIZER_EPS=1e-06" in page


def test_a_framework_started_as_the_main_module_is_still_that_framework(tmp_path: Path) -> None:
    """`python -m` names the module `__main__`. The package is a stand-in: verl's own entry points need a GPU."""
    package = tmp_path / "trinity"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "worker.py").write_text(
        "import torch\nprint(torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]).param_groups[0]['fused'])\n"
    )
    (tmp_path / "mine.py").write_text((package / "worker.py").read_text())
    code = "import fusepatch, runpy, sys; runpy.run_module(sys.argv[1], run_name='__main__')"
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(fusepatch.__file__).parents[1]), str(tmp_path)])}
    for name, expected in (("trinity.worker", "True"), ("mine", "None")):
        done = run_process([sys.executable, "-c", code, name], env=paths)
        assert (done.stdout.strip(), done.returncode) == (expected, 0), done.stderr


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_unscaling_and_clipping_before_a_fused_step(name: str) -> None:
    results = []
    for fused in (0, 1):
        with active(OPTIMIZER_FUSED=fused):
            params = parameters()
            optimizer = verl.construct(getattr(torch.optim, name), params, lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            for step in range(3):
                generator = torch.Generator().manual_seed(step)
                scaler.scale(torch.ones(()))
                for param in params:
                    param.grad = 8 * torch.randn(param.shape, generator=generator)
                scaler.unscale_(optimizer)
                assert torch.nn.utils.clip_grad_norm_(params, 0.5) > 0.5
                scaler.step(optimizer)
                scaler.update()
            results.append(torch.cat([param.detach().flatten() for param in params]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)
