"""Keeps the caller's `FUSEPATCH_*` variables out of the test process."""

from __future__ import annotations

import os

for name in [name for name in os.environ if name.startswith("FUSEPATCH")]:
    del os.environ[name]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
