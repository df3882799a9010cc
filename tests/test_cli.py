"""The command line, in fresh processes, on the installed upstreams."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import fusepatch
from fusepatch import activation, cli, settings
from fusepatch.cli import run as cli_run
from fusepatch.cli.main import CHECK_STATUS
from fusepatch.engine.patch import Outcome
from fusepatch.patches import PATCHES
from kits.helpers import Completed, clean_environment, fresh, run

REPOSITORY = Path(__file__).parents[1]
SITE_PACKAGES = Path(sysconfig.get_path("purelib"))

LIGER = "liger.instance_flags"
LIGER_MODULE = "liger_kernel.transformers.monkey_patch"
IDS = [patch.id for patch in PATCHES]
ONLY_LIGER = {"FUSEPATCH_DISABLE": ",".join(name for name in IDS if name != LIGER)}
"""Switches every other patch off, where the exit status of `check` is to be that of one patch."""

UPSTREAMS = ("torch", "triton", "transformers", "liger_kernel", "trl", "verl", "trinity", "ray")


def command(*arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Completed:
    """Run `python -m fusepatch ARGUMENTS` at 80 columns."""
    return run([sys.executable, "-m", "fusepatch", *arguments], env={"COLUMNS": "80", **(env or {})}, cwd=cwd)


def records(done: Completed) -> dict[str, Any]:
    return {record["id"]: record for record in json.loads(done.stdout)}


def joined(text: str) -> str:
    """The text with its line breaks and indentation as single blanks."""
    return " ".join(text.split())


@pytest.fixture
def liger_in_place_of_the_real_one(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Puts a `liger_kernel` whose patched module has the given source before the installed one."""

    def shadow(source: str | None, version: str = "") -> dict[str, str]:
        folder = tmp_path / "shadow"
        package = folder / "liger_kernel" / "transformers"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").touch()
        (package / "__init__.py").touch()
        if source is not None:
            (package / "monkey_patch.py").write_text(textwrap.dedent(source))
        if version:
            metadata = folder / f"liger_kernel-{version}.dist-info"
            metadata.mkdir()
            (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: liger_kernel\nVersion: {version}\n")
        return {"PYTHONPATH": str(folder)}

    return shadow


# The command line as such


@pytest.mark.parametrize(
    "program", [[sys.executable, "-m", "fusepatch"], [Path(sysconfig.get_path("scripts")) / "fusepatch"]]
)
def test_module_and_script_are_the_same_command(program: Sequence[str | Path]) -> None:
    done = run([*program, "--version"])
    assert (done.returncode, done.stdout, done.stderr) == (0, f"fusepatch {fusepatch.__version__}\n", "")
    for env in ({}, {"FUSEPATCH": "0"}, {"FUSEPATCH": "1"}, {"FUSEPATCH": "yes"}, {"FUSEPATCH_STRICT": "maybe"}):
        done = run([*program, "env"], env=env)
        assert "Traceback" not in done.stderr
        assert done.returncode == (2 if set(env.values()) & {"yes", "maybe"} else 0), env


def test_the_command_line_does_not_activate_the_package_that_it_imports(tmp_path: Path) -> None:
    look = "import os, fusepatch; print(fusepatch.status()[0].outcome.name, os.environ.get('FUSEPATCH'))"
    for name in ("fusepatch", "-c"):
        done = fresh(f"import sys; sys.argv = [{name!r}, 'status']; {look}", check=True)
        assert done.stdout == ("DISABLED None\n" if name == "fusepatch" else "PENDING 1\n")


def test_a_package_started_by_m_that_imports_fusepatch_activates_it(tmp_path: Path) -> None:
    package = tmp_path / "my_training"
    package.mkdir()
    (package / "__init__.py").write_text("import fusepatch, os\nprint(os.environ.get('FUSEPATCH'))\n")
    (package / "__main__.py").touch()
    for arguments in ([], ["fusepatch"], ["-m", "fusepatch"]):
        done = run([sys.executable, "-m", "my_training", *arguments], cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_help_and_usage_errors() -> None:
    bare = command()
    assert (bare.returncode, bare.stderr) == (2, "")
    for name in ("status", "check", "explain", "env", "run", "bench"):
        assert re.search(rf"^    {name} ", bare.stdout, re.MULTILINE)
        shown = command(name, "--help")
        assert (shown.returncode, shown.stderr) == (0, "")
    for wrong in (["nonsense"], ["explain"], ["status", "--nonsense"], ["run"], ["check", "--require"]):
        done = command(*wrong)
        assert (done.returncode, done.stdout) == (2, ""), wrong
        assert "usage: " in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        *([name, "--help"] for name in ("status", "check", "explain", "env")),
        ["status"],
        ["status", "-v"],
        ["env"],
        *(["explain", name] for name in IDS),
        ["explain", "nonsense"],
    ],
    ids=" ".join,
)
def test_no_line_is_longer_than_80_columns(arguments: list[str]) -> None:
    done = command(*arguments, env={"FUSEPATCH_LIGER_ROPE": "0", "FUSEPATCH_NONSENSE": "1"})
    assert done.stdout or done.stderr
    assert [line for line in (done.stdout + done.stderr).splitlines() if len(line) > 80] == []


# What is written, whatever there is to write to


def shell(line: str, **env: str) -> Completed:
    """Run a line of shell in which `fusepatch` is the command under test."""
    return run(
        ["bash", "-c", f'fusepatch() {{ {shlex.quote(sys.executable)} -m fusepatch "$@"; }}; {line}'],
        {"COLUMNS": "200", **env},
    )


COMMANDS = ("status --json", f"explain {LIGER}", "--help", "bench grpo --help")


@pytest.mark.parametrize("words", COMMANDS)
@pytest.mark.parametrize("stdout", [">&-", ">/dev/full", "1</dev/null"])
def test_a_stdout_that_cannot_be_written_to_is_one_line_and_exit_status_2(words: str, stdout: str) -> None:
    done = shell(f"fusepatch {words} {stdout}")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert re.match("fusepatch: (stdout is closed|the output could not be written to stdout)", line)


@pytest.mark.parametrize("words", COMMANDS)
def test_a_reader_that_goes_away_is_silence_and_the_exit_status_that_was_due(words: str) -> None:
    done = shell(f"fusepatch {words} | true; exit ${{PIPESTATUS[0]}}", PYTHONUNBUFFERED="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full"])
def test_a_stderr_that_cannot_be_written_to_costs_the_message_only(stderr: str) -> None:
    unknown = shell(f"fusepatch status --json {stderr}", FUSEPATCH_STRCIT="1")
    assert unknown.returncode == 0
    assert [record["id"] for record in json.loads(unknown.stdout)] == IDS
    for words in ("explain nonsense", "status --nonsense", "nonsense", "bench grpo --repeats 1"):
        done = shell(f"fusepatch {words} {stderr}")
        assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_stdout_cannot_encode_is_written_as_an_escape(encoding: str) -> None:
    value = "\u00e9\u20ac\udcff\x1b[2J"
    env = {"PYTHONIOENCODING": encoding, "FUSEPATCH_REPORT": value, "COLUMNS": "200"}
    argv = [sys.executable, "-m", "fusepatch"]
    done = subprocess.run([*argv, "env"], env=clean_environment(env), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    shown = {"ascii": r"\xe9\u20ac", "latin-1": "\u00e9" + r"\u20ac", "utf-8": "\u00e9\u20ac"}[encoding]
    assert shown + r"\udcff\x1b[2J (from the environment)" in done.stdout.decode(encoding)
    done = subprocess.run([*argv, "explain", value], env=clean_environment(env), capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"fusepatch: there is no patch ")


def test_a_folder_that_is_gone_and_a_width_without_end_are_no_traceback(tmp_path: Path) -> None:
    done = shell(f"mkdir {tmp_path}/gone; cd {tmp_path}/gone; rmdir ../gone; fusepatch env", FUSEPATCH_REPORT="report")
    assert (done.returncode, done.stderr) == (0, "")
    assert "FUSEPATCH_REPORT" in done.stdout
    table = "from fusepatch import terminal; terminal.print_table(['a', 'b'], [['1', '2']], terminal.width())"
    for columns in ("0", "-1", "x", "9" * 30):
        assert fresh(table, env={"COLUMNS": columns, "FUSEPATCH": "0"}, check=True).stdout.startswith("a")


def in_a_terminal(*arguments: str, columns: int = 80, **env: str) -> str:
    """What `python -m fusepatch ARGUMENTS` writes to a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fusepatch", *arguments],
        env=clean_environment({"COLUMNS": str(columns), "TERM": "xterm", "NO_COLOR": "", **env}),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    written = b""
    with contextlib.suppress(OSError):  # the end of a terminal is an error
        while part := os.read(ours, 1 << 16):
            written += part
    os.close(ours)
    assert process.wait() == 0
    return written.decode().replace("\r\n", "\n")


def test_a_terminal_has_colours_and_the_same_words() -> None:
    shown, piped = in_a_terminal("status"), command("status", env={"TERM": "xterm", "NO_COLOR": ""}).stdout
    assert f"\033[32m\u2713\033[0m {LIGER}" in shown
    assert re.sub("\033\\[[0-9]+m", "", shown) == piped
    for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert in_a_terminal("status", **env) == piped


# status


def lines_of(done: Completed) -> dict[str, tuple[str, str, str]]:
    """Mark, outcome and detail of each patch; a line that goes on below counts as one."""
    block = done.stdout.split("\n\n")[1]
    found = re.findall(r"^(\S) (\S+) +(.+?)(?:  +(\S.*))?$", re.sub(r"\n {20,}", " ", block), re.M)
    return {name: (mark, outcome, detail) for mark, name, outcome, detail in found}


def test_status_says_in_one_line_each_what_would_be_applied() -> None:
    done = command("status")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == (
        f"fusepatch {fusepatch.__version__}, Python {sys.version.split()[0]}: what a fresh process would do"
    )
    lines = lines_of(done)
    assert list(lines) == IDS
    mark, outcome, detail = lines[LIGER]
    assert (mark, outcome) == ("\u2713", "would apply")
    assert re.fullmatch(r"liger_kernel [0-9.]+", detail)
    assert lines["optimizer.in_backward"] == ("-", "on request", "set FUSEPATCH_OPTIMIZER_IN_BACKWARD")
    for columns in ("80", "120"):
        text = command("status", env={"COLUMNS": columns}).stdout
        assert len(text.splitlines()) <= 24
        assert max(map(len, text.splitlines())) <= int(columns)


def test_what_somebody_asked_for_is_not_on_request() -> None:
    lines = lines_of(command("status", env={"FUSEPATCH_OPTIMIZER_IN_BACKWARD": "1"}))
    assert lines["optimizer.in_backward"][:2] == ("\u2713", "would apply")
    assert lines["optimizer.class"][1] == "on request"
    until = "It changes nothing until FUSEPATCH_OPTIMIZER_CLASS is set."
    assert until in joined(command("explain", "optimizer.class").stdout)
    asked = {"FUSEPATCH_OPTIMIZER_CLASS": "torch.optim.SGD"}
    assert until not in joined(command("explain", "optimizer.class", env=asked).stdout)


def test_verbose_adds_each_module_with_its_reason() -> None:
    short, long = command("status").stdout, command("status", "-v").stdout
    assert set(short.split("\n\n")[1].splitlines()) <= set(long.splitlines())
    text = joined(long)
    assert f"{LIGER_MODULE}: would apply: liger_kernel " in text
    assert "ray._private.worker: ABSENT: ray is not installed" in text or "ray._private.worker: would apply" in text
    assert "torch.optim: adam, sgd, adagrad, " in text


def test_a_mark_is_ascii_where_stdout_is() -> None:
    text = command("status", env={"PYTHONIOENCODING": "ascii"}).stdout
    assert text.isascii()
    assert re.search(rf"^\+ {LIGER} ", text, re.M)


def test_status_imports_no_upstream() -> None:
    done = run([sys.executable, "-X", "importtime", "-m", "fusepatch", "status", "--json"])
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "fusepatch" in imported
    assert imported.isdisjoint(UPSTREAMS)


def test_status_as_json_has_the_keys_that_its_help_names() -> None:
    found = records(command("status", "--json"))
    assert list(found) == IDS
    record = found[LIGER]
    assert list(record) == ["id", "outcome", "reason", "sites", "calls", "replaced", "fallbacks"]
    assert (record["outcome"], record["calls"], record["replaced"], record["fallbacks"]) == ("PENDING", 0, [], [])
    (site,) = record["sites"]
    assert set(site) == {
        *("patch", "upstream", "module", "version", "outcome", "reason", "flags", "holders", "slots", "traceback"),
    }
    assert list(site["reason"]) == ["found", "wanted", "consequence", "action"]
    documented = joined(command("status", "--help").stdout)
    for key in {*record, *site, *site["reason"], *Outcome.__members__, *fusepatch.engine.patch.Note._fields}:
        assert re.search(rf"\b{key}\b", documented), key


def test_status_names_what_is_switched_off() -> None:
    for env, why in (
        ({"FUSEPATCH": "0"}, "FUSEPATCH=0 makes the import inert"),
        ({"FUSEPATCH_DISABLE": "all"}, "FUSEPATCH_DISABLE names it"),
    ):
        done = command("status", "--json", env=env)
        assert done.returncode == 0
        for record in records(done).values():
            assert record["outcome"] == "DISABLED"
            assert record["reason"].startswith(why)


def test_status_names_an_unknown_variable() -> None:
    done = command("status", "--json", env={"FUSEPATCH_STRCIT": "1"})
    assert records(done)[LIGER]["outcome"] == "PENDING"
    assert "FUSEPATCH_STRCIT is set but fusepatch has no such variable" in joined(done.stderr)
    assert "the nearest known one is FUSEPATCH_STRICT" in joined(done.stderr)


@pytest.mark.parametrize("arguments", [["status"], ["status", "--json"], ["check"], ["explain", LIGER]], ids=" ".join)
@pytest.mark.parametrize(
    "env",
    [
        {"FUSEPATCH": "yes"},
        {"FUSEPATCH_STRICT": "maybe"},
        {"FUSEPATCH_LIGER_ROPE": "off"},
        {"FUSEPATCH_DISABLE": "liger.flags"},
        {"FUSEPATCH_LIGER_CROSS_ENTROPY": "1", "FUSEPATCH_LIGER_FUSED_LINEAR_CROSS_ENTROPY": "1"},
    ],
    ids=lambda env: next(iter(env)),
)
def test_a_value_that_cannot_be_read_is_explained(arguments: list[str], env: dict[str, str]) -> None:
    done = command(*arguments, env=env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("fusepatch: FUSEPATCH")
    assert "Traceback" not in done.stderr
    for name, value in env.items():
        assert name in done.stderr
        assert value in done.stderr


def test_status_and_check_say_the_same_of_a_module_without_its_targets(
    liger_in_place_of_the_real_one: Callable[..., dict[str, str]],
) -> None:
    env = {**ONLY_LIGER, **liger_in_place_of_the_real_one("LIGER = 1", "0.8.0")}
    (before,) = records(command("status", "--json", env=env))[LIGER]["sites"]
    done = command("check", "--json", env=env)
    (after,) = records(done)[LIGER]["sites"]
    assert after == before
    assert (after["outcome"], done.returncode) == ("ABSENT", 3)
    assert after["reason"]["found"].startswith(f"liger_kernel 0.8.0: {LIGER_MODULE} has no _apply_liger_kernel")


def test_check_imports_what_its_source_does_not_show(
    liger_in_place_of_the_real_one: Callable[..., dict[str, str]],
) -> None:
    source = """
        exec("def _apply_liger_kernel_to_instance(model, **kwargs): ...")
        exec("def _apply_liger_kernel(model_type, **kwargs): ...")
        exec("def apply_liger_kernel_to_llama(model=None): ...")
    """
    env = {**ONLY_LIGER, **liger_in_place_of_the_real_one(source, "0.8.0")}
    assert records(command("status", "--json", env=env))[LIGER]["outcome"] == "ABSENT"
    assert records(command("check", "--json", env=env))[LIGER]["outcome"] == "APPLIED"


# check


@pytest.fixture(scope="module")
def checked() -> Completed:
    """One `check` of the real upstreams; it takes as long as their imports."""
    return command("check", "--json")


def test_check_applies_the_patches_to_the_installed_upstreams(checked: Completed) -> None:
    record = records(checked)[LIGER]
    assert record["outcome"] == "APPLIED"
    (site,) = record["sites"]
    assert site["outcome"] == "APPLIED"
    assert "_apply_liger_kernel_to_instance" in site["slots"]
    assert "apply_liger_kernel_to_qwen3" in site["slots"]


def test_the_exit_status_of_check_is_that_of_the_worst_patch(checked: Completed) -> None:
    outcomes = [Outcome[record["outcome"]] for record in records(checked).values()]
    assert checked.returncode == max(CHECK_STATUS[outcome] for outcome in outcomes)


def test_every_outcome_that_check_can_meet_has_an_exit_status() -> None:
    assert set(CHECK_STATUS) == set(Outcome) - {Outcome.REMOVED}
    documented = command("check", "--help").stdout
    for outcome, status in CHECK_STATUS.items():
        if outcome not in (Outcome.APPLIED, Outcome.DISABLED, Outcome.PENDING):
            assert f"\n  {status}  {outcome.value}: " in documented


def test_check_reports_an_import_that_raises(
    liger_in_place_of_the_real_one: Callable[[str], dict[str, str]],
) -> None:
    source = """
        import atexit, os
        print("chatter on stdout")
        os.system("echo chatter of a child")
        atexit.register(print, "chatter at the end")
        def _apply_liger_kernel_to_instance(model, **kwargs): ...
        def _apply_liger_kernel(model_type, **kwargs): ...
        def apply_liger_kernel_to_llama(model=None): ...
        raise ImportError("libfast.so is\\nnot here")
    """
    env = {**ONLY_LIGER, **liger_in_place_of_the_real_one(source)}
    assert records(command("status", "--json", env=env))[LIGER]["outcome"] == "PENDING"
    done = command("check", env=env)
    assert done.returncode == 7
    text = joined(done.stdout)
    assert f"exit status 7: {LIGER} is FAILED" in text
    assert "Traceback" not in done.stdout + done.stderr
    chatter = ["chatter of a child", "chatter on stdout", "chatter at the end"]
    assert sorted(done.stderr.splitlines()) == sorted(chatter)
    assert command("check", env={**env, "PYTHONUNBUFFERED": "1"}).stderr.splitlines() == [
        *("chatter on stdout", "chatter of a child", "chatter at the end"),
    ]
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []
    (site,) = records(command("check", "--json", env=env))[LIGER]["sites"]
    assert site["outcome"] == "FAILED"
    assert site["reason"]["found"] == "importing it raised ImportError: libfast.so is not here"
    assert "monkey_patch.py" in site["traceback"]


@pytest.mark.parametrize(
    ("source", "version", "status", "outcome", "why"),
    [
        (None, "", 3, "ABSENT", f"there is no module {LIGER_MODULE}"),
        ("", "0.3.0", 4, "GATED", "liger_kernel 0.3.0; wanted liger_kernel >="),
        (
            "def _apply_liger_kernel_to_instance(model, **kwargs): ...",
            "",
            5,
            "DRIFTED",
            "monkey_patch has no _apply_liger_kernel;",
        ),
        ("def (", "", 7, "FAILED", "importing it raised SyntaxError"),
    ],
    ids=["absent", "gated", "drifted", "no python"],
)
def test_each_outcome_has_its_exit_status(
    source: str | None,
    version: str,
    status: int,
    outcome: str,
    why: str,
    liger_in_place_of_the_real_one: Callable[..., dict[str, str]],
) -> None:
    env = {**ONLY_LIGER, **liger_in_place_of_the_real_one(source, version), "COLUMNS": "400"}
    done = command("check", env=env)
    assert done.returncode == status, done.stdout
    mark, shown, detail = lines_of(done)[LIGER]
    assert (mark, shown) == ("-" if outcome == "ABSENT" else "!", outcome)
    assert why in detail
    assert f"exit status {status}: {LIGER} is {outcome}" in done.stdout

    required = command("check", "--require", LIGER, env=env)
    assert required.returncode == 8
    assert f"exit status 8: required, but not applied: {LIGER}" in required.stdout


def test_what_is_switched_off_is_no_failure_unless_it_is_required() -> None:
    for env in ({"FUSEPATCH_DISABLE": "all"}, {"FUSEPATCH": "0"}):
        assert command("check", env=env).returncode == 0
        assert command("check", "--require", LIGER, env=env).returncode == 8


def test_an_applied_patch_satisfies_require_whatever_the_others_do(
    liger_in_place_of_the_real_one: Callable[..., dict[str, str]],
) -> None:
    source = """
        def _apply_liger_kernel_to_instance(model, **kwargs): ...
        def _apply_liger_kernel(model_type, **kwargs): ...
        def apply_liger_kernel_to_llama(model=None): ...
    """
    env = {**ONLY_LIGER, **liger_in_place_of_the_real_one(source, "99.0"), "COLUMNS": "400"}
    done = command("check", "--require", LIGER, env=env)
    assert done.returncode == 0
    assert lines_of(done)[LIGER] == ("\u2713", "APPLIED", "liger_kernel 99.0 (untested)")


def test_check_knows_the_ids() -> None:
    done = command("check", "--require", f"{LIGER},liger.flags")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"there is no patch 'liger.flags'; the nearest is {LIGER}." in joined(done.stderr)


@pytest.mark.parametrize("names", ["", " ", ","])
def test_a_list_of_no_patches_is_no_requirement_that_holds(names: str) -> None:
    done = command("check", "--require", names)
    assert (done.returncode, done.stdout) == (2, "")
    assert "argument --require: wanted the id of a patch" in done.stderr


@pytest.mark.parametrize("source", ["raise SystemExit(0)", "import pytest; pytest.skip('x', allow_module_level=True)"])
def test_a_library_that_ends_the_process_at_its_import_has_failed(
    source: str, liger_in_place_of_the_real_one: Callable[[str], dict[str, str]]
) -> None:
    done = command("check", env={**ONLY_LIGER, **liger_in_place_of_the_real_one(source)})
    assert done.returncode == 7
    assert lines_of(done)[LIGER][1] == "FAILED"


@pytest.mark.parametrize("what", ["a folder", "nested", "no text"])
def test_a_library_that_cannot_be_read_is_no_traceback(
    what: str, liger_in_place_of_the_real_one: Callable[..., dict[str, str]]
) -> None:
    env = liger_in_place_of_the_real_one(None, "0.8.5")
    package = Path(env["PYTHONPATH"])
    module = package / "liger_kernel" / "transformers" / "monkey_patch.py"
    if what == "a folder":
        module.mkdir()
    else:
        module.write_text("x = " + "-" * 100_000 + "1")
    if what == "no text":
        (package / "liger_kernel-0.8.5.dist-info" / "METADATA").write_bytes(b"Name: \xff")
    done = command("status", env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert lines_of(done)[LIGER][1] == "would apply"


# explain


@pytest.mark.parametrize("id", IDS)
def test_explain_prints_the_page_of_the_patch(id: str) -> None:
    patch = next(patch for patch in PATCHES if patch.id == id)
    done = command("explain", id)
    assert (done.returncode, done.stderr) == (0, "")
    text = joined(done.stdout)
    for part in (patch.promise, patch.why, *patch.changes, *patch.limits, *patch.upstream, patch.remove_when):
        assert joined(part) in text
    assert "In a fresh process: " in text


def test_explain_shows_the_values_that_are_set() -> None:
    text = joined(command("explain", LIGER, env={"FUSEPATCH_LIGER_ROPE": "0"}).stdout)
    assert "here: FUSEPATCH_LIGER_ROPE=0" in text


def test_explain_of_an_unknown_id_names_the_nearest_and_the_known() -> None:
    done = command("explain", "liger.flags")
    assert (done.returncode, done.stdout) == (2, "")
    assert joined(done.stderr) == (
        f"fusepatch: there is no patch 'liger.flags'; the nearest is {LIGER}. The patches are {', '.join(IDS)}."
    )


# env


def test_env_shows_every_variable_with_value_and_source() -> None:
    done = command("env", env={"FUSEPATCH": "1", "FUSEPATCH_LIGER_ROPE": "0", "FUSEPATCH_DISABLE": " "})
    assert (done.returncode, done.stderr) == (0, "")
    blocks = {block.splitlines()[0]: joined(block) for block in done.stdout.strip().split("\n\n")}
    assert list(blocks) == [variable.shown_name for variable in settings.TABLE]
    for variable in settings.TABLE:
        assert joined(variable.meaning.replace("`", "")) in blocks[variable.shown_name]
    exported = "value 1 (from the environment: set by you, or exported by an active process that started this one)"
    assert exported in blocks["FUSEPATCH"]
    assert "value not set (default: 0)" in blocks["FUSEPATCH_STRICT"]
    assert blocks["FUSEPATCH_STRICT"].endswith("read by start-up")
    assert blocks["FUSEPATCH_OPTIMIZER_SCOPE"].endswith("read by optimizer.class, optimizer.flags")
    assert "value (empty, which counts as not set; from the environment)" in blocks["FUSEPATCH_DISABLE"]
    assert "value FUSEPATCH_LIGER_ROPE=0 (from the environment)" in blocks["FUSEPATCH_LIGER_<FLAG>"]


def test_env_shows_unknown_names_and_values_that_cannot_be_read() -> None:
    env = {"FUSEPATCH_STRCIT": "1", "FUSEPATCH_STRICT": "maybe", "FUSEPATCH_LIGER_ROPE": "off", "FUSEPATCH": "yes"}
    done = command("env", env=env)
    assert done.returncode == 2
    text = joined(done.stdout)
    for shown in ("maybe CANNOT BE READ", "FUSEPATCH_LIGER_ROPE=off CANNOT BE READ", "yes CANNOT BE READ"):
        assert shown in text
    assert "FUSEPATCH_STRCIT is set but fusepatch has no such variable" in text
    complaints = joined(done.stderr)
    assert "Traceback" not in complaints
    for name in ("FUSEPATCH", "FUSEPATCH_STRICT", "FUSEPATCH_LIGER_ROPE"):
        assert f"fusepatch: {name}={env[name]!r} cannot be read: wanted 0, 1." in complaints


def test_env_shows_a_contradiction() -> None:
    env = {"FUSEPATCH_LIGER_CROSS_ENTROPY": "1", "FUSEPATCH_LIGER_FUSED_LINEAR_CROSS_ENTROPY": "1"}
    done = command("env", env=env)
    assert done.returncode == 2
    assert "contradict each other" in joined(done.stderr)


# run


PROGRAM = """
import os, sys
print(__name__, sys.argv[1:], sys.path[0] == os.path.dirname(os.path.abspath(__file__)), os.environ.get("FUSEPATCH"))
import trl
fusepatch = sys.modules.get("fusepatch")
print(fusepatch is not None and fusepatch.status()[0].outcome.name)
sys.exit(41)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.parametrize("arguments", [[], ["a", "--json", "-m", "x"], ["--help"], ["-h", "run"]], ids=repr)
def test_run_becomes_the_program_with_the_patches_on(program: Path, arguments: list[str]) -> None:
    done = command("run", program, *arguments)
    assert done.stdout.splitlines() == [f"__main__ {arguments} True 1", "PENDING"]
    assert (done.returncode, done.stderr) == (41, "")


def test_run_of_a_module_and_of_code(program: Path) -> None:
    done = command("run", "-m", "train", "-c", cwd=program.parent)
    assert (done.returncode, done.stdout.splitlines()) == (41, ["__main__ ['-c'] True 1", "PENDING"])
    done = command("run", "-c", "import sys, os; print(sys.argv, os.environ['FUSEPATCH'])", "x")
    assert (done.returncode, done.stdout) == (0, "['-c', 'x'] 1\n")


def test_run_passes_the_interpreters_options() -> None:
    look = "import sys; print(sys.flags.dev_mode, sys.warnoptions, sys.flags.isolated, sys.argv[1:])"
    done = command("run", "-X", "dev", "-Werror::UserWarning", "-I", "-c", look, "-u")
    assert done.stdout == "True ['default', 'error::UserWarning'] 1 ['-u']\n"
    outside = [sys.executable, "-W", "ignore", "-X", "dev", "-m", "fusepatch", "run", "-I", "-c", look]
    assert run(outside).stdout == "True ['default', 'ignore'] 1 []\n"


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["train.py", "-u"], []),
        (["-u", "train.py", "-S"], ["-u"]),
        (["-m", "train", "-S"], []),
        (["-um", "train", "-S"], ["-u"]),
        (["-mtrain", "-S"], []),
        (["-c", "code", "-S"], []),
        (["-W", "error", "-X", "dev", "x"], ["-W", "error", "-X", "dev"]),
        (
            ["-Werror::m.W", "-uW", "ignore", "-X", "importtime", "-", "-S"],
            ["-Werror::m.W", "-uW", "ignore", "-X", "importtime"],
        ),
        (["--check-hash-based-pycs", "never", "-S", "x"], ["--check-hash-based-pycs", "never", "-S"]),
        (["-Xfaulthandler", "-Im", "m"], ["-Xfaulthandler", "-I"]),
        (["-W"], ["-W"]),
    ],
    ids=" ".join,
)
def test_the_interpreters_options_end_where_the_program_begins(words: list[str], options: list[str]) -> None:
    assert cli_run.interpreter_options(words) == options


def test_tracebacks_signals_and_a_missing_script_are_pythons_own(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def f():\n    1 / 0\nf()\n")
    done, own = command("run", broken), run([sys.executable, broken])
    assert (done.returncode, done.stderr) == (own.returncode, own.stderr)
    assert "ZeroDivisionError" in done.stderr

    missing = tmp_path / "missing.py"
    done, own = command("run", missing), run([sys.executable, missing])
    assert (done.returncode, done.stderr) == (own.returncode, own.stderr)
    assert done.returncode == 2

    killed = tmp_path / "killed.py"
    killed.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    assert command("run", killed).returncode == -signal.SIGTERM


def test_run_leaves_off_what_is_switched_off(program: Path) -> None:
    done = command("run", program, env={"FUSEPATCH": "0"})
    assert (done.returncode, done.stdout.splitlines()) == (41, ["__main__ [] True 0", "False"])
    assert joined(done.stderr) == (
        "fusepatch: FUSEPATCH=0 is set, so the program runs unpatched; unset it to use the patches"
    )


def test_run_refuses_values_that_cannot_be_read(program: Path) -> None:
    done = command("run", program, env={"FUSEPATCH_STRICT": "maybe"})
    assert (done.returncode, done.stdout) == (125, "")
    assert "FUSEPATCH_STRICT='maybe' cannot be read" in joined(done.stderr)
    assert "The program was not started." in joined(done.stderr)


def test_an_interpreter_that_is_gone_is_a_program_that_was_not_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/gone/python")
    assert cli.main(["run", "train.py"]) == 125
    text = joined(capsys.readouterr().err)
    assert re.match(r"fusepatch: /gone/python could not be started: FileNotFoundError: .* was not started\.$", text)


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(environ: Mapping[str, str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(activation, "planned", interrupted)
    assert cli.main(["status"]) == 130


def test_the_streams_that_run_leaves_are_the_programs_own() -> None:
    for stdout in (">&-", ">/dev/full", "2>&-"):
        assert shell(f"fusepatch run -c 'import sys; sys.exit(7)' {stdout}").returncode == 7


def test_run_refuses_where_the_start_up_file_is_not_installed(program: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    made = run([sys.executable, "-m", "venv", "--without-pip", environment])
    assert made.returncode == 0, made.stderr
    path = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(SITE_PACKAGES)]), "COLUMNS": "80"}
    done = run([environment / "bin" / "python", "-m", "fusepatch", "run", program], env=path)
    assert (done.returncode, done.stdout) == (125, "")
    text = joined(done.stderr)
    assert "does not read fusepatch's start-up file" in text
    assert "a checkout on PYTHONPATH does not put them there" in text
    assert [line for line in done.stderr.splitlines() if len(line) > 80 and " " in line] == []

    without_site = command("run", "-S", program)
    assert without_site.returncode == 125
    assert f"{sys.executable} -S does not read" in joined(without_site.stderr)
