"""verl's own worker groups in Ray actors, and the doors that verl has for plugins: what is patched where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from kits.helpers import fresh
from kits.upstream import CHECKOUT, Seen, needs, open_door, version
from tools.rows import DOORS

pytestmark = pytest.mark.upstream

VERL = Version(version("verl") or "0")


class TestWorkerGroup:
    """Two ranks of verl's FSDP engine, initialised with Liger, and one optimizer step, in actors that verl creates."""

    @pytest.fixture(autouse=True)
    def _needs(self) -> None:
        needs("ray_verl")

    def test_without_the_import_verl_is_as_it_is(self) -> None:
        seen = open_door("ray_verl", "--fused-kernels", patched=False)
        assert seen.models.keys() == {"rank 0", "rank 1"}
        for rank in seen.models.values():
            assert "fusepatch" not in rank
            assert [fused(rank), fused(rank["step"])] == [None, None]
            # The fault of verl's bare call: Liger's loss forward hides verl's own.
            assert rank["forward"]["held_by"] == ("class" if Version("0.8") <= VERL else "instance")

    def test_with_the_import_every_rank_is_patched_and_has_reported(self, tmp_path: Path) -> None:
        variables = ("LIGER_SWIGLU=0", f"FUSEPATCH_REPORT={tmp_path}")
        seen = open_door("ray_verl", "--fused-kernels", variables=variables)
        reports = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
        for number, rank in enumerate(seen.models.values()):
            assert [fused(rank), fused(rank["step"])] == [True, True]
            assert rank["forward"]["held_by"] == "class"
            assert rank["forward"]["function"].startswith("verl.models.transformers.")
            assert rank["liger"]["rms_norm"]
            assert not rank["liger"]["mlp"]
            # Ray's worker begins as a script that becomes the worker by exec: where the start-up file is installed,
            # that has left a report with the same pid.
            (report,) = [r for r in reports if r["pid"] == rank["pid"] and r["role"].startswith("Ray actor")]
            assert (report["role"], report["rank"], report["world_size"]) == ("Ray actor EngineWorker", number, 2)
            calls = {patch["id"]: patch["calls"] for patch in report["patches"]}
            assert (calls["optimizer.flags"], calls["liger.instance_flags"]) == (2, 1)

    def test_the_step_is_the_same(self) -> None:
        norms = [[rank["step"]["grad_norm"] for rank in seen.models.values()] for seen in both()]
        assert norms[0][0] > 0
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_trinitys_engine_in_its_actors_is_patched_too() -> None:
    needs("trinity_engine")
    seen = open_door("ray_verl", "--trinity", variables=("LIGER_SWIGLU=0",))
    assert len(seen.models) == 2
    for rank in seen.models.values():
        assert [fused(rank), fused(rank["step"])] == [True, True]
        assert rank["liger"]["rms_norm"]
        assert not rank["liger"]["mlp"]
        told = "\n".join(rank["fusepatch"]["liger.instance_flags"]["replaced"])
        assert "swiglu: True from trinity.trainer.verl.monkey_patch" in told


def both() -> tuple[Seen, Seen]:
    plain = open_door("ray_verl", "--fused-kernels", patched=False)
    return plain, open_door("ray_verl", "--fused-kernels")


def fused(seen: dict[str, Any]) -> Any:
    (group,) = seen["optimizer"]["groups"]
    return group["fused"]


AFTERWARDS = """
    import json, os, sys
    def state():
        import torch
        initialiser = torch.optim.AdamW.__init__.__code__.co_filename
        return ["fusepatch" in sys.modules, initialiser.endswith(os.path.join("engine", "install.py"))]
    print()
    print(json.dumps(state()))
"""


def import_verl(before: str = "import verl", path: str = "", external: str = "", **env: str) -> list[bool]:
    """Whether fusepatch is active, and torch's AdamW wrapped, in a process that ran `before`."""
    needs("verl_engine")
    modules = [*(["cpu_platform"] if Version("0.9") <= VERL else []), *([external] if external else [])]
    everything = {
        "PYTHONPATH": f"{path or CHECKOUT}:{DOORS}",
        "VERL_USE_EXTERNAL_MODULES": ",".join(modules),
        "VERL_PLATFORM": "cpu",
        **env,
    }
    done = fresh(f"{before}\n" + "\n".join(line[4:] for line in AFTERWARDS.splitlines()), env=everything, check=True)
    found: list[bool] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_verl_use_external_modules() -> None:
    assert import_verl() == [False, False]
    assert import_verl(external="fusepatch") == [True, True]
    assert import_verl(external="fusepatch", FUSEPATCH="0") == [True, False]


def test_external_lib() -> None:
    before = """
import sys
from pathlib import Path
from tiny import save_tiny_model
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
from verl.workers.config.optimizer import build_optimizer
import tempfile
folder = tempfile.mkdtemp()
model = save_tiny_model("llama", Path(folder))
assert "fusepatch" not in sys.modules
HFModelConfig(path=folder, external_lib="fusepatch", override_config={"attn_implementation": "eager"})
import torch
optimizer = build_optimizer([torch.nn.Parameter(torch.ones(2))], FSDPOptimizerConfig(lr=1e-3, total_training_steps=2))
assert optimizer.param_groups[0]["fused"] is True, optimizer.param_groups[0]
"""
    assert import_verl(before) == [True, True]


@pytest.mark.skipif(Version("0.9") > VERL, reason="verl has entry points for plugins from 0.9 on")
@pytest.mark.parametrize(("switch", "active"), [("", False), ("0", False), ("1", True)])
def test_the_entry_point_switches_on_where_the_environment_says_so(switch: str, active: bool, tmp_path: Path) -> None:
    # What a wheel installs, in a folder that is no site-packages: the .pth file has no part in it.
    metadata = tmp_path / "fusepatch-0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fusepatch\nVersion: 0.0\n")
    (metadata / "entry_points.txt").write_text("[verl.plugins]\nfusepatch = fusepatch_startup\n")
    path = f"{tmp_path}:{CHECKOUT / 'fusepatch' / 'startup'}:{CHECKOUT}"
    env = {"FUSEPATCH": switch} if switch else {}
    assert import_verl(path=path, **env) == [active, active]
    if active:
        assert import_verl(path=path, FUSEPATCH="1", VERL_USE_EXTERNAL_PLUGINS="none") == [
            start_up_file(),
            start_up_file(),
        ]


def start_up_file() -> bool:
    import sysconfig

    return (Path(sysconfig.get_path("purelib")) / "fusepatch.pth").exists()
