"""The benchmarks' command line, called in the test's own process: what refuses arguments starts no other."""

from __future__ import annotations

import pytest

from fusepatch.bench.main import main
from fusepatch.errors import FusepatchError


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What `bench ARGUMENTS` says of arguments that it cannot follow, in one line."""
    with pytest.raises((SystemExit, FusepatchError)) as raised:
        main(arguments, "python -m fusepatch")
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    if isinstance(raised.value, SystemExit):
        assert raised.value.code == 2
        return " ".join(stderr.split())
    return str(raised.value)
