"""The same values in other memory: what a caller may pass where a kernel would like one value after the other."""

from __future__ import annotations

import torch

LAYOUTS = ("dense", "packed", "cut", "transposed", "offset", "expanded")


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """``values`` (at least 1-D) with other strides; what lies between them in memory is other values of the same
    tensor.

    "expanded" gives the first value everywhere, with strides of 0.
    """
    if layout == "expanded":
        return values.reshape(-1)[:1].expand(values.shape) if values.numel() else values
    other = values.flip(0)
    if layout == "packed":
        return torch.stack((values, other), -1)[..., 0]
    if layout == "cut":
        return torch.cat((other, values), -1)[..., values.shape[-1] :]
    if layout == "transposed":
        return values.movedim(-1, 0).contiguous().movedim(0, -1)
    if layout == "offset":
        return torch.cat((values.reshape(-1)[:1], values.reshape(-1)))[-values.numel() :].view(values.shape)
    assert layout == "dense"
    return values
