"""`FUSEPATCH_REPORT` in real processes, and the command line that reads what they wrote."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers import Completed, fresh, run
from report_kit import BUILD, PATCH, environment, patch, processes, seen

import fusepatch
from fusepatch.patches import PATCHES

TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="the optimizers are torch's")


def command(*arguments: str | Path, env: Mapping[str, str] | None = None, columns: int = 80) -> Completed:
    return run([sys.executable, "-m", "fusepatch", *arguments], env={"COLUMNS": str(columns), **(env or {})})


def joined(text: str) -> str:
    return " ".join(text.split())


# What a process writes


def test_without_the_variable_nothing_of_it_is_loaded() -> None:
    code = "import sys, fusepatch; print([name for name in sys.modules if 'report' in name or 'record' in name])"
    assert fresh(code, check=True).stdout == "[]\n"


def test_a_process_writes_who_it_is_when_it_is_activated(tmp_path: Path) -> None:
    env = {"FUSEPATCH_REPORT": str(tmp_path / "report"), "RANK": "3", "WORLD_SIZE": "8", "FUSEPATCH_STRICT": "1"}
    done = fresh(
        "import fusepatch, os; print(os.getpid(), flush=True); os._exit(0)", env={**env, "SECRET": "hidden"}, check=True
    )
    (record,) = processes(tmp_path / "report")
    assert record["pid"] == int(done.stdout)
    assert record["parent"] == os.getpid()
    assert record["host"] == os.uname().nodename
    assert (record["rank"], record["world_size"], record["role"]) == (3, 8, "-c")
    assert record["fusepatch"] == fusepatch.__version__
    assert record["python"] == ".".join(map(str, sys.version_info[:3]))
    assert record["settings"] == {"FUSEPATCH_REPORT": str(tmp_path / "report"), "FUSEPATCH_STRICT": "1"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", record["started"])
    assert record["started"] <= record["written"]
    assert [entry["id"] for entry in record["patches"]] == [patch.id for patch in PATCHES]
    sites = [site for entry in record["patches"] for site in entry["sites"]]
    assert {(site["outcome"], site["loaded"]) for site in sites} == {("PENDING", False)}
    assert record["upstreams"] == {}
    (path,) = (tmp_path / "report").iterdir()
    assert "hidden" not in path.read_text()


@TORCH
def test_a_killed_process_has_left_its_outcomes_calls_and_values(tmp_path: Path) -> None:
    code = (
        BUILD
        + 2 * BUILD.strip().splitlines()[-1].join("\n\n")
        + "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = fresh("import fusepatch\n" + code, env=environment(tmp_path))
    assert done.returncode == -9
    (record,) = processes(tmp_path)
    assert seen(record) == ("-c", 3, "APPLIED")
    assert list(record["upstreams"]) == ["torch"]
    own = patch(record)
    assert sum(note["times"] for note in (*own["replaced"], *own["fallbacks"])) >= 3
    assert len(list(tmp_path.iterdir())) == 1


@TORCH
def test_many_calls_cost_few_writes_and_a_killed_process_lacks_less_than_half_of_them(tmp_path: Path) -> None:
    code = f"""
        import fusepatch, os, signal
        from fusepatch.engine import ledger, report
        writes = []
        real = os.replace
        os.replace = lambda *names: (writes.append(1), real(*names))
        for _ in range(1000):
            ledger.count_call({PATCH!r})
        print(len(writes), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = fresh(code, env=environment(tmp_path))
    assert int(done.stdout) < 8 + 7 + 20
    (record,) = processes(tmp_path)
    assert 500 < patch(record)["calls"] <= 1000


@TORCH
def test_a_process_that_is_killed_right_after_an_import_has_reported_it(tmp_path: Path) -> None:
    code = "import fusepatch, os, signal, torch.optim.adamw; os.kill(os.getpid(), signal.SIGKILL)"
    fresh(code, env=environment(tmp_path))
    (record,) = processes(tmp_path)
    assert seen(record) == ("-c", 0, "APPLIED")
    assert [
        site["module"] for site in patch(record)["sites"] if site["outcome"] == "APPLIED" and not site["loaded"]
    ] == []


def test_an_ordinary_end_writes_every_call(tmp_path: Path) -> None:
    code = f"""
        import fusepatch
        from fusepatch.engine import ledger
        for _ in range(1000):
            ledger.count_call({PATCH!r})
    """
    fresh(code, env=environment(tmp_path), check=True)
    (record,) = processes(tmp_path)
    assert patch(record)["calls"] == 1000


def test_what_is_taken_out_and_put_back_is_in_the_same_file(tmp_path: Path) -> None:
    code = f"""
        import fusepatch, json, glob
        def outcome():
            (path,) = glob.glob({str(tmp_path)!r} + "/*.json")
            return [patch["outcome"] for patch in json.load(open(path))["patches"] if patch["id"] == {PATCH!r}][0]
        print(outcome())
        fusepatch.deactivate({PATCH!r})
        print(outcome())
        fusepatch.activate()
        print(outcome())
        fusepatch.deactivate()
        print(outcome())
        fusepatch.activate()
        print(outcome())
    """
    done = fresh(code, env=environment(tmp_path), check=True)
    assert done.stdout.split() == ["PENDING", "DISABLED", "PENDING", "DISABLED", "PENDING"]


def test_a_relative_directory_is_the_same_one_for_children_elsewhere_and_is_given_back(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    code = """
        import os, subprocess, sys
        import fusepatch
        print(os.environ["FUSEPATCH_REPORT"])
        subprocess.run([sys.executable, "-c", "import fusepatch"], cwd="elsewhere", check=True)
        fusepatch.deactivate()
        print(os.environ["FUSEPATCH_REPORT"])
    """
    done = fresh(code, env={"FUSEPATCH_REPORT": "report"}, cwd=tmp_path, check=True)
    assert done.stdout.split() == [str(tmp_path / "report"), "report"]
    assert len(processes(tmp_path / "report")) == 2


def test_an_inert_import_reports_nothing(tmp_path: Path) -> None:
    fresh("import fusepatch", env={**environment(tmp_path / "report"), "FUSEPATCH": "0"}, check=True)
    assert not (tmp_path / "report").exists()


def test_the_command_line_is_no_process_of_the_run(tmp_path: Path) -> None:
    for arguments in (["status"], ["check"], ["env"]):
        command(*arguments, env={"FUSEPATCH_REPORT": str(tmp_path / "report"), "FUSEPATCH_DISABLE": "all"})
        assert not (tmp_path / "report").exists(), arguments


# What goes wrong while it is written


def survives(done: Completed, problem: str) -> None:
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert done.stderr.count("could not be written") == 1, done.stderr
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


COUNT = f"""
import fusepatch
from fusepatch.engine import ledger
for number in range(40):
    ledger.count_call({PATCH!r})
    ledger.fallback({PATCH!r}, f"shape {{number}}")
print("trained")
"""


def test_a_file_in_its_place_is_one_warning_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    survives(fresh(COUNT, env=environment(tmp_path / "file")), "NotADirectoryError")


def on_a_disk(options: str, program: str, folder: Path) -> Completed:
    """Run `program` and list and print what it leaves in `disk`, a file system of its own that reports go to."""
    (folder / "program.py").write_text(program)
    (folder / "disk").mkdir()
    shell = f"""
        mount -t tmpfs -o {options} none disk || exit 77
        {sys.executable} program.py
        echo $(ls -A disk)
        cat disk/*.json
    """
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not there: no file system can be made for a test")
    done = run(["unshare", "--map-root-user", "--mount", "sh", "-c", shell], environment(folder / "disk"), folder)
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        pytest.skip(f"no file system can be made here: {done.stderr}")
    return done


def test_a_directory_that_cannot_be_written_to_is_one_warning(tmp_path: Path) -> None:
    done = on_a_disk("ro", COUNT, tmp_path)
    assert done.stdout == "trained\n\n"
    assert "Read-only file system" in done.stderr
    assert done.stderr.count("could not be written") == 1


def test_a_disk_that_fills_up_leaves_the_last_whole_record(tmp_path: Path) -> None:
    fill = "    number == 20 and os.system('cat /dev/zero > disk/filling 2> /dev/null')\n"
    done = on_a_disk(
        "size=256k", "import os\n" + COUNT.replace("    ledger.count", fill + "    ledger.count", 1), tmp_path
    )
    trained, listed, text = done.stdout.split("\n", 2)
    assert (trained, listed.count(".json"), listed.count(".tmp")) == ("trained", 1, 0)
    assert 0 < patch(json.loads(text))["calls"] <= 20
    assert "No space left on device" in done.stderr
    assert done.stderr.count("could not be written") == 1


def test_a_directory_that_is_removed_during_the_run_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    code = f"import fusepatch, shutil; shutil.rmtree({str(folder)!r})\n" + COUNT
    done = fresh(code, env=environment(folder))
    assert (done.returncode, done.stderr.count("could not be written")) == (0, 0)
    (record,) = processes(folder)
    assert patch(record)["calls"] == 40


def test_activations_that_race_leave_one_whole_record(tmp_path: Path) -> None:
    code = f"""
        import os, sys, threading
        os.environ["FUSEPATCH"] = "0"
        import fusepatch
        from fusepatch.engine import ledger
        sys.setswitchinterval(1e-5)
        def work():
            fusepatch.activate()
            for _ in range(500):
                ledger.count_call({PATCH!r})
                ledger.fallback({PATCH!r}, threading.current_thread().name)
        threads = [threading.Thread(target=work, name=f"thread {{number}}") for number in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        print(ledger.calls({PATCH!r}))
    """
    done = fresh(code, env=environment(tmp_path), check=True)
    (record,) = processes(tmp_path)
    assert patch(record)["calls"] == int(done.stdout) == 4000
    assert {note["text"]: note["times"] for note in patch(record)["fallbacks"]} == {
        f"thread {n}": 500 for n in range(8)
    }


# What the command line makes of it


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks that build an optimizer each, one of which calls for a warning, and a process that imports nothing."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "train.py").write_text("import fusepatch\n" + BUILD)
    (folder / "prepare.py").write_text("import fusepatch\n")
    env = {**environment(folder / "report"), "WORLD_SIZE": "2"}
    for rank in ("0", "1"):
        assert run([sys.executable, folder / "train.py"], {**env, "RANK": rank}).returncode == 0
    assert run([sys.executable, folder / "prepare.py"], environment(folder / "report")).returncode == 0
    return folder / "report"


@pytest.fixture
def a_worker_without(tmp_path: Path) -> Path:
    """The report of one process in which the Liger that it loads has drifted from the shape that a patch is written for."""
    package = tmp_path / "shadow" / "liger_kernel" / "transformers"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "monkey_patch.py").write_text("def _apply_liger_kernel_to_instance(model): ...\n")
    env = {**environment(tmp_path / "report"), "PYTHONPATH": str(tmp_path / "shadow"), "RANK": "1", "WORLD_SIZE": "4"}
    fresh("import fusepatch, liger_kernel.transformers.monkey_patch", env=env, check=True)
    return tmp_path / "report"


@pytest.fixture(params=["rich", "plain"])
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    if request.param == "rich":
        return {}
    (tmp_path / "without" / "rich").mkdir(parents=True)
    (tmp_path / "without" / "rich" / "__init__.py").write_text("raise ImportError('there is no rich here')\n")
    return {"PYTHONPATH": str(tmp_path / "without")}


LIGER = "liger.instance_flags"


@TORCH
def test_status_says_which_process_trains_with_what(a_run: Path, tables: dict[str, str]) -> None:
    done = command("status", "--report", a_run, env=tables, columns=200)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].endswith(f"the processes that report to {a_run}")
    assert lines[1] == "3 processes on 1 host"
    assert lines[3].split() == ["process", "where", "rank", "outcome", "patches"]
    host = re.escape(os.uname().nodename)
    for rank in ("0/2", "1/2"):
        assert re.search(
            rf"^train.py +{host} \d+ +{rank} +APPLIED +.*{PATCH} 1 call \(torch [^)]+\)", done.stdout, re.M
        )
    assert re.search(rf"^prepare.py +{host} \d+ +nothing loaded +no target is loaded", done.stdout, re.M)
    assert re.search(rf"{PATCH}: (replaced|not done) 2x in 2 processes: ", joined(done.stdout))
    assert "NOT APPLIED" not in done.stdout


def test_status_shouts_where_a_target_is_loaded_without_its_patch(
    a_worker_without: Path, tables: dict[str, str]
) -> None:
    done = command("status", "--report", a_worker_without, env=tables)
    assert done.returncode == 0
    assert [line for line in done.stdout.splitlines()[1:] if len(line.rstrip()) > 80] == []
    text = joined(done.stdout)
    assert f"NOT APPLIED: {LIGER}: liger_kernel.transformers.monkey_patch is loaded, but DRIFTED: " in text
    assert re.search(r"In -c \(\S+ \d+, rank 1/4\)", text)
    squeezed = "".join(done.stdout.split())
    assert "NOTAPPLIED" in squeezed.partition("-NOT")[0]
    for arguments, status, verdict in (
        ((), 5, f"exit status 5: {LIGER} is DRIFTED"),
        (("--require", LIGER), 8, f"exit status 8: {LIGER} is DRIFTED in -c ("),
    ):
        done = command("check", *arguments, "--report", a_worker_without, env=tables)
        assert (done.returncode, done.stderr) == (status, "")
        assert verdict in joined(done.stdout)


@TORCH
def test_check_requires_a_patch_in_every_process_that_loaded_a_target(a_run: Path, tmp_path: Path) -> None:
    done = command("check", "--require", PATCH, "--report", a_run, columns=200)
    assert done.returncode == 0
    assert done.stdout.endswith(f"switched off by you: {PATCH} in 2 processes with 2 calls\n")
    assert command("check", "--report", a_run).returncode == 0

    nowhere = command("check", "--require", f"{PATCH},{LIGER}", "--report", a_run)
    assert nowhere.returncode == 8
    assert f"{LIGER} is not applied anywhere: of 3 processes that reported, none has loaded a target of it" in joined(
        nowhere.stdout
    )

    shutil.copytree(a_run, tmp_path / "report")
    env = {**environment(tmp_path / "report"), "FUSEPATCH_DISABLE": PATCH, "RANK": "7"}
    fresh("import fusepatch, torch", env=env, check=True)
    off = command("check", "--require", PATCH, "--report", tmp_path / "report")
    assert off.returncode == 8
    assert re.search(rf"{PATCH} is DISABLED in -c \(\S+ \d+, rank 7\)", joined(off.stdout))
    assert command("check", "--report", tmp_path / "report").returncode == 0
    assert "NOT APPLIED" not in command("status", "--report", tmp_path / "report").stdout


def test_a_directory_without_a_report_is_a_failed_check(tmp_path: Path) -> None:
    for arguments, status in ((("--require", PATCH), 8), ((), 3)):
        done = command("check", *arguments, "--report", tmp_path)
        assert done.returncode == status
        assert "no process has reported" in done.stdout
        assert "none has loaded a target" in joined(done.stdout) or "no process has loaded a target" in joined(
            done.stdout
        )
    assert command("status", "--report", tmp_path).returncode == 0


@pytest.mark.parametrize("name", ["status", "check"])
def test_a_directory_that_cannot_be_read_is_exit_status_2(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, error in ((tmp_path / "file", "NotADirectoryError"), (tmp_path / "none", "FileNotFoundError")):
        done = command(name, "--report", path, columns=400)
        assert (done.returncode, done.stdout) == (2, "")
        assert error in done.stderr
        assert str(path) in done.stderr
        assert "Traceback" not in done.stderr
    assert command("check", "--require", "no.such", "--report", tmp_path).returncode == 2


def test_torn_and_foreign_files_are_named_and_do_not_count(a_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    shutil.copytree(a_run, folder)
    whole = next(iter(a_run.iterdir())).read_bytes()
    (folder / "torn.json").write_bytes(whole[: len(whole) // 2])
    (folder / "other.json").write_text("[1, 2]")
    (folder / "binary.json").write_bytes(b"\xff\xfe\x00")
    (folder / "later.json").write_text('{"format": 99, "fusepatch": "9.9"}')
    (folder / "notes.txt").write_text("my notes")
    (folder / "folder").mkdir()
    (folder / ".being-written.tmp").write_text("{")
    (folder / "gone.json").symlink_to(folder / "nothing")
    done = command("status", "--json", "--report", folder)
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert len(found["processes"]) == 3
    why = {entry["file"]: entry["why"] for entry in found["not_read"]}
    assert set(why) == {"torn.json", "other.json", "binary.json", "later.json", "notes.txt", "folder", "gone.json"}
    assert why["later.json"] == "written by fusepatch 9.9 in format 99; this one reads 1"
    text = joined(command("check", "--report", folder).stdout)
    for name in why:
        assert f"not read: {name}: " in text
    assert command("check", "--report", folder).returncode == command("check", "--report", a_run).returncode


def test_the_json_has_the_keys_that_the_help_names(a_worker_without: Path) -> None:
    found = json.loads(command("status", "--json", "--report", a_worker_without).stdout)
    assert found == json.loads(command("check", "--json", "--report", a_worker_without).stdout)
    assert list(found) == ["processes", "not_applied", "not_read"]
    (process,) = found["processes"]
    (wrong,) = found["not_applied"]
    assert (wrong["patch"], wrong["rank"], wrong["outcome"]) == (LIGER, 1, "DRIFTED")
    documented = command("status", "--help").stdout
    for key in {*process, *wrong, *process["patches"][0]["sites"][0], "file", "why"}:
        assert re.search(rf"\b{key}\b", documented), key


def test_processes_that_fare_alike_share_a_row_and_hosts_are_told_apart(tmp_path: Path) -> None:
    fresh("import fusepatch", env=environment(tmp_path / "one"), check=True)
    ((path,), (record,)) = (list((tmp_path / "one").iterdir()), processes(tmp_path / "one"))
    for number in range(5):
        copy = {**record, "pid": 1000 + number, "host": "node-1" if number < 4 else "node-2"}
        (tmp_path / "one" / f"copy-{number}.json").write_text(json.dumps(copy))
    path.unlink()
    text = command("status", "--report", tmp_path / "one", columns=160).stdout
    assert "5 processes on 2 hosts" in text
    assert len(re.findall(r"^-c +node-1 1000, 1001, 1002 and 1 more; node-2 1004 ", text, re.M)) == 1
