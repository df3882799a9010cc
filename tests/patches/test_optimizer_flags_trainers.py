"""`optimizer.flags` in the real Trainer of transformers and the real SFT and GRPO trainers of TRL, on a tiny model."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kits.optimizer_flags import active, fallbacks, flags, inactive, record, replaced  # noqa: E402
from kits.trainers import MIDDLE, STEPS, TRAINERS, arguments, plain_trainer, tiny_model, weights  # noqa: E402


def run(name: str, folder: Path, resume: Path | None = None, **changes: Any) -> tuple[Any, list[tuple[Any, ...]]]:
    """Train to the last step; the weights, and the flags that the optimizer ended with."""
    trainer = TRAINERS[name](folder, **changes)
    transformers.set_seed(1)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    assert trainer.state.global_step == STEPS
    return weights(trainer), flags(trainer.optimizer)


@pytest.mark.parametrize("name", TRAINERS)
def test_twenty_steps_and_a_resume_in_the_middle_agree(name: str, tmp_path: Path) -> None:
    """float32: all weights together agree to 1e-6 relative, and the way they went to 1e-5 of its length (a fused and an
    ordinary step round differently, and training amplifies that where a gradient is near 0)."""
    with inactive():
        start = weights(TRAINERS[name](tmp_path / "start"))
        ordinary, seen = run(name, tmp_path / "ordinary")
        assert set(seen) == {(None, None)}
    with active():
        fused, seen = run(name, tmp_path / "fused")
        assert set(seen) == {(True, None)}
        assert record().calls == 1
    with active():
        to_fused, seen = run(name, tmp_path / "to_fused", tmp_path / "ordinary" / f"checkpoint-{MIDDLE}")
        assert set(seen) == {(True, None)}, "a checkpoint made without the flag does not take it away"
    with active(OPTIMIZER_FUSED=0):
        to_ordinary, seen = run(name, tmp_path / "to_ordinary", tmp_path / "fused" / f"checkpoint-{MIDDLE}")
        assert set(seen) == {(None, None)}, "one made with it does not bring it in"
    way = (ordinary - start).norm()
    assert way > 0.01 * start.norm(), "it trained"
    for other in (fused, to_fused, to_ordinary):
        difference = (other - ordinary).norm()
        assert difference <= 1e-6 * ordinary.norm()
        assert difference <= 1e-5 * way


UNTOUCHED: dict[str, object] = {}
FUSED, NEITHER, FOREACH = (True, None), (None, None), (None, True)


@pytest.mark.parametrize("name", TRAINERS)
def test_param_groups_for_every_setting(name: str, tmp_path: Path) -> None:
    trainer = TRAINERS[name](tmp_path)

    def built(optim: str, **more: Any) -> list[tuple[Any, ...]]:
        trainer.args.optim = transformers.training_args.OptimizerNames(optim)
        for key, value in more.items():
            setattr(trainer.args, key, value)
        trainer.optimizer = None
        optimizer = trainer.create_optimizer()
        assert type(optimizer) is torch.optim.AdamW
        assert flags(optimizer, "weight_decay") == [(0.1,), (0.0,)]
        (values,) = set(flags(optimizer, "fused", "foreach", "eps"))
        return values

    with inactive():
        assert built("adamw_torch") == (*NEITHER, 1e-8)
        assert built("adamw_torch_fused") == (*FUSED, 1e-8)
    for variables, plain, hard_coded in (
        (UNTOUCHED, FUSED, FUSED),
        ({"OPTIMIZER_FUSED": "auto"}, FUSED, FUSED),
        ({"OPTIMIZER_FUSED": 0}, NEITHER, NEITHER),
        ({"OPTIMIZER_FUSED": 1}, FUSED, FUSED),
        ({"OPTIMIZER_FUSED": "keep"}, NEITHER, FUSED),
        ({"OPTIMIZER_FOREACH": 1}, FOREACH, FOREACH),
        ({"OPTIMIZER_FOREACH": 0}, (True, False), (True, False)),
        ({"OPTIMIZER_FUSED": 0, "OPTIMIZER_FOREACH": 0}, (None, False), (None, False)),
        ({"OPTIMIZER_FUSED": "keep", "OPTIMIZER_FOREACH": 1}, FOREACH, FUSED),
    ):
        with active(**variables):
            assert built("adamw_torch") == (*plain, 1e-8), variables
            assert built("adamw_torch_fused") == (*hard_coded, 1e-8), variables
            assert record().calls == 2
    with active(OPTIMIZER_EPS=1e-6):
        assert built("adamw_torch_fused") == (*FUSED, 1e-6)
        assert "eps: 1e-08 from transformers.trainer -> 1e-06 (FUSEPATCH_OPTIMIZER_EPS=1e-06)" in " ".join(replaced())
        assert built("adamw_torch", adam_epsilon=1e-5) == (*FUSED, 1e-5), "adam_epsilon is the user's, 1e-8 nobody's"


def test_the_default_optim_is_as_it_was(tmp_path: Path) -> None:
    trainer = plain_trainer(tmp_path, optim=None)
    with inactive():
        before = flags(trainer.create_optimizer())
    trainer.optimizer = None
    with active(OPTIMIZER_FUSED="keep"):
        assert flags(trainer.create_optimizer()) == before
    trainer.optimizer = None
    with active():
        assert set(flags(trainer.create_optimizer())) == {FUSED}


def test_a_users_own_optimizer_is_left(tmp_path: Path) -> None:
    model = tiny_model()
    with active():
        mine = torch.optim.AdamW(model.parameters(), lr=1e-3)
        rows = [{"input_ids": [4, 5], "labels": [4, 5]}] * 4
        options = arguments(transformers.TrainingArguments, tmp_path, max_steps=1, save_strategy="no", save_steps=None)
        trainer = transformers.Trainer(model, options, train_dataset=rows, optimizers=(mine, None))
        trainer.train()
        assert flags(trainer.optimizer) == [(None, None)]
        assert record().calls == 0


def test_a_users_class_and_arguments(tmp_path: Path) -> None:
    """`optimizer_cls_and_kwargs` is the user's; what the Trainer would not pass by itself is kept."""
    if "optimizer_cls_and_kwargs" not in inspect.signature(transformers.Trainer).parameters:
        pytest.skip("this transformers has no optimizer_cls_and_kwargs")

    def built(kind: Any, **kwargs: Any) -> Any:
        options = arguments(transformers.TrainingArguments, tmp_path)
        return transformers.Trainer(tiny_model(), options, optimizer_cls_and_kwargs=(kind, kwargs)).create_optimizer()

    with active(OPTIMIZER_FUSED=1, OPTIMIZER_EPS=1e-6):
        assert set(flags(built(torch.optim.AdamW, fused=False, eps=1e-4), "fused", "eps")) == {(False, 1e-4)}
    with active():
        assert set(flags(built(torch.optim.SGD, lr=0.1))) == {FUSED}
        assert set(flags(built(torch.optim.RMSprop, lr=0.1), "foreach")) == {(None,)}
        assert any("RMSprop has no fused form" in text for text in fallbacks())


@pytest.mark.parametrize("optim", ["sgd", "adagrad", "rmsprop", "adafactor"])
def test_other_optims_of_the_trainer_train(optim: str, tmp_path: Path) -> None:
    with active():
        trainer = plain_trainer(tmp_path, optim=optim, max_steps=2, save_strategy="no", save_steps=None)
        trainer.train()
        fused = {"sgd": True, "adagrad": True}.get(optim)
        assert set(flags(trainer.optimizer, "fused")) == {(fused,)}
        assert bool(fallbacks()) == (fused is None)


def test_accelerate_prepares_and_loads_it_as_any_other(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from kits.optimizer_flags import module

    def prepared(make: Any) -> Any:
        model = torch.nn.Linear(3, 2)
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, make(torch.optim.AdamW, model.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()
        return accelerator, optimizer

    with inactive():
        accelerator, optimizer = prepared(lambda kind, *args, **kwargs: kind(*args, **kwargs))
        accelerator.save_state(str(tmp_path))
    with active():
        accelerator, optimizer = prepared(module("transformers.trainer").construct)
        assert flags(optimizer) == [FUSED]
        accelerator.load_state(str(tmp_path))
        assert flags(optimizer) == [FUSED]
        optimizer.step()


def test_distributed_checkpoints_leave_the_flag(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import state_dict as dcp

    from kits.optimizer_flags import module

    def one_step(model: Any, optimizer: Any) -> None:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model = torch.nn.Linear(3, 2)
    with inactive():
        plain = torch.optim.AdamW(model.parameters(), lr=0.25)
        one_step(model, plain)
        saved = dcp.get_optimizer_state_dict(model, plain)
    with active():
        fused = module("verl.workers.engine").construct(torch.optim.AdamW, model.parameters(), lr=0.5)
        dcp.set_optimizer_state_dict(model, fused, saved)
        assert flags(fused, "fused", "lr") == [(True, 0.25)]
        assert [state["step"].item() for state in fused.state.values()] == [1.0, 1.0]
        one_step(model, fused)
        back = dcp.get_optimizer_state_dict(model, fused)
    with active(OPTIMIZER_FUSED=0):
        plain = module("verl.workers.engine").construct(torch.optim.AdamW, model.parameters(), lr=0.5)
        dcp.set_optimizer_state_dict(model, plain, back)
        assert flags(plain) == [NEITHER]
        one_step(model, plain)
