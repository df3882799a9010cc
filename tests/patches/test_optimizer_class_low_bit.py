"""`optimizer.class` with the real 8-bit optimizers of torchao and bitsandbytes, on the CPU.

torchao compiles its step; in the Trainers it runs the same code eagerly here, since compiling each shape takes seconds.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("torchao.optim")
pytest.importorskip("bitsandbytes.optim")

from packaging.version import Version  # noqa: E402

import fusepatch  # noqa: E402
from fusepatch.errors import OptimizerClassError  # noqa: E402
from fusepatch.optim import capability, refusals  # noqa: E402
from kits import trainers as trainers  # noqa: E402
from kits.optimizer_flags import active, flags, inactive  # noqa: E402
from kits.ranks import on_ranks  # noqa: E402

TORCHAO = "torchao.optim.AdamW8bit"
BITSANDBYTES = "bitsandbytes.optim.AdamW8bit"
SHORT: dict[str, Any] = {"max_steps": 6, "save_steps": 3}


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(autouse=True)
def a_model_with_matrices_of_4096_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both packages leave smaller parameters in float32."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.LlamaConfig(vocab_size=len(trainers.WORDS), num_key_value_heads=4, **shape, **special)

    def model() -> Any:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)

    monkeypatch.setattr(trainers, "tiny_model", model)


def kind_at(path: str) -> Any:
    from fusepatch.optim.exchange import Target, resolve

    return resolve(Target(path))


def has_eight_bits(optimizer: Any) -> bool:
    """Whether a state is held in bytes, and is nowhere larger."""
    inner = getattr(optimizer, "optimizer", optimizer)
    states = [state for param, state in inner.state.items() if param.numel() >= 4096]
    if "torchao" in type(inner).__module__:
        return bool(states) and all(state["exp_avg"].codes.dtype == torch.uint8 for state in states)
    return bool(states) and all(state["state1"].dtype == torch.uint8 for state in states)


def trained(trainer: Any, resume: Path | None = None) -> Any:
    transformers.set_seed(1)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    assert trainer.state.global_step == SHORT["max_steps"]
    return trainers.weights(trainer)


@pytest.mark.parametrize("path", [TORCHAO, BITSANDBYTES])
@pytest.mark.parametrize("name", ["Trainer", "SFT"])
def test_the_trainers_train_and_resume(name: str, path: str, tmp_path: Path) -> None:
    make = trainers.TRAINERS[name]
    with inactive():
        by_hand = make(tmp_path / "by_hand", **SHORT)
        by_hand.optimizer_cls_and_kwargs = (kind_at(path), {"lr": 1e-3, "betas": (0.9, 0.999)})
        start = trainers.weights(by_hand)
        expected = trained(by_hand)
        assert not torch.equal(start, expected)
    with active(OPTIMIZER_CLASS=path):
        exchanged = make(tmp_path / "exchanged", **SHORT)
        assert torch.equal(trained(exchanged), expected)
        optimizer = getattr(exchanged.optimizer, "optimizer", exchanged.optimizer)
        assert type(optimizer) is kind_at(path)
        assert has_eight_bits(optimizer)
        assert flags(optimizer, "weight_decay") == [(0.1,), (0.0,)]
        assert [float(group["lr"]) for group in optimizer.param_groups] == [0.0, 0.0], "the schedule's last value"
        resumed = make(tmp_path / "resumed", **SHORT)
        assert torch.equal(trained(resumed, tmp_path / "exchanged" / "checkpoint-3"), expected)
        assert has_eight_bits(resumed.optimizer)


@pytest.mark.parametrize("path", [TORCHAO, BITSANDBYTES])
def test_inside_backward(path: str, tmp_path: Path) -> None:
    make = trainers.TRAINERS["SFT"]
    with active(OPTIMIZER_CLASS=path):
        ordinary = trained(make(tmp_path / "ordinary", max_grad_norm=0.0, **SHORT))
    with active(OPTIMIZER_CLASS=path, OPTIMIZER_IN_BACKWARD=1):
        inside = make(tmp_path / "inside", max_grad_norm=0.0, **SHORT)
        assert (trained(inside) - ordinary).norm() <= 1e-6 * ordinary.norm()
        assert has_eight_bits(inside.optimizer)
        (record,) = [record for record in fusepatch.status() if record.id == "optimizer.in_backward"]
        assert record.calls == 1


def test_arguments_of_the_class(tmp_path: Path) -> None:
    with active(OPTIMIZER_CLASS=TORCHAO, OPTIMIZER_KWARGS='{"bf16_stochastic_round": true, "block_size": 128}'):
        optimizer = trainers.TRAINERS["Trainer"](tmp_path, **SHORT).create_optimizer()
        assert (optimizer.bf16_stochastic_round, optimizer.block_size) == (True, 128)
    with (
        active(OPTIMIZER_CLASS=TORCHAO, OPTIMIZER_KWARGS='{"fused": true}'),
        pytest.raises(OptimizerClassError, match="AdamW8bit accepts lr, betas, eps, weight_decay, amsgrad, block_size"),
    ):
        trainers.TRAINERS["Trainer"](tmp_path, **SHORT).create_optimizer()
    with active(OPTIMIZER_CLASS=BITSANDBYTES, OPTIMIZER_KWARGS='{"min_8bit_size": 16}'):
        assert trainers.TRAINERS["Trainer"](tmp_path, **SHORT).create_optimizer().args.min_8bit_size == 16


@pytest.mark.parametrize("path", [TORCHAO, BITSANDBYTES])
def test_the_checkpoint_of_adamw_is_refused_before_any_step(path: str, tmp_path: Path) -> None:
    with inactive():
        trained(trainers.TRAINERS["Trainer"](tmp_path / "adamw", **SHORT))
    with active(OPTIMIZER_CLASS=path):
        resumed = trainers.TRAINERS["Trainer"](tmp_path / "other", **SHORT)
        middle = tmp_path / "adamw" / "checkpoint-3"
        with pytest.raises(OptimizerClassError, match="another class"):
            resumed.train(resume_from_checkpoint=str(middle))
        saved = type(resumed.model).from_pretrained(middle)
        assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), saved.parameters(), strict=True))


@pytest.mark.parametrize(
    ("writer", "asked", "found"),
    [
        ("torchao.optim.AdamW8bit", "torchao.optim.AdamW8bit", None),
        (
            "torchao.optim.AdamW8bit",
            "torchao.optim.AdamW4bit",
            "are OptimState8bit, and those of this class are OptimState4bit",
        ),
        ("bitsandbytes.optim.AdamW8bit", "bitsandbytes.optim.AdamW8bit", None),
        ("bitsandbytes.optim.AdamW8bit", "bitsandbytes.optim.Lion8bit", "wanted state1 without state2"),
        ("bitsandbytes.optim.Lion8bit", "bitsandbytes.optim.AdamW8bit", "wanted state1 and state2"),
        (
            "bitsandbytes.optim.AdamW32bit",
            "bitsandbytes.optim.AdamW8bit",
            "are torch.float32, and those of this class have 8 bits",
        ),
    ],
)
def test_states_of_another_class_of_the_same_package(writer: str, asked: str, found: str | None) -> None:
    """Their param groups have the same keys. bitsandbytes loads in a way of its own, so its first step is where it is
    seen."""
    from kits.optimizer_flags import module

    def step(optimizer: Any) -> None:
        optimizer.param_groups[0]["params"][0].grad = torch.ones(64, 64)
        optimizer.step()

    def params() -> list[Any]:
        return [torch.nn.Parameter(torch.ones(64, 64))]

    with inactive():
        by_writer = kind_at(writer)(params(), lr=1e-3)
        step(by_writer)
        saved = by_writer.state_dict()

    def resume(fresh: list[Any]) -> None:
        optimizer = module("transformers.trainer").construct(torch.optim.AdamW, fresh, lr=1e-3)
        optimizer.load_state_dict(saved)
        step(optimizer)

    with active(OPTIMIZER_CLASS=asked):
        fresh = params()
        if found is None:
            resume(fresh)
        else:
            with pytest.raises(OptimizerClassError, match=found):
                resume(fresh)
        assert torch.equal(fresh[0], params()[0]) == (found is not None)


@pytest.mark.parametrize("path", [TORCHAO, BITSANDBYTES])
def test_verls_build_optimizer(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("verl") is None:
        pytest.skip("verl is not installed here")
    if Version(importlib.metadata.version("verl")) >= Version("0.9"):
        # These take their device from a registry, where the doors register a CPU.
        monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "doors.cpu_platform")
        monkeypatch.setenv("VERL_PLATFORM", "cpu")
    try:
        from verl.workers.config.optimizer import FSDPOptimizerConfig, build_optimizer
    except ImportError as error:
        pytest.skip(f"this verl has no build_optimizer ({error})")

    def run(**chosen: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(96, 64)
        config = FSDPOptimizerConfig(lr=1e-3, weight_decay=0.1, total_training_steps=3, **chosen)
        optimizer = build_optimizer(model.parameters(), config)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            model(torch.randn(8, 96, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach().clone(), optimizer

    module, _, name = path.rpartition(".")
    with inactive():
        expected, _ = run(optimizer=name, optimizer_impl=module)
    with active(OPTIMIZER_CLASS=path):
        weights, optimizer = run()
        assert type(optimizer) is kind_at(path)
        assert has_eight_bits(optimizer)
        assert torch.equal(weights, expected)


class Sharded:
    """A model that FSDP2 has sharded, and an optimizer that a stand-in for verl constructs on it."""

    def __init__(self, optimizer_class: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        from kits.optimizer_flags import module

        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 128))
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.before = self.values()
        construct = module("verl.workers.engine").construct
        self.optimizer = construct(optimizer_class, self.model.parameters(), lr=1e-2)

    def values(self) -> list[float]:
        return [float(param.full_tensor().double().sum()) for param in self.model.parameters()]

    def train(self, steps: range) -> list[float]:
        for step in steps:
            batch = torch.randn(8, 128, generator=torch.Generator().manual_seed(step))
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.values()


def served(rank: int, path: str) -> tuple[Any, ...]:
    from torch.distributed.checkpoint import state_dict as dcp

    with inactive():
        ordinary = Sharded(kind_at(path)).train(range(6))
    with active(OPTIMIZER_CLASS=path):
        exchanged = Sharded(torch.optim.AdamW)
        assert type(exchanged.optimizer) is kind_at(path)
        exchanged.train(range(3))
        file = io.BytesIO()  # what get_state_dict returns are the live tensors
        torch.save(dcp.get_state_dict(exchanged.model, exchanged.optimizer), file)
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        resumed = Sharded(torch.optim.AdamW)
        dcp.set_state_dict(resumed.model, resumed.optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
        return ordinary, exchanged.train(range(3, 6)), resumed.train(range(3, 6))


@pytest.mark.parametrize("number", [1, 2])
def test_torchaos_eight_bit_states_on_dtensors(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Compiled, since the eager step does not know DTensors; with a cache of its own, since torch's does not tell the
    # state classes of torchao apart.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.set_stance("default")
    for ordinary, exchanged, resumed in on_ranks(number, served, TORCHAO):
        assert exchanged == ordinary
        assert resumed == ordinary


def refused(rank: int, path: str) -> tuple[str, bool, str]:
    with inactive():
        unpatched = Sharded(kind_at(path))
        try:
            unpatched.train(range(1))
            fault = "none"
        except Exception as error:
            fault = type(error).__name__
    constructed = unpatched
    with active(OPTIMIZER_CLASS=path):
        try:
            constructed = Sharded(torch.optim.AdamW)
            told = f"constructed {type(constructed.optimizer)}"
        except OptimizerClassError as error:
            told = str(error)
    return told, constructed is unpatched, fault


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (BITSANDBYTES, "bitsandbytes' kernels take plain tensors only"),
        ("bitsandbytes.optim.AdamW", "bitsandbytes' kernels take plain tensors only"),
    ],
)
def test_states_that_dtensors_break_are_refused_at_the_construction(path: str, found: str) -> None:
    ((told, nothing_made, fault),) = on_ranks(1, refused, path)
    assert fault != "none", "unpatched, the first step raises; if it does no more, the rule can go"
    assert nothing_made
    assert found in told
    assert "torchao.optim.AdamW8bit serves DTensors" in told


def offloaded(rank: int) -> list[str | None]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    local = torch.ones(64, 64)
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    found = []
    for device in ("cuda", "cpu"):
        mesh = DeviceMesh(device, [0], _init_backend=False)
        param = DTensor(local, DTensorSpec(mesh, (Replicate(),), tensor_meta=meta), requires_grad=True)
        found.append(refusals.obstacle(kind_at(TORCHAO), [param]))
    return found


def cautions(rank: int) -> list[str | None]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    param = DTensor.from_local(torch.ones(64, 64), DeviceMesh("cpu", [0]))
    found = []
    for version in ("2.11.0+cu130", "2.13.0"):
        torch.__version__ = version
        capability.in_releases.cache_clear()
        found += [refusals.caution(kind_at(TORCHAO), [each]) for each in (param, param.to_local())]
    return found


def test_torchaos_states_on_dtensors_are_warned_of_before_torch_2_12() -> None:
    ((on_dtensor, on_plain, *with_newer_torch),) = on_ranks(1, cautions)
    assert on_dtensor is not None
    assert "found torch 2.11.0+cu130" in on_dtensor
    assert (on_plain, with_newer_torch) == (None, [None, None])


def test_torchaos_states_on_offloaded_dtensors_are_refused() -> None:
    ((on_cuda_mesh, on_cpu_mesh),) = on_ranks(1, offloaded)
    assert on_cuda_mesh is not None
    assert "DTensors of a cuda mesh that are offloaded to the cpu" in on_cuda_mesh
    assert on_cpu_mesh is None


def test_torchaos_states_under_fsdp1_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    from torch.distributed.fsdp._common_utils import _set_fsdp_flattened

    from kits.optimizer_flags import module

    flat = torch.nn.Parameter(torch.ones(8192))
    _set_fsdp_flattened(flat)
    for path, warned in ((TORCHAO, True), (BITSANDBYTES, False)):
        caplog.clear()
        with active(OPTIMIZER_CLASS=path):
            module("transformers.trainer").construct(torch.optim.AdamW, [flat], lr=0.1)
            assert ("optim_state_dict cannot gather its states" in caplog.text) == warned


def test_bitsandbytes_without_a_kernel_or_a_library_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes.cextension

    kind = kind_at(BITSANDBYTES)
    assert refusals.obstacle(kind, [torch.ones(3)]) is None, "this one has kernels for the CPU"
    monkeypatch.setattr(refusals, "BITSANDBYTES_KERNEL", "bitsandbytes::a_kernel_that_is_not_there")
    assert "no optimizer kernels for parameters on cpu" in (refusals.obstacle(kind, [torch.ones(3)]) or "")

    class OnCuda:
        ndim, device = 2, torch.device("cuda")

    assert bitsandbytes.cextension.lib.compiled_with_cuda is False
    assert "found no library for this CUDA" in (refusals.obstacle(kind, [OnCuda()]) or "")  # type: ignore[list-item]


def test_the_patch_says_what_it_did(tmp_path: Path) -> None:
    with active(OPTIMIZER_CLASS=TORCHAO):
        trainers.TRAINERS["Trainer"](tmp_path, **SHORT).create_optimizer()
        record = next(record for record in fusepatch.status() if record.id == "optimizer.class")
        assert f"class torch.optim.AdamW -> {TORCHAO}" in record.replaced[0].text
        assert record.fallbacks == ()
