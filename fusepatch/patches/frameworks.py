"""The packages whose optimizers are reached, and what each passes to a constructor although no user wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusepatch import settings

_TRAINER: Mapping[str, tuple[Any, ...]] = {"fused": (True,), "eps": (1e-8,)}

FRAMEWORKS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "transformers": _TRAINER,
    "trl": _TRAINER,
    "llamafactory": _TRAINER,
    "axolotl": _TRAINER,
    "swift": {**_TRAINER, "foreach": (False,)},
    "areal": {"fused": (True, False), "eps": (1e-8,)},
    "verl": {},
    "trinity": {},
}
"""The values of `fused`, `foreach` and `eps` that each passes by itself: the Trainer's default `optim` and
`adam_epsilon`. Any other value that arrives from them was written by the user in the framework's configuration (verl
passes none of the three itself: what comes is `override_optimizer_config`)."""


def own_values(caller: str) -> Mapping[str, tuple[Any, ...]] | None:
    """What the framework that `caller` is a module of passes by itself; None where its optimizers are not to be
    touched."""
    own = FRAMEWORKS.get(caller.partition(".")[0])
    return {} if own is None and settings.current().optimizer_scope == "all" else own
