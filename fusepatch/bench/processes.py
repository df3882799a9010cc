"""Runs each peer's worker process and asks it, one command at a time."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import IO, Any

from fusepatch.errors import FusepatchError

FAILED = 1
"""Exit status where a check failed."""


class PeerError(FusepatchError):
    """A `--peer` or `--peers` value cannot be used."""


@dataclass(frozen=True)
class Peer:
    """An implementation under a name; ``path`` is a wheel or folder that comes first on its path."""

    name: str
    implementation: str
    path: str | None = None


def read_peer(text: str, implementations: Collection[str]) -> Peer:
    """Read NAME=PATH, where NAME is one of `implementations`, or that with a dash and a label of any text.

    Raises:
        PeerError: there is no such implementation or path.
    """
    name, _, path = text.partition("=")
    matches = [known for known in implementations if name == known or name.startswith(f"{known}-")]
    if not matches:
        raise PeerError(
            f"--peer {text}: {name!r} is not an implementation. Wanted NAME=PATH, where NAME is one of "
            f"{', '.join(implementations)}, or one of these with a label, as in liger-0.8.3."
        )
    # Only a regular file is opened to see: a FIFO would wait for its writer.
    if not os.path.isdir(path) and not (os.path.isfile(path) and zipfile.is_zipfile(path)):
        raise PeerError(f"--peer {text}: {path!r} is neither a folder nor a wheel. Wanted NAME=PATH.")
    return Peer(name, max(matches, key=len), path)


class Worker:
    """A peer's process, which runs `module`. After its end every answer says so; stderr is kept for that."""

    def __init__(self, peer: Peer, folder: str, module: str) -> None:
        self.peer = peer
        self._errors: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        paths = [] if peer.path is None else [_unpacked(peer.path, os.path.join(folder, peer.name))]
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, peer.implementation, *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "FUSEPATCH": "0"},
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, command: dict[str, Any]) -> None:
        """Begin a command; `answer` waits for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer will be the end of the file
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line.endswith("\n"):  # half a line is what a killed process leaves
            found: dict[str, Any] = json.loads(line)
            return found
        status = self._process.wait()
        self._errors.seek(0)
        last = " ".join(self._errors.read().split())[-300:]
        return {"problem": "error", "reason": f"its process ended with status {status}: {last}"}

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        self.send(command)
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._errors.close()


def _unpacked(path: str, folder: str) -> str:
    if os.path.isdir(path):
        return os.path.abspath(path)
    try:
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(folder)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise PeerError(
            f"--peer {path}: the wheel cannot be unpacked ({error}). Nothing was measured; name an intact one."
        ) from None
    return folder
