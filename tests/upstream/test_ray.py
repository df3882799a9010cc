"""`ray.worker_setup` on a real Ray: drivers that bring a cluster with them, and drivers that join one started
elsewhere."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from generate.examples import EXAMPLES
from kits.helpers import clean_environment, fresh
from kits.upstream import CHECKOUT, factor, needs, open_door, version
from tools.rows import DOORS

pytestmark = pytest.mark.upstream

if version("ray") is None:
    pytest.skip("ray is not installed here", allow_module_level=True)
if factor() not in (None, "latest"):
    pytest.skip("the same Ray as in the environment latest", allow_module_level=True)

QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
KINDS = {"task", "pool 0", "pool 1", "nested", "restarted"}


class TestClusterOfItsOwn:
    """The door makes every kind of worker; each builds a model with Liger and an optimizer as verl does."""

    variables = (
        "LIGER_ROPE=0",
        "VERL_USE_EXTERNAL_MODULES=cpu_platform",
        "VERL_PLATFORM=cpu",
        "RAY_AUTH_MODE=disabled",
    )

    @pytest.fixture(autouse=True)
    def _needs(self) -> None:
        needs("ray_driver")

    def test_without_the_import_no_worker_is_patched(self) -> None:
        seen = open_door("ray_driver", variables=self.variables, patched=False)
        assert seen.models.keys() == KINDS
        for worker in seen.models.values():
            assert not worker["active from the start"]
            assert "fusepatch" not in worker
            assert worker["liger"]["rope"]
            assert not worker["optimizer"]["groups"][0]["fused"]

    def test_with_the_import_every_worker_is_patched_and_has_reported(self, tmp_path: Path) -> None:
        seen = open_door("ray_driver", variables=(*self.variables, f"FUSEPATCH_REPORT={tmp_path}"))
        assert seen.models.keys() == KINDS
        assert len({worker["pid"] for worker in seen.models.values()}) == len(KINDS)
        for worker in seen.models.values():
            assert worker["active from the start"]
            assert not worker["liger"]["rope"]
            assert worker["optimizer"]["groups"][0]["fused"] is True
            assert worker["fusepatch"]["optimizer.flags"]["calls"] > 0
        # Ray's worker begins as scripts that become the worker by exec: where the start-up file is installed, these
        # have left reports with the same pid.
        written = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
        reports = {report["pid"]: report for report in written if report["role"].startswith("Ray")}
        roles = {kind: reports[worker["pid"]]["role"] for kind, worker in seen.models.items()}
        actor = "Ray actor Trainer"
        assert roles == {
            "task": "Ray worker",
            "pool 0": actor,
            "pool 1": actor,
            "nested": "Ray actor Inner",
            "restarted": actor,
        }
        for worker in seen.models.values():
            calls = {patch["id"]: patch["calls"] for patch in reports[worker["pid"]]["patches"]}
            assert calls["optimizer.flags"] > 0
            assert calls["liger.instance_flags"] > 0


class Cluster(NamedTuple):
    """A Ray that was started without fusepatch, on whose path the doors are."""

    address: str
    client: str


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Sockets lie in this folder, and their paths may not be long.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder, socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
        free.close()
        options = ["--head", "--block", "--port=0", f"--ray-client-server-port={port}", f"--temp-dir={folder}"]
        small = ["--num-cpus=4", "--object-store-memory=83886080", "--include-dashboard=false"]
        output = Path(folder) / "output"
        with output.open("w") as sink:
            head = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", *options, *small],
                env=clean_environment({**QUIET, "PYTHONPATH": f"{CHECKOUT}:{DOORS}"}),
                cwd=folder,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        try:
            address = _address(output, head)
            yield Cluster(address, f"ray://{address.partition(':')[0]}:{port}")
        finally:
            head.send_signal(signal.SIGTERM)
            head.wait(60)


def _address(output: Path, head: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + 120
    while head.poll() is None and time.monotonic() < deadline:
        found = re.search(r"--address='([^']+)'", output.read_text())
        if found:
            return found[1]
        time.sleep(0.2)
    raise AssertionError(output.read_text())


LOOK = """
import os, sys, json
def look():
    import ray_worker
    return ray_worker.look()
def hook_of_a_user():
    import ray_worker
    ray_worker.leave_a_mark()
def workers():
    return ray.get(ray.remote(num_cpus=0)(look).remote())
def notes():
    (record,) = [record for record in fusepatch.status() if record.id == "ray.worker_setup"]
    return [note.text for note in (*record.replaced, *record.fallbacks)]
"""


class Drove(NamedTuple):
    """The objects that a driver printed, one per line, and what went to stderr; workers' logs arrive there too."""

    seen: list[Any]
    errors: str


def drive(code: str, **env: str) -> Drove:
    """Run a driver with `LOOK` before it; `show(object)` prints one line."""
    prelude = f"{LOOK}\ndef show(*what):\n    print('>>>', json.dumps(what), flush=True)\n"
    path = {"PYTHONPATH": f"{CHECKOUT}:{DOORS}"}
    with tempfile.TemporaryDirectory() as elsewhere:  # Ray puts the driver's folder on the workers' path
        done = fresh(prelude + textwrap.dedent(code), env={**QUIET, **path, **env}, cwd=elsewhere)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    shown = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith(">>>")]
    return Drove(shown, done.stderr)


def test_without_the_import_a_worker_of_another_cluster_is_left_alone(cluster: Cluster) -> None:
    code = f"""
        import ray
        ray.init({cluster.address!r}, log_to_driver=True)
        show(workers())
    """
    ((worker,),) = drive(code).seen
    assert (worker["active from the start"], worker["patched"], worker["variables"]) == (False, False, {})


def test_the_drivers_variables_reach_a_cluster_that_was_started_elsewhere(cluster: Cluster) -> None:
    code = f"""
        import fusepatch, ray
        ray.init({cluster.address!r})
        show(workers())
        show(notes())
    """
    (worker,), (notes,) = drive(code, FUSEPATCH_OPTIMIZER_EPS="1e-6").seen
    assert (worker["active from the start"], worker["patched"]) == (True, True)
    assert worker["variables"] == {"FUSEPATCH": "1", "FUSEPATCH_OPTIMIZER_EPS": "1e-6"}
    assert notes == [
        "ray.init: worker_process_setup_hook: fusepatch's own",
        "ray.init: env_vars of the job: FUSEPATCH=1, FUSEPATCH_OPTIMIZER_EPS=1e-6",
    ]


def test_an_automatic_init_carries_them_too(cluster: Cluster) -> None:
    code = """
        import fusepatch, ray
        show(workers())
    """
    ((worker,),) = drive(code, RAY_ADDRESS=cluster.address).seen
    assert worker["patched"]


@pytest.mark.parametrize("hook", ["hook_of_a_user", "'ray_worker.leave_a_mark'"])
def test_the_users_hook_runs_after_ours_and_the_same_dict_serves_again(cluster: Cluster, hook: str) -> None:
    code = f"""
        import copy
        import fusepatch, ray
        given = {{"env_vars": {{"FUSEPATCH_OPTIMIZER_EPS": "1e-5"}}, "worker_process_setup_hook": {hook}}}
        before = copy.deepcopy(given)
        for _ in range(2):
            ray.init({cluster.address!r}, runtime_env=given)
            show(workers())
            assert given == before, given
            ray.shutdown()
        show(notes())
    """
    (first,), (second,), (notes,) = drive(code, FUSEPATCH_OPTIMIZER_EPS="1e-6", FUSEPATCH_STRICT="0").seen
    assert first["pid"] != second["pid"]
    for worker in (first, second):
        assert (worker["patched"], worker["their hook"]) == (True, "after fusepatch")
        assert worker["variables"] == {"FUSEPATCH": "1", "FUSEPATCH_OPTIMIZER_EPS": "1e-5", "FUSEPATCH_STRICT": "0"}
    name = hook.strip("'")
    assert f"ray.init: worker_process_setup_hook: fusepatch's own, which runs before {name}" in notes


def test_a_dict_that_ray_processed_before_fusepatch_came_is_tolerated(cluster: Cluster) -> None:
    code = f"""
        import ray
        given = {{"worker_process_setup_hook": "ray_worker.leave_a_mark"}}
        ray.init({cluster.address!r}, runtime_env=given)
        show(workers())
        ray.shutdown()
        import fusepatch
        assert any("HOOK" in name for name in given["env_vars"]), given
        ray.init({cluster.address!r}, runtime_env=given)
        show(workers())
    """
    (before,), (after,) = drive(code).seen
    assert (before["patched"], before["their hook"]) == (False, "alone")
    assert (after["patched"], after["their hook"]) == (True, "after fusepatch")


def test_a_runtime_env_object_and_one_in_a_job_config_are_merged_too(cluster: Cluster) -> None:
    code = f"""
        import fusepatch, ray
        from ray.job_config import JobConfig
        from ray.runtime_env import RuntimeEnv
        given = RuntimeEnv(env_vars={{"FUSEPATCH_STRICT": "0"}}, worker_process_setup_hook="ray_worker.leave_a_mark")
        ray.init({cluster.address!r}, runtime_env=given)
        show(workers())
        assert given["env_vars"] == {{"FUSEPATCH_STRICT": "0"}}, given
        ray.shutdown()
        config = JobConfig(runtime_env={{"env_vars": {{"FUSEPATCH_STRICT": "1"}}}}, metadata={{"name": "mine"}})
        for _ in range(2):
            ray.init({cluster.address!r}, job_config=config)
            show(workers())
            assert config.runtime_env == {{"env_vars": {{"FUSEPATCH_STRICT": "1"}}}}, config.runtime_env
            ray.shutdown()
    """
    (given,), (first,), (second,) = drive(code).seen
    assert given["their hook"] == "after fusepatch"
    assert given["variables"] == {"FUSEPATCH": "1", "FUSEPATCH_STRICT": "0"}
    for worker in (given, first, second):
        assert worker["patched"]
    assert second["variables"] == first["variables"] == {"FUSEPATCH": "1", "FUSEPATCH_STRICT": "1"}


def test_a_user_can_keep_all_workers_off_or_one_actor(cluster: Cluster) -> None:
    code = f"""
        import fusepatch, ray
        ray.init({cluster.address!r}, runtime_env={{"env_vars": {{"FUSEPATCH": "0"}}}})
        show(workers())
        show(notes())
        ray.shutdown()
        ray.init({cluster.address!r})
        off = {{"env_vars": {{"FUSEPATCH": "0"}}}}
        show(ray.get(ray.remote(num_cpus=0)(look).options(runtime_env=off).remote()))
    """
    (job,), (notes,), (actor,) = drive(code).seen
    for worker in (job, actor):
        assert (worker["patched"], worker["variables"]) == (False, {"FUSEPATCH": "0"})
    assert notes == ["ray.init: FUSEPATCH=0 in env_vars keeps the workers of this job unpatched"]


JOB = '{"runtime_env": %s, "metadata": {"name": "mine"}}'


def test_a_submitted_job_keeps_its_keys(cluster: Cluster) -> None:
    code = f"""
        import fusepatch, ray
        ray.init({cluster.address!r}, runtime_env={{"env_vars": {{"MINE": "1"}}}})
        show(workers())
    """
    job = JOB % '{"env_vars": {"FUSEPATCH": "1", "FUSEPATCH_STRICT": "0", "OTHER": "1"}}'
    (worker,) = drive(code, RAY_JOB_CONFIG_JSON_ENV_VAR=job, FUSEPATCH_STRICT="1", FUSEPATCH_OPTIMIZER_EPS="1e-6").seen[
        0
    ]
    assert worker["patched"]
    assert worker["variables"] == {"FUSEPATCH": "1", "FUSEPATCH_OPTIMIZER_EPS": "1e-6", "FUSEPATCH_STRICT": "0"}


def test_the_hook_of_a_submitted_job_stands(cluster: Cluster) -> None:
    code = f"""
        import fusepatch, ray
        ray.init({cluster.address!r})
        show(workers())
    """
    job = JOB % '{"worker_process_setup_hook": "ray_worker.leave_a_mark"}'
    drove = drive(code, RAY_JOB_CONFIG_JSON_ENV_VAR=job)
    (worker,) = drove.seen[0]
    assert worker["their hook"] is not None
    assert worker["variables"] == {"FUSEPATCH": "1"}
    assert worker["patched"] == start_up_file()
    assert "no setup hook: the submitted job has one (ray_worker.leave_a_mark)" in drove.errors


def test_through_rays_client_the_variables_travel(cluster: Cluster) -> None:
    code = f"""
        import fusepatch, ray
        ray.init({cluster.client!r}, runtime_env={{"env_vars": {{"MINE": "1"}}}})
        show(workers())
    """
    drove = drive(code, FUSEPATCH_OPTIMIZER_EPS="1e-6")
    (worker,) = drove.seen[0]
    assert worker["variables"] == {"FUSEPATCH": "1", "FUSEPATCH_OPTIMIZER_EPS": "1e-6"}
    assert worker["patched"] == start_up_file()
    assert "no setup hook: Ray's client (ray://) runs none" in drove.errors


@pytest.fixture(scope="module")
def python_without_fusepatch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with everything that this one has installed, but for fusepatch."""
    folder = tmp_path_factory.mktemp("other") / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    packages = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "fusepatch" not in entry.name and not (packages / entry.name).exists():
            (packages / entry.name).symlink_to(entry)
    return python


def test_a_worker_without_fusepatch_says_so_and_lives(cluster: Cluster, python_without_fusepatch: Path) -> None:
    code = f"""
        import fusepatch, ray
        env = {{
            "py_executable": {str(python_without_fusepatch)!r},
            "env_vars": {{"PYTHONPATH": {str(DOORS)!r}}},
            "worker_process_setup_hook": hook_of_a_user,
        }}
        ray.init({cluster.address!r}, runtime_env=env)
        show(workers())
        import time
        time.sleep(2)  # what workers print reaches the driver a moment later
    """
    drove = drive(code)
    (worker,) = drove.seen[0]
    assert (worker["patched"], worker["their hook"]) == (False, "alone")
    message = (
        f"fusepatch: NOT ACTIVE in the Ray worker with pid {worker['pid']}, which trains unpatched; it is not "
        "installed for"
    )
    assert message in drove.errors


def test_a_worker_in_which_activation_raises_says_so_and_lives(cluster: Cluster) -> None:
    code = f"""
        import fusepatch, ray
        ray.init({cluster.address!r}, runtime_env={{"env_vars": {{"FUSEPATCH_OPTIMIZER_EPS": "small"}}}})
        show(workers())
        import time
        time.sleep(2)
    """
    drove = drive(code)
    (worker,) = drove.seen[0]
    assert not worker["patched"]
    assert (
        f"NOT ACTIVE in the Ray worker with pid {worker['pid']}, which trains unpatched; SettingError: " in drove.errors
    )
    assert "FUSEPATCH_OPTIMIZER_EPS='small'" in drove.errors


def test_a_ray_that_was_initialised_before_is_out_of_reach_and_that_is_said(cluster: Cluster) -> None:
    code = f"""
        import ray
        ray.init({cluster.address!r})
        import fusepatch
        show(workers())
        ray.init(ignore_reinit_error=True)
        show(notes())
        ray.shutdown()
        ray.init({cluster.address!r})
        show(workers())
    """
    drove = drive(code)
    (before,), (notes,), (after,) = drove.seen
    assert not before["patched"]
    assert after["patched"]
    assert drove.errors.count("Ray was initialised before fusepatch was activated") == 1
    assert any("ignores the runtime_env of a second call" in note for note in notes)


@pytest.mark.parametrize("how", ["FUSEPATCH_DISABLE", "deactivate", "deactivate all", "inert"])
def test_what_is_switched_off_leaves_ray_init_alone(cluster: Cluster, how: str) -> None:
    call = {"deactivate": "fusepatch.deactivate('ray.worker_setup')", "deactivate all": "fusepatch.deactivate()"}
    env = {"FUSEPATCH_DISABLE": {"FUSEPATCH_DISABLE": "ray.worker_setup"}, "inert": {"FUSEPATCH": "0"}}
    code = f"""
        import fusepatch, ray
        {call.get(how, "pass")}
        ray.init({cluster.address!r})
        show(workers())
    """
    ((worker,),) = drive(code, **env.get(how, {})).seen
    assert (worker["patched"], worker["variables"]) == (False, {})


def test_a_driver_of_rays_own_is_left_alone(cluster: Cluster) -> None:
    code = f"""
        import fusepatch, ray
        ray.init({cluster.address!r}, _skip_env_hook=True)
        show(workers())
    """
    ((worker,),) = drive(code).seen
    assert (worker["patched"], worker["variables"]) == (False, {})


def start_up_file() -> bool:
    """Whether this environment has the start-up file, which switches on workers that no hook reaches."""
    return (Path(sysconfig.get_path("purelib")) / "fusepatch.pth").exists()


def test_the_program_on_the_page_of_the_patch_prints_what_the_page_says(tmp_path: Path) -> None:
    example = EXAMPLES["ray.worker_setup"]
    if version("ray") != example.versions["ray"]:
        pytest.skip(f"ray is {version('ray')}, the page shows {example.versions['ray']}")
    assert fresh(example.code, cwd=tmp_path, check=True).stdout == example.before
    assert fresh(f"import fusepatch\n{example.code}", cwd=tmp_path, check=True).stdout == example.after
