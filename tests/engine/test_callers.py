from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fusepatch.engine.callers import calling_module, is_below
from kits.helpers import clean_environment


def test_the_caller_is_the_nearest_foreign_module() -> None:
    assert calling_module() == __name__
    namespace = {"__name__": "verl.workers.fsdp_workers"}
    exec("from fusepatch.engine.callers import calling_module\ndef build(): return calling_module()", namespace)
    assert namespace["build"]() == "verl.workers.fsdp_workers"
    assert calling_module(skip=(__name__,)) != __name__


def test_a_module_started_with_dash_m_has_its_own_name(tmp_path: Path) -> None:
    package = tmp_path / "verlike"
    (package / "trainer").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    body = "from fusepatch.engine.callers import calling_module\nprint(calling_module())\n"
    (package / "trainer" / "__init__.py").write_text("")
    (package / "trainer" / "sft.py").write_text(body)
    (package / "trainer" / "__main__.py").write_text(body)
    for started, name in (("verlike.trainer.sft", "verlike.trainer.sft"), ("verlike.trainer", "verlike.trainer")):
        done = subprocess.run(
            [sys.executable, "-m", started],
            env=clean_environment({"PYTHONPATH": str(tmp_path), "FUSEPATCH": "0"}),
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == name


def test_a_script_is_main(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from fusepatch.engine.callers import calling_module\nprint(calling_module())\n")
    done = subprocess.run(
        [sys.executable, script], env=clean_environment({"FUSEPATCH": "0"}), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "__main__"


def test_packages_are_told_apart_by_dots() -> None:
    assert is_below("verl", ("verl",))
    assert is_below("verl.workers", ("trl", "verl"))
    assert not is_below("verlx.workers", ("verl",))
