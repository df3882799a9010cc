"""What `bench update` measures: the forms, the models, the batch and the tolerances, as data. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple


class Form(NamedTuple):
    """A way to run the trainer. `patched` says whether fusepatch is active in its process."""

    text: str
    patched: bool
    variables: Mapping[str, str]


FORMS = {
    "plain": Form("TRL as it is", False, {}),
    "patched": Form("with `import fusepatch`", True, {}),
    "drop": Form("the same with FUSEPATCH_GRPO_ZERO_ADVANTAGE=drop", True, {"FUSEPATCH_GRPO_ZERO_ADVANTAGE": "drop"}),
}

TRAINED = {"full": "every weight", "lora": "LoRA of rank 16 on every linear layer of the blocks"}

TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
"""Largest relative distance of a gradient norm from the plain one, by the dtype of the weights. Rows of another width
are summed in another order, and in bfloat16 each sum is rounded."""

WARM_UP = 2
"""Updates before the timing: the first allocates the optimizer's state and compiles kernels."""


@dataclass(frozen=True)
class Model:
    """A Qwen3 with random weights, by the values of its configuration."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int

    def changed(self, hidden: int | None, layers: int | None, vocabulary: int | None) -> Model:
        """The same with other sizes. Another hidden size takes the width of the feed-forward part and the heads
        along."""
        found = self
        if hidden is not None and hidden != self.hidden:
            heads = max(hidden * self.heads // self.hidden, 1)
            shared = max(heads * self.key_value_heads // self.heads, 1)
            shared = max(number for number in range(1, shared + 1) if heads % number == 0)
            found = replace(
                found,
                hidden=hidden,
                intermediate=hidden * self.intermediate // self.hidden,
                heads=heads,
                key_value_heads=shared,
            )
        return replace(found, layers=layers or self.layers, vocabulary=vocabulary or self.vocabulary)


SHAPES = {
    "tiny": Model(64, 192, 2, 4, 2, 16, 512),
    "0.6b": Model(1024, 3072, 28, 16, 8, 128, 151936),
    "1.7b": Model(2048, 6144, 28, 16, 8, 128, 151936),
    "4b": Model(2560, 9728, 36, 32, 8, 128, 151936),
}
"""The last three are those of Qwen3, with tied embeddings as they have."""

FEWEST_TOKENS = 8
"""The vocabulary must have room for the tokens that pad and end, and for others."""


@dataclass(frozen=True)
class Batch:
    """The rows of one update, over all ranks.

    ``completions`` rows in groups of ``group`` that share a prompt, trained in ``micro_batches`` forward and backward
    passes; lengths of completions are drawn with this ``median`` and at most ``longest``, those of prompts up to
    ``prompt``; the share ``dead`` of the groups has one reward for all rows, and so no gradient.
    """

    completions: int
    group: int
    micro_batches: int
    median: int
    longest: int
    prompt: int
    dead: float

    @property
    def groups(self) -> int:
        return self.completions // self.group

    @property
    def dead_groups(self) -> int:
        return round(self.groups * self.dead)


GPU_BATCH = Batch(64, 8, 8, 600, 2048, 128, 0.0)
CPU_BATCH = Batch(8, 4, 2, 12, 40, 8, 0.0)


@dataclass(frozen=True)
class Case:
    """Everything that a process needs to know beside its form."""

    shape: str
    model: Model
    batch: Batch
    trained: str
    dtype: str
    liger: bool
    ranks: int
    fsdp: bool
    updates: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Case:
        return cls(**{**values, "model": Model(**values["model"]), "batch": Batch(**values["batch"])})

    @property
    def title(self) -> str:
        """The case in words."""
        batch = self.batch
        dead = f"{batch.dead_groups} of {batch.groups} groups" if batch.dead_groups else "no group"
        parts = [f"{self.shape}, {self.trained}", f"{dead} dead"]
        if self.liger:
            parts.append("Liger's loss")
        if self.ranks > 1:
            parts.append(f"{self.ranks} ranks, {'FSDP2' if self.fsdp else 'DDP'}")
        return "; ".join(parts)
