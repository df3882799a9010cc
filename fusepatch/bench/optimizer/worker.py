"""One variant of `bench optimizer` in a process of its own; see `worker.py` for the protocol.

Started as `python -m fusepatch.bench.optimizer.worker VARIANT`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from typing import Any, NamedTuple

import torch

from fusepatch.bench.answering import answering, machine, milliseconds, problem
from fusepatch.bench.optimizer.cases import CHECK_STEPS, TOLERANCES, Size
from fusepatch.optim.in_backward import InBackward

WARM_UP, SECONDS = 3, 2.0
FEWEST, MOST = 3, 20
"""Steps before the timing; how long one variant is timed in one repeat, about, and within how many steps."""

FLAGS: dict[str, dict[str, Any]] = {
    "default": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "in-backward": {"fused": True},
}


class Block(torch.nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(hidden, 4 * hidden), torch.nn.Linear(4 * hidden, hidden)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = inputs + self.down(torch.nn.functional.gelu(self.up(inputs)))
        return outputs


class Training(NamedTuple):
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batch: torch.Tensor
    inside: InBackward | None

    def forward_backward(self) -> None:
        self.model(self.batch).float().square().mean().backward()

    def step(self) -> None:
        self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def build(variant: str, size: Size, dtype: str, device: torch.device) -> Training:
    torch.manual_seed(0)
    with device:
        model = torch.nn.Sequential(*(Block(size.hidden) for _ in range(size.blocks))).to(getattr(torch, dtype))
        batch = torch.randn(size.rows, size.hidden).to(getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, **FLAGS[variant])
    inside = InBackward(optimizer, {}) if variant == "in-backward" else None
    return Training(model, optimizer, batch, inside)


def check(training: Training, path: str, variant: str, dtype: str) -> dict[str, Any]:
    """The weights after some steps beside those of `default`, which leaves its own in a file; then the memory of a
    step."""
    for _ in range(CHECK_STEPS):
        training.step()
    weights = [parameter.detach().cpu() for parameter in training.model.parameters()]
    if variant == "default":
        torch.save(weights, path)
    if not os.path.exists(path):
        return {"problem": "not checked", "reason": "default, which the others are compared with, did not run"}
    distance = length = 0.0
    for mine, theirs in zip(weights, torch.load(path), strict=True):
        distance += float((mine.double() - theirs.double()).square().sum())
        length += float(theirs.double().square().sum())
    error = (distance / length) ** 0.5
    tolerance = TOLERANCES[dtype]
    return {
        **memory(training),
        "check": {"error": error, "tolerance": tolerance, "passed": error <= tolerance},
    }


def memory(training: Training) -> dict[str, int]:
    """Bytes of the parameters and the optimizer's state, and how far a step goes above them."""
    if training.batch.device.type != "cuda":
        return {}
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    training.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    return {"peak_bytes": peak, "state_bytes": before, "above_state_bytes": peak - before}


def times(training: Training) -> dict[str, Any]:
    """Milliseconds of whole steps, and of forward and backward alone."""
    device = training.batch.device
    # The CPU's times say little anyway.
    warm_up, wanted = (WARM_UP, SECONDS) if device.type == "cuda" else (1, 0.0)
    for _ in range(warm_up):
        training.step()
    start = time.perf_counter()
    milliseconds(training.step, device)
    count = min(max(int(wanted / 2 / (time.perf_counter() - start)), FEWEST), MOST)
    whole = [milliseconds(training.step, device) for _ in range(count)]
    if training.inside is not None:
        training.inside.armed = False
    alone = []
    for _ in range(count):
        alone.append(milliseconds(training.forward_backward, device))
        training.optimizer.zero_grad()
    return {"milliseconds": whole, "forward_backward": alone}


def main() -> None:
    variant = sys.argv[1]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    answer = answering()
    answer({"version": torch.__version__, "machine": machine(device)})
    for line in sys.stdin:
        command = json.loads(line)
        dtype = command["dtype"]
        try:
            training = build(variant, Size(**command["size"]), dtype, device)
            found = check(training, command["path"], variant, dtype) if command["do"] == "check" else times(training)
        except Exception as error:
            found = problem(error)
        training = None  # type: ignore[assignment]
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the other processes need the memory
        answer(found)


if __name__ == "__main__":
    main()
