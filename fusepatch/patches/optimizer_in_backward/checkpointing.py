"""torch's gradient checkpointing: its two ways of computing a region again, each with a look at the weights that it
reads.

`checkpoint` itself is left alone: Dynamo knows it by identity, and frameworks take it by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusepatch.engine.patch import Proceed
from fusepatch.optim import in_backward


def without_reentrant(proceed: Proceed, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Handler of `_checkpoint_without_reentrant_generator`, which calls `fn` in backward only."""
    return proceed(_watched(fn), *args, **kwargs)


def reentrant(proceed: Proceed, ctx: Any, run_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Handler of `CheckpointFunction.forward`, which keeps `run_function` for its backward."""
    return proceed(ctx, _watched(run_function), *args, **kwargs)


def saving(proceed: Proceed, hooks: Any, frame: Any) -> None:
    """Handler of `_checkpoint_hook.__init__`, whose unpack hook computes the region again and returns what that
    saved."""
    proceed(hooks, frame)
    if in_backward.any_live():
        from fusepatch.optim import recomputation

        hooks.unpack_hook = recomputation.unpacked(hooks.unpack_hook)


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    if not in_backward.any_live():
        return function
    from fusepatch.optim import recomputation

    return recomputation.recomputed(function)
