"""A small library on disk that the engine's tests patch: real files, real metadata, really imported."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusepatch.engine import install, ledger

SOURCE = '''
def scale(value, factor=2):
    """Multiply."""
    return value * factor


def scale_more(value, factor=3):
    return value * factor


class Base:
    def __init__(self, size):
        self.size = size


class Model(Base):
    def forward(self, value):
        return value + self.size

    @staticmethod
    def double(value):
        return value * 2

    @classmethod
    def named(cls, value):
        return cls.__name__, value


TABLE = {"a": scale, "b": scale_more}
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Writes a package `toylib` with the given source and version; gives its name. Forgets it afterwards."""

    def write(source: str = SOURCE, version: str | None = "1.2.0", distribution: str = "toylib") -> str:
        package = tmp_path / "toylib"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text("")
        (package / "core.py").write_text(textwrap.dedent(source))
        if version is not None:
            metadata = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
            metadata.mkdir()
            (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        return "toylib.core"

    monkeypatch.syspath_prepend(str(tmp_path))
    ledger.reset(strict=False, first_use=lambda: "first use")
    yield write
    for installed in [installed for wrapped in install._slots.values() for installed in wrapped]:
        if installed.target.module.startswith("toylib"):
            for link in list(installed.links):
                install._unlink(link.patch, installed)
    for name in [name for name in sys.modules if name.split(".")[0] in ("toylib", "consumer")]:
        del sys.modules[name]
