"""The handlers of TRL's GRPOTrainer and RLOOTrainer.

`compute_loss` says which micro-batch is trained; the log-probabilities and hidden states are made inside of it, or
without gradients before it, and look there for what they may leave out. `_prepare_inputs` says whose rows are shuffled.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from fusepatch import settings
from fusepatch.engine import ledger
from fusepatch.engine.patch import Proceed
from fusepatch.patches.grpo_live_tokens import model_check, obstacles, regroup, rows, zero_advantage
from fusepatch.patches.grpo_live_tokens.rows import Layout, Part
from fusepatch.patches.grpo_live_tokens.without_mask import without_mask
from fusepatch.patches.grpo_live_tokens.zero_advantage import MicroBatch

if TYPE_CHECKING:
    import torch

ID = "grpo.live_tokens"
PADDING = "FUSEPATCH_GRPO_PADDING"
ZERO_ADVANTAGE = "FUSEPATCH_GRPO_ZERO_ADVANTAGE"

_preparing: ContextVar[tuple[Any, str, str] | None] = ContextVar("fusepatch_preparing", default=None)
_verdicts: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()
"""Why the rows for a model are not moved, by the model below all wrappers."""


class Call(NamedTuple):
    """A call of a method that runs the model on a batch. others: its arguments by name beside the five. apart: whether
    the method calls the model's backbone, not the model."""

    trainer: Any
    model: Any
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    width: int
    batch_size: int | None
    others: Mapping[str, Any]
    apart: bool

    @property
    def size(self) -> int:
        return self.input_ids.shape[0]


_NAMES = ("input_ids", "attention_mask", "logits_to_keep", "batch_size")


def _read(trainer: Any, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], apart: bool) -> Call | None:
    """The call; None where it gives arguments in another way than every known release does."""
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    if len(args) > len(_NAMES) or any(given.get(name) is None for name in _NAMES[:3]):
        return None
    others = {name: value for name, value in given.items() if name not in _NAMES}
    ids, mask, width = given["input_ids"], given["attention_mask"], given["logits_to_keep"]
    return Call(trainer, model, ids, mask, width, given.get("batch_size"), others, apart)


def log_probabilities(proceed: Proceed, trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Handler of the method that gives log-probabilities `[B, T]`, alone or with entropies and an auxiliary loss."""
    # TRL 1.14 takes backbone and head apart for its fused loss; every other release calls the model.
    apart = hasattr(trainer, "_chunked_logps") and trainer.use_liger_kernel
    call = _read(trainer, model, args, kwargs, apart)
    if call is None:
        ledger.fallback(ID, f"{proceed.target.name} was called with arguments that are not known here")
        return proceed(trainer, model, *args, **kwargs)
    served = _serve(proceed, call)
    return proceed(trainer, model, *args, **kwargs) if served is None else served


def hidden_states(proceed: Proceed, trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Handler of `_get_last_hidden_state`, which gives `[B, T, H]` for Liger's loss. What comes after the fourth
    argument is of images."""
    images = {f"argument {place}": value for place, value in enumerate(args[3:], start=5)}
    call = _read(trainer, model, args[:3], {**kwargs, **images}, apart=True)
    if call is None:
        ledger.fallback(ID, f"{proceed.target.name} was called with arguments that are not known here")
        return proceed(trainer, model, *args, **kwargs)
    call = call._replace(others={name: value for name, value in call.others.items() if value is not None})
    served = _serve(proceed, call)
    return proceed(trainer, model, *args, **kwargs) if served is None else served


def compute_loss(proceed: Proceed, trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Handler of `compute_loss(model, inputs, ...)`."""
    if not (_moves() or _drops()) or "completion_mask" not in inputs:
        return proceed(trainer, model, inputs, *args, **kwargs)
    batch = zero_advantage.read(inputs, _drops() and model.training and _may_drop(proceed, trainer), ID)
    if hasattr(trainer, "compute_liger_loss") and obstacles.uses_liger(trainer):
        inputs = zero_advantage.finite_for_liger(inputs, batch)
    token = zero_advantage.current.set(batch)
    try:
        return proceed(trainer, model, inputs, *args, **kwargs)
    finally:
        zero_advantage.current.reset(token)


def prepare_inputs(proceed: Proceed, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Handler of `_prepare_inputs`, inside of which a generation batch is shuffled and cut into micro-batches."""
    token = _preparing.set((trainer, *_place(proceed)))
    try:
        return proceed(trainer, *args, **kwargs)
    finally:
        _preparing.reset(token)


def shuffle(proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
    """Handler of the function that shuffles a generation batch: the rows are sorted after it, so that the random
    numbers that it draws are the ones that upstream draws."""
    batch = proceed(*args, **kwargs)
    preparing = _preparing.get()
    if preparing is None or not _moves():
        return batch
    trainer, module, class_name = preparing
    slices = getattr(trainer.args, "steps_per_generation", None) or trainer.args.gradient_accumulation_steps
    if slices == 1:
        return batch
    size = batch["completion_ids"].shape[0]
    reason = (
        obstacles.of_trainer(trainer)
        or obstacles.of_regrouping(trainer, module, class_name)
        or regroup.why_not_per_row(batch, size)
        or _of_windows(trainer, slices)
        or _verdicts.get(_base(trainer, trainer.model))
    )
    if reason is not None:
        ledger.fallback(ID, f"rows are not regrouped by length: {reason}")
        return batch
    lengths = batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)
    if _drops() and obstacles.of_dropping(trainer, module, class_name) is None:
        advantages = batch["advantages"]
        lengths = lengths * (advantages.reshape(size, -1) != 0).any(1)
    window = regroup.window(slices, trainer.args.gradient_accumulation_steps) or slices
    ledger.replaced(ID, "rows regrouped by length among the micro-batches of each optimizer step (automatic)")
    return regroup.arranged(batch, regroup.order(lengths, size // slices * window))


def _of_windows(trainer: Any, slices: int) -> str | None:
    accumulation = trainer.args.gradient_accumulation_steps
    found = regroup.window(slices, accumulation)
    if found is None:
        return f"steps_per_generation={slices} and gradient_accumulation_steps={accumulation} do not divide each other"
    try:
        micro_batches = len(trainer.callback_handler.train_dataloader)
    except (AttributeError, TypeError):
        return "the number of micro-batches of an epoch is not known"
    if micro_batches % slices or (slices % accumulation == 0 and trainer._step % accumulation):
        return "an epoch ends inside of a generation batch, so optimizer steps do not begin with its slices"
    return None


def _moves() -> bool:
    return settings.current().grpo_padding == "auto"


def _drops() -> bool:
    return settings.current().grpo_zero_advantage == "drop"


def _may_drop(proceed: Proceed, trainer: Any) -> bool:
    """Whether sequences of advantage 0 can be left out here; what cannot be followed is said."""
    reason = obstacles.of_dropping(trainer, *_place(proceed))
    if reason is not None:
        ledger.refused(
            ID,
            f"{ZERO_ADVANTAGE}=drop was not followed: {reason}; sequences of advantage 0 run through the model, as "
            "upstream has it; change that setting or unset the variable",
        )
    return reason is None


def _place(proceed: Proceed) -> tuple[str, str]:
    """The module and the class of a wrapped method."""
    return proceed.target.module, proceed.target.path.partition(".")[0]


def _unwrapped(trainer: Any, model: Any) -> Any:
    model = trainer.accelerator.unwrap_model(model)
    return getattr(model, "_orig_mod", model)


def _base(trainer: Any, model: Any) -> Any:
    """The model below all wrappers, PEFT's too."""
    model = _unwrapped(trainer, model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _backbones(trainer: Any, model: Any) -> list[Any]:
    """What TRL may call for hidden states: the model's backbone under either of its two names."""
    base = _base(trainer, model)
    found = [getattr(base, "base_model", None), getattr(base, "model", None)]
    return [module for place, module in enumerate(found) if module is not None and module not in found[:place]]


def _get_mask(call: Call) -> Sequence[Any]:
    """The modules that the method gives the mask."""
    return _backbones(call.trainer, call.model) if call.apart else [call.model]


def _serve(proceed: Proceed, call: Call) -> Any:
    """What the method gives, with fewer tokens in the model; None where upstream is to do all of it."""
    import torch

    ledger.count_call(ID)
    batch = _micro_batch(call)
    live = None if batch is None else batch.rows
    layout = _layout(proceed, call) if _moves() else None
    if layout is None and live is None:
        return None
    parts = [_part(call, layout, chosen) for chosen in _chunks(call, layout, live)]
    results = []
    for part in parts:
        with nullcontext() if layout is None else without_mask(_get_mask(call)):
            results.append(_ask(proceed, call, part.input_ids, part.attention_mask, part.logits_to_keep))
    if layout is not None:
        ledger.replaced(
            ID, f"{type(_base(call.trainer, call.model)).__name__}: rows moved to the left, attention_mask -> None"
        )
    if live is not None:
        ledger.replaced(
            ID,
            f"sequences of advantage 0 stay out of the model ({ZERO_ADVANTAGE}=drop); `entropy` is the mean over the "
            "sequences that enter",
        )
    try:
        return _returned(results, parts, call, batch)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        ledger.fallback(
            ID,
            "what the model gave could not be put back, and was made again by upstream; please report it: "
            f"{traceback.format_exc(limit=-3)}",
        )
        return None


def _micro_batch(call: Call) -> MicroBatch | None:
    batch = zero_advantage.current.get()
    return batch if batch is not None and batch.shape == (call.size, call.width) else None


def _layout(proceed: Proceed, call: Call) -> Layout | None:
    """Where the tokens of each row are; None, with the reason in the record, where they are left there."""
    trainer, policy = call.trainer, call.trainer.model
    reason = obstacles.of_call(call.others) or obstacles.of_trainer(trainer) or _of_model(proceed, call)
    if reason is None and _base(trainer, call.model) is not _base(trainer, policy):
        # A padding column of the reference alone would have log-probability 0, and exp(0 - the policy's) may be
        # infinite: under the mask that is NaN.
        reason = _of_model(proceed, call._replace(model=policy))
    layout = None
    if reason is None:
        layout = rows.read_layout(call.attention_mask, call.width)
        if layout is None:
            reason = "a row of the batch has no prompt, or tokens that are not one run"
    if reason is not None:
        ledger.fallback(ID, f"rows are not moved: {reason}")
    return layout


def _of_model(proceed: Proceed, call: Call) -> str | None:
    """Why the rows for a model are not moved, by what it is set to now, and by what it is."""
    base = _base(call.trainer, call.model)
    reason = obstacles.of_settings(call.model, _unwrapped(call.trainer, call.model), base)
    if reason is None:
        if base not in _verdicts:
            _verdicts[base] = _verdict(proceed, call, base)
        reason = _verdicts[base]
    return reason


def _verdict(proceed: Proceed, call: Call, base: Any) -> str | None:
    import torch

    reason = obstacles.of_model(base)
    if reason is not None:
        return reason
    name = type(base).__name__
    unchecked = model_check.why_not_checked(base)
    if unchecked is not None:
        ledger.fallback(
            ID, f"{name}: moved rows were not compared with padded ones ({unchecked}); its type is a tested one"
        )
        return None
    if isinstance(call.model, torch.nn.parallel.DistributedDataParallel):
        call = call._replace(model=call.model.module)  # the wrapper talks to the other ranks, which may not check

    def upstreams(*batch: Any) -> torch.Tensor:
        return _first(_ask(proceed, call, *batch))

    def moved(*batch: Any) -> torch.Tensor:
        with without_mask(_get_mask(call)):
            return upstreams(*batch)

    two = model_check.two_rows(call.input_ids, call.attention_mask, call.width)
    precision = getattr(call.trainer.accelerator, "mixed_precision", None)
    try:
        compared = model_check.compare(upstreams, moved, *two, model_check.rounding_of(base, precision))
    except torch.OutOfMemoryError:
        raise
    except Exception:
        trace = traceback.format_exc(limit=-3)
        return f"the comparison of moved rows with padded ones failed for {name}; please report it: {trace}"
    if compared.is_equal:
        ledger.replaced(ID, f"{name}: moved rows were compared with padded ones: {compared}")
        return None
    return f"{name} gives something else for moved rows than for padded ones: {compared}"


def _ask(proceed: Proceed, call: Call, input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int) -> Any:
    return proceed(call.trainer, call.model, input_ids, attention_mask, width, **call.others)


def _first(result: Any) -> torch.Tensor:
    first: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return first


def _chunks(call: Call, layout: Layout | None, live: Sequence[int] | None) -> list[Sequence[int] | None]:
    """The rows of each forward: as many forwards as upstream has. Ranks agree on that number, which collectives
    need."""
    size = call.batch_size or call.size
    if size >= call.size:
        return [live]
    if layout is None:
        chosen: Sequence[int] = range(call.size) if live is None else live
    else:
        chosen = rows.by_length(layout, live)
    return [chosen[start : start + size] for start in range(0, len(chosen), size)]


def _part(call: Call, layout: Layout | None, chosen: Sequence[int] | None) -> Part:
    if layout is not None:
        return rows.move(call.input_ids, call.attention_mask, layout, chosen)
    return rows.select(call.input_ids, call.attention_mask, call.width, range(call.size) if chosen is None else chosen)


def _returned(results: Sequence[Any], parts: Sequence[Part], call: Call, batch: MicroBatch | None) -> Any:
    fill = None if batch is None else batch.fill
    if not isinstance(results[0], tuple):
        further = (1,) * (results[0].dim() - 2)
        return rows.put_back(results, parts, call.size, None if further else fill)
    values = rows.put_back([result[0] for result in results], parts, call.size, fill)
    entropies = None
    if results[0][1] is not None:
        entropies = rows.put_back([result[1] for result in results], parts, call.size)
        entropies = entropies if batch is None else batch.entropy(entropies)
    return (values, entropies, *results[0][2:])
