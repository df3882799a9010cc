"""A process group of one rank over gloo, which frameworks find already initialised."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def one_rank() -> Iterator[None]:
    """Initialise torch.distributed for one process, and the variables that a launcher would have set."""
    import torch.distributed

    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    with tempfile.TemporaryDirectory() as folder:
        store = torch.distributed.FileStore(str(Path(folder) / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()
