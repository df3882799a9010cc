"""`tox.ini` says what the matrix says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PATH = Path(__file__).with_name("generate_tox.py")


def test_tox_ini_is_what_the_matrix_says() -> None:
    spec = importlib.util.spec_from_file_location("generate_tox", PATH)
    assert spec is not None
    assert spec.loader is not None
    generate_tox = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate_tox)
    assert generate_tox.TOX_INI.read_text(encoding="utf-8") == generate_tox.current(), (
        "tox.ini is stale: run python tests/upstream/generate_tox.py"
    )
