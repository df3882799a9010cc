"""A pytest plugin for `run.py`: writes what became of every test to the file that `OWN_OUTCOMES` names.

`OWN_BF16=1` tells transformers that bfloat16 is to be had: TRL's configurations ask for it by default, the CPU computes
in it too, and transformers refuses it there unless each test says `use_cpu`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fusepatch.testing import SESSION

_worst: dict[str, str] = {}
_reasons: dict[str, str] = {}
_deselected: list[str] = []

_SEVERITY = ("passed", "skipped", "failed")

if os.environ.get("OWN_BF16") == "1":
    import transformers.training_args

    transformers.training_args.is_torch_bf16_gpu_available = lambda: True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    before = _worst.get(report.nodeid, "passed")
    _worst[report.nodeid] = max(before, report.outcome, key=_SEVERITY.index)
    if report.failed and report.nodeid not in _reasons:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash is not None else str(report.longrepr)
        _reasons[report.nodeid] = text.strip().partition("\n")[0][:300]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _worst[report.nodeid] = "failed"
        _reasons[report.nodeid] = str(report.longrepr).strip().splitlines()[-1][:300]


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    _deselected.extend(item.nodeid for item in items)


def pytest_unconfigure(config: Any) -> None:
    session = config.stash[SESSION]
    entries = [[entry.test, session.deselected[entry]] for entry in session.deselections]
    outcomes = {"tests": _worst, "reasons": _reasons, "deselected": len(_deselected), "entries": entries}
    Path(os.environ["OWN_OUTCOMES"]).write_text(json.dumps(outcomes), encoding="utf-8")
