"""`python -m fuzz --seconds N [--seed S] [--only MODULE]` from `tests/`: sample cases until the time is over.

The modules take turns. The number of cases of each is printed at the end; a case that fails is printed as a program
that shows it, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import logging
import os
import random
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MODULES = ("grpo_loss", "optimizer")

ENVIRONMENT = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""What a case may need before anything is imported."""


def modules(only: str | None = None) -> dict[str, Any]:
    """The modules of this package that sample, imported, by name."""
    os.environ.update(ENVIRONMENT)
    logging.getLogger("fusepatch").addHandler(logging.NullHandler())
    names = [name for name in MODULES if only in (None, name)]
    return {name: importlib.import_module(f"fuzz.{name}") for name in names}


def program(name: str, case: Any) -> str:
    """A program that checks one case."""
    lines = [
        "import os, sys",
        f"os.environ.update({ENVIRONMENT!r})",
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})",
        f"from fuzz.{name} import Case, check",
        f"check({case!r})",
    ]
    return "\n".join(lines)


def failure(name: str, module: Any, seed: str) -> str | None:
    """Sample one case and check it: what is wrong, with the program that shows it, or None."""
    case = module.sample(random.Random(seed))
    try:
        module.check(case)
    except Exception:
        return f"{traceback.format_exc()}\n{name}, seed {seed}. This program shows it:\n\n{program(name, case)}\n"
    return None


def run(sampled: dict[str, Any], seed: int, numbers: Iterable[int], seconds: float = float("inf")) -> int:
    """Check case after case of every module in turn; the exit status."""
    counts = dict.fromkeys(sampled, 0)
    found = None
    end = time.monotonic() + seconds
    for number, (name, module) in ((number, entry) for number in numbers for entry in sampled.items()):
        if time.monotonic() > end:
            break
        found = failure(name, module, f"{seed} {number}")
        counts[name] += 1
        if found is not None:
            print(found)
            break
    print(", ".join(f"{name}: {count} cases" for name, count in counts.items()))
    return 1 if found is not None else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, required=True, help="stop after this time")
    parser.add_argument("--seed", type=int, default=None, help="where to begin; another one each time if left out")
    parser.add_argument("--only", choices=MODULES, default=None, help="this module alone")
    given = parser.parse_args(arguments)
    seed = random.randrange(10**9) if given.seed is None else given.seed
    print(f"--seed {seed}")
    return run(modules(given.only), seed, itertools.count(), given.seconds)


if __name__ == "__main__":
    sys.exit(main())
