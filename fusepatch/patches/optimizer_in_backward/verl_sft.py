"""verl's SFT: the FSDP engine of `sft_trainer` (0.6.0 and later), and `fsdp_sft_trainer` (up to 0.7.0).

The engine is hooked when it has been initialized, and armed for the time of `forward_backward_batch`. How many
micro-batches a batch has is known in `prepare_micro_batches`, which it calls first.

`fsdp_sft_trainer` is a script: started with `torchrun -m` its class is in `__main__`, where no import hook reaches it.
Its optimizer is met in the constructor of torch's base class, and the trainer is the `self` of the method that
constructs it.

Both clip to `optim.clip_grad` always, and skip a step whose norm is not finite. The first has to be switched off, the
second is done for each gradient.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from fusepatch import settings
from fusepatch.engine import ledger
from fusepatch.engine.callers import calling_module, module_name
from fusepatch.engine.patch import Proceed
from fusepatch.optim import in_backward
from fusepatch.optim.in_backward import InBackward, Obstacle
from fusepatch.patches.optimizer_in_backward import attachment
from fusepatch.patches.optimizer_in_backward.attachment import CALLER, ID

SCRIPT = "verl.trainer.fsdp_sft_trainer"
ENGINE = "verl.workers.engine.fsdp.FSDPEngine"

_attached: WeakKeyDictionary[Any, InBackward] = WeakKeyDictionary()
_running: ContextVar[InBackward | None] = ContextVar("fusepatch_in_backward", default=None)


def initialize(proceed: Proceed, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Handler of `FSDPEngine.initialize`."""
    if not settings.current().optimizer_in_backward or engine.engine_config.forward_only:
        return proceed(engine, *args, **kwargs)
    ledger.count_call(ID)
    in_backward.refuse(ENGINE, _of_engine(engine), CALLER)  # before the model is loaded
    result = proceed(engine, *args, **kwargs)
    _attached[engine] = attachment.attach(
        ENGINE,
        engine.optimizer,
        engine.module,
        _of_engine(engine),
        armed=False,
        on_skipped=_tell_skipped,
        stepped=_read_of(engine),
    )
    return result


def _read_of(owner: Any) -> Callable[[], Any]:
    """Reads the optimizer that `owner` steps, without keeping `owner` in memory."""
    this = weakref.ref(owner)
    return lambda: getattr(this(), "optimizer", None)


def forward_backward_batch(
    proceed: Proceed, engine: Any, data: Any, loss_function: Any, forward_only: bool = False, **kwargs: Any
) -> Any:
    """Handler of `FSDPEngine.forward_backward_batch`."""
    attached = None if forward_only else _attached.get(engine)
    if attached is None:
        return proceed(engine, data, loss_function, forward_only=forward_only, **kwargs)
    token = _running.set(attached)
    attached.armed = True
    try:
        with in_backward.explained():
            return proceed(engine, data, loss_function, forward_only=forward_only, **kwargs)
    finally:
        attached.armed = False
        _running.reset(token)


def prepare_micro_batches(proceed: Proceed, data: Any, *args: Any, **kwargs: Any) -> Any:
    """Handler of `verl.workers.engine.utils.prepare_micro_batches`: several of them have to wait for the ordinary
    step."""
    result = proceed(data, *args, **kwargs)
    attached, number = _running.get(), len(result[0])
    if attached is None or number == 1:
        return result
    from verl.utils import tensordict_utils

    if not tensordict_utils.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
        in_backward.refuse(ENGINE, [_accumulation(number, len(data))], CALLER)
    attached.armed = False
    ledger.fallback(ID, f"{ENGINE}: batches of several micro-batches took the ordinary step")
    ledger.warn_once(
        f"{ID}: {ENGINE}: a batch had {number} micro-batches (data.use_dynamic_bsz, data.max_token_len_per_gpu): their "
        "gradients are summed and the ordinary step updates the parameters, as without fusepatch, and no memory is "
        "saved in such a batch",
        kind=f"{ID}: several micro-batches",
    )
    return result


def construct(proceed: Proceed, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Handler of the constructor of torch's base class: waits for the optimizer of `fsdp_sft_trainer`."""
    if settings.current().optimizer_in_backward:
        ledger.tell_of_lost()  # the loop that would refuse or hook may have been replaced
    result = proceed(optimizer, *args, **kwargs)
    if not settings.current().optimizer_in_backward:
        return result
    trainer = _constructing_trainer(type(optimizer))
    if trainer is not None:
        ledger.count_call(ID)
        attachment.attach(
            SCRIPT,
            optimizer,
            trainer.fsdp_model,
            [*_of_script(trainer.config)],
            armed=True,
            on_skipped=_tell_skipped,
            stepped=_read_of(trainer),
        )
    return result


def _constructing_trainer(kind: type[Any]) -> Any:
    own = tuple(base.__module__ for base in kind.__mro__)
    if calling_module(skip=("torch.optim", "verl.workers.config", *own)) != SCRIPT:
        return None
    frame = sys._getframe(1)
    while module_name(frame) != SCRIPT:
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_locals.get("self")


def _tell_skipped(names: list[str]) -> None:
    for name in names:
        ledger.fallback(ID, f"the gradient of {name} was not finite; the parameter was left as it was in that step")
    ledger.warn_once(
        f"{ID}: {len(names)} gradients were not finite in a step, among them that of {names[0]}; their parameters were "
        "left as they were, the others were updated (verl skips the whole step, which is not possible inside backward)",
        kind=f"{ID}: gradients not finite",
    )


def _of_engine(engine: Any) -> list[Obstacle]:
    config = engine.engine_config
    found = [*_clipping(engine.optimizer_config.clip_grad)]
    if config.strategy != "fsdp2":
        found.append(_strategy(config.strategy, "engine.strategy"))
    offloads = [
        name for name in ("param_offload", "optimizer_offload", "offload_policy") if getattr(config, name, False)
    ]
    if offloads:
        found.append(_offload([f"engine.{name}" for name in offloads]))
    if getattr(engine, "scaler", None) is not None:
        found.append(
            Obstacle(
                "the engine scales the loss (engine.mixed_precision.param_dtype=fp16)",
                "the scaler checks all gradients before it allows a step",
                "set engine.mixed_precision.param_dtype=bf16",
            )
        )
    return found


def _of_script(config: Any) -> Iterable[Obstacle]:
    yield from _clipping(config.optim.clip_grad)
    number = config.data.train_batch_size // config.data.micro_batch_size_per_gpu
    if number > 1:
        yield _accumulation(number, config.data.train_batch_size)
    if config.model.strategy != "fsdp2":
        yield _strategy(config.model.strategy, "model.strategy")
    if config.model.fsdp_config.cpu_offload:
        yield _offload(["model.fsdp_config.cpu_offload"])


def _clipping(maximum: float | None) -> Iterable[Obstacle]:
    if maximum is None or in_backward.clips(maximum):
        yield Obstacle(
            f"optim.clip_grad={maximum} (1.0 is verl's default)",
            "the norm over all gradients is known only after backward, when they have already been used",
            "set optim.clip_grad=inf, which trains without clipping and keeps verl's guard against a norm that is not "
            "finite, for each gradient",
        )


def _accumulation(micro_batches: int, samples: int) -> Obstacle:
    return Obstacle(
        f"a batch has {micro_batches} micro-batches on each rank",
        "each of their backward passes would update the parameters with a part of the gradient",
        f"set data.micro_batch_size_per_gpu={samples}, the whole batch of a rank",
    )


def _strategy(found: str, setting: str) -> Obstacle:
    return Obstacle(
        f"{setting}={found}",
        "FSDP1 recreates its flat parameters and their gradient accumulators in every step",
        f"set {setting}=fsdp2",
    )


def _offload(names: list[str]) -> Obstacle:
    return Obstacle(
        f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} on",
        "parameters, gradients or optimizer states are on the CPU for a part of the step",
        f"set {' and '.join(f'{name}=False' for name in names)}",
    )
