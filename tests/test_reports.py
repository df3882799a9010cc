"""`FUSEPATCH_REPORT` in real processes, and the command line that reads what they wrote."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from functools import reduce
from importlib.util import find_spec
from operator import getitem
from pathlib import Path
from random import Random
from typing import Any

import pytest

import fusepatch
from fusepatch.cli import show
from fusepatch.patches import PATCHES
from fusepatch.reporting import reader
from kits.helpers import Completed, fresh, run
from kits.reports import BUILD, PATCH, environment, patch, processes, seen

TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="the optimizers are torch's")


def command(*arguments: str | Path, env: Mapping[str, str] | None = None, columns: int = 80) -> Completed:
    return run([sys.executable, "-m", "fusepatch", *arguments], env={"COLUMNS": str(columns), **(env or {})})


def joined(text: str) -> str:
    return " ".join(text.split())


# What a process writes


def test_without_the_variable_nothing_of_it_is_loaded() -> None:
    code = "import sys, fusepatch; print([name for name in sys.modules if 'report' in name or 'record' in name])"
    assert fresh(code, check=True).stdout == "[]\n"


def test_what_a_preview_finds_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "__init__.py").touch()
    metadata = tmp_path / "trl-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 0.1\n")
    code = """
    import json, fusepatch
    from fusepatch.reporting.record import of_this_process
    print(json.dumps(of_this_process(fusepatch.status())))
    """
    record = json.loads(fresh(code, env={"PYTHONPATH": str(tmp_path)}, check=True).stdout)
    of_trl = [site for site in patch(record, "liger.grpo_loss")["sites"] if site["upstream"] == "trl"]
    assert {(site["outcome"], site["loaded"]) for site in of_trl} == {("GATED", False)}
    assert record["upstreams"] == {}


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
        from fusepatch.engine import ledger
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
    """The report of one process in which the Liger that it loads has drifted from the shape that a patch is written
    for."""
    package = tmp_path / "shadow" / "liger_kernel" / "transformers"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "monkey_patch.py").write_text("def _apply_liger_kernel_to_instance(model): ...\n")
    env = {**environment(tmp_path / "report"), "PYTHONPATH": str(tmp_path / "shadow"), "RANK": "1", "WORLD_SIZE": "4"}
    fresh("import fusepatch, liger_kernel.transformers.monkey_patch", env=env, check=True)
    return tmp_path / "report"


LIGER = "liger.instance_flags"


@TORCH
def test_status_says_which_process_trains_with_what(a_run: Path) -> None:
    done = command("status", "--report", a_run, columns=200)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].endswith(f"the processes that report to {a_run}")
    assert lines[1] == "3 processes on 1 host"
    host = re.escape(os.uname().nodename)
    trained, prepared = (re.split("\n(?=\\S)", block) for block in done.stdout.split("\n\n")[1:3])
    assert re.match(rf"train.py: 2 processes, ranks 0-1 of 2 \({host} \d+, \d+\)\n", trained[0])
    assert re.search(rf"^  \u2713 {PATCH} +APPLIED +torch [^ ]+; 2 calls$", trained[0], re.M)
    assert re.search(r"^  - optimizer.class +on request +set FUSEPATCH_OPTIMIZER_CLASS$", trained[0], re.M)
    assert re.match(rf"prepare.py: 1 process \({host} \d+\)\n  - no target is loaded$", prepared[0])
    assert re.search(rf"{PATCH}: (replaced|not done) 2x in 2 processes: ", joined(done.stdout))
    assert "NOT APPLIED" not in done.stdout
    long = command("status", "-v", "--report", a_run, columns=200).stdout
    assert set(lines) <= set(long.splitlines())
    assert re.search(r"^      torch.optim: adam, adamw, .*: APPLIED: torch ", long, re.M)


def test_status_shouts_where_a_target_is_loaded_without_its_patch(a_worker_without: Path) -> None:
    done = command("status", "--report", a_worker_without)
    assert done.returncode == 0
    assert [line for line in done.stdout.splitlines()[1:] if len(line) > 80] == []
    assert re.search(rf"^  ! {LIGER}  DRIFTED  liger_kernel ", done.stdout, re.M)
    text = joined(done.stdout)
    assert f"NOT APPLIED: {LIGER}: liger_kernel.transformers.monkey_patch is loaded, but DRIFTED: " in text
    assert re.search(r"In -c \(\S+ \d+, rank 1 of 4\)", text)
    for arguments, status, verdict in (
        ((), 5, f"exit status 5: {LIGER} is DRIFTED"),
        (("--require", LIGER), 8, f"exit status 8: {LIGER} is DRIFTED in -c ("),
    ):
        done = command("check", *arguments, "--report", a_worker_without)
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


@pytest.fixture(scope="module")
def a_record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process writes that has a note and calls."""
    folder = tmp_path_factory.mktemp("record")
    fresh(COUNT, env={**environment(folder), "RANK": "0", "WORLD_SIZE": "8"}, check=True)
    (record,) = processes(folder)
    return record


def test_files_that_are_no_report_are_named_in_a_line_each_and_do_not_count(
    a_record: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = json.dumps(a_record)
    pid = f'"pid": {a_record["pid"]}'
    files: dict[str, bytes | str] = {
        "good": whole,
        "utf-16": whole.encode("utf-16"),
        "torn": whole[: len(whole) // 2],
        "empty": "",
        "binary": b"\xff\xfe\x00",
        "latin-1": whole.replace('"role": "', '"role": "\u00e9').encode("latin-1"),
        "other": "[1, 2]",
        "notes": "my notes",
        "later": '{"format": 99, "fusepatch": "9.9"}',
        "fields": '{"format": 1, "fusepatch": "0.1.0"}',
        "nested": "[" * 200_000,
        "nested fields": '{"a":' * 900 + "1" + "}" * 900,
        "nan": whole.replace(pid, '"pid": NaN'),
        "infinite": whole.replace(pid, f'"more": 1e999, {pid}'),
        "digits": whole.replace(pid, '"pid": ' + "9" * 5000),
        "large": whole.replace(pid, '"pid": ' + "9" * 100),
        "outcome": whole.replace('"PENDING"', '"BANANA"', 1),
        "huge": whole + " " * reader.MAXIMUM_BYTES,
        ".being-written.tmp": "{",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name, target in {"loop": "loop", "gone": "nothing", "device": "/dev/zero", "terminal": "/dev/tty"}.items():
        (tmp_path / name).symlink_to(target)
    monkeypatch.chdir(tmp_path)  # the path of a socket is a short one
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
    (tmp_path / os.fsdecode(b"odd\xff\n\x1b[2J")).touch()

    done = command("status", "--json", "--report", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout, parse_constant=pytest.fail)
    assert found["processes"] == [a_record, a_record]
    why = {entry["file"]: entry["why"] for entry in found["not_read"]}
    assert set(why) == {os.fsdecode(name) for name in os.listdir(os.fsencode(tmp_path))} - {
        *("good", "utf-16", ".being-written.tmp"),
    }
    for name, words in {
        "later": "written by fusepatch 9.9 in format 99; this one reads 1",
        "fields": "incomplete: host is missing",
        "nested": "not a report of fusepatch: nested too deeply",
        "nan": "incomplete, or not a report of fusepatch: not JSON (NaN is not a number in JSON)",
        "infinite": "incomplete, or not a report of fusepatch: not JSON (1e999 is too large a number)",
        "large": "pid is too large; wanted a count, a rank or a process id",
        "huge": "not a report of fusepatch: larger than 8 MiB",
        "fifo": "a FIFO, which is not opened",
        "folder": "a directory, which is not opened",
        "socket": "a socket, which is not opened",
        "device": "a device, which is not opened",
        "terminal": "a device, which is not opened",
        "loop": "OSError: Too many levels of symbolic links",
        "gone": "FileNotFoundError: No such file or directory",
    }.items():
        assert why[name] == words
    assert why["outcome"].startswith("patches[0].outcome is BANANA; wanted one of DISABLED, ")
    done = command("check", "--report", tmp_path, columns=400)
    assert (done.returncode, done.stderr) == (3, "")
    assert all(line.isprintable() for line in done.stdout.splitlines())
    assert "- not read: device, terminal: a device, which is not opened\n" in done.stdout
    assert re.search(r"- not read: \d+ further files: `--json` names them all\n", done.stdout)


def test_a_report_in_which_any_field_is_another_one_is_read_or_named(a_record: dict[str, Any], tmp_path: Path) -> None:
    def fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        if path:
            yield path
        inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in inside:
            yield from fields(item, (*path, key))

    random = Random(12)
    paths = list(fields(a_record))
    values = [None, True, 7, -1, 1.5, "", "x", "\ud800\x1b[31m", [], {}, [[]], {"a": "b"}, [1], 2**70]
    for number in range(400):
        changed = copy.deepcopy(a_record)
        *head, last = random.choice(paths)
        holder = reduce(getitem, head, changed)
        if random.random() < 0.3:
            del holder[last]
        else:
            holder[last] = random.choice(values)
        (tmp_path / f"{number}.json").write_text(json.dumps(changed))
    report = reader.read(str(tmp_path))
    assert len(report.processes) + len(report.not_read) == 400
    assert len(report.processes) > 20  # a text instead of another text
    assert len(report.not_read) > 200
    assert json.loads(json.dumps(reader.as_data(report)), parse_constant=pytest.fail)["processes"]
    assert all(line.isprintable() for line in show.of_report(report, 80, verbose=True).splitlines())
    reader.missing(report, [PATCH])
    reader.used(report, [])


def test_no_text_of_a_report_reaches_the_terminal_as_a_command(a_worker_without: Path) -> None:
    def evil(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: evil(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [evil(item) for item in value]
        return f"\x1b[2J\n\ud800{value}" if isinstance(value, str) and key != "outcome" else value

    (path,) = a_worker_without.iterdir()
    record = evil(json.loads(path.read_text()))
    record["patches"][0]["fallbacks"] = [{"text": "\x07", "times": 1}]
    path.write_text(json.dumps(record))
    report = reader.read(str(a_worker_without))
    text = show.of_report(report, 80, verbose=True)
    assert "\\x1b[2J" in text
    assert all(line.isprintable() for line in text.splitlines())
    done = command("check", "--report", a_worker_without)
    assert (done.returncode, done.stderr) == (5, "")
    assert all(line.isprintable() for line in done.stdout.splitlines())


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


def test_processes_that_fare_alike_are_one_group_whatever_their_ranks_and_counts(
    a_worker_without: Path,
) -> None:
    ((path,), (record,)) = (list(a_worker_without.iterdir()), processes(a_worker_without))
    path.unlink()
    for number in range(400):
        same = {**copy.deepcopy(record), "pid": 1000 + number, "host": f"node-{number // 8}", "world_size": 400}
        same |= {"rank": number, "role": f"SpawnProcess-{number} of train.py"}
        for entry in same["patches"]:
            entry["calls"] = number % 3
        (a_worker_without / f"{number}.json").write_text(json.dumps(same))
    report = reader.read(str(a_worker_without))
    first, *others = (process["patches"][0]["sites"] for process in report.processes)
    assert all(sites is first for sites in others)  # checked once, held once
    text = command("check", "--require", LIGER, "--report", a_worker_without).stdout
    assert len(text.splitlines()) < 40
    assert "400 processes on 50 hosts" in text
    assert "SpawnProcess-* of train.py: 400 processes, ranks 0-399 of 400 (node-0 1000, 1001, 1002 and 5 more; " in (
        joined(text)
    )
    assert "; 47 further hosts)" in joined(text)
    verdict = joined(text).partition("exit status 8: ")[2]
    assert re.fullmatch(rf"{LIGER} is DRIFTED in (SpawnProcess-\d+ of train.py \([^)]+\),? ){{3}}and 397 more", verdict)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ([(None, None)], ""),
        ([(3, None)], "rank 3"),
        ([(3, 8), (None, 8)], "rank 3 of 8"),
        ([(1, 8), (0, 8), (2, 8), (2, 8), (5, 8)], "ranks 0-2, 5 of 8"),
        ([(0, 2), (1, 4)], "ranks 0-1"),
        ([(2 * number, None) for number in range(9)], "ranks 0, 2, 4 and 6 more"),
    ],
)
def test_ranks_are_named_in_few_words(given: list[tuple[int | None, int | None]], shown: str) -> None:
    assert reader.ranks([{"rank": rank, "world_size": size} for rank, size in given]) == shown
