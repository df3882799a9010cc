"""The transformers Trainer, and the trainers derived from it (TRL, axolotl, LLaMA-Factory, ms-swift).

`Trainer._inner_training_loop` is wrapped, for it brackets one training. What the hooks need is settled inside it only:
the optimizer and the model are prepared, and a checkpoint is loaded, when `on_train_begin` is called. So a callback
that is there for the time of the loop looks, refuses, hooks and arms: from `on_step_begin` to `on_pre_optimizer_step`,
which is exactly one training step's backward. Backward passes of evaluations, of other callbacks and of user code are
ordinary ones.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

from fusepatch import settings
from fusepatch.engine import ledger
from fusepatch.engine.patch import Proceed
from fusepatch.optim import in_backward
from fusepatch.optim.in_backward import InBackward, Obstacle
from fusepatch.patches.optimizer_in_backward import attachment
from fusepatch.patches.optimizer_in_backward.attachment import CALLER, ID


def inner_training_loop(proceed: Proceed, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Handler of `Trainer._inner_training_loop`."""
    if not settings.current().optimizer_in_backward:
        return proceed(trainer, *args, **kwargs)
    ledger.count_call(ID)
    in_backward.refuse(_named(trainer), _of_settings(trainer), CALLER)  # before a large model is sharded and loaded
    callback = _callback_class()(trainer)
    trainer.add_callback(callback)
    try:
        with in_backward.explained():
            return proceed(trainer, *args, **kwargs)
    finally:
        trainer.remove_callback(callback)
        callback.detach()


def _named(trainer: Any) -> str:
    return f"{type(trainer).__module__}.{type(trainer).__qualname__}"


def _of_settings(trainer: Any) -> list[Obstacle]:
    return [*_of_arguments(trainer.args), *_of_accelerator(trainer.accelerator), *_of_loading(trainer.model)]


def _of_arguments(arguments: Any) -> Iterable[Obstacle]:
    if arguments.gradient_accumulation_steps > 1:
        yield Obstacle(
            f"gradient_accumulation_steps={arguments.gradient_accumulation_steps}",
            "each of the backward passes would update the parameters with a part of the gradient",
            "set gradient_accumulation_steps=1 and per_device_train_batch_size to the whole batch (in-backward may "
            "free the memory that this needs; gradient checkpointing frees more)",
        )
    if in_backward.clips(arguments.max_grad_norm):
        yield Obstacle(
            f"max_grad_norm={arguments.max_grad_norm} (1.0 is the Trainer's default)",
            "the norm over all gradients is known only after backward, when they have already been used",
            "set max_grad_norm=0, which trains without clipping",
        )
    if arguments.fp16:
        yield Obstacle(
            "fp16=True",
            "the GradScaler checks all gradients before it allows a step",
            "set bf16=True instead",
        )
    if arguments.auto_find_batch_size:
        yield Obstacle(
            "auto_find_batch_size=True",
            "when a backward that ran out of memory is tried again, it has already updated some of the parameters",
            "set per_device_train_batch_size",
        )


def _of_accelerator(accelerator: Any) -> Iterable[Obstacle]:
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        yield Obstacle(
            f"accelerate runs {kind}",
            "it manages gradients and their reduction itself (DeepSpeed at every ZeRO stage)",
            "shard with FSDP2 (fsdp_version=2), or train in one process",
        )
    if getattr(accelerator, "scaler", None) is not None:
        yield Obstacle(
            "accelerate scales the loss with a GradScaler (fp16)",
            "it checks all gradients before it allows a step",
            "use bf16",
        )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and type(getattr(plugin, "cpu_offload", None)).__name__ == "CPUOffloadPolicy":
        yield Obstacle(*_OFFLOAD)


def _of_loading(model: Any) -> Iterable[Obstacle]:
    """transformers 5 shards a model while it loads it, with a configuration of its own."""
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    if getattr(config, "fsdp_cpu_offload", False):
        yield Obstacle(*_OFFLOAD)


_OFFLOAD = (
    "FSDP offloads parameters to the CPU (cpu_offload, fsdp_offload_params, fsdp_cpu_offload)",
    "the gradients are still on their way to the CPU when the hooks run",
    "switch the offload off",
)


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer inside accelerate's wrapper."""
    while type(optimizer).__name__ == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer
    return optimizer


def _of_wrappers(optimizer: Any) -> Iterable[Obstacle]:
    """The Trainer calls the step of accelerate's wrapper."""
    while type(optimizer).__name__ == "AcceleratedOptimizer":
        yield from in_backward.of_own_step(optimizer)
        optimizer = optimizer.optimizer


def attach(trainer: Any, begun: bool = False) -> InBackward:
    """Hook the parameters of a trainer whose optimizer and model are as they will train; raises InBackwardError."""
    optimizer, model = _unwrapped(trainer.optimizer), trainer.model_wrapped
    this = weakref.ref(trainer)
    return attachment.attach(
        _named(trainer),
        optimizer,
        model,
        [*_of_settings(trainer), *_of_wrappers(trainer.optimizer)],
        armed=False,
        stepped=lambda: _unwrapped(getattr(this(), "optimizer", None)),
        begun=begun,
    )


def _saves_through_hooks(value: Any) -> bool:
    """Whether this is a context like TRL's `activation_offloading`, under which autograd does not look at versions."""
    from torch.autograd.graph import saved_tensors_hooks

    return isinstance(value, saved_tensors_hooks)


@functools.cache
def _callback_class() -> Any:
    from transformers import TrainerCallback

    from fusepatch.optim import recomputation

    class InBackwardCallback(TrainerCallback):
        """Hooks at the beginning of a training, arms for each training step."""

        def __init__(self, trainer: Any) -> None:
            self.trainer = trainer
            self.attached: InBackward | None = None
            self.hooks = [(hooks, hooks.unpack_hook) for hooks in vars(trainer).values() if _saves_through_hooks(hooks)]

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.attached = attach(self.trainer)
            for hooks, unpack in self.hooks:
                hooks.unpack_hook = recomputation.unpacked(unpack)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            # Callbacks may change the arguments and exchange the optimizer between two steps.
            found = [*_of_settings(self.trainer), *_of_wrappers(self.trainer.optimizer)]
            in_backward.refuse(_named(self.trainer), found, CALLER, begun=True)
            if self.attached is not None and self.attached.optimizer is not _unwrapped(self.trainer.optimizer):
                self.attached.remove()
                self.attached = attach(self.trainer, begun=True)
            self._arm(True)

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self._arm(False)

        def _arm(self, armed: bool) -> None:
            if self.attached is not None:
                self.attached.armed = armed

        def detach(self) -> None:
            if self.attached is not None:
                self.attached.remove()
            for hooks, unpack in self.hooks:
                hooks.unpack_hook = unpack

    return InBackwardCallback
