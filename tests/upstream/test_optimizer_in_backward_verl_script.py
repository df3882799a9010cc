"""`optimizer.in_backward` in verl's real `fsdp_sft_trainer` (up to 0.7.0): imported, and run as `__main__` as torchrun
does."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import runpy
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
SCRIPT = "verl.trainer.fsdp_sft_trainer"
if importlib.util.find_spec("verl") is None or importlib.util.find_spec(SCRIPT) is None:
    pytest.skip("no verl with fsdp_sft_trainer is installed here", allow_module_level=True)
VERL = importlib.metadata.version("verl")
try:
    import verl.trainer.fsdp_sft_trainer as imported
except ImportError as error:
    pytest.skip(f"fsdp_sft_trainer of verl {VERL} cannot be imported here ({error})", allow_module_level=True)

import fusepatch  # noqa: E402
from doors import tiny  # noqa: E402
from fusepatch.errors import InBackwardError  # noqa: E402
from kits.optimizer_flags import active, inactive  # noqa: E402
from kits.ranks import on_ranks  # noqa: E402

pytestmark = pytest.mark.upstream

ID = "optimizer.in_backward"
STEPS = 20
MIDDLE = 10
LENGTH = 8


class Rows(torch.utils.data.Dataset):
    """Token ids as the SFT dataset returns them."""

    def __len__(self) -> int:
        return 4 * STEPS * 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.randint(3, 64, (LENGTH,), generator=torch.Generator().manual_seed(index))
        ones = torch.ones(LENGTH, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": ones, "position_ids": torch.arange(LENGTH), "loss_mask": ones}


def configuration(folder: Path, *overrides: str) -> Any:
    """verl's own configuration with overrides as on its command line."""
    import hydra

    known = Path(importlib.import_module("verl.trainer").__file__ or "").parent / "config"
    given = [
        f"model.partial_pretrain={folder}",
        "model.strategy=fsdp2",
        "model.fsdp_config.wrap_policy.min_num_params=0",
        "+model.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap=[LlamaDecoderLayer]",
        "data.micro_batch_size_per_gpu=4",
        "data.max_length=8",
        "optim.lr=1e-2",
        "trainer.total_epochs=1",
        "++trainer.device=cpu",
        "++trainer.resume_mode=disable",
    ]
    with hydra.initialize_config_dir(config_dir=str(known), version_base=None):
        return hydra.compose(config_name="sft_trainer", overrides=[*given, *overrides])


def trainer_class(as_main: bool) -> Any:
    """The script's class; as `__main__` it has that module's name, as under `torchrun -m`."""
    namespace = vars(imported)
    if as_main:
        import hydra

        decorate = hydra.main
        hydra.main = lambda *_, **__: lambda function: lambda: None
        try:
            namespace = runpy.run_module(SCRIPT, run_name="__main__")
        finally:
            hydra.main = decorate
    kind = namespace["FSDPSFTTrainer"]
    assert kind.__module__ == ("__main__" if as_main else SCRIPT)
    # flash_attention_2, and how much memory a device has left, which the script asks for, the CPU does not have.
    names = kind._build_model_optimizer.__globals__
    names["log_gpu_memory_usage"] = lambda *_, **__: None
    models = names["AutoModelForCausalLM"]
    load = models.from_pretrained.__func__

    def without_flash_attention(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return load(cls, *args, **{**kwargs, "attn_implementation": "eager"})

    models.from_pretrained = classmethod(without_flash_attention)
    return kind


def trainer(ranks: int, folder: Path, as_main: bool, *overrides: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoTokenizer

    config = configuration(folder, f"data.train_batch_size={4 * ranks}", *overrides)
    return trainer_class(as_main)(
        config=config,
        device_mesh=init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",)),
        ulysses_device_mesh=init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("dp", "sp")),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        train_dataset=Rows(),
        val_dataset=Rows(),
    )


class Seen(NamedTuple):
    """The weights at the end, how many gradients each step left, and what fusepatch recorded."""

    weights: list[float]
    gradients: list[int]
    calls: int
    replaced: list[str]


def weights(built: Any) -> list[float]:
    return [float(x) for p in built.fsdp_model.parameters() for x in p.full_tensor().detach().flatten()]


def train(built: Any, rank: int, steps: range) -> list[int]:
    from tensordict import TensorDict

    gradients: list[int] = []
    for step in steps:
        rows = [Rows()[8 * step + 4 * rank + row] for row in range(4)]
        built.training_step(TensorDict({key: torch.stack([row[key] for row in rows]) for key in rows[0]}, batch_size=4))
        # The script clears gradients at the start of the next step.
        gradients.append(sum(parameter.grad is not None for parameter in built.fsdp_model.parameters()))
    return gradients


def run(
    rank: int, ranks: int, folder: Path, inside: bool, as_main: bool, resume: Path | None, save: Path | None
) -> Seen:
    from torch.distributed.checkpoint import state_dict as dcp

    with active(OPTIMIZER_IN_BACKWARD=1, OPTIMIZER_FUSED="keep") if inside else inactive():
        built = trainer(ranks, folder, as_main, "optim.clip_grad=inf")
        model, optimizer = built.fsdp_model, built.optimizer
        if resume is not None:
            saved = torch.load(resume / f"{rank}.pt", weights_only=False)
            dcp.set_state_dict(model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
            built.lr_scheduler.load_state_dict(saved[2])
        gradients = train(built, rank, range(MIDDLE if resume else 0, MIDDLE))
        if save is not None:
            save.mkdir(exist_ok=True)
            torch.save((*dcp.get_state_dict(model, optimizer), built.lr_scheduler.state_dict()), save / f"{rank}.pt")
        gradients += train(built, rank, range(MIDDLE, STEPS))
        notes = next(record for record in fusepatch.status() if record.id == ID)
        return Seen(weights(built), gradients, notes.calls, [note.text for note in notes.replaced])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.save_tiny_model("llama", folder)
    return folder


def close(one: list[float], other: list[float]) -> bool:
    first, second = torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64)
    return bool((first - second).norm() <= 1e-6 * first.norm())


@pytest.mark.parametrize(("ranks", "as_main"), [(1, False), (1, True), (2, True)])
def test_twenty_steps_and_a_resume_both_ways(ranks: int, as_main: bool, model: Path, tmp_path: Path) -> None:
    def on_each(inside: bool, resume: str | None, save: str | None) -> Seen:
        paths = [tmp_path / name if name else None for name in (resume, save)]
        return on_ranks(ranks, run, ranks, model, inside, as_main, *paths)[0]

    ordinary = on_each(False, None, "ordinary")
    inside = on_each(True, None, "inside")
    resumed_inside = on_each(True, "ordinary", None)
    resumed_ordinary = on_each(False, "inside", None)
    assert set(ordinary.gradients) == {21}
    assert set(inside.gradients) == {0}
    assert inside.calls == 1
    assert f"{SCRIPT}: torch.optim.adamw.AdamW updates 21 parameters inside backward" in inside.replaced[0]
    for other in (inside, resumed_inside, resumed_ordinary):
        assert close(ordinary.weights, other.weights)


def refused(rank: int, folder: Path, overrides: tuple[str, ...]) -> str:
    with active(OPTIMIZER_IN_BACKWARD=1):
        try:
            trainer(1, folder, True, *overrides)
        except InBackwardError as error:
            return str(error)
    raise AssertionError("it was not refused")


@pytest.mark.parametrize(
    ("overrides", "texts"),
    [
        ((), ["optim.clip_grad=1.0 (1.0 is verl's default)", "set optim.clip_grad=inf"]),
        (
            ("optim.clip_grad=inf", "data.micro_batch_size_per_gpu=1"),
            ["a batch has 4 micro-batches on each rank", "set data.micro_batch_size_per_gpu=4"],
        ),
        (
            ("optim.clip_grad=.5", "data.micro_batch_size_per_gpu=2"),
            ["optim.clip_grad=0.5", "a batch has 2 micro-batches"],
        ),
    ],
)
def test_settings_that_are_refused(overrides: tuple[str, ...], texts: list[str], model: Path) -> None:
    (message,) = on_ranks(1, functools.partial(refused, folder=model, overrides=overrides))
    assert "no parameter was changed" in message
    for text in texts:
        assert text in message


def test_offload_is_refused_by_its_setting(model: Path) -> None:
    """The rule alone: FSDP1, and the offload of this script, start on accelerators only."""
    from fusepatch.patches.optimizer_in_backward import verl_sft

    config = configuration(
        model,
        "data.train_batch_size=4",
        "optim.clip_grad=inf",
        "model.fsdp_config.cpu_offload=True",
        "model.strategy=fsdp",
    )
    text = "\n".join(map(str, verl_sft._of_script(config)))
    assert "set model.strategy=fsdp2" in text
    assert "set model.fsdp_config.cpu_offload=False" in text
