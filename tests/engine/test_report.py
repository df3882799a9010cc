"""The file that a ledger is kept in: when it is written, and that nothing about it can hurt the process."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fusepatch.engine import ledger
from fusepatch.engine.patch import Outcome, Reason, SiteRecord
from fusepatch.reporting import writer


class Counter:
    """Stands for the ledger: a number that is counted up, and every state of it that was asked for."""

    def __init__(self) -> None:
        self.times = 0
        self.asked: list[int] = []

    def __call__(self) -> dict[str, Any]:
        self.asked.append(self.times)
        return {"times": self.times}

    def count(self, times: int = 1) -> None:
        for _ in range(times):
            self.times += 1
            writer.grown(self.times)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The clock that the writer looks at, which stands still; and a writer that has written nothing yet."""
    clock = [1000.0]
    monkeypatch.setattr(writer.time, "monotonic", lambda: clock[0])
    for name in ("_folder", "_name", "_content", "_unwritten", "_written_at", "_warned", "_lock"):
        monkeypatch.setattr(writer, name, getattr(writer, name))
    writer._folder = writer._name = ""
    yield clock
    writer._content, writer._unwritten = None, False


def read(folder: Path) -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def test_the_first_change_makes_the_directory_and_the_file(tmp_path: Path, now: list[float]) -> None:
    folder = tmp_path / "made" / "for it"
    writer.begin(str(folder), lambda: {"a": 1})
    assert not folder.exists()
    writer.grown(1)
    (path,) = folder.iterdir()
    host = os.uname().nodename.split(".")[0]
    assert path.name.startswith(f"{host}-")
    assert f"-{os.getpid()}-" in path.name
    assert json.loads(path.read_text()) == {"a": 1}


def test_few_calls_are_written_each_and_many_calls_seldom(tmp_path: Path, now: list[float]) -> None:
    counter = Counter()
    writer.begin(str(tmp_path), counter)
    counter.count(8)
    assert counter.asked == [1, 2, 3, 4, 5, 6, 7, 8]
    counter.count(992)
    assert counter.asked[8:] == [16, 32, 64, 128, 256, 512]
    assert read(tmp_path) == [{"times": 512}]


def test_what_is_older_than_a_second_is_written_with_the_next_call(tmp_path: Path, now: list[float]) -> None:
    counter = Counter()
    writer.begin(str(tmp_path), counter)
    counter.count(100)
    now[0] += 0.99
    counter.count()
    assert read(tmp_path) == [{"times": 64}]
    now[0] += 0.01
    counter.count()
    assert read(tmp_path) == [{"times": 102}]


def test_the_end_of_the_process_writes_what_is_left(tmp_path: Path, now: list[float]) -> None:
    counter = Counter()
    writer.begin(str(tmp_path), counter)
    counter.count(100)
    writer._at_exit()
    assert read(tmp_path) == [{"times": 100}]
    counter.times = 200  # a change that nobody has told of, such as the import of a module that is not patched
    writer._at_exit()
    assert read(tmp_path) == [{"times": 200}]


def test_the_end_of_a_process_in_which_nothing_happened_writes_nothing(tmp_path: Path, now: list[float]) -> None:
    writer.begin(str(tmp_path), Counter())
    writer._at_exit()
    assert list(tmp_path.iterdir()) == []


def test_another_directory_is_another_file_and_the_same_one_the_same(tmp_path: Path, now: list[float]) -> None:
    for folder in ("a", "a", "b", "b"):
        writer.begin(str(tmp_path / folder), Counter())
        writer.grown(1)
    assert [len(list((tmp_path / folder).iterdir())) for folder in ("a", "b")] == [1, 1]


def test_processes_that_share_host_name_pid_and_start_do_not_share_a_file(now: list[float]) -> None:
    assert len({writer._new_name() for _ in range(50)}) == 50


# Threads and forks


def test_a_thread_that_finds_another_one_writing_goes_on_and_its_change_is_written(
    tmp_path: Path, now: list[float]
) -> None:
    writing, go_on = threading.Event(), threading.Event()
    told_to_go_on = []
    counter = Counter()

    def content() -> dict[str, Any]:
        found = counter()
        if len(counter.asked) == 1:
            writing.set()
            told_to_go_on.append(go_on.wait(10))
        return found

    writer.begin(str(tmp_path), content)
    slow = threading.Thread(target=counter.count)
    slow.start()
    assert writing.wait(30)
    counter.count()
    go_on.set()
    slow.join(30)
    assert told_to_go_on == [True]  # False where this thread waited for the other one
    assert read(tmp_path) == [{"times": 2}]


def test_no_reader_ever_sees_half_a_file(tmp_path: Path, now: list[float]) -> None:
    writer.begin(str(tmp_path), lambda: {"filling": "x" * 200_000})
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            writer.grown(1)

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            for path in tmp_path.glob("*.json"):
                assert len(json.loads(path.read_text())["filling"]) == 200_000
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert len(list(tmp_path.iterdir())) == 1


def in_fork(function: Callable[[], None]) -> None:
    child = os.fork()
    if child == 0:
        try:
            function()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def test_a_forked_child_has_a_file_of_its_own_from_its_first_change(tmp_path: Path, now: list[float]) -> None:
    counter = Counter()
    writer.begin(str(tmp_path), lambda: {**counter(), "pid": os.getpid()})
    counter.count(3)
    in_fork(lambda: None)
    assert read(tmp_path) == [{"times": 3, "pid": os.getpid()}]

    def child() -> None:
        counter.times = 0
        counter.count(1)

    in_fork(child)
    assert sorted(record["times"] for record in read(tmp_path)) == [1, 3]
    assert len({record["pid"] for record in read(tmp_path)}) == 2


def test_a_fork_in_the_middle_of_a_write_leaves_a_child_that_can_write(tmp_path: Path, now: list[float]) -> None:
    writer.begin(str(tmp_path), lambda: {"pid": os.getpid()})
    with writer._lock:  # another thread is writing
        in_fork(lambda: writer.grown(1))
    assert [record["pid"] != os.getpid() for record in read(tmp_path)] == [True]


def test_what_a_forked_child_counts_is_its_own() -> None:
    ledger.reset(strict=False, first_use=lambda: "")
    ledger.count_call("p")
    ledger.fallback("p", "why")
    ledger.replaced("p", "what")
    ledger.record(SiteRecord("p", "lib", "lib.core", Outcome.APPLIED, Reason("lib 1.0")))
    read_end, write_end = os.pipe()

    def child() -> None:
        ledger.count_call("p")
        site = ledger.site("p", "lib.core")
        seen = [ledger.calls("p"), len(ledger.fallbacks("p")), len(ledger.replacements("p")), site is not None]
        os.write(write_end, json.dumps(seen).encode())

    in_fork(child)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        assert json.loads(pipe.read()) == [1, 0, 0, True]
    assert (ledger.calls("p"), len(ledger.fallbacks("p"))) == (1, 1)


# What goes wrong


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_a_path_that_is_a_file_is_one_warning_from_whatever_rank(
    tmp_path: Path, now: list[float], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    path = tmp_path / "file"
    path.write_text("not a directory")
    writer.begin(str(path), Counter())
    for _ in range(5):
        writer.grown(1)
    (warning,) = warnings(caplog)
    assert "NotADirectoryError" in warning
    assert f"FUSEPATCH_REPORT={path}" in warning
    assert str(os.getpid()) in warning
    assert path.read_text() == "not a directory"


def test_a_directory_that_cannot_be_made_is_one_warning(now: list[float], caplog: pytest.LogCaptureFixture) -> None:
    writer.begin("/proc/no such place", Counter())
    writer.grown(1)
    writer.grown(2)
    assert len(warnings(caplog)) == 1


def test_a_file_that_cannot_be_written_whole_leaves_the_last_whole_one(
    tmp_path: Path, now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    filling = [10]
    writer.begin(str(tmp_path), lambda: {"filling": "x" * filling[0]})
    writer.grown(1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        filling[0] = 100_000
        writer.grown(2)
        writer.grown(3)
        assert read(tmp_path) == [{"filling": "x" * 10}]
        assert len(list(tmp_path.iterdir())) == 1
        assert len(warnings(caplog)) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writer.grown(4)
    assert read(tmp_path) == [{"filling": "x" * 100_000}]


def test_a_directory_that_is_removed_comes_back_with_the_whole_record(tmp_path: Path, now: list[float]) -> None:
    counter = Counter()
    writer.begin(str(tmp_path / "report"), counter)
    counter.count()
    shutil.rmtree(tmp_path / "report")
    counter.count()
    assert read(tmp_path / "report") == [{"times": 2}]


def test_content_that_raises_is_one_warning_and_the_next_content_is_written(
    tmp_path: Path, now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    broken = [True]

    def content() -> dict[str, Any]:
        if broken[0]:
            raise RuntimeError("no such thing")
        return {"fine": True}

    writer.begin(str(tmp_path), content)
    writer.grown(1)
    writer.grown(2)
    assert len(warnings(caplog)) == 1
    assert "RuntimeError: no such thing" in warnings(caplog)[0]
    assert "in content" in warnings(caplog)[0], "with its traceback"
    broken[0] = False
    writer.grown(3)
    assert read(tmp_path) == [{"fine": True}]


# The ledger


def test_the_ledger_tells_its_observer_of_every_change_with_no_lock_held() -> None:
    ledger.reset(strict=False, first_use=lambda: "")
    told: list[tuple[int, bool]] = []

    def observer(times: int) -> None:
        free: list[bool] = []

        def take() -> None:
            if ledger._lock.acquire(timeout=5):
                free.append(True)
                ledger._lock.release()

        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        told.append((times, free == [True]))

    ledger.observe(observer)
    ledger.record(SiteRecord("p", "lib", "lib.core", Outcome.PENDING, Reason("")))
    ledger.count_call("p")
    ledger.count_call("p")
    ledger.replaced("p", "a")
    ledger.fallback("p", "b")
    ledger.fallback("p", "b")
    ledger.changed()
    ledger.reset(strict=False, first_use=lambda: "")
    ledger.count_call("p")
    assert told == [(times, True) for times in (1, 1, 2, 1, 1, 2, 1)]
