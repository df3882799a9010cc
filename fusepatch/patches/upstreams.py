"""The libraries that are patched, under every distribution name that ships them."""

from __future__ import annotations

from fusepatch.engine.patch import Upstream

LIGER = Upstream("liger_kernel", ("liger-kernel", "liger-kernel-nightly"))
TORCH = Upstream("torch", ("torch",))
TRL = Upstream("trl", ("trl",))
