"""Keeps the caller's `FUSEPATCH_*` variables out of the test process, and leaves out what needs a GPU where there is
none."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec

import pytest

for name in [name for name in os.environ if name.startswith("FUSEPATCH")]:
    del os.environ[name]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_gpu() -> bool:
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
