"""Imported, it makes torch look like a build for CUDA with a cuDNN that has the fault of `sdpa.masked_width`, to what
asks for versions.

A GPU is still not there. For forked children and fresh processes: nothing is put back.
"""

from __future__ import annotations

import torch

torch.version.cuda = torch.version.cuda or "13.0"
torch.backends.cudnn.version = lambda: 91900  # type: ignore[assignment]
