"""One implementation in a process of its own: reads commands from stdin, one JSON object a line, and answers each
likewise.

Started as `python -m fusepatch.bench.grpo.worker IMPLEMENTATION [PATH]`, with FUSEPATCH=0 in the environment, so that
nothing is patched before the implementation says so.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from fusepatch.bench.answering import answering, machine, milliseconds, problem
from fusepatch.bench.grpo.cases import CASES, TOLERANCES, Shape
from fusepatch.bench.grpo.inputs import Inputs, errors, make_inputs
from fusepatch.bench.grpo.peers import IMPLEMENTATIONS, DoesNotApplyError, Maker, NotInstalledError, Step
from fusepatch.bench.report import DOES_NOT_APPLY

WARM_UP_SECONDS = 0.2
SECONDS = 0.3
"""How long one implementation is timed in one repeat, about, and within 3 to 10 calls; before that it is warmed up."""
FEWEST, MOST = 3, 10


def main() -> None:
    name, *paths = sys.argv[1:]
    sys.path[0:0] = paths
    answer = answering()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    implementation = IMPLEMENTATIONS[name]
    loaded: Maker | None = None
    hello = _guarded(lambda: {"version": implementation.version(), "machine": machine(device)})
    if "problem" not in hello:
        try:
            loaded = implementation.load()
        except NotInstalledError as error:
            hello |= {"problem": "not installed", "reason": str(error)}
        except Exception as error:
            hello |= problem(error)
    answer(hello)
    for line in sys.stdin:
        command = json.loads(line)
        assert loaded is not None
        answer(_guarded(partial(_run, command, loaded, device)))
        _release(device)


def _guarded(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except DoesNotApplyError as error:
        return {"problem": DOES_NOT_APPLY, "reason": str(error)}
    except Exception as error:
        return problem(error)


def _run(command: dict[str, Any], make: Maker, device: torch.device) -> dict[str, Any]:
    case = CASES[command["case"]]
    shape = Shape(**command["shape"])
    inputs = make_inputs(case, shape, device)
    step = make(inputs, case)
    if command["do"] == "warm":
        _call(step, inputs)
        return {}
    if command["do"] == "check":
        loss, measured = _memory(step, inputs, device)
        if loss is None:
            return measured
        _clear(device)
        found = errors(loss, inputs, case)
        tolerance = TOLERANCES[shape.dtype]
        return {**measured, "check": {**asdict(found), "tolerance": tolerance, "passed": found.within(tolerance)}}
    return {"milliseconds": _times(step, inputs, device)}


def _release(device: torch.device) -> None:
    # The other processes need the memory.
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _call(step: Step, inputs: Inputs) -> None:
    _zero_grad(inputs)
    step()


def _zero_grad(inputs: Inputs) -> None:
    for leaf in inputs.leaves():
        leaf.grad = None


def _memory(step: Step, inputs: Inputs, device: torch.device) -> tuple[torch.Tensor | None, dict[str, Any]]:
    """The loss of a warm call, and its bytes: the peak, its part above the inputs (gradients count as above), and what
    stays beside gradients and the loss.
    """
    _call(step, inputs)
    _zero_grad(inputs)
    _clear(device)
    if device.type != "cuda":
        return step(), {}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    gradients = sum(leaf.grad.numel() * leaf.grad.element_size() for leaf in inputs.leaves() if leaf.grad is not None)
    return loss, {
        "peak_bytes": peak,
        "above_inputs_bytes": peak - before,
        "gradient_bytes": gradients,
        "left_bytes": torch.cuda.memory_allocated() - before - gradients,
    }


def _times(step: Step, inputs: Inputs, device: torch.device) -> list[float]:
    # The CPU's times say little anyway.
    warm_up, wanted = (WARM_UP_SECONDS, SECONDS) if device.type == "cuda" else (0.0, 0.0)
    begin = now = time.perf_counter()
    while now == begin or now - begin < warm_up:
        start = now
        _call(step, inputs)
        if device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
    calls = min(max(int(wanted / (now - start)), FEWEST), MOST)
    return [_time(step, inputs, device) for _ in range(calls)]


def _time(step: Step, inputs: Inputs, device: torch.device) -> float:
    _zero_grad(inputs)
    return milliseconds(step, device)


def _clear(device: torch.device) -> None:
    gc.collect()
    _release(device)


if __name__ == "__main__":
    main()
