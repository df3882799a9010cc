"""Which form of the steps runs, decided at call time, and why."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

from fusepatch.loss.logit_map import LogitMap


class BackendUnavailableError(RuntimeError):
    """The Triton kernels were asked for where they cannot run."""


class Steps(Protocol):
    """What is computed between two matrix products: :mod:`fusepatch.loss.steps` in plain torch, which documents each step,
    and :mod:`fusepatch.loss.kernels` in Triton.
    """

    def log_sum_exp(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        bias: torch.Tensor | None,
        logit_map: LogitMap,
        log_probabilities: torch.Tensor,
        normaliser: torch.Tensor,
    ) -> None: ...

    def exponentials(
        self,
        logits: torch.Tensor,
        gradients: torch.Tensor,
        targets: torch.Tensor,
        bias: torch.Tensor | None,
        logit_map: LogitMap,
        log_probabilities: torch.Tensor,
        normaliser: torch.Tensor,
        multiplier: torch.Tensor,
        gain: float,
    ) -> None: ...

    def gradient_of_logits(
        self,
        logits: torch.Tensor,
        gradients: torch.Tensor,
        targets: torch.Tensor,
        bias: torch.Tensor | None,
        logit_map: LogitMap,
        normaliser: torch.Tensor,
        scale: torch.Tensor,
        first_column: int,
    ) -> None: ...

    def scale_rows(self, values: torch.Tensor, scale: torch.Tensor) -> None: ...


@dataclass(frozen=True)
class Backend:
    """The chosen form: ``name`` is ``"triton"`` or ``"torch"``; ``reasons`` say what was not possible, empty if nothing."""

    name: str
    steps: Steps
    reasons: tuple[str, ...] = ()


def unsupported_device(device: torch.device) -> str | None:
    """Why a caller should keep its own code on this device, or None: only NVIDIA GPUs and the CPU are served.

    ROCm tensors say ``cuda``; ``torch.version.hip`` tells them apart.
    """
    if device.type == "cuda" and torch.version.hip:
        return "the device is an AMD GPU (ROCm); only NVIDIA GPUs and the CPU are served"
    if device.type not in ("cuda", "cpu"):
        return f"the device type is {device.type!r}; only NVIDIA GPUs and the CPU are served"
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
        return "Triton kernels were tested on NVIDIA GPUs only; this torch is built for ROCm"
    if dtype == torch.float64:
        return "the kernels compute in float32; the matrix products are in float64"
    if device.type == "cuda" and _capability(device) < (8, 0):
        return "Triton needs compute capability 8.0; this GPU has {}.{}".format(*_capability(device))
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
            f"torch {torch.__version__} cannot write float32 logits from {str(dtype)[6:]} inputs (2.8 can): "
            f"logits are held in {str(dtype)[6:]}, and log-probabilities are less accurate"
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
