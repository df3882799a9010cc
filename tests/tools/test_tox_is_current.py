"""`tox.ini` says what the matrix says."""

from __future__ import annotations

from tools import generate_tox


def test_tox_ini_is_what_the_matrix_says() -> None:
    assert generate_tox.TOX_INI.read_text(encoding="utf-8") == generate_tox.current(), (
        "tox.ini is stale: run python tests/tools/generate_tox.py"
    )
