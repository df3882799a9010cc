"""The libraries that are patched: the distributions that ship each, and the releases in which its patches were
tested."""

from __future__ import annotations

from fusepatch.engine.patch import Upstream

LIGER = Upstream("liger_kernel", ("liger-kernel", "liger-kernel-nightly"), tested=">=0.5.5.dev0,<0.8.6")
RAY = Upstream("ray", ("ray",), tested=">=2.40,<2.61")
TORCH = Upstream("torch", ("torch",), tested=">=2.11,<2.16")
TRANSFORMERS = Upstream("transformers", ("transformers",), tested=">=4.51,<5.25")
TRL = Upstream("trl", ("trl",), tested=">=0.17,<1.17")
VERL = Upstream("verl", ("verl",), tested=">=0.4.1,<0.9.2")
