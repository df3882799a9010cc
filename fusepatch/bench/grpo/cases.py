"""What is measured: the cases by name and the shape, as data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Case:
    """One setting of the loss.

    ``ragged``: 55 % of the tokens are valid, else all. ``zero_advantages``: those of every second sequence. ``old``:
    old log-probabilities and a sampling ratio [B, T] are given, at sequence level the first alone. ``beta``: weight of
    the KL penalty; where it is not 0, reference log-probabilities are given.
    """

    name: str
    trainable: bool = False
    ragged: bool = False
    zero_advantages: bool = False
    old: bool = False
    beta: float = 0.0
    level: Literal["token", "sequence"] = "token"

    @property
    def sampling_ratio(self) -> bool:
        return self.old and self.level == "token"

    @property
    def on_policy(self) -> bool:
        """Whether the mask is full and the policy is the plain one: what is measured at every vocabulary."""
        return self in (Case(self.name), Case(self.name, trainable=True))


_FROZEN = (
    Case("frozen"),
    Case("frozen-ragged", ragged=True),
    Case("frozen-half", zero_advantages=True),
    Case("frozen-old", old=True),
    Case("frozen-beta", beta=0.04),
    Case("frozen-sequence", old=True, level="sequence"),
)
CASES = {
    case.name: case
    for frozen in _FROZEN
    for case in (frozen, replace(frozen, name=frozen.name.replace("frozen", "trainable"), trainable=True))
}

DESCRIPTIONS = {
    "ragged": "ragged mask, 55 % of the tokens valid",
    "half": "half of the advantages zero",
    "old": "old log-probabilities and a sampling ratio [B, T]",
    "beta": "beta 0.04 with reference log-probabilities",
    "sequence": "sequence-level importance ratio with old log-probabilities",
}


def describe(case: Case) -> str:
    """The case in words."""
    head, _, rest = case.name.partition("-")
    return f"{head} head, {DESCRIPTIONS[rest] if rest else 'on-policy, beta 0'}"


@dataclass(frozen=True)
class Shape:
    """Hidden states are [batch, length, hidden], the head [vocabulary, hidden], both in ``dtype`` (torch's name)."""

    batch: int
    length: int
    hidden: int
    vocabulary: int
    dtype: str


GPU_SHAPE = Shape(8, 1024, 4096, 128256, "bfloat16")
CPU_SHAPE = Shape(2, 32, 64, 512, "float32")
VOCABULARIES = (128256, 151936)
"""Of Llama 3 and of Qwen 2.5 and 3."""

TOLERANCES = {"float32": 1e-3, "float16": 5e-3, "bfloat16": 2e-2}
"""Largest relative error that passes, by dtype of the inputs. float32 leaves room for TF32 products, and
half precision for logits that are rounded to it."""

PEERS = {
    "floor": "the matrix products alone, 2 (frozen) or 3 (trainable), cuBLAS, by 2,048 rows that can carry gradient",
    "fusepatch": "the installed Liger, patched",
    "fusepatch-memory": "the same with FUSEPATCH_HEAD_PREFER=memory (trainable heads)",
    "liger": "the installed Liger's LigerFusedLinearGRPOLoss, unpatched",
    "trl": "TRL's chunked log-probabilities (1.15 and later), the policy in torch",
    "verl": "verl's linear_cross_entropy, the policy in torch",
    "cut-cross-entropy": "linear_cross_entropy(reduction='none'), the policy in torch",
    "full-logits": "all logits and cross_entropy in torch, the policy in torch",
}
