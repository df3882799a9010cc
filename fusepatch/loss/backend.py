"""Which form of the steps runs, decided at call time, and why."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from fusepatch.loss.logit_map import RawLogits


class BackendUnavailableError(RuntimeError):
    """The Triton kernels were asked for where they cannot run."""


class Steps(Protocol):
    """What is computed between two matrix products: in plain torch by :mod:`fusepatch.loss.steps`, which documents each
    step, and in Triton by :mod:`fusepatch.loss.kernels`.
    """

    def log_sum_exp(self, logits: RawLogits, log_probabilities: Tensor, normaliser: Tensor) -> None: ...

    def exponentials(
        self,
        logits: RawLogits,
        gradients: Tensor,
        log_probabilities: Tensor,
        normaliser: Tensor,
        multiplier: Tensor,
        gain: float,
    ) -> None: ...

    def gradient_of_logits(
        self, logits: RawLogits, gradients: Tensor, normaliser: Tensor, scale: Tensor, first_column: int
    ) -> None: ...

    def scale_rows(self, values: Tensor, scale: Tensor) -> None: ...


@dataclass(frozen=True)
class Backend:
    """The chosen form: ``name`` is ``"triton"`` or ``"torch"``; ``reasons`` say what was not possible, if anything."""

    name: str
    steps: Steps
    reasons: tuple[str, ...] = ()


def unsupported_device(device: torch.device) -> str | None:
    """Why a caller should keep its own code on this device, or None: only NVIDIA GPUs and the CPU are supported.

    ROCm tensors say ``cuda``; ``torch.version.hip`` tells them apart.
    """
    if device.type == "cuda" and torch.version.hip:
        return "the device is an AMD GPU (ROCm); only NVIDIA GPUs and the CPU are supported"
    if device.type not in ("cuda", "cpu"):
        return f"the device type is {device.type!r}; only NVIDIA GPUs and the CPU are supported"
    return None


def float32_products_of_half(device: torch.device) -> bool:
    """Whether a matrix product of half-precision operands can be written in float32: torch >= 2.8 on CUDA."""
    return device.type == "cuda" and hasattr(torch.ops.aten.mm, "dtype_out")


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not (interpreted and device.type == "cpu"):
        return f"Triton kernels run on NVIDIA GPUs; the tensors are on {device.type!r}"
    if torch.version.hip:
        return "Triton kernels are supported on NVIDIA GPUs only; this torch is built for ROCm"
    if dtype == torch.float64:
        return "the Triton kernels compute in float32, and these tensors need float64"
    if device.type == "cuda" and _capability(device) < (8, 0):
        return "Triton kernels need a GPU of compute capability 8.0 or higher; this GPU has {}.{}".format(
            *_capability(device)
        )
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    return None


def choose_backend(device: torch.device, dtype: torch.dtype, requested: str = "auto") -> Backend:
    """Choose the form of the steps for matrix products of ``dtype`` on ``device``.

    Args:
        requested: ``"auto"``, ``"triton"`` or ``"torch"``.

    Raises:
        BackendUnavailableError: ``"triton"`` was requested and cannot run here.
        ValueError: ``requested`` is none of the three.
    """
    if requested not in ("auto", "triton", "torch"):
        raise ValueError(f"requested must be 'auto', 'triton' or 'torch', found {requested!r}")
    reasons: list[str] = []
    if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16) and not float32_products_of_half(device):
        reasons.append(
            f"torch {torch.__version__} cannot multiply {str(dtype)[6:]} matrices into float32 (torch 2.8 can): "
            f"logits are kept in {str(dtype)[6:]}, and log-probabilities are less accurate"
        )
    why_not = None
    if requested != "torch":
        why_not = _why_not_triton(device, dtype)
        if why_not is not None and requested == "triton":
            raise BackendUnavailableError(
                f"The Triton kernels were requested and cannot run: {why_not}. Use 'auto' or 'torch' instead."
            )
        if why_not is not None:
            reasons.append(why_not)
    if requested == "torch" or why_not is not None:
        from fusepatch.loss import steps

        return Backend("torch", steps, tuple(reasons))
    from fusepatch.loss import kernels

    return Backend("triton", kernels, tuple(reasons))
