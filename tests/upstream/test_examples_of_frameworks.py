"""The examples for verl, Trinity-RFT and Ray, in the environments of the matrix that have them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from kits.examples import (
    EXAMPLES,
    NEED_A_GPU,
    ON_THE_CPU,
    TEXT,
    blocks,
    command,
    printed,
    run_script,
    said,
    save_model,
    save_rows,
)
from kits.helpers import fresh, run
from kits.upstream import CHECKOUT, factor, version
from tools.rows import DOORS

pytestmark = pytest.mark.upstream

QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


def save_conversations(file: Path) -> Path:
    """Rows as verl's SFT dataset reads them."""
    from datasets import Dataset

    from demo import tiny

    rows = [
        [{"role": "user", "content": text[: TEXT // 2]}, {"role": "assistant", "content": text[TEXT // 2 :]}]
        for text in tiny.text(TEXT)[:16]
    ]
    Dataset.from_dict({"messages": rows}).to_parquet(file)
    return file


def test_verl(tmp_path: Path) -> None:
    found = Version(version("verl") or "0")
    if not Version("0.6") <= found < Version("0.9"):
        pytest.skip(
            f"verl {found}: 0.6 has the module first, and that of 0.9.1 does not import beside transformers 5.24"
        )
    variables, words = command("verl_sft.sh")
    assert words == ["bash", "verl_sft.sh"]
    env = {
        **variables,
        "MODEL": str(save_model(tmp_path / "model")),
        "DATASET": str(save_conversations(tmp_path / "train.parquet")),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{DOORS}",
        "VERL_USE_EXTERNAL_MODULES": "cpu_engine",
    }
    on_the_cpu = [
        "model.use_remove_padding=False",
        "+model.override_config.attn_implementation=eager",
        "engine.use_torch_compile=False",
        "checkpoint.save_contents=[model,optimizer]",  # torch.cpu has no random states to save
        "data.num_workers=0",
        "trainer.device=cpu",
        "trainer.total_training_steps=2",
    ]
    done = run(["bash", EXAMPLES / "verl_sft.sh", *on_the_cpu], env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "step:2 - train/loss:" in done.stdout
    assert " ".join(done.stdout.split()).endswith(" ".join(blocks("verl_sft.sh")[1].split()))
    require = ["check", "--require", "optimizer.flags,optimizer.in_backward", "--report", tmp_path / "report"]
    assert run([sys.executable, "-m", "fusepatch", *require], env={"PYTHONPATH": str(CHECKOUT)}).returncode == 0


TRINITY = """
import json
import fusepatch  # as `run` does before it starts the launcher
import ray
from trinity.cli import launcher
from trinity.common.config import load_config

config = load_config(PATH)
config.check_and_update()
config.cluster.ray_address = "local"

@ray.remote
def worker():
    import os, sys
    return ["fusepatch" in sys.modules, os.environ.get("FUSEPATCH_OPTIMIZER_CLASS")]

def look(config):
    records = [record for record in fusepatch.status() if record.calls]
    lines = []
    for record in records:
        lines.append(f"{record.id}: {record.outcome.value}, calls: {record.calls}")
        lines += [f"    {note.text}" for note in record.replaced]
    return {"worker": ray.get(worker.remote()), "model": config.model.model_path, "lines": lines}

launcher.MODE_MAP["both"] = look  # the explorer and the trainer need vLLM and GPUs
print()
print(json.dumps(launcher.run_stage(config)))
"""


def test_trinitys_launcher_reads_the_file_and_its_workers_have_the_variables(tmp_path: Path) -> None:
    if factor() != "latest":
        pytest.skip("the file is for Trinity-RFT 0.6")
    variables, words = command("trinity.yaml")
    assert words == [
        "python",
        "-m",
        "fusepatch",
        "run",
        "-m",
        "trinity.cli.launcher",
        "run",
        "--config",
        "trinity.yaml",
    ]
    report = tmp_path / "report"
    env = {**QUIET, **variables, "MODEL": str(save_model(tmp_path / "model")), "FUSEPATCH_REPORT": str(report)}
    program = TRINITY.replace("PATH", repr(str(EXAMPLES / "trinity.yaml")))
    done = fresh(program, env={**env, "PYTHONPATH": str(CHECKOUT)}, cwd=tmp_path, check=True)
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["worker"] == [True, variables["FUSEPATCH_OPTIMIZER_CLASS"]]
    assert seen["model"] == env["MODEL"]
    wanted = "\n".join(said("trinity.yaml"))
    assert seen["lines"] == wanted.replace("FUSEPATCH_REPORT=...", f"FUSEPATCH_REPORT={report}").splitlines()


def test_ray_job(tmp_path: Path) -> None:
    if factor() != "latest":
        pytest.skip("the script is for transformers 5; what its workers do is the same in every environment with Ray")
    places = {"--model": save_model(tmp_path / "model"), "--dataset": save_rows(tmp_path / "text", "text")}
    env = {**QUIET, **NEED_A_GPU, "PYTHONPATH": str(CHECKOUT)}
    done = run_script("ray_job.py", tmp_path, places, *ON_THE_CPU, env=env)
    # Ray forwards what the workers print when it arrives.
    lines = [line for line in printed(done) if "(train pid=" not in line]
    assert lines[-len(said("ray_job.py")) :] == said("ray_job.py")
