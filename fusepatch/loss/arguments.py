"""Checks of what a caller passes: shapes, devices and dtypes, before anything is computed."""

from __future__ import annotations

import torch

TARGET_DTYPES = (torch.int64, torch.int32)


def check_tensor(name: str, tensor: torch.Tensor | None, device: torch.device, *shapes: tuple[int, ...]) -> None:
    """None passes.

    Raises:
        ValueError: ``tensor`` has none of the shapes, or is on another device.
    """
    if tensor is None:
        return
    if tuple(tensor.shape) not in shapes:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, shapes))}, found {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} like the other tensors, found {tensor.device}")


def check_head(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, prefix: str = "") -> None:
    """Hidden states [B, T, H], a weight [V, H] and a bias [V] or None.

    Raises:
        ValueError: one of them has another shape, or is on another device than the hidden states.
    """
    if hidden.dim() != 3:
        raise ValueError(f"{prefix}hidden must be [B, T, H], found shape {tuple(hidden.shape)}")
    vocabulary = weight.shape[0] if weight.dim() else 0
    check_tensor(f"{prefix}weight", weight, hidden.device, (vocabulary, hidden.shape[2]))
    check_tensor(f"{prefix}bias", bias, hidden.device, (vocabulary,))


def check_targets(targets: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Raises ValueError for another shape, another device, or a dtype other than int64 and int32."""
    check_tensor("targets", targets, device, shape)
    if targets.dtype not in TARGET_DTYPES:
        raise ValueError(f"targets must be int64 or int32, found {targets.dtype}: they index the vocabulary")
