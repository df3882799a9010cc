"""Processes that keep a report: the program that they run, and what they wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fusepatch.reporting import reader

BUILD = """
import torch
optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
"""
"""Builds an optimizer, one call of `optimizer.flags` where `TRAIN` is the environment and fusepatch is active."""

PATCH = "optimizer.flags"


def environment(folder: Path) -> dict[str, str]:
    """Keeps a report in `folder`; the optimizers of a test's own program count as a framework's."""
    return {"FUSEPATCH_REPORT": str(folder), "FUSEPATCH_OPTIMIZER_SCOPE": "all"}


def processes(folder: Path) -> list[dict[str, Any]]:
    """The records in `folder`, each of which must be one."""
    report = reader.read(str(folder))
    assert report.not_read == ()
    return list(report.processes)


def patch(process: dict[str, Any], name: str = PATCH) -> dict[str, Any]:
    """What one process says of one patch."""
    (found,) = [patch for patch in process["patches"] if patch["id"] == name]
    return dict(found)


def seen(process: dict[str, Any], name: str = PATCH) -> tuple[str, int, str]:
    """Role, calls of a patch, and the outcome of its sites that are loaded ("nothing" where none is)."""
    record = patch(process, name)
    outcomes = {site["outcome"] for site in record["sites"] if site["loaded"]}
    return process["role"], record["calls"], ", ".join(sorted(outcomes)) or "nothing"
