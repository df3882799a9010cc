"""What fusepatch says never raises, never lands elsewhere, and never changes a process's exit status."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fusepatch.engine import notice
from kits.helpers import clean_environment

TELL = "import logging\nfrom fusepatch.engine import notice\nnotice.tell(logging.WARNING, 'w\\xf6rt')\n"


def shell(redirection: str, code: str = TELL, **env: str) -> subprocess.CompletedProcess[bytes]:
    """Run `code` with the shell's redirection; bash's exit status is that of the last command or, in a pipe, of
    Python."""
    command = f'set -o pipefail; exec 3>&1; "$0" -c "$1" {redirection}'
    argv = ["bash", "-c", command, sys.executable, textwrap.dedent(code)]
    return subprocess.run(argv, env=clean_environment({"FUSEPATCH": "0", **env}), capture_output=True, timeout=60)


def test_a_line_on_stderr() -> None:
    done = shell("")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", "fusepatch: wört\n".encode())


@pytest.mark.parametrize(
    "redirection",
    ["2>/dev/full", "2>&-", "<&- 2>&-", "2>&1 >&3 | true"],
    ids=["full", "closed", "stdin closed too", "reader gone"],
)
@pytest.mark.parametrize("flags", ["", "1"], ids=["buffered", "unbuffered"])
def test_stderr_that_cannot_be_written_to(redirection: str, flags: str) -> None:
    waiting = "import time; time.sleep(0.3)\n" if "true" in redirection else ""  # until the reader has gone
    done = shell(redirection, waiting + TELL, PYTHONUNBUFFERED=flags)
    assert (done.returncode, done.stdout) == (0, b""), done.stderr


def test_a_file_that_took_the_place_of_stderr_stays_the_users(tmp_path: Path) -> None:
    code = f"""
    import os
    file = os.open({str(tmp_path / "model")!r}, os.O_CREAT | os.O_WRONLY)
    assert file == 2
    {TELL.replace(chr(10), chr(10) + "    ")}
    """
    done = shell("2>&-", code)
    assert (done.returncode, done.stdout) == (0, b"")
    assert (tmp_path / "model").read_bytes() == b""


def test_stderr_that_the_program_closed() -> None:
    done = shell("", f"import sys\nsys.stderr.close()\n{TELL}")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("stdout", ["", "1>/dev/null"])
def test_stderr_that_is_not_utf_8(stdout: str) -> None:
    done = shell(stdout, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"fusepatch: w\\xf6rt\n")


@pytest.fixture
def no_handler(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(notice.logger, "hasHandlers", lambda: False)  # pytest's own are there
    return monkeypatch


@pytest.mark.parametrize(("encoding", "said"), [("ascii", b"w\\xf6rt \\udcff"), ("utf-8", b"w\xc3\xb6rt \\udcff")])
def test_a_strict_stream_in_place_of_stderr(no_handler: pytest.MonkeyPatch, encoding: str, said: bytes) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding, errors="strict")
    no_handler.setattr(sys, "stderr", stream)
    notice.tell(logging.WARNING, "w\xf6rt \udcff")
    assert stream.buffer.getvalue() == b"fusepatch: " + said + b"\n"  # type: ignore[attr-defined]


def test_lines_keep_their_order_in_a_file_that_is_buffered(no_handler: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with open(tmp_path / "log", "w", encoding="utf-8") as stream:
        no_handler.setattr(sys, "stderr", stream)
        print("before", file=stream)
        notice.tell(logging.WARNING, "told")
        print("after", file=stream)
    assert (tmp_path / "log").read_text().splitlines() == ["before", "fusepatch: told", "after"]


def test_a_descriptor_that_does_not_block_and_is_full(no_handler: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with os.fdopen(write_end, "w") as stream, os.fdopen(read_end):
        no_handler.setattr(sys, "stderr", stream)
        for _ in range(3):
            notice.tell(logging.WARNING, "x" * 50_000)


class Raising(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("the log server is away")


def test_a_logging_handler_that_raises() -> None:
    handler = Raising()
    notice.logger.addHandler(handler)
    try:
        notice.tell(logging.WARNING, "told")
    finally:
        notice.logger.removeHandler(handler)


@pytest.mark.parametrize("name", ["RANK", "SLURM_PROCID", "LOCAL_RANK"])
def test_a_rank_that_is_no_number_speaks(name: str) -> None:
    assert notice.speaks({name: "²"})
