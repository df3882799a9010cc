"""What the worker processes share: the pipe on which they answer, and what they say of the machine and of errors."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from typing import Any

import torch


def answering() -> Callable[[dict[str, Any]], None]:
    """A function that answers on the real stdout, which libraries that print no longer reach."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    return answer


def problem(error: Exception) -> dict[str, Any]:
    return {"problem": "error", "reason": " ".join(f"{type(error).__name__}: {error}".split())[:500]}


def machine(device: torch.device) -> dict[str, Any]:
    try:
        import triton
    except ImportError:
        triton_version = None
    else:
        triton_version = triton.__version__
    gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads",
        "cuda": gpu,
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if gpu else 0,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version,
    }


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """How long one call takes; on a GPU between two events on its stream."""
    if device.type != "cuda":
        import time

        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1000
    event: Callable[..., Any] = torch.cuda.Event
    first, last = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    work()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last))
