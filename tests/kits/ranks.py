"""Run a function on several gloo ranks of this machine, each in a forked child."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import traceback
from collections.abc import Callable
from typing import Any


def on_ranks(number: int, function: Callable[..., Any], *args: Any, timeout: int = 180) -> list[Any]:
    """What `function(rank, *args)` returns on each rank; fails with the traceback of the first rank that raises.

    fusepatch is switched off in the children first. Results travel through a queue: numbers, not tensors.
    """
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A gloo group that an earlier test left to the garbage collector ends here: in a child it would wait for threads
    # that a fork does not copy.
    gc.collect()
    children = [
        fork.Process(target=_child, args=(function, rank, number, port, results, args)) for rank in range(number)
    ]
    for child in children:
        child.start()
    found = {}
    try:
        for _ in children:
            rank, succeeded, value = results.get(timeout=timeout)
            assert succeeded, value
            found[rank] = value
    finally:
        for child in children:
            child.kill()
            child.join()
    return [found[rank] for rank in range(number)]


def _child(
    function: Callable[..., Any], rank: int, number: int, port: int, results: Any, args: tuple[Any, ...]
) -> None:
    import torch

    import fusepatch

    fusepatch.deactivate()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(number))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(number))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=number)
    try:
        results.put((rank, True, function(rank, *args)))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
    signal.pause()  # the parent ends all, so that none leaves while another still talks to it
