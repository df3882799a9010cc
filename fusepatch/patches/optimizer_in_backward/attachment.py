"""What the trainers have in common: how the patch speaks of itself, and which parameters are left to the ordinary
step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fusepatch.engine import ledger
from fusepatch.engine.patch import Outcome
from fusepatch.optim import in_backward
from fusepatch.optim.in_backward import Caller, InBackward, Obstacle

ID = "optimizer.in_backward"

CALLER = Caller(
    asked="FUSEPATCH_OPTIMIZER_IN_BACKWARD=1",
    undo="unset FUSEPATCH_OPTIMIZER_IN_BACKWARD",
    without_reentrant='gradient_checkpointing_kwargs={"use_reentrant": False}',
    optimizer_class="FUSEPATCH_OPTIMIZER_CLASS=",
    steps={"transformers": frozenset({"Adafactor"})},
    wrappers={
        "deepspeed.runtime.engine.DeepSpeedEngine": (
            "the model is in a DeepSpeed engine",
            "every ZeRO stage manages the gradients itself and steps its own optimizer",
            "shard with FSDP2, or train in one process without DeepSpeed",
        )
    },
)

CHECKPOINTING = "torch.utils.checkpoint"
"""The module whose recomputation is watched (`checkpointing.py`)."""


def attach(
    where: str,
    optimizer: Any,
    model: Any,
    settings: list[Obstacle],
    armed: bool,
    on_skipped: Callable[[list[str]], None] | None = None,
    stepped: Callable[[], Any] | None = None,
    begun: bool = False,
) -> InBackward:
    """Hook the parameters of an optimizer whose model is as it will train; `settings` are the framework's own
    obstacles.

    Raises:
        InBackwardError: something is in the way; nothing was hooked.
    """
    found = [*settings, *in_backward.obstacles(optimizer, model, CALLER), *_of_checkpointing(model)]
    in_backward.refuse(where, found, CALLER, begun)
    tied = in_backward.reached_by_several_names(model) if _checkpoints_reentrantly(model) else []
    names = {parameter: name for name, parameter in model.named_parameters()}
    attached = InBackward(
        optimizer, names, leave=tied, armed=armed, on_skipped=on_skipped, stepped=stepped, caller=CALLER
    )
    if tied:
        ledger.fallback(
            ID,
            f"{where}: {', '.join(names[parameter] for parameter in tied)}: tied, and under re-entrant checkpointing a "
            "tied gradient can arrive in two parts; the ordinary step updates it (use_reentrant=False includes it)",
        )
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    ledger.replaced(ID, f"{where}: {kind} updates {attached.number_of_parameters} parameters inside backward")
    ledger.warn_once(
        f"{ID}: the optimizer of {where} runs inside backward, where each gradient is freed once it is used; so "
        "grad_norm is logged as 0 or not at all, and step hooks and callbacks before the step see no gradients"
    )
    return attached


def _of_checkpointing(model: Any) -> Iterable[Obstacle]:
    """Under gradient checkpointing, weights that are read too late are seen in torch's own functions only."""
    record = ledger.site(ID, CHECKPOINTING)
    if record is not None and record.outcome is Outcome.APPLIED:
        return
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        yield Obstacle(
            f"gradient checkpointing is on, and {CHECKPOINTING} could not be wrapped "
            f"({record.outcome.value if record is not None else 'PENDING'}; `python -m fusepatch status` says why)",
            "a recomputed region could read weights that are already updated, and nothing would detect it",
            "set gradient_checkpointing=False, or use a tested release of torch",
        )


def _checkpoints_reentrantly(model: Any) -> bool:
    """Whether a module of transformers recomputes its forward in a backward of its own."""
    for module in model.modules():
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if checkpoint is not None and getattr(module, "gradient_checkpointing", False):
            return bool(getattr(checkpoint, "keywords", {}).get("use_reentrant", True))
    return False
