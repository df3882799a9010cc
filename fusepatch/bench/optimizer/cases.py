"""What `bench optimizer` measures: the variants, the sizes and the tolerances, as data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

VARIANTS = {
    "default": "AdamW as torch chooses: multi-tensor on a GPU, a loop on the CPU",
    "foreach": "AdamW(foreach=True), the multi-tensor form",
    "fused": "AdamW(fused=True)",
    "in-backward": "AdamW(fused=True), run inside backward by fusepatch",
}

TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest distance of all weights after `CHECK_STEPS` steps from those of `default`, relative to their length. In
bfloat16 the fused kernels round once per step, the other forms after every operation."""

CHECK_STEPS = 3


@dataclass(frozen=True)
class Size:
    """A stack of feed-forward blocks with residuals, `hidden` -> 4 `hidden` -> `hidden`, and the rows of one batch."""

    blocks: int
    hidden: int
    rows: int

    @property
    def parameters(self) -> int:
        return self.blocks * (8 * self.hidden * self.hidden + 5 * self.hidden)


GPU_HIDDEN, GPU_ROWS, GPU_MILLIONS = 2048, 1024, 800
"""Few rows, so that gradients and not activations are what a step's memory is made of."""
CPU_HIDDEN, CPU_ROWS, CPU_MILLIONS = 128, 16, 1
