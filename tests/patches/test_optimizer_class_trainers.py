"""`optimizer.class` in the real Trainer of transformers and the real SFT and GRPO trainers of TRL, on a tiny model."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import fusepatch  # noqa: E402
from fusepatch.errors import OptimizerClassError  # noqa: E402
from kits.optimizer_flags import active, flags, inactive  # noqa: E402
from kits.trainers import TRAINERS, arguments, tiny_model, weights  # noqa: E402

ID = "optimizer.class"
SHORT: dict[str, Any] = {"max_steps": 6, "save_steps": 3}
OPTIMS = [
    name for name in ("adamw_torch", "adamw_torch_fused") if name in set(transformers.training_args.OptimizerNames)
]


class Own(torch.optim.Optimizer):
    """A user's class with keyword-only arguments and a state of its own: sign descent with momentum."""

    def __init__(self, params: Any, lr: float = 1.0, *, beta: float = 0.5, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                average = self.state[param].setdefault("average", torch.zeros_like(param))
                average.lerp_(param.grad, group["beta"])
                param.mul_(1 - group["lr"] * group["weight_decay"]).add_(average.sign(), alpha=-group["lr"])


@pytest.fixture(autouse=True)
def of_a_user() -> Iterator[None]:
    made = types.ModuleType("optimizers_of_mine")
    made.Own = Own  # type: ignore[attr-defined]
    sys.modules[made.__name__] = made
    yield
    del sys.modules[made.__name__]


CLASSES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "torch.optim.SGD": (torch.optim.SGD, '{"momentum": 0.9}', {"momentum": 0.9}),
    "torch.optim.NAdam": (
        torch.optim.NAdam,
        '{"momentum_decay": 0.01}',
        {"betas": (0.8, 0.99), "momentum_decay": 0.01},
    ),
    "torch.optim.Adafactor": (torch.optim.Adafactor, '{"d": 2.0}', {"d": 2.0}),
    "optimizers_of_mine.Own": (Own, '{"beta": 0.25}', {"beta": 0.25}),
}


def record() -> Any:
    return next(record for record in fusepatch.status() if record.id == ID)


def trained(trainer: Any, resume: Path | None = None) -> Any:
    transformers.set_seed(1)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    assert trainer.state.global_step == SHORT["max_steps"]
    return weights(trainer)


def inner(trainer: Any) -> Any:
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


@pytest.mark.parametrize("path", CLASSES)
@pytest.mark.parametrize("name", TRAINERS)
def test_it_trains_and_resumes_as_the_class_that_the_user_builds(name: str, path: str, tmp_path: Path) -> None:
    kind, asked, kwargs = CLASSES[path]
    options = {**SHORT, "adam_beta1": 0.8, "adam_beta2": 0.99}
    with inactive():
        by_hand = TRAINERS[name](tmp_path / "by_hand", **options)
        by_hand.optimizer_cls_and_kwargs = (kind, {"lr": 1e-3, **kwargs})
        start = weights(by_hand)
        expected = trained(by_hand)
        assert not torch.equal(start, expected), "it trained"
    # Equal to the last bit, which rows that are moved are not.
    with active(OPTIMIZER_CLASS=path, OPTIMIZER_KWARGS=asked, OPTIMIZER_FUSED="keep", GRPO_PADDING="keep"):
        exchanged = TRAINERS[name](tmp_path / "exchanged", **options)
        assert torch.equal(trained(exchanged), expected)
        assert type(inner(exchanged)) is kind
        assert record().calls == 1
        assert flags(exchanged.optimizer, "weight_decay") == [(0.1,), (0.0,)]
        assert flags(exchanged.optimizer, "lr") == flags(by_hand.optimizer, "lr"), "the schedule's last values"
        saved = torch.load(tmp_path / "exchanged" / "checkpoint-3" / "optimizer.pt", weights_only=True)
        assert len(saved["state"]) == sum(len(group["params"]) for group in saved["param_groups"])
        resumed = TRAINERS[name](tmp_path / "resumed", **options)
        assert torch.equal(trained(resumed, tmp_path / "exchanged" / "checkpoint-3"), expected)
        assert type(inner(resumed)) is kind


@pytest.mark.parametrize("optim", OPTIMS)
def test_every_name_of_adamw_is_exchanged(optim: str, tmp_path: Path) -> None:
    with active(OPTIMIZER_CLASS="torch.optim.RMSprop"):
        optimizer = TRAINERS["Trainer"](tmp_path, optim=optim).create_optimizer()
        assert type(optimizer) is torch.optim.RMSprop
        assert set(flags(optimizer, "lr", "eps")) == {(1e-3, 1e-8)}


def test_the_default_optim_is_exchanged(tmp_path: Path) -> None:
    with active(OPTIMIZER_CLASS="torch.optim.SGD"):
        assert type(TRAINERS["Trainer"](tmp_path, optim=None).create_optimizer()) is torch.optim.SGD


@pytest.mark.parametrize("optim", ["sgd", "adagrad", "rmsprop", "adafactor"])
def test_another_optim_is_the_users(optim: str, tmp_path: Path) -> None:
    with inactive():
        kind = type(TRAINERS["Trainer"](tmp_path, optim=optim).create_optimizer())
    with active(OPTIMIZER_CLASS="optimizers_of_mine.Own"):
        assert type(TRAINERS["Trainer"](tmp_path, optim=optim).create_optimizer()) is kind
        assert f"{kind.__name__} in transformers.trainer kept" in record().replaced[0].text
        assert record().calls == 0


def test_the_users_class_and_the_users_optimizer_stand(tmp_path: Path) -> None:
    if "optimizer_cls_and_kwargs" not in inspect.signature(transformers.Trainer).parameters:
        pytest.skip("this transformers has no optimizer_cls_and_kwargs")
    options = arguments(transformers.TrainingArguments, tmp_path)
    with active(OPTIMIZER_CLASS="torch.optim.SGD"):
        chosen = (torch.optim.AdamW, {"lr": 0.5})
        trainer = transformers.Trainer(tiny_model(), options, optimizer_cls_and_kwargs=chosen)
        assert type(trainer.create_optimizer()) is torch.optim.AdamW
        kept = "AdamW in transformers.trainer kept: the Trainer was given optimizer_cls_and_kwargs"
        assert kept in record().replaced[0].text
        model = tiny_model()
        mine = torch.optim.AdamW(model.parameters())
        trainer = transformers.Trainer(model, options, optimizers=(mine, None))
        assert trainer.create_optimizer() is mine
        assert type(transformers.Trainer(tiny_model(), options).create_optimizer()) is torch.optim.SGD, "it ends there"


def test_a_trainer_of_the_user_that_constructs_its_own(tmp_path: Path) -> None:
    class Mine(transformers.Trainer):
        def create_optimizer(self, *_: Any) -> Any:
            self.optimizer = torch.optim.AdamW(self.model.parameters())
            return self.optimizer

    options = arguments(transformers.TrainingArguments, tmp_path)
    with active(OPTIMIZER_CLASS="torch.optim.SGD"):
        assert type(Mine(tiny_model(), options).create_optimizer()) is torch.optim.AdamW


@pytest.mark.parametrize(
    ("path", "kwargs", "found"),
    [
        ("torch.optim.Muon", "{}", "it takes matrices only, and 5 of"),
        ("torch.optim.SGD", '{"momentun": 0.9}', "'momentun' is nearest to 'momentum'"),
    ],
)
@pytest.mark.parametrize("name", TRAINERS)
def test_what_cannot_be_built_ends_the_run_before_any_step(
    name: str, path: str, kwargs: str, found: str, tmp_path: Path
) -> None:
    with active(OPTIMIZER_CLASS=path, OPTIMIZER_KWARGS=kwargs):
        trainer = TRAINERS[name](tmp_path, **SHORT)
        start = weights(trainer)
        with pytest.raises(OptimizerClassError, match=found):
            trainer.train()
        assert torch.equal(weights(trainer), start)


@pytest.mark.parametrize("path", CLASSES)
def test_the_checkpoint_of_adamw_is_refused_before_any_step(path: str, tmp_path: Path) -> None:
    with inactive():
        trained(TRAINERS["Trainer"](tmp_path / "adamw", **SHORT))
    with active(OPTIMIZER_CLASS=path):
        resumed = TRAINERS["Trainer"](tmp_path / "other", **SHORT)
        with pytest.raises(OptimizerClassError, match="the checkpoint was written by an optimizer of another class"):
            resumed.train(resume_from_checkpoint=str(tmp_path / "adamw" / "checkpoint-3"))
        assert not inner(resumed).state
