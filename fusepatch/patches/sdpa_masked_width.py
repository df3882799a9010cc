"""`sdpa.masked_width`: transformers' SDPA attention without the NaN of cuDNN's backward on Hopper.

That backward takes the keys in tiles of 128 and decides in steps of 64 what lies behind the last one. Where the number
of keys is 64 modulo 128, half a tile of keys that do not exist gets the score 0; for a row of queries whose
log-sum-exp is below -88.7, as that of a row that is masked entirely, exp(0 - log-sum-exp) overflows and the gradient
of the queries is NaN (pytorch/pytorch#196678). With 64 masked keys more there is no such half.

torch's function itself is not wrapped: `torch.nn.attention.bias` compares
`torch.nn.functional.scaled_dot_product_attention` with what `__torch_function__` is given, `torch.nested` compares
with the builtin, and no wrapper is both.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fusepatch.engine import install, ledger
from fusepatch.engine.patch import Contract, Outcome, Patch, Proceed, Reason, Site, SiteRecord, Slot
from fusepatch.patches.upstreams import TRANSFORMERS

if TYPE_CHECKING:
    import torch

ID = "sdpa.masked_width"
MODULE = "transformers.integrations.sdpa_attention"

HOPPER = 9
"""The major compute capability."""
TILE, HALF_TILE = 128, 64
"""Keys that cuDNN's backward on Hopper takes at once, and the step in which it looks for the end of the keys."""

FIRST_TORCH = (2, 11)
"""Wheels from this release on ship a cuDNN that torch prefers."""
LAST_CUDNN_NOT_PREFERRED = 91500
"""torch takes cuDNN's attention first where cuDNN is newer than 9.15.0 (`check_prefer_cudnn_attention` of its
sdp_utils.cpp)."""
FIRST_CUDNN_WITHOUT = 92600
"""cuDNN 9.26 has the fix (pytorch/pytorch#196861, NVIDIA/cudnn-frontend#628). The fault was measured with 9.19, and is
reported of 9.20 and up to 9.25.1; the versions between are presumed to have it."""


def nothing_to_do(torch_version: str, cuda_version: str | None, cudnn_version: int | None) -> str:
    """Why no call of this process can have the fault, whatever its GPUs are; empty where one can.

    The versions are `torch.__version__`, `torch.version.cuda` and `torch.backends.cudnn.version()`.
    """
    from packaging.version import InvalidVersion, Version

    if cuda_version is None:
        return f"no Hopper GPU: torch {torch_version} is built without CUDA"
    try:
        release = Version(torch_version).release[:2]
    except InvalidVersion:
        return (
            f"the version of torch {torch_version} cannot be read, so it is not known whether its cuDNN has the fault"
        )
    if release < FIRST_TORCH:
        first = ".".join(map(str, FIRST_TORCH))
        return f"torch {torch_version} is older than {first}, the first whose cuDNN has the fault"
    if cudnn_version is None:
        return f"torch {torch_version} has no cuDNN"
    if cudnn_version <= LAST_CUDNN_NOT_PREFERRED:
        return f"cuDNN {cudnn_version} is one that torch does not prefer for attention (9.15.0 and older)"
    if cudnn_version >= FIRST_CUDNN_WITHOUT:
        return f"cuDNN {cudnn_version} has the fix (9.26 and later)"
    return ""


def is_hit(
    device_type: str, capability: tuple[int, int] | None, masked: bool, width: int, half: bool, grad: bool
) -> bool:
    """Whether a call's backward can be NaN, in a process of which `nothing_to_do` says nothing.

    `capability` is that of the device, None inside code that `torch.compile` traces, where it is not asked for;
    `width` is the number of keys; `half` is whether the call computes in 16 bits, without which cuDNN does not serve
    it; `grad` whether the gradient of the queries is wanted. Whether a row is masked entirely is in the device's
    memory and is not read.
    """
    if device_type != "cuda" or not (masked and half and grad):
        return False
    return (capability is None or capability[0] == HOPPER) and width % TILE == HALF_TILE


_looked = False
_other_gpus = ""
"""Why there is nothing to do, where that needed a look at the GPUs."""


def unneeded() -> str:
    """`nothing_to_do` of this process, without initialising CUDA: a child that is forked later may want to."""
    if _other_gpus:
        return _other_gpus
    import torch

    cudnn = None
    backends: Any = torch.backends
    if torch.version.cuda is not None:
        try:
            cudnn = backends.cudnn.version()
        except RuntimeError as error:  # the library that was found is not the one that torch was built for
            return f"cuDNN's version cannot be read: {error}"
    return nothing_to_do(torch.__version__, torch.version.cuda, cudnn)


def attend(
    proceed: Proceed,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Handler of `sdpa_attention_forward`; query [B, H, Q, D], key and value [B, H_kv, K, D], the mask [B, 1 or H, Q,
    >= K]."""
    width = key.shape[-2]
    if attention_mask is None or width % TILE != HALF_TILE or not query.requires_grad:
        return proceed(module, query, key, value, attention_mask, *args, **kwargs)
    import torch

    compiling = torch.compiler.is_compiling()
    capability = None
    if query.device.type == "cuda" and not compiling:
        if not _looked:
            _look_at_gpus()
        capability = torch.cuda.get_device_capability(query.device)
    half = query.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled("cuda")
    hit = is_hit(query.device.type, capability, True, width, half, torch.is_grad_enabled())
    # A bias by position is as wide as the keys, and has another value where nothing may be attended.
    if not hit or attention_mask.dim() != 4 or kwargs.get("position_bias") is not None:
        return proceed(module, query, key, value, attention_mask, *args, **kwargs)
    if not compiling:
        backends: Any = torch.backends
        if not backends.cuda.cudnn_sdp_enabled():
            return proceed(module, query, key, value, attention_mask, *args, **kwargs)
        ledger.count_call(ID)
    return proceed(module, query, *widened(key, value, attention_mask), *args, **kwargs)


def widened(
    key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Key, value [.., K, D] and mask [.., >= K] with 64 more keys that are masked for every query: the same
    attention."""
    import torch

    pad = torch.nn.functional.pad
    mask = mask[..., : key.shape[-2]]
    masked = 0.0 if mask.dtype == torch.bool else float("-inf")
    more = (0, 0, 0, HALF_TILE)
    return pad(key, more), pad(value, more), pad(mask, (0, HALF_TILE), value=masked)


def _look_at_gpus() -> None:
    """Take the patch out where no GPU is a Hopper. Called when CUDA is in use already."""
    global _looked, _other_gpus
    import torch

    _looked = True
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    if any(gpu.major == HOPPER for gpu in found):
        return
    _other_gpus = f"no Hopper GPU: found {', '.join(sorted({gpu.name for gpu in found}))}"
    install.uninstall(ID, SITE)
    reason = Reason(_other_gpus, consequence="there is nothing to patch here")
    ledger.record(SiteRecord(ID, TRANSFORMERS.import_name, MODULE, Outcome.ABSENT, reason))


def reach_table(module: ModuleType) -> None:
    """Put the wrapper where transformers' models look for it, if their table has taken the function before."""
    table = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", None)
    if table is not None and table.get("sdpa") is module.sdpa_attention_forward.__wrapped__:
        table["sdpa"] = module.sdpa_attention_forward


SITE = Site(
    upstream=TRANSFORMERS,
    module=MODULE,
    supported=">=4.48",
    slots=(
        Slot(
            "sdpa_attention_forward",
            attend,
            Contract(parameters=("module", "query", "key", "value", "attention_mask"), keywords=True),
        ),
    ),
    when_late=reach_table,
    unneeded=unneeded,
)

PATCH = Patch(
    id=ID,
    promise="No NaN from SDPA's backward on Hopper GPUs where the number of keys is 64 modulo 128.",
    why=(
        "With torch 2.11 and later and a cuDNN before 9.26, the backward of scaled_dot_product_attention on Hopper "
        "GPUs is "
        "NaN for such widths if a mask hides a whole row, as it does where a batch is padded on the left. The update "
        "that "
        "follows makes every weight NaN. One width in 128 is such a one, and every second one with "
        "pad_to_multiple_of=64."
    ),
    upstream=(
        "https://github.com/pytorch/pytorch/issues/196678",
        "https://github.com/huggingface/trl/issues/7181",
        "https://github.com/NVIDIA/cudnn-frontend/pull/628",
    ),
    fixed_in="cuDNN 9.26",
    remove_when="the oldest supported torch ships cuDNN 9.26",
    variables=(),
    requested_by="",
    changes=(
        "64 masked keys are added to a call with a mask, whose queries want a gradient, in float16 or bfloat16, on a "
        "Hopper GPU, "
        "with 64 modulo 128 keys: the same attention, at a width at which cuDNN's backward is right",
        "every other call passes as it is, and on machines without such a GPU, torch or cuDNN nothing is wrapped",
    ),
    limits=(
        "models whose attention calls torch's function itself are not reached: falcon, the encoders of some vision "
        "and speech models, "
        "and with transformers 4 those that have a class of their own for SDPA (qwen2_moe, olmoe, stablelm and others)",
        "a call with a bias by position (position_bias) is left alone",
        "calls in code that torch.compile has compiled are served, but not counted, and what is compiled before the "
        "first ordinary call "
        "on a GPU that is no Hopper has the 64 keys too",
        "the fault was measured with cuDNN 9.19 and is reported of 9.20 and up to 9.25.1; the versions between are "
        "presumed to have it, and 9.26 not to",
    ),
    sites=(SITE,),
)
