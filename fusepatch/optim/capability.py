"""Can an optimizer of torch run fused, or multi-tensor, with these parameters: asked before it is constructed.

torch checks most of this at the first step only, so a constructor that succeeds says little. The answers come from the
installed torch where it has them (its list of devices, its rule per parameter, its dispatcher), from tables where not.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fusepatch.optim import layout

if TYPE_CHECKING:
    import torch

FUSED_DEVICES = ("cuda", "cpu", "mps", "xpu", "hpu", "mtia")
"""Where the installed torch no longer has its own list."""

FUSED_DTYPES = ("float32", "float64", "float16", "bfloat16")
"""torch's own rule lets every floating dtype pass; the float8 ones have no kernel and fail at the first step."""

SPARSE_GRADIENTS = frozenset({"SGD", "Adagrad"})
"""Classes whose ordinary form takes sparse gradients and whose fused form does not. The parameters do not show whether
their gradients will be sparse; only the step does."""

KNOWN = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
"""Classes whose fused steps are looked at before the kernel runs. A class that gets a fused form in a later torch is
left to it."""

TENSOR_LEARNING_RATE_WITHOUT_FOREACH = frozenset({"Adam", "AdamW"})
"""Classes whose multi-tensor form takes a learning rate or betas in a tensor only when `capturable` is set."""


class Fault(NamedTuple):
    """A known fault of torch in fused optimizers on DTensor parameters: the releases that have it, and what it does."""

    releases: str
    several_meshes: bool
    text: str


DTENSOR_FAULTS = (
    Fault(
        ">=2.10.dev0,<2.13.dev0",
        False,
        "fused steps on DTensor parameters keep one object per parameter and step until the host's memory is gone in "
        "torch 2.10 and 2.11, and perhaps 2.12 (pytorch/pytorch#181761, #188174)",
    ),
    Fault(
        "<2.9.dev0",
        True,
        "fused steps on DTensor parameters of several device meshes in one param group fail before torch 2.9 "
        "(pytorch/pytorch#157682)",
    ),
)
"""2.13 was measured without the leak and with parameters of two meshes in one group."""

NO_FUSED_ADAGRAD_ON_CUDA = "<2.13.dev0"
"""Its dispatcher has the kernel in these releases already, but the class refuses CUDA parameters at the first step
(seen in 2.11)."""


class Verdict(NamedTuple):
    """Whether a param group can be fused, each as words for a sentence.

    `obstacle`: torch would raise, in the constructor or at the first step. `wrong`: it would train on wrong numbers
    without a word, or raise, by where the parameters lie in memory or by a fault of the kernel. `caution`: it runs, but
    is not for an automatic rule to choose.
    """

    obstacle: str | None = None
    wrong: str | None = None
    caution: str | None = None


def parameters_of(constructor: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of an optimizer's `__init__`, `self` included."""
    return _signature(constructor).parameters


@functools.lru_cache(maxsize=64)
def _signature(constructor: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(constructor)


def fused(
    optimizer: type[torch.optim.Optimizer],
    name: str,
    parameters: Collection[torch.Tensor],
    differentiable: bool,
    devices: Collection[str],
) -> Verdict:
    """Judge `fused=True` for one param group.

    Args:
        optimizer: the class that is constructed, perhaps a subclass of torch's.
        name: the name of torch's class whose constructor takes `fused`.
        parameters: the group's parameters.
        differentiable: the group's `differentiable`.
        devices: the device types of all parameters of the optimizer, in this group and in others.
    """
    if differentiable:
        return Verdict(obstacle="differentiable=True has no fused form")
    one_of_each = {(type(p), p.device.type, p.dtype): p for p in parameters}
    kinds = one_of_each.keys()
    mixed = _mixed(kinds)
    if mixed is not None:
        return Verdict(obstacle=mixed)
    for obstacle in (_kernel_obstacle(name, device, dtype) for _, device, dtype in kinds if device != "meta"):
        if obstacle is not None:
            return Verdict(obstacle=obstacle)
    for parameter in one_of_each.values():
        refusal = _torch_refuses(parameter)
        if refusal is not None:
            return Verdict(obstacle=f"torch refuses it: {refusal}")
    if name in SPARSE_GRADIENTS and any(map(_has_sparse_gradient, parameters)):
        return Verdict(obstacle=f"the fused {name} takes no sparse gradients")
    return Verdict(
        wrong=_kernel_fault(name, kinds) or layout.unfit(parameters),
        caution=_caution(optimizer, name, kinds, parameters, devices),
    )


def foreach_obstacle(
    name: str, parameters: Iterable[torch.Tensor], scalars: Iterable[object], differentiable: bool, capturable: bool
) -> str | None:
    """Why torch would raise with `foreach=True` for one param group, as words for a sentence; None where it runs.

    `scalars` are the learning rate and betas of the group, which may be tensors.
    """
    import torch

    if differentiable:
        return "differentiable=True has no multi-tensor form"
    if (
        name in TENSOR_LEARNING_RATE_WITHOUT_FOREACH
        and not capturable
        and any(isinstance(scalar, torch.Tensor) for scalar in scalars)
    ):
        return f"the multi-tensor {name} takes a learning rate or betas in a tensor only with capturable=True"
    return _mixed({(type(p), p.device.type, p.dtype) for p in parameters})


def becomes_zero(eps: float, parameters: Iterable[torch.Tensor]) -> str | None:
    """The dtype among the parameters' in which `eps` is rounded to 0, so that a gradient of 0 gives NaN; None if
    none."""
    import torch

    for dtype in {p.dtype for p in parameters if p.is_floating_point()}:
        if torch.tensor(eps, dtype=torch.float64).to(dtype).item() == 0:
            return str(dtype).removeprefix("torch.")
    return None


def _kernel_fault(name: str, kinds: Iterable[tuple[type, str, torch.dtype]]) -> str | None:
    if name == "SGD" and any(device == "cpu" and dtype.itemsize == 2 for _, device, dtype in kinds):
        # pytorch/pytorch#192545 mends it; not bounded by a release until one was measured.
        return "the fused SGD leaves most elements of 16-bit parameters on the CPU as they are (pytorch/pytorch#191763)"
    return None


def _kernel_obstacle(name: str, device: str, dtype: torch.dtype) -> str | None:
    refused = name == "Adagrad" and device == "cuda" and in_releases(NO_FUSED_ADAGRAD_ON_CUDA)
    if refused or device not in _fused_devices() or not _has_kernel(name, device):
        return f"this torch has no fused {name} for parameters on {device}"
    if str(dtype).removeprefix("torch.") not in FUSED_DTYPES:
        return f"there is no fused {name} for parameters of {dtype}"
    return None


@functools.lru_cache(maxsize=1)
def _fused_devices() -> tuple[str, ...]:
    utilities = importlib.import_module("torch.utils._foreach_utils")
    supported = getattr(utilities, "_get_fused_kernels_supported_devices", None)
    return tuple(supported()) if supported is not None else FUSED_DEVICES


@functools.lru_cache(maxsize=64)
def _has_kernel(name: str, device: str) -> bool:
    """Whether the dispatcher has the class's fused kernel for the device (the list of devices is one for all
    classes)."""
    import torch

    try:
        key = torch._C._dispatch_key_for_device(device)
        return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::_fused_{name.lower()}_", key)
    except (AttributeError, RuntimeError):
        return True  # the dispatcher cannot be asked, or the class's kernel has another name: the list decides


def _torch_refuses(parameter: torch.Tensor) -> str | None:
    # In sys.modules only: torch deletes the attribute.
    rule = getattr(sys.modules["torch.optim.optimizer"], "_device_dtype_check_for_fused", None)
    if rule is None or parameter.is_meta:
        return None
    try:
        rule(parameter)
    except RuntimeError as error:
        return str(error)
    return None


def _has_sparse_gradient(parameter: torch.Tensor) -> bool:
    return parameter.is_leaf and parameter.grad is not None and parameter.grad.is_sparse


def _mixed(kinds: Iterable[tuple[type, str, torch.dtype]]) -> str | None:
    distributed = dtensor_type()
    if distributed is None or len({issubclass(kind, distributed) for kind, _, _ in kinds}) < 2:
        return None
    return "DTensors and plain tensors are mixed in one param group, which only foreach=False takes"


def _caution(
    optimizer: type[torch.optim.Optimizer],
    name: str,
    kinds: Collection[tuple[type, str, torch.dtype]],
    parameters: Iterable[torch.Tensor],
    devices: Collection[str],
) -> str | None:
    if name not in KNOWN:
        return f"nothing is known about the memory that the fused {name} takes"
    for method in ("step", "_init_group"):
        module = getattr(optimizer, method).__module__
        if not module.startswith("torch.optim"):
            return f"{optimizer.__name__} has a {method} of its own ({module}), which may not know the fused form"
    distributed = dtensor_type()
    for kind, _, _ in kinds:
        if kind is not distributed and _dispatches(kind):
            return f"nothing is known about fused kernels on parameters of type {kind.__module__}.{kind.__qualname__}"
    meshes = {p.device_mesh for p in parameters if isinstance(p, distributed)} if distributed is not None else set()
    for fault in DTENSOR_FAULTS if meshes else ():
        if (not fault.several_meshes or len(meshes) > 1) and in_releases(fault.releases):
            return fault.text
    on_cpu = any(device == "cpu" for _, device, _ in kinds)
    if on_cpu and any(device not in ("cpu", "meta") for device in (*devices, *(mesh.device_type for mesh in meshes))):
        return "its parameters are offloaded to the CPU, where fused saves no memory of the accelerator"
    return None


def _dispatches(kind: type) -> bool:
    """Whether a tensor class answers operators with Python code of its own (quantized weights do, FSDP's do not)."""
    import torch

    below = kind.__mro__[: kind.__mro__.index(torch.Tensor)]
    return any("__torch_dispatch__" in vars(owner) for owner in below)


def dtensor_type() -> type[Any] | None:
    """The class DTensor if anyone has imported it; without that there are no such parameters."""
    for module in ("torch.distributed.tensor", "torch.distributed._tensor"):
        found = getattr(sys.modules.get(module), "DTensor", None)
        if isinstance(found, type):
            return found
    return None


@functools.lru_cache(maxsize=16)
def in_releases(specifier: str) -> bool:
    """Whether torch's version is within a specifier."""
    import torch
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(str(torch.__version__), prereleases=True)
