"""What Liger replaced in a model, read from the model itself, and what an optimizer was built with.

Every door prints what these functions return, so that one vocabulary serves all frameworks and versions. Nothing here
depends on fusepatch or on a particular Liger: a replacement is recognised by the module that its function comes from.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

LIGER = "liger_kernel"

DISTRIBUTIONS = {
    "torch": "torch",
    "triton": "triton",
    "transformers": "transformers",
    "trl": "trl",
    "peft": "peft",
    "accelerate": "accelerate",
    "liger-kernel": "liger_kernel",
    "liger-kernel-nightly": "liger_kernel",
    "verl": "verl",
    "trinity-rft": "trinity",
    "ray": "ray",
    "openrlhf": "openrlhf",
    "axolotl": "axolotl",
    "llamafactory": "llamafactory",
    "torchao": "torchao",
    "bitsandbytes": "bitsandbytes",
    "wrapt": "wrapt",
    "packaging": "packaging",
}
"""Distributions that a door may touch, and the name under which each is imported."""


def observe_model(model: Any) -> dict[str, Any]:
    """Describe a causal language model (bare, wrapped by PEFT, or sharded by FSDP2).

    Returns a JSON object:
        model: the class that transformers defines.
        forward: the model's own forward: `held_by` the instance or the class, and the `function` it ends in.
        modules: for every class of module in the decoder, how many there are and in how many Liger's forward sits on
            the instance, or in the class.
        module_globals: names of the modeling module (functions, norm and MLP classes) that come from Liger.
        cross_entropy: the function behind `torch.nn.functional.cross_entropy`.
        liger: the summary, one boolean per kernel: rope, rms_norm, mlp, cross_entropy, fused_linear_cross_entropy.
    """
    import torch

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    forward = _forward(base)
    modules = _modules(base)
    taken = _module_globals(modeling_module(base))
    cross_entropy = _name(torch.nn.functional.cross_entropy)
    norms = [counts for name, counts in modules.items() if "RMSNorm" in name]
    mlps = [counts for name, counts in modules.items() if name.endswith("MLP")]
    return {
        "model": _defining_class(base).__name__,
        "forward": forward,
        "modules": modules,
        "module_globals": taken,
        "cross_entropy": cross_entropy,
        "liger": {
            "rope": "apply_rotary_pos_emb" in taken,
            "rms_norm": any(counts["instance"] or counts["class"] for counts in norms),
            "mlp": any(counts["instance"] or counts["class"] for counts in mlps),
            "cross_entropy": cross_entropy.startswith(LIGER) or "CrossEntropyLoss" in taken,
            "fused_linear_cross_entropy": forward["function"].startswith(LIGER),
        },
    }


def observe_optimizer(optimizer: Any) -> dict[str, Any]:
    """Describe an optimizer: its class, and for every param group its flags and how many parameters it holds."""
    inner = getattr(optimizer, "optimizer", optimizer)
    keys = ("lr", "betas", "eps", "weight_decay", "fused", "foreach", "capturable", "differentiable")
    return {
        "class": _name(type(inner)),
        "groups": [
            {**{key: group[key] for key in keys if key in group}, "parameters": len(group["params"])}
            for group in inner.param_groups
        ],
    }


def versions() -> dict[str, str]:
    """The versions of what this process has imported, by distribution, and of Python.

    A distribution counts only where the module in `sys.modules` lies in the folder that its metadata describes: a
    release that is put in front by PYTHONPATH is the one that is named.
    """
    found = {"python": platform.python_version()}
    for name, import_name in DISTRIBUTIONS.items():
        file = getattr(sys.modules.get(import_name), "__file__", None)
        if file is None:
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if Path(str(distribution.locate_file(import_name))).resolve() == Path(file).resolve().parent:
            found[name] = distribution.version
    return found


def modeling_module(model: Any) -> ModuleType:
    """The module in which transformers defines the model's class."""
    return sys.modules[_defining_class(model).__module__]


def _defining_class(module: Any) -> type:
    """The module's class as its library wrote it: FSDP2 puts a class of its own in front."""
    for cls in type(module).__mro__:
        if not cls.__module__.startswith("torch.distributed") and not cls.__name__.startswith("FSDP"):
            return cls
    return type(module)


def _forward(module: Any) -> dict[str, str]:
    """Who holds `forward` and which function it is.

    The instance is asked first, as Python does. FSDP2 wraps the forward that it finds on the instance or the class;
    `functools.wraps` leaves the original's name in place and `__wrapped__` to follow.
    """
    if "forward" in vars(module):
        return {"held_by": "instance", "function": _name(vars(module)["forward"])}
    for cls in type(module).__mro__:
        if "forward" in vars(cls):
            return {"held_by": "class", "function": _name(vars(cls)["forward"])}
    raise AssertionError(f"{type(module)} has no forward")


def _modules(model: Any) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for module in model.modules():
        if module is model:
            continue
        cls = _defining_class(module)
        if cls.__module__.startswith("torch.nn"):
            continue
        entry = counts.setdefault(cls.__qualname__, {"total": 0, "instance": 0, "class": 0})
        entry["total"] += 1
        forward = _forward(module)
        if forward["function"].startswith(LIGER):
            entry[forward["held_by"]] += 1
    return counts


def _module_globals(module: ModuleType) -> dict[str, str]:
    return {
        name: _name(value)
        for name, value in sorted(vars(module).items())
        if callable(value) and not name.startswith("_") and str(getattr(value, "__module__", "")).startswith(LIGER)
    }


def _name(function: Any) -> str:
    function = getattr(function, "__func__", function)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return f"{function.__module__}.{function.__qualname__}"
