"""The libraries that are patched, under every distribution name that ships them."""

from __future__ import annotations

from fusepatch.engine.patch import Upstream

LIGER = Upstream("liger_kernel", ("liger-kernel", "liger-kernel-nightly"))
RAY = Upstream("ray", ("ray",))
TORCH = Upstream("torch", ("torch",))
TRANSFORMERS = Upstream("transformers", ("transformers",))
TRL = Upstream("trl", ("trl",))
VERL = Upstream("verl", ("verl",))
