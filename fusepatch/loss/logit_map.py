"""What a model does to the output of its lm_head before the softmax, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class LogitMap:
    """The map from the raw output of the head, ``hidden @ weight.T + bias``, to logits.

    In this order: times ``logit_scale`` (Cohere; Granite divides, so pass ``1 / logits_scaling``), then
    ``cap * tanh(x / cap)`` with ``cap = final_logit_softcapping`` (Gemma 2) unless that is None, then divided by the
    sampling ``temperature``. All of it is computed in float32.

    Raises:
        ValueError: the temperature or the soft cap is not positive.
    """

    temperature: float = 1.0
    logit_scale: float = 1.0
    final_logit_softcapping: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"temperature must be a positive number, found {self.temperature!r}: logits are divided by it"
            )
        cap = self.final_logit_softcapping
        if cap is not None and not cap > 0:
            raise ValueError(f"final_logit_softcapping must be None or a positive number, found {cap!r}")

    @property
    def slope(self) -> float:
        """Derivative of a logit with respect to the raw head output, the soft cap left out."""
        return self.logit_scale / self.temperature


PLAIN = LogitMap()


class RawLogits(NamedTuple):
    """The raw output of a head for R rows and W columns of the vocabulary, and what makes logits of it.

    raw: [R, W] in float32 (or lower where the hardware leaves no choice), rows contiguous, row stride at least W.
    targets: int64 [R]. Outside the vocabulary a target counts as one whose logit is 0, as Liger-Kernel 0.8 counts it.
    bias: [W] or None.
    """

    raw: Tensor
    targets: Tensor
    bias: Tensor | None
    logit_map: LogitMap
