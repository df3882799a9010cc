"""What verl 0.6 to 0.8 need to train with the FSDP2 engine on the CPU; named in VERL_USE_EXTERNAL_MODULES.

The engine itself runs there. verl registers it for accelerators only, takes NCCL for the process group, and asks the
device how much memory it has left, which `torch.cpu` cannot say.
"""

from __future__ import annotations

from verl.utils import device, memory_utils

device.get_nccl_backend = lambda: "gloo"
memory_utils.aggressive_empty_cache = lambda **_: None

# These modules import the two names above.
from verl.workers.engine.base import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402

EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")(FSDPEngineWithLMHead)
