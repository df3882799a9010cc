"""Every way in which a training process is started, with the report that it leaves: real launchers, real children."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import textwrap
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from kits.helpers import Completed, fresh, run
from kits.reports import BUILD, environment, processes, seen

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="what is trained is torch's")

SCRIPTS = Path(sysconfig.get_path("scripts"))
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}


def started(folder: Path, code: str, env: Mapping[str, str] | None = None) -> list[tuple[str, int, str]]:
    """Role, calls and outcome of each process that reported when `driver.py` with `code` was run in `folder`.

    `train.py` lies beside it and builds an optimizer; it has no import of fusepatch.
    """
    (folder / "train.py").write_text(BUILD)
    (folder / "driver.py").write_text(textwrap.dedent(code))
    done = run([sys.executable, "driver.py"], {**environment(folder / "report"), **HIDDEN, **(env or {})}, folder)
    assert done.returncode == 0, done.stderr
    return sorted(seen(record) for record in processes(folder / "report"))


TRAINED = (1, "APPLIED")
NOTHING = (0, "nothing")


# Children


@pytest.mark.parametrize(
    ("arguments", "role"),
    [
        (["train.py"], "train.py"),
        (["-I", "train.py"], "train.py"),
        (["-m", "train"], "-m train"),
        (["-c", "import runpy; runpy.run_path('train.py')"], "-c"),
    ],
    ids=["script", "isolated", "module", "command"],
)
def test_a_child(arguments: list[str], role: str, tmp_path: Path) -> None:
    code = f"""
        import fusepatch, subprocess, sys
        subprocess.run([sys.executable, *{arguments}], check=True)
    """
    assert started(tmp_path, code) == sorted([("driver.py", *NOTHING), (role, *TRAINED)])


def test_a_child_of_a_child_that_imports_no_upstream_itself(tmp_path: Path) -> None:
    (tmp_path / "between.py").write_text(
        "import subprocess, sys; subprocess.run([sys.executable, 'train.py'], check=True)"
    )
    code = "import fusepatch, subprocess, sys; subprocess.run([sys.executable, 'between.py'], check=True)"
    assert started(tmp_path, code) == [("driver.py", *NOTHING), ("train.py", *TRAINED)]


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_child_by_multiprocessing(method: str, tmp_path: Path) -> None:
    code = f"""
        import multiprocessing

        def work():
            import train

        if __name__ == "__main__":
            import fusepatch
            start = multiprocessing.get_context({method!r}).Process
            processes = [start(target=work, name=f"rank {{n}}") for n in (0, 1)]
            [process.start() for process in processes]
            [process.join() for process in processes]
            raise SystemExit(max(process.exitcode for process in processes))
    """
    expected = [("driver.py", *NOTHING), *((f"rank {number} of driver.py", *TRAINED) for number in (0, 1))]
    assert started(tmp_path, code) == expected


def test_a_forked_child_reports_its_own_calls_only(tmp_path: Path) -> None:
    code = """
        import os
        import fusepatch, train
        for calls in (0, 2):
            if (child := os.fork()) == 0:
                for _ in range(calls):
                    train.torch.optim.AdamW([train.torch.nn.Parameter(train.torch.zeros(2))])
                os._exit(0)
            os.waitpid(child, 0)
    """
    assert started(tmp_path, code) == [("driver.py", *TRAINED), ("driver.py", 2, "APPLIED")]


@pytest.mark.parametrize("form", ["module", "package"])
@pytest.mark.parametrize("place", ["PYTHONPATH", "first on PYTHONPATH"])
def test_a_sitecustomize_of_the_site_runs_too(form: str, place: str, tmp_path: Path) -> None:
    path = tmp_path / "site" / ("sitecustomize.py" if form == "module" else "sitecustomize/__init__.py")
    path.parent.mkdir(parents=True)
    path.write_text("import builtins; builtins.site_was_here = True")
    (tmp_path / "empty").mkdir()
    parts = [tmp_path / "site"] if place == "first on PYTHONPATH" else [tmp_path / "empty", tmp_path / "site"]
    code = """
        import fusepatch, subprocess, sys
        subprocess.run([sys.executable, "-c", "assert site_was_here; import train"], check=True)
    """
    env = {"PYTHONPATH": ":".join(map(str, parts))}
    assert started(tmp_path, code, env) == [("-c", *TRAINED), ("driver.py", *NOTHING)]


def other_interpreters() -> list[str]:
    """Interpreters of other versions that run and have no fusepatch: on PATH, and behind the shims of pyenv on PATH."""
    names = [f"python3.{minor}" for minor in range(8, 15) if minor != sys.version_info[1]]
    found = [Path(path) for name in names if (path := shutil.which(name))]
    found += [real for path in found for real in path.parents[1].glob(f"versions/*/bin/{path.name}")]
    return [str(path) for path in found if works(str(path))]


def works(python: str) -> bool:
    done = run([python, "-I", "-c", "import importlib.util as u; print(u.find_spec('fusepatch'))"])
    return done.stdout == "None\n"


def test_an_interpreter_without_fusepatch_as_a_child_is_untouched(tmp_path: Path) -> None:
    others = other_interpreters()
    if not others:
        pytest.skip("no other interpreter without fusepatch is on PATH")
    look = "import sys, json; print(sys.version_info[1], [name for name in sys.modules if 'fusepatch' in name])"
    for python in others:
        alone = run([python, "-c", look])
        done = fresh(
            f"import fusepatch, subprocess; subprocess.run([{python!r}, '-c', {look!r}], check=True)",
            env=environment(tmp_path / "report"),
            check=True,
        )
        assert (done.stdout, done.stderr) == (alone.stdout, "")
    assert {seen(record) for record in processes(tmp_path / "report")} == {("-c", *NOTHING)}


def test_a_sandbox_for_generated_code_costs_nothing_and_reports_nothing(tmp_path: Path) -> None:
    sandbox = "import sys, json, math, re; print('fusepatch' in sys.modules, 'wrapt' in sys.modules)"
    code = f"""
        import fusepatch, subprocess, sys
        for _ in range(5):
            done = subprocess.run([sys.executable, "-c", {sandbox!r}], check=True, capture_output=True, text=True)
            assert (done.stdout, done.stderr) == ("False False\\n", ""), done
    """
    assert started(tmp_path, code) == [("driver.py", *NOTHING)]


# Launchers

TWO_RANKS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == 2
"""


def ranks(folder: Path) -> dict[int | None, list[tuple[str, int, str]]]:
    found: dict[int | None, list[tuple[str, int, str]]] = {}
    for record in processes(folder):
        found.setdefault(record["rank"], []).append(seen(record))
        assert record["rank"] is None or record["world_size"] == 2
    return found


def launch(command: list[str], folder: Path, script: str, env: Mapping[str, str] | None = None) -> Completed:
    (folder / "train.py").write_text(script)
    done = run(command, {**environment(folder / "report"), **HIDDEN, **(env or {})}, folder)
    assert done.returncode == 0, done.stderr
    return done


def test_torchrun_of_a_script_that_imports_fusepatch_needs_nothing(tmp_path: Path) -> None:
    command = [str(SCRIPTS / "torchrun"), "--standalone", "--nproc-per-node=2", "train.py"]
    done = launch(command, tmp_path, f"import fusepatch\n{TWO_RANKS}{BUILD}")
    assert ranks(tmp_path / "report") == {rank: [("torchrun: train.py", *TRAINED)] for rank in (0, 1)}
    assert done.stderr.count("fusepatch: applied") == 1  # rank 0 speaks


def test_torchrun_of_a_script_without_the_import_is_reached_from_outside(tmp_path: Path) -> None:
    command = [str(SCRIPTS / "torchrun"), "--standalone", "--nproc-per-node=2", "-m", "train"]
    launch(command, tmp_path, TWO_RANKS + BUILD, {"FUSEPATCH": "1"})
    found = ranks(tmp_path / "report")
    assert found.pop(None) == [("torchrun", 0, "APPLIED")]  # the launcher imports torch too
    assert found == {rank: [("torchrun: -m train", *TRAINED)] for rank in (0, 1)}


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_launch_of_a_script_that_imports_fusepatch_needs_nothing(tmp_path: Path) -> None:
    command = [str(SCRIPTS / "accelerate"), "launch", "--cpu", "--num_processes=1", "--num_machines=1"]
    command += ["--mixed_precision=no", "--dynamo_backend=no", "--num_cpu_threads_per_process=1"]
    script = f"""
import fusepatch
from accelerate import Accelerator
Accelerator(cpu=True)
{BUILD}
"""
    launch([*command, "train.py"], tmp_path, script, {"HF_HOME": str(tmp_path / "home")})
    assert [seen(record) for record in processes(tmp_path / "report")] == [("accelerate: train.py", *TRAINED)]


def test_run_carries_the_patches_through_a_launcher_that_starts_the_script_again(tmp_path: Path) -> None:
    launcher = """
import os, subprocess, sys
from importlib.util import find_spec
torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
subprocess.run([*torchrun, "train.py"], check=True)
os.execv(sys.executable, [sys.executable, "-c", "import train"])
"""
    (tmp_path / "launcher.py").write_text(launcher)
    launch([sys.executable, "-m", "fusepatch", "run", "launcher.py"], tmp_path, BUILD)
    found = sorted(((record["rank"], *seen(record)) for record in processes(tmp_path / "report")), key=str)
    assert found == [
        (0, "torchrun: train.py", *TRAINED),
        (1, "torchrun: train.py", *TRAINED),
        (None, "-c", *TRAINED),
        (None, "-m torch.distributed.run", 0, "APPLIED"),
    ]


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_the_deepspeed_launcher_of_a_script_that_imports_fusepatch_needs_nothing(tmp_path: Path) -> None:
    command = [str(SCRIPTS / "deepspeed"), "--num_gpus=2", "--no_local_rank", "train.py"]
    path = f"{SCRIPTS}:{os.environ['PATH']}"  # it starts `deepspeed`'s own helpers by name
    launch(command, tmp_path, f"import fusepatch\n{BUILD}", {"DS_ACCELERATOR": "cpu", "PATH": path})
    assert ranks(tmp_path / "report") == {rank: [("train.py", *TRAINED)] for rank in (0, 1)}
