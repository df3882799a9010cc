"""`optimizer.flags` in verl's real `build_optimizer`, its FSDP2 engine on the CPU, and Trinity-RFT's workers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed here", allow_module_level=True)

from doors import tiny  # noqa: E402
from kits.helpers import run as run_process  # noqa: E402
from kits.optimizer_flags import active, fallbacks, flags, inactive, record, replaced  # noqa: E402

DOORS = Path(__file__).parents[1] / "doors"
VERL = importlib.metadata.version("verl")
STEPS = 20
MIDDLE = 10
FUSED, NEITHER, FOREACH = (True, None), (None, None), (None, True)

if VERL >= "0.8":  # this verl takes its device from a registry, where the doors register a CPU
    os.environ.update({"VERL_USE_EXTERNAL_MODULES": "doors.cpu_platform", "VERL_PLATFORM": "cpu"})
try:
    from verl.workers.config.optimizer import FSDPOptimizerConfig, build_optimizer
except ImportError as error:
    pytest.skip(f"verl {VERL} has no build_optimizer ({error})", allow_module_level=True)


def config(**changes: Any) -> Any:
    return FSDPOptimizerConfig(**{"lr": 1e-3, "weight_decay": 0.1, "total_training_steps": STEPS, **changes})


def network() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


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


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch.distributed as distributed

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def engine(folder: Path) -> Any:
    """verl's FSDP2 engine on a model of two layers: what its workers run, with DTensor parameters."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    contents = ["model", "optimizer"]
    built = FSDPEngineWithLMHead(
        model_config=HFModelConfig(
            path=str(folder), use_remove_padding=False, override_config={"attn_implementation": "eager"}
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            # float32 throughout, so that rounding can be told from a fault
            model_dtype="fp32",
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            wrap_policy={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        ),
        optimizer_config=config(lr=1e-3),
        # Without the random states: torch.cpu has none, and nothing here draws from them. The learning rate is constant.
        checkpoint_config=CheckpointConfig(save_contents=contents, load_contents=contents),
    )
    built.initialize()
    return built


def train_engine(built: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(3, 64, (2, 8), generator=generator)
        built.optimizer_zero_grad()
        logits = built.module(input_ids=ids, use_cache=False).logits.float()
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        built.optimizer_step()
        built.lr_scheduler_step()


def engine_weights(built: Any) -> Any:
    from torch.distributed.tensor import DTensor

    params = list(built.module.parameters())
    assert all(isinstance(param, DTensor) for param in params)
    return torch.cat([param.full_tensor().detach().flatten().double() for param in params])


def test_the_fsdp2_engine_trains_and_resumes_the_same(one_rank: None, tmp_path: Path) -> None:
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


def save_tiny_model(folder: Path) -> Path:
    tiny.save_tiny_model("llama", folder)
    return folder


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
