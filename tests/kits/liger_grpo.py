"""Cases of Liger's GRPO loss on the CPU, and what a call with one gives: value, metrics and gradients.

`python tests/kits/liger_grpo.py NUMBER` compares that many sampled cases for every loss type and level, with and
without the patch, on whatever Liger the path holds first (`--trl` on TRL 1.13's copy of it).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import os
import random
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
LEVELS = ("token", "sequence")
BATCH, LENGTH, WIDTH, VOCABULARY = 6, 50, 12, 33
# One chunk of 128 rows, the least there is, and groups of two: 300 rows make two groups.
SMALL_CHUNK_MIB = 0.001


class Case(NamedTuple):
    loss_type: str = "dapo"
    level: str = "token"
    beta: float = 0.0
    old: bool = False
    ref: str = "none"
    ratio: str = "none"
    delta: float | None = None
    bias_correction: bool = False
    temperature: float = 1.0
    chunk_size: int = 1
    bias: bool = False
    num_items: float | None = None
    trainable: str = "all"


OPTIONS: dict[str, tuple[Any, ...]] = {
    "beta": (0.0, 0.04),
    "old": (False, True),
    "ref": ("none", "given", "input", "input+bias", "unused"),
    "ratio": ("none", "B", "B1", "BT"),
    "delta": (None, 1.1),
    "bias_correction": (False, True),
    "temperature": (1.0, 0.7),
    "chunk_size": (1, 2),
    "bias": (False, True),
    "num_items": (None, 9.0),
    "trainable": ("all", "hidden", "weight"),
}


class Result(NamedTuple):
    loss: torch.Tensor
    metrics: tuple[torch.Tensor, ...]
    gradients: dict[str, torch.Tensor | None]


def loss_class(module: str = "liger_kernel.chunked_loss.grpo_loss") -> Any:
    name = "LigerFusedLinearGRPOLoss" if module.startswith("liger") else "FusedLinearGRPOLoss"
    return getattr(importlib.import_module(module), name)


def accepted(kind: Any) -> tuple[frozenset[str], frozenset[str]]:
    """The parameters of the constructor and of forward."""
    return frozenset(inspect.signature(kind).parameters), frozenset(inspect.signature(kind.forward).parameters)


def sample(loss_type: str, level: str, number: int, kind: Any) -> list[Case]:
    """Up to `number` distinct cases that this release has the arguments for; the same ones at every run."""
    made, called = accepted(kind)
    options = dict(OPTIONS)
    if "delta" not in made:
        options |= {"delta": (None,), "bias_correction": (False,)}
    if "vllm_is_ratio" not in called:
        options["ratio"] = ("none",)
    if "num_items_in_batch" not in called:
        options["num_items"] = (None,)
    product = [Case(loss_type, level, *values) for values in itertools.product(*options.values())]
    # Not drawn from the hash of a string, which differs from process to process.
    return random.Random(f"{loss_type} {level}").sample(product, min(number, len(product)))


def combinations(kind: Any) -> list[tuple[str, str]]:
    """The loss types and levels that this release has."""
    made, _ = accepted(kind)
    if "loss_type" not in made:
        return [("bnpo", "token")]
    levels = LEVELS if "importance_sampling_level" in made else LEVELS[:1]
    return [(loss_type, level) for loss_type in LOSS_TYPES for level in levels if _runs(kind, loss_type, level)]


def _runs(kind: Any, loss_type: str, level: str) -> bool:
    try:
        run(Case(loss_type, level), kind)
    except ValueError:
        return False
    return True


def tensors(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Everything that a call can be given, by name."""
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made)

    lengths = torch.tensor([LENGTH, 17, 0, 33, 1, 41])
    tokens = (BATCH, LENGTH)
    advantages = normal(BATCH)
    advantages[3] = 0.0
    return {
        "hidden": normal(BATCH, LENGTH, WIDTH).to(dtype),
        "weight": (normal(VOCABULARY, WIDTH) * 0.5).to(dtype),
        "bias": (normal(VOCABULARY) * 0.5).to(dtype),
        "ids": torch.randint(0, VOCABULARY, tokens, generator=made),
        "mask": (torch.arange(LENGTH).unsqueeze(0) < lengths.unsqueeze(1)).to(torch.int64),
        "advantages": advantages,
        "old": normal(*tokens) * 0.3 - 3.5,
        "ref": normal(*tokens) * 0.3 - 3.5,
        "ref_hidden": normal(BATCH, LENGTH, WIDTH).to(dtype),
        "ref_weight": (normal(VOCABULARY, WIDTH) * 0.5).to(dtype),
        "ref_bias": (normal(VOCABULARY) * 0.5).to(dtype),
        "ratio": normal(*tokens).exp(),
    }


def build(case: Case, kind: Any) -> Any:
    """The loss module of a case."""
    made, _ = accepted(kind)
    wanted = {
        "beta": case.beta,
        "compiled": False,
        "use_ref_model": case.ref not in ("none", "unused"),
        "chunk_size": case.chunk_size,
        "loss_type": case.loss_type,
        "max_completion_length": LENGTH,
        "importance_sampling_level": case.level,
        "temperature": case.temperature,
        "delta": case.delta,
        "use_bias_correction_kl": case.bias_correction,
    }
    return kind(**{name: value for name, value in wanted.items() if name in made})


def arguments(case: Case, given: dict[str, torch.Tensor], kind: Any) -> dict[str, Any]:
    """The keywords of one call; the tensors that require a gradient are new leaves."""
    _, called = accepted(kind)

    def leaf(name: str) -> torch.Tensor:
        return given[name].clone().requires_grad_(case.trainable in ("all", name))

    ratio = {"none": None, "B": given["ratio"].sum(1), "B1": given["ratio"][:, :1], "BT": given["ratio"]}[case.ratio]
    keywords = {
        "_input": leaf("hidden"),
        "lin_weight": leaf("weight"),
        "selected_token_ids": given["ids"],
        "attention_mask": given["mask"],
        "advantages": given["advantages"],
        "bias": leaf("bias") if case.bias else None,
        "old_per_token_logps": given["old"] if case.old else None,
        "ref_per_token_logps": given["ref"] if case.ref in ("given", "unused") else None,
        "vllm_is_ratio": ratio,
        "num_items_in_batch": case.num_items,
    }
    if case.ref.startswith("input"):
        keywords |= {"ref_input": given["ref_hidden"], "ref_weight": given["ref_weight"]}
        keywords["ref_bias"] = given["ref_bias"] if case.ref == "input+bias" else None
    return {name: value for name, value in keywords.items() if name in called}


def run(case: Case, kind: Any, given: dict[str, torch.Tensor] | None = None, scale: float = 0.7) -> Result:
    """One call, and a backward with another gradient than 1."""
    keywords = arguments(case, given or tensors(), kind)
    loss, metrics = build(case, kind)(**keywords)
    leaves = {"hidden": keywords["_input"], "weight": keywords["lin_weight"], "bias": keywords["bias"]}
    if loss.requires_grad:
        (loss * scale).backward()
    gradients = {name: None if tensor is None else tensor.grad for name, tensor in leaves.items()}
    return Result(loss.detach(), tuple(metrics), gradients)


def assert_equal(ours: Result, theirs: Result, tolerance: float = 5e-6) -> None:
    """Same values, dtypes, shapes and number; the tolerance is relative to the largest value of a tensor."""
    assert len(ours.metrics) == len(theirs.metrics)
    pairs = [(ours.loss, theirs.loss), *zip(ours.metrics, theirs.metrics, strict=True)]
    for name, gradient in theirs.gradients.items():
        mine = ours.gradients[name]
        assert (mine is None) == (gradient is None), name
        if mine is not None and gradient is not None:
            pairs.append((mine, gradient))
    for mine, other in pairs:
        assert (mine.dtype, mine.shape, mine.requires_grad) == (other.dtype, other.shape, other.requires_grad)
        scale = max(float(other.abs().max()), 1e-3) if other.numel() else 1.0
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance * scale)


@contextlib.contextmanager
def patched(**env: str) -> Iterator[Any]:
    """Inside of it, fusepatch is active with these variables."""
    import fusepatch

    before = dict(os.environ)
    os.environ.update(env)
    fusepatch.activate()
    try:
        yield fusepatch
    finally:
        fusepatch.deactivate()
        os.environ.clear()
        os.environ.update(before)


def record() -> Any:
    """What fusepatch says of the patch."""
    import fusepatch

    return next(record for record in fusepatch.status() if record.id == "liger.grpo_loss")


def variants(index: int) -> dict[str, Any]:
    """Settings that the cases take in turn: one chunk, several groups of rows, and slices of the vocabulary."""
    prefer = "memory" if index % 3 == 2 else "speed"
    return {"head_chunk_mib": 256.0 if index % 3 == 0 else SMALL_CHUNK_MIB, "head_prefer": prefer}


def differences(cases: list[Case], kind: Any) -> list[str]:
    """Run every case with and without the patch, and say where the two differ or the patch did not compute."""
    from fusepatch import settings

    theirs = [run(case, kind) for case in cases]
    found = []
    with patched():
        for index, (case, expected) in enumerate(zip(cases, theirs, strict=True)):
            settings.use(settings.current()._replace(**variants(index)))
            try:
                assert_equal(run(case, kind), expected)
            except Exception as error:
                found.append(f"{case} {variants(index)}: {type(error).__name__}: {str(error)[:300]}")
        notes = record()
    found += [note.text for note in notes.fallbacks if "upstream's own forward" in note.text or "failed" in note.text]
    if notes.calls != len(cases):
        found.append(f"{notes.calls} calls went through the patch, not {len(cases)}")
    return found


def main() -> int:
    kind = loss_class("trl.losses.grpo_loss" if "--trl" in sys.argv else "liger_kernel.chunked_loss.grpo_loss")
    cases = [case for pair in combinations(kind) for case in sample(*pair, int(sys.argv[1]), kind)]
    found = differences(cases, kind)
    print(*found[:8], sep="\n")
    print(f"{inspect.getfile(kind)}: {len(cases)} cases, {len(found)} complaints")
    return 1 if found else 0


if __name__ == "__main__":
    os.environ["FUSEPATCH"] = "0"
    import fusepatch  # noqa: F401

    del os.environ["FUSEPATCH"]
    sys.exit(main())
