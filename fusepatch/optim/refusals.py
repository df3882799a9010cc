"""Which parameters an optimizer class cannot serve, known before its first step.

Constructors accept almost everything and the first step raises, after the model has been loaded and a batch computed;
in one case it reads memory that is not its own. The answers come from the class where it has them (the signature of its
`step`, the dispatcher), from what was measured where not.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from fusepatch.optim.capability import dtensor_type, in_releases

if TYPE_CHECKING:
    import torch

BITSANDBYTES_KERNEL = "bitsandbytes::optimizer_update_8bit_blockwise"


def obstacle(kind: type[torch.optim.Optimizer], parameters: Collection[torch.Tensor]) -> str | None:
    """Why `kind` cannot train `parameters` in a framework's loop, as words for a sentence; None where nothing is
    known."""
    closure = _required_by_step(kind)
    if closure:
        return f"its step() needs {closure}, and frameworks call step() without any argument"
    return (
        _sparse_only(kind)
        or _matrices_only(kind, parameters)
        or _on_dtensors(kind, parameters)
        or _without_kernel(kind, parameters)
    )


def caution(kind: type[torch.optim.Optimizer], parameters: Collection[torch.Tensor]) -> str | None:
    """What will go wrong later although the steps are right, as words for a sentence."""
    distributed = dtensor_type()
    if (
        _derives(kind, "torchao")
        and in_releases("<2.12")
        and any(distributed is not None and isinstance(parameter, distributed) for parameter in parameters)
    ):
        return (
            "the parameters are DTensors (FSDP2), and on a GPU with torch 2.11 its compiled step was seen to stop at "
            f"the first one (OptimState8bit has no aten.view); torch 2.13 ran it; found torch {_torch_version()}; use "
            "a newer torch if it stops"
        )
    # Set by torch on FSDP1's flat parameters and on the views of them that modules keep.
    if _derives(kind, "torchao") and any(getattr(parameter, "_fsdp_flattened", False) for parameter in parameters):
        return (
            "the parameters are FSDP1's, whose optim_state_dict cannot gather its states: a checkpoint that is made "
            "through it will fail (pytorch/ao#1185); save once early in the run, or use FSDP2"
        )
    return None


States: TypeAlias = Mapping[tuple[str, str], tuple[frozenset[str], ...]]

STATES: States = {
    ("torch", "ASGD"): (frozenset({"step", "eta", "mu", "ax"}),),
    ("torch", "Adadelta"): (frozenset({"square_avg", "acc_delta"}),),
    ("torch", "Adafactor"): (frozenset({"step", "row_var", "col_var"}), frozenset({"step", "variance"})),
    ("torch", "Adagrad"): (frozenset({"step", "sum"}),),
    ("torch", "Adam"): (frozenset({"step", "exp_avg", "exp_avg_sq"}),),
    ("torch", "AdamW"): (frozenset({"step", "exp_avg", "exp_avg_sq"}),),
    ("torch", "Adamax"): (frozenset({"step", "exp_avg", "exp_inf"}),),
    ("torch", "Muon"): (frozenset({"momentum_buffer"}),),
    ("torch", "NAdam"): (frozenset({"step", "exp_avg", "exp_avg_sq", "mu_product"}),),
    ("torch", "RAdam"): (frozenset({"step", "exp_avg", "exp_avg_sq"}),),
    ("torch", "RMSprop"): (frozenset({"step", "square_avg"}),),
    ("torch", "Rprop"): (frozenset({"step", "prev", "step_size"}),),
    ("torchao", "_AdamBase"): (frozenset({"step", "exp_avg", "exp_avg_sq"}),),
}
"""What a step takes for granted in a parameter's state once there is one, by the package and the class that define the
step."""


def lost_keys(optimizer: torch.optim.Optimizer, keys: Collection[str]) -> str | None:
    """Which of `keys`, those that each param group has when it is constructed, are not there since something was
    loaded."""
    for group in optimizer.param_groups:
        missing = sorted(set(keys) - set(group))
        if missing:
            return f"the param groups that were loaded have no {', '.join(missing)}, so another class wrote them"
    return None


def foreign_state(
    optimizer: torch.optim.Optimizer, states: Iterable[Mapping[str, Any]], more: States = MappingProxyType({})
) -> str | None:
    """Why the states of a checkpoint cannot be trained with, since another class wrote them, as words for a sentence.

    None where they can, and for classes whose step is neither in `STATES` nor in `more`.
    """
    states = [state for state in states if state]
    if _derives(type(optimizer), "bitsandbytes"):
        return _foreign_to_bitsandbytes(optimizer, states)
    step = inspect.unwrap(type(optimizer).step)
    owner = step.__qualname__.rpartition(".")[0]
    wanted = {**STATES, **more}.get((step.__module__.partition(".")[0], owner))
    gathers = inspect.unwrap(getattr(type(optimizer), "_init_group", step)).__qualname__.rpartition(".")[0]
    if wanted is None or gathers != owner:
        return None
    for state in states:
        if not any(names <= state.keys() for names in wanted):
            return _foreign(state, " or ".join(", ".join(sorted(names)) for names in wanted))
    return _foreign_to_torchao(optimizer, states) if owner == "_AdamBase" else None


def _foreign(state: Mapping[Any, Any], wanted: str) -> str:
    found = ", ".join(sorted(map(str, state)))
    return f"the states that were loaded have {found}; wanted {wanted}, so another class wrote them"


def _foreign_to_bitsandbytes(optimizer: Any, states: Collection[Mapping[str, Any]]) -> str | None:
    two = _derives(type(optimizer), "bitsandbytes", ("Optimizer2State",))
    for state in states:
        if "state1" not in state or ("state2" in state) != two:
            return _foreign(state, "state1 and state2" if two else "state1 without state2")
    bits = optimizer.args.optim_bits
    large = [state["state1"] for state in states if state["state1"].numel() >= optimizer.args.min_8bit_size]
    if large and not any((one.element_size() == 1) == (bits == 8) for one in large):
        return f"the states that were loaded are {large[0].dtype}, and those of this class have {bits} bits"
    return None


def _foreign_to_torchao(optimizer: Any, states: Collection[Mapping[str, Any]]) -> str | None:
    import torch

    try:
        wanted = type(optimizer._subclass_zeros(torch.empty(optimizer.block_size), True, optimizer.block_size))
    except NotImplementedError:
        return None
    for state in states:
        found = type(getattr(state["exp_avg"], "_local_tensor", state["exp_avg"]))
        if found not in (wanted, torch.Tensor):
            return f"the states that were loaded are {found.__name__}, and those of this class are {wanted.__name__}"
    return None


def _required_by_step(kind: type[torch.optim.Optimizer]) -> str:
    parameters = list(inspect.signature(kind.step).parameters.values())[1:]
    ordinary = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    return ", ".join(p.name for p in parameters if p.kind in ordinary and p.default is p.empty)


def _sparse_only(kind: type[torch.optim.Optimizer]) -> str | None:
    if not _derives(kind, "torch.optim", ("SparseAdam",)):
        return None
    return "it takes sparse gradients only, but parameters that AdamW was to train have dense ones"


def _matrices_only(kind: type[torch.optim.Optimizer], parameters: Collection[torch.Tensor]) -> str | None:
    others = [parameter for parameter in parameters if parameter.ndim != 2]
    if not others or not _derives(kind, "torch.optim", ("Muon",)):
        return None
    return (
        f"it takes matrices only, and {len(others)} of {len(parameters)} parameters are not (biases and the weights of "
        "norms have one dimension); frameworks pass all parameters of a model in one optimizer"
    )


def _on_dtensors(kind: type[torch.optim.Optimizer], parameters: Iterable[torch.Tensor]) -> str | None:
    distributed = dtensor_type()
    sharded = [p for p in parameters if distributed is not None and isinstance(p, distributed)]
    if not sharded:
        return None
    if _derives(kind, "bitsandbytes"):
        return (
            "the parameters are DTensors (FSDP2), and bitsandbytes' kernels take plain tensors only: they raise at the "
            "first step or read memory that is not theirs (bitsandbytes#1633); torchao.optim.AdamW8bit serves DTensors"
        )
    if _derives(kind, "torchao"):
        offloaded = [p for p in sharded if p.to_local().device.type not in (p.device_mesh.device_type, "meta")]
        if offloaded:
            return (
                f"the parameters are DTensors of a {offloaded[0].device_mesh.device_type} mesh that are offloaded to "
                f"the {offloaded[0].to_local().device.type}, and its compiled step mixes the two devices "
                "(pytorch/ao#1931); switch the CPU offload off"
            )
    return None


def _without_kernel(kind: type[torch.optim.Optimizer], parameters: Iterable[torch.Tensor]) -> str | None:
    if not _derives(kind, "bitsandbytes"):
        return None
    devices = {parameter.device.type for parameter in parameters} - {"meta"}
    library = getattr(sys.modules.get("bitsandbytes.cextension"), "lib", None)
    if "cuda" in devices and not getattr(library, "compiled_with_cuda", True):
        return "bitsandbytes found no library for this CUDA; `python -m bitsandbytes` says what it looked for"
    without = sorted(device for device in devices if not _has_kernel(device))
    if without:
        return f"this bitsandbytes has no optimizer kernels for parameters on {', '.join(without)}"
    return None


def _has_kernel(device: str) -> bool:
    import torch

    try:
        key = torch._C._dispatch_key_for_device(device)
        return torch._C._dispatch_has_kernel_for_dispatch_key(BITSANDBYTES_KERNEL, key)
    except RuntimeError:
        return device == "cuda"  # before its operators were torch's, bitsandbytes had CUDA only


def _torch_version() -> str:
    import torch

    return str(torch.__version__)


def _derives(kind: type[Any], package: str, names: tuple[str, ...] = ()) -> bool:
    """Whether a class is, or derives from, one that `package` defines (of one of these names)."""
    return any(
        f"{base.__module__}.".startswith(f"{package}.") and (not names or base.__name__ in names)
        for base in kind.__mro__
    )
