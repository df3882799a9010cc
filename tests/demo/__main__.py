"""`python -m demo [SCENARIO...]`: run every scenario, or those named, plain and patched; print them side by side.

Exit status 1 where something is not as it must be.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from demo import report, scenario
from demo.scenario import Column, Run

AT_ONCE = 2
"""Processes at a time: importing torch, transformers and Liger keeps one core busy for most of a run."""

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    # Liger compiles its loss with torch.compile, which takes longer here than the steps do.
    "TORCHDYNAMO_DISABLE": "1",
}


def main(names: list[str]) -> int:
    """Run and print; the exit status."""
    started = time.monotonic()
    known = dict(scenario.modules())
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"there is no scenario {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    chosen = {name: known[name].SCENARIO for name in names or known}
    count = sum(len(declared.columns) for declared in chosen.values())
    print(f"{count} runs, each in its own process, {AT_ONCE} at a time on the CPU.", flush=True)
    wrong = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running: dict[str, list[Future[Run]]] = {
            name: [pool.submit(run, name, column) for column in declared.columns] for name, declared in chosen.items()
        }
        for name, declared in chosen.items():
            runs = [future.result() for future in running[name]]
            found = list(report.problems(declared, runs))
            wrong += bool(found)
            print("\n".join(report.render(declared, runs, found)), flush=True)
    seconds = time.monotonic() - started
    print(f"\n{len(chosen) - wrong} of {len(chosen)} scenarios are as they must be; {seconds:.0f} s.")
    return 1 if wrong else 0


def run(name: str, column: Column) -> Run:
    """Run one column of a scenario in its own process."""
    started = time.monotonic()
    kept = {key: value for key, value in os.environ.items() if not key.startswith("FUSEPATCH")}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "run.json")
        done = subprocess.run(
            [sys.executable, "-m", "demo.child", name, str(int(column.patched)), str(path)],
            env={**kept, **ENVIRONMENT, **column.variables},
            capture_output=True,
            text=True,
            check=False,
        )
        brought: dict[str, Any] = {"rows": {}, "patches": None}
        failure = ""
        if done.returncode == 0:
            brought = json.loads(path.read_text(encoding="utf-8"))
        else:
            failure = f"exit status {done.returncode}\n{done.stderr[-2000:]}"
    seconds = time.monotonic() - started
    print(
        f"  {name}, {column.heading}: {'failed' if failure else 'done'} in {seconds:.0f} s", file=sys.stderr, flush=True
    )
    lines = done.stderr.splitlines()
    said = tuple(line.removeprefix("fusepatch: ") for line in lines if line.startswith("fusepatch: "))
    return Run(brought["rows"], brought["patches"], said, seconds, failure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
