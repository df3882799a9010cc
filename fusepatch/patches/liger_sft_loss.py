"""`liger.sft_loss`: TRL's SFTTrainer gets the loss that it names where the model was left without Liger's.

With `use_liger_kernel` TRL 0.26 to 1.14 hands the model `use_token_scaling` (the DFT loss) and `return_token_accuracy`,
and leaves its own loss and metrics out. A model without Liger's fused linear cross-entropy takes both for keywords that
mean nothing and returns the ordinary loss. There TRL's other branch is the right one.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from fusepatch.engine import ledger
from fusepatch.engine.patch import Contract, Patch, Proceed, Site, Slot
from fusepatch.patches.upstreams import TRL

ID = "liger.sft_loss"
MODULE = "trl.trainer.sft_trainer"


class LeftWithout(NamedTuple):
    """Why Liger was applied to a model without its fused linear cross-entropy. `asked` is true of a variable's
    doing."""

    why: str
    asked: bool


_left_without: WeakKeyDictionary[Any, LeftWithout] = WeakKeyDictionary()


def note(model: Any, left_without: LeftWithout | None) -> None:
    """Keep what became of a model's fused linear cross-entropy, as `liger.instance_flags` saw it: None where it is
    on."""
    if left_without is None:
        _left_without.pop(model, None)
    else:
        _left_without[model] = left_without


def compute_loss(proceed: Proceed, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Handler of `SFTTrainer.compute_loss`: TRL's branch without Liger where the loss is not Liger's."""
    model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    left = _left_without.get(model)
    if left is None or not trainer.args.use_liger_kernel or _runs_ligers_forward(model) or not _asks_liger(proceed):
        return proceed(trainer, *args, **kwargs)
    dft = trainer.args.loss_type == "dft"
    if not dft and not left.asked:
        return proceed(trainer, *args, **kwargs)
    ledger.count_call(ID)
    own = trainer.compute_loss_func
    if dft and own is not None:
        ledger.refused(
            ID,
            f"loss_type='dft' was not followed: compute_loss_func={getattr(own, '__name__', own)} computes the loss of "
            f"this SFTTrainer, since Liger's forward is off ({left.why}); drop one of the two",
        )
        return proceed(trainer, *args, **kwargs)
    ledger.replaced(
        ID,
        f"SFTTrainer.compute_loss: the {trainer.args.loss_type} loss and its metrics are computed from the logits by "
        f"TRL, instead of by Liger's forward, which {type(model).__name__} does not have ({left.why})",
    )
    trainer.args.use_liger_kernel = False
    if dft:
        trainer.compute_loss_func = vars(sys.modules[MODULE])["dft_loss"]
    try:
        return proceed(trainer, *args, **kwargs)
    finally:
        trainer.args.use_liger_kernel = True
        trainer.compute_loss_func = own


def _runs_ligers_forward(model: Any) -> bool:
    return str(getattr(inspect.unwrap(model.forward), "__module__", "")).startswith("liger_kernel.")


def _asks_liger(proceed: Proceed) -> bool:
    """Whether this TRL asks by argument: older ones ask for nothing, and from 1.15 on TRL's own forward is
    installed."""
    code = getattr(inspect.unwrap(proceed.target.original), "__code__", None)
    return code is not None and "use_token_scaling" in code.co_consts


PATCH = Patch(
    id=ID,
    promise="TRL's SFTTrainer trains the loss that it names even when Liger's fused linear cross-entropy is switched "
    "off.",
    why=(
        "With use_liger_kernel the SFTTrainer asks Liger's forward for the DFT loss and for the token accuracy, "
        "through arguments that a model's own forward ignores. With that kernel off, loss_type='dft' silently trains "
        "the ordinary loss, and the accuracy is not logged (an AttributeError in the first of these releases)."
    ),
    upstream=(
        "https://github.com/linkedin/Liger-Kernel/issues/1378",
        "https://github.com/huggingface/trl/pull/4302",
        "https://github.com/huggingface/trl/issues/4730",
    ),
    fixed_in="TRL 1.15, which uses its own forward with Liger too",
    remove_when="no supported TRL is older than 1.15",
    variables=(),
    requested_by="",
    changes=(
        "where a FUSEPATCH_LIGER_* variable has switched the fused linear cross-entropy off, TRL 0.26 to 1.14 computes "
        "loss and metrics from the logits, as it does without use_liger_kernel",
        "the same for loss_type='dft' where liger_kernel_config, or Liger's default for the model, has switched it off",
        "loss_type='dft' together with a compute_loss_func, which TRL refuses without Liger, triggers a warning, and "
        "an error under FUSEPATCH_STRICT=1",
    ),
    limits=(
        "a model that Liger was not applied to, or has no kernels for, is left to TRL, and so is an evaluation before "
        "the first training",
        "other releases of TRL pass Liger no such arguments, so nothing is changed there",
    ),
    sites=(
        Site(
            upstream=TRL,
            module=MODULE,
            supported=">=0.17",
            slots=(
                Slot(
                    "SFTTrainer.compute_loss",
                    compute_loss,
                    Contract(parameters=("model", "inputs", "return_outputs", "num_items_in_batch")),
                ),
            ),
        ),
    ),
)
