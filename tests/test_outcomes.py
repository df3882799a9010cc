"""What a patch with several places says where a process uses one of them, and what several processes say together."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kits.helpers import Completed, fresh, run
from kits.reports import patch, processes

GRPO = "liger.grpo_loss"
TRAINER = "trl.trainer.grpo_trainer"

LOOK = f"""
import json, sys, fusepatch
from fusepatch import settings
from fusepatch.explain import summary

def look():
    (record,) = [record for record in fusepatch.status() if record.id == "{GRPO}"]
    line = summary(fusepatch.status(), settings.current())
    page = fusepatch.explain("{GRPO}").partition("In this process: ")[2]
    return [record.outcome.value, record.reason, fusepatch.is_applied("{GRPO}"), line, page]

seen = [look()]
{{imports}}
print(json.dumps([*seen, look(), "trl" in sys.modules]))
"""


class Process(NamedTuple):
    """What the patch said of itself before and after the imports, and in the report."""

    before: list[Any]
    after: list[Any]
    reported: dict[str, Any]


def process(report: Path, imports: str, trl: bool, **env: str) -> Process:
    done = fresh(LOOK.format(imports=imports), env={"FUSEPATCH_REPORT": str(report), **env}, check=True)
    before, after, imported = json.loads(done.stdout)
    assert imported is trl
    return Process(before, after, patch(processes(report)[-1], GRPO))


def drifted_trl(folder: Path) -> dict[str, str]:
    """A TRL of a supported version whose trainer has a target of another shape; importing it takes no time."""
    (folder / "trl" / "trainer").mkdir(parents=True)
    (folder / "trl" / "__init__.py").touch()
    (folder / "trl" / "trainer" / "__init__.py").touch()
    source = "class GRPOTrainer:\n    def compute_liger_loss(self, another): ...\n"
    (folder / "trl" / "trainer" / "grpo_trainer.py").write_text(source)
    (folder / "trl-1.12.0.dist-info").mkdir()
    (folder / "trl-1.12.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 1.12.0\n")
    return {"PYTHONPATH": str(folder)}


def check(report: Path) -> Completed:
    arguments = ["check", "--require", GRPO, "--report", report]
    return run([sys.executable, "-m", "fusepatch", *arguments], env={"COLUMNS": "400"})


def test_a_patch_is_applied_where_it_is_used_and_what_waits_is_named(tmp_path: Path) -> None:
    for name in ("liger_kernel", "trl"):
        pytest.importorskip(name, reason="the places are Liger's and TRL's")
    report = tmp_path / "report"
    used = process(report, "import liger_kernel.chunked_loss", trl=False)
    outcome, _, applied, line, page = used.before
    assert (outcome, applied) == ("PENDING", False)
    assert GRPO in line.partition("waiting for their modules to be imported: ")[2]
    assert page.startswith("PENDING\n")

    outcome, reason, applied, line, page = used.after
    assert (outcome, applied) == ("APPLIED", True)
    assert reason == f"applied in 1 of 2 places; waiting: {TRAINER}"
    assert f"{GRPO} (waiting: {TRAINER})" in line
    assert line.index(GRPO) < line.index("waiting for their modules")
    assert line.count(GRPO) == 1
    assert page.startswith(f"APPLIED: {reason}\n")
    assert used.reported["outcome"] == "APPLIED"
    assert used.reported["reason"].startswith("applied in 1 of 3 places; waiting: "), (
        "a report looks at nothing that waits"
    )
    done = check(report)
    assert (done.returncode, done.stderr) == (0, "")

    elsewhere = process(report, f"import {TRAINER}", trl=True, **drifted_trl(tmp_path))
    assert elsewhere.after[::2] == ["DRIFTED", False, elsewhere.after[4]]
    assert elsewhere.reported["outcome"] == "DRIFTED"
    done = check(report)
    assert done.returncode == 8
    assert f"{GRPO} is DRIFTED in -c" in done.stdout, "one process in which it is broken is enough"
