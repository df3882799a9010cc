"""`optimizer.class` in verl's real `build_optimizer` and its FSDP2 engine on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import fusepatch  # noqa: E402
from fusepatch.errors import OptimizerClassError, StrictError  # noqa: E402
from kits.optimizer_flags import active, flags, inactive  # noqa: E402
from kits.verl_engine import (  # noqa: E402
    build_optimizer,
    config,
    engine,
    engine_weights,
    network,
    on_one_rank,
    save_tiny_model,
    train_engine,
)

pytestmark = pytest.mark.upstream

STEPS = 8
MIDDLE = 4


def record() -> Any:
    return next(record for record in fusepatch.status() if record.id == "optimizer.class")


def test_the_settings_of_verl_carry_over() -> None:
    with active(OPTIMIZER_CLASS="torch.optim.NAdam", OPTIMIZER_KWARGS='{"momentum_decay": 0.01}'):
        optimizer = build_optimizer(network().parameters(), config(betas=(0.8, 0.9)))
        assert type(optimizer) is torch.optim.NAdam
        names = ("lr", "weight_decay", "betas", "momentum_decay", "eps")
        assert flags(optimizer, *names) == [(1e-3, 0.1, (0.8, 0.9), 0.01, 1e-8)]
        assert len(optimizer.param_groups[0]["params"]) == 4, "verl passes a generator"
        assert record().calls == 1


def test_another_class_in_verls_configuration_stands() -> None:
    with active(OPTIMIZER_CLASS="torch.optim.NAdam"):
        assert type(build_optimizer(network().parameters(), config(optimizer="SGD"))) is torch.optim.SGD
        assert "torch.optim.sgd.SGD in verl.workers.config.optimizer kept" in record().replaced[0].text


def test_override_optimizer_config_is_the_users() -> None:
    chosen = config(override_optimizer_config={"eps": 1e-5, "amsgrad": True})
    with active(OPTIMIZER_CLASS="torch.optim.RMSprop", OPTIMIZER_KWARGS='{"eps": 1e-6, "alpha": 0.5}'):
        optimizer = build_optimizer(network().parameters(), chosen)
        assert flags(optimizer, "eps", "alpha") == [(1e-5, 0.5)]
        assert "amsgrad=True from verl.workers.config.optimizer left out" in record().fallbacks[0].text
    with active(OPTIMIZER_CLASS="torch.optim.RMSprop", STRICT=1), pytest.raises(StrictError, match="amsgrad=True"):
        build_optimizer(network().parameters(), chosen)


def test_an_argument_that_the_class_does_not_take_is_named_where_verl_would_only_fail() -> None:
    with (
        active(OPTIMIZER_CLASS="torch.optim.SGD", OPTIMIZER_KWARGS='{"betas": [0.9, 0.99]}'),
        pytest.raises(OptimizerClassError, match=r"'betas', which torch\.optim\.SGD does not take"),
    ):
        build_optimizer(network().parameters(), config())


@on_one_rank
def test_the_fsdp2_engine_trains_and_resumes_as_with_the_class_in_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from kits import verl_engine as verl

    folder = save_tiny_model(tmp_path / "model")

    def run(resume: Path | None, save: Path | None) -> Any:
        built = engine(folder)
        if resume is not None:
            built.checkpoint_manager.load_checkpoint(local_path=str(resume), del_local_after_load=False)
        train_engine(built, range(MIDDLE if resume else 0, MIDDLE))
        if save is not None:
            built.checkpoint_manager.save_checkpoint(local_path=str(save), global_step=MIDDLE)
        train_engine(built, range(MIDDLE, STEPS))
        assert type(built.optimizer) is torch.optim.SGD
        return engine_weights(built)

    with active(OPTIMIZER_CLASS="torch.optim.SGD", OPTIMIZER_KWARGS='{"momentum": 0.9}', OPTIMIZER_FUSED="keep"):
        exchanged = run(None, tmp_path / "exchanged")
        assert torch.equal(run(tmp_path / "exchanged", None), exchanged)
    with inactive():
        by_configuration = {"optimizer": "SGD", "override_optimizer_config": {"momentum": 0.9}}
        monkeypatch.setattr(verl, "config", lambda **changes: config(**by_configuration, **changes))
        assert torch.equal(run(None, None), exchanged)


@on_one_rank
def test_parameters_that_the_class_cannot_train_are_refused_before_any_step(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = save_tiny_model(tmp_path / "model")
    with active(OPTIMIZER_CLASS="torch.optim.Muon"), pytest.raises(OptimizerClassError, match="it takes matrices only"):
        engine(folder)
