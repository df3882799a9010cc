"""`optimizer.flags` in verl's real `build_optimizer`, its FSDP2 engine on the CPU, and Trinity-RFT's workers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kits.helpers import run as run_process  # noqa: E402
from kits.optimizer_flags import active, fallbacks, flags, inactive, record, replaced  # noqa: E402
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

DOORS = Path(__file__).parents[1] / "doors"
STEPS = 20
MIDDLE = 10
FUSED, NEITHER, FOREACH = (True, None), (None, None), (None, True)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, FUSED),
        ({"OPTIMIZER_FUSED": "auto"}, FUSED),
        ({"OPTIMIZER_FUSED": 1}, FUSED),
        ({"OPTIMIZER_FUSED": 0}, NEITHER),
        ({"OPTIMIZER_FUSED": "keep"}, NEITHER),
        ({"OPTIMIZER_FOREACH": 1}, FOREACH),
        ({"OPTIMIZER_FOREACH": 0}, (True, False)),
        ({"OPTIMIZER_FUSED": 0, "OPTIMIZER_FOREACH": 1}, FOREACH),
    ],
)
def test_build_optimizer_for_every_setting(variables: dict[str, object], expected: tuple[Any, ...]) -> None:
    with inactive():
        assert flags(build_optimizer(network().parameters(), config()), "fused", "foreach", "eps") == [(*NEITHER, 1e-8)]
    with active(**variables):
        optimizer = build_optimizer(network().parameters(), config())
        assert type(optimizer) is torch.optim.AdamW
        assert len(optimizer.param_groups[0]["params"]) == 4, "verl passes a generator"
        assert flags(optimizer) == [expected]
        assert record().calls == 1


def test_eps_reaches_verl_which_has_none_in_its_configuration() -> None:
    with active(OPTIMIZER_EPS=1e-6):
        optimizer = build_optimizer(network().parameters(), config())
        assert flags(optimizer, "fused", "eps", "lr", "weight_decay") == [(True, 1e-6, 1e-3, 0.1)]
        assert any("eps: not passed -> 1e-06" in text for text in replaced())


def test_override_optimizer_config_is_the_users() -> None:
    with active(OPTIMIZER_FUSED=1, OPTIMIZER_EPS=1e-6):
        chosen = config(override_optimizer_config={"fused": False, "eps": 1e-5})
        assert flags(build_optimizer(network().parameters(), chosen), "fused", "eps") == [(False, 1e-5)]
        assert sum("kept (it beats" in text for text in replaced()) == 2
    with active():
        chosen = config(override_optimizer_config={"foreach": True})
        assert flags(build_optimizer(network().parameters(), chosen)) == [FOREACH]
        assert any("passes foreach=True" in text for text in fallbacks())


def test_other_classes_by_name() -> None:
    with active():
        assert flags(build_optimizer(network().parameters(), config(optimizer="SGD"))) == [FUSED]
        assert flags(build_optimizer(network().parameters(), config(optimizer="RMSprop"))) == [NEITHER]


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(8, 6, generator=generator)
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()


def test_twenty_steps_and_a_resume_in_the_middle_agree() -> None:
    def built() -> tuple[Any, Any]:
        model = network()
        return model, build_optimizer(model.parameters(), config())

    def weights(model: Any) -> Any:
        return torch.cat([param.detach().flatten().double() for param in model.parameters()])

    def resumed(saved: dict[str, Any]) -> tuple[Any, Any]:
        model, optimizer = built()
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train(model, optimizer, range(MIDDLE, STEPS))
        return weights(model), flags(optimizer)

    def trained() -> tuple[Any, dict[str, Any]]:
        import copy

        model, optimizer = built()
        train(model, optimizer, range(MIDDLE))
        middle = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        train(model, optimizer, range(MIDDLE, STEPS))
        return weights(model), middle

    with inactive():
        start = weights(network())
        ordinary, ordinary_middle = trained()
    with active():
        fused, fused_middle = trained()
        to_fused, seen = resumed(ordinary_middle)
        assert seen == [FUSED]
    with active(OPTIMIZER_FUSED=0):
        to_ordinary, seen = resumed(fused_middle)
        assert seen == [NEITHER]
    for other in (fused, to_fused, to_ordinary):
        assert (other - ordinary).norm() <= 1e-6 * ordinary.norm()
        assert (other - ordinary).norm() <= 1e-5 * (ordinary - start).norm()


@on_one_rank
def test_the_fsdp2_engine_trains_and_resumes_the_same(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = save_tiny_model(tmp_path / "model")

    def run(resume: Path | None, save: Path | None) -> tuple[Any, list[tuple[Any, ...]]]:
        built = engine(folder)
        if resume is not None:
            built.checkpoint_manager.load_checkpoint(local_path=str(resume), del_local_after_load=False)
        train_engine(built, range(MIDDLE if resume else 0, MIDDLE))
        if save is not None:
            built.checkpoint_manager.save_checkpoint(local_path=str(save), global_step=MIDDLE)
        train_engine(built, range(MIDDLE, STEPS))
        return engine_weights(built), flags(built.optimizer)

    with inactive():
        start = engine_weights(engine(folder))
        ordinary, seen = run(None, tmp_path / "ordinary")
        assert seen == [NEITHER]
    with active():
        fused, seen = run(None, tmp_path / "fused")
        assert seen == [FUSED]
        assert record().calls == 1
        to_fused, seen = run(tmp_path / "ordinary", None)
        assert seen == [FUSED]
        assert any(text.startswith("load_state_dict of AdamW") for text in replaced())
    with active(OPTIMIZER_FUSED=0):
        to_ordinary, seen = run(tmp_path / "fused", None)
        assert seen == [NEITHER]
    assert (ordinary - start).norm() > 0.01 * start.norm(), "it trained"
    for other in (fused, to_fused, to_ordinary):
        assert (other - ordinary).norm() <= 1e-6 * ordinary.norm()
        assert (other - ordinary).norm() <= 1e-5 * (ordinary - start).norm()


@pytest.mark.parametrize(("variables", "expected"), [({}, True), ({"FUSEPATCH_OPTIMIZER_FUSED": "keep"}, None)])
def test_trinitys_own_path(variables: dict[str, str], expected: bool | None) -> None:
    """Trinity-RFT's worker takes `build_optimizer` by name at its import (0.5) or runs verl's engine (0.6)."""
    if importlib.util.find_spec("trinity") is None:
        pytest.skip("Trinity-RFT is not installed here")
    door = "trinity_worker.py" if importlib.metadata.version("trinity-rft") < "0.6" else "trinity_engine.py"
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = run_process(
        [sys.executable, DOORS / door, "--models", "llama", "--import-fusepatch"],
        env={"PYTHONPATH": paths, "FUSEPATCH_OPTIMIZER_EPS": "1e-6", **variables},
    )
    assert done.returncode == 0, done.stderr
    (model,) = json.loads(done.stdout.splitlines()[-1])["models"].values()
    (group,) = model["optimizer"]["groups"]
    assert (group["fused"], group["foreach"], group["eps"]) == (expected, None, 1e-6)
