"""`optimizer.in_backward` in the real Trainer on two gloo ranks: DDP is refused, FSDP2 served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import fusepatch  # noqa: E402
from doors import tiny  # noqa: E402
from fusepatch.errors import InBackwardError  # noqa: E402
from kits import trainers as trainers  # noqa: E402
from kits.optimizer_flags import active, inactive  # noqa: E402
from kits.ranks import on_ranks  # noqa: E402

RANKS = 2
ID = "optimizer.in_backward"


def arguments(folder: Path, **changes: Any) -> Any:
    return trainers.arguments(
        transformers.TrainingArguments, folder, max_grad_norm=0.0, ddp_backend="gloo", **{"max_steps": 20, **changes}
    )


def rows() -> list[dict[str, Any]]:
    return [{"input_ids": ids, "labels": ids} for ids in trainers.words()(trainers.texts(40))["input_ids"]]


def refused_under_ddp(rank: int, folder: Path) -> tuple[str, bool]:
    with active(OPTIMIZER_IN_BACKWARD=1):
        built = transformers.Trainer(trainers.tiny_model(), arguments(folder), train_dataset=rows())
        before = trainers.weights(built)
        try:
            built.train()
        except InBackwardError as error:
            return str(error), bool(torch.equal(trainers.weights(built), before))
    raise AssertionError("it was not refused")


def test_ddp_is_refused(tmp_path: Path) -> None:
    for message, same in on_ranks(RANKS, refused_under_ddp, tmp_path):
        assert "the model is in DistributedDataParallel" in message
        assert "shard with FSDP2" in message
        assert same, "no parameter moved"


def sharded_trainer(model: Path, folder: Path, **changes: Any) -> Any:
    from transformers.distributed import DistributedConfig

    loaded = transformers.LlamaForCausalLM.from_pretrained(
        model, distributed_config=DistributedConfig(fsdp_size=RANKS, **changes), dtype=torch.float32
    )
    # transformers itself refuses to save the optimizer of such a model.
    options = arguments(folder, save_strategy="no", save_steps=None)
    return transformers.Trainer(loaded, options, train_dataset=rows())


def trained_sharded(rank: int, model: Path, folder: Path, inside: bool) -> list[float]:
    with active(OPTIMIZER_IN_BACKWARD=1) if inside else inactive():
        built = sharded_trainer(model, folder)
        transformers.set_seed(1)
        built.train()
        if inside:
            (record,) = [record for record in fusepatch.status() if record.id == ID]
            assert record.calls == 1
        shards = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in built.model.parameters()]
        assert any(hasattr(p, "full_tensor") for p in built.model.parameters())
        return [float(x) for shard in shards for x in shard.detach().flatten()]


def saved_model(folder: Path) -> Path:
    tiny.save_tiny_model("llama", folder)
    return folder


def needs_sharded_loading() -> None:
    try:
        from transformers.distributed import DistributedConfig
    except ImportError:
        pytest.skip("this transformers does not shard a model while it loads it")
    if not hasattr(transformers.PreTrainedModel, "is_distributed_loading_by_transformers") and "fsdp_size" not in (
        DistributedConfig.__dataclass_fields__
    ):
        pytest.skip("this transformers does not shard with FSDP2 while it loads")


def test_fsdp2_trains_the_same(tmp_path: Path) -> None:
    needs_sharded_loading()
    model = saved_model(tmp_path / "model")
    (ordinary, _), (inside, again) = (on_ranks(RANKS, trained_sharded, model, tmp_path, on) for on in (False, True))
    assert inside == again, "both ranks"
    assert inside == pytest.approx(ordinary, rel=1e-6, abs=1e-6)


def refused_offload(rank: int, model: Path, folder: Path) -> str:
    with active(OPTIMIZER_IN_BACKWARD=1):
        built = sharded_trainer(model, folder, fsdp_cpu_offload=True)
        try:
            built.train()
        except InBackwardError as error:
            return str(error)
    raise AssertionError("it was not refused")


def test_offload_of_a_model_that_transformers_shards_is_refused(tmp_path: Path) -> None:
    needs_sharded_loading()
    for message in on_ranks(RANKS, refused_offload, saved_model(tmp_path / "model"), tmp_path):
        assert "switch the offload off" in message
