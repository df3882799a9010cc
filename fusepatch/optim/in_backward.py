"""The optimizer's step inside backward: each parameter is updated as soon as its gradient is complete, which is then
freed.

The one real optimizer does the work, parameter by parameter: torch's post-accumulate-grad hooks run the class's own
step on a view of the parameter's group. State, param groups, learning rate and checkpoints stay where they always are,
and the framework's own `step()` finds no gradients and changes nothing. What a hook does not take (a parameter that was
added or unfrozen later, a batch during which the hooks are disarmed) keeps its gradient, and that same `step()` updates
it.

Exact where one backward makes the whole gradient, an update needs nothing but its own parameter, and nothing reads a
parameter between its update and the end of that backward. `obstacles` names what is in the way before; a parameter
whose gradient arrives in several parts raises at the second one. Who reads an updated weight is found out by autograd,
whose version counter every update raises, and where a checkpointed region is computed again by `recomputed`.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

from fusepatch.errors import InBackwardError

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle

KNOWN_STEPS: Mapping[str, frozenset[str]] = {
    "torch": frozenset(
        {
            "ASGD",
            "Adadelta",
            "Adafactor",
            "Adagrad",
            "Adam",
            "AdamW",
            "Adamax",
            "Muon",
            "NAdam",
            "RAdam",
            "RMSprop",
            "Rprop",
            "SGD",
            "SparseAdam",
        }
    ),
    "torchao": frozenset({"_AdamBase"}),
    "bitsandbytes": frozenset({"Optimizer8bit"}),
}
"""By package, the classes whose `step` updates each parameter from that parameter's gradient, state and group alone.
Every 8-bit, 4-bit and float8 Adam of torchao and every optimizer of bitsandbytes but LARS has the step of the class
given here."""

WRAPPERS: Mapping[str, tuple[str, str, str]] = {
    "torch.nn.parallel.distributed.DistributedDataParallel": (
        "the model is in DistributedDataParallel",
        "a parameter's hook sees the gradient of this rank alone, before it is averaged over the ranks",
        "shard with FSDP2 (fully_shard), or train in one process",
    ),
    "torch.nn.parallel.data_parallel.DataParallel": (
        "the model is in DataParallel",
        "it copies the parameters to several devices of one process in every forward",
        "make one device visible (CUDA_VISIBLE_DEVICES), or start one process per device with FSDP2",
    ),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "the model is in FSDP1 (FullyShardedDataParallel)",
        "it recreates its flat parameters and their gradient accumulators in every step",
        "shard with FSDP2 (fully_shard)",
    ),
}
"""By its class's dotted path, a module around the model that is in the way: what was found, why, and what to change."""


_WRAPPERS_OF_STEP = frozenset({"torch.optim.optimizer", "torch.optim.lr_scheduler", "torch.utils._contextlib"})
"""Modules of torch whose wrappers of a step change nothing but what is counted and recorded around it."""


class Caller(NamedTuple):
    """What only the caller knows.

    `asked` to `optimizer_class` are words for messages: what switched this on, how to switch it off, and the settings
    to change. `steps` and `wrappers` are of the caller's libraries what `KNOWN_STEPS` and `WRAPPERS` are of others.
    """

    asked: str = "in-backward"
    undo: str = "train without it"
    without_reentrant: str = "use_reentrant=False"
    optimizer_class: str = ""
    steps: Mapping[str, frozenset[str]] = MappingProxyType({})
    wrappers: Mapping[str, tuple[str, str, str]] = MappingProxyType({})


_NOBODY = Caller()


class Obstacle(NamedTuple):
    """Something that makes in-backward wrong or useless: what was found, why it is in the way, what to change."""

    found: str
    why: str
    change: str

    def __str__(self) -> str:
        return f"{self.found}: {self.why}; {self.change}"


def refuse(where: str, obstacles: Collection[Obstacle], caller: Caller, begun: bool = False) -> None:
    """Raise InBackwardError with every obstacle, if there is one. `where` names whose training it is, `begun` says that
    it has taken steps already."""
    if obstacles:
        listed = "\n".join(f"  - {obstacle}" for obstacle in obstacles)
        consequence = "training did not start and no parameter was changed"
        if begun:
            consequence = "training stops before this step has changed a parameter"
        raise InBackwardError(
            f"the optimizer of {where} cannot run inside backward ({caller.asked}); "
            f"{consequence}:\n{listed}\nChange that, or {caller.undo}."
        )


def obstacles(optimizer: Any, model: torch.nn.Module, caller: Caller = _NOBODY) -> list[Obstacle]:
    """What is in the way in the optimizer, the model and the process, before anything is hooked."""
    return [*_of_optimizer(optimizer, caller), *_of_model(model, caller), *_of_parameters(optimizer), *_of_process()]


def reached_by_several_names(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that are tied: those with more than one name in the model."""
    seen: dict[torch.nn.Parameter, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        seen[parameter] = seen.get(parameter, 0) + 1
    return [parameter for parameter, names in seen.items() if names > 1]


def clips(maximum: float | None) -> bool:
    """Whether a maximum gradient norm changes gradients: any positive finite number does."""
    return maximum is not None and 0 < maximum < float("inf")


def _of_optimizer(optimizer: Any, caller: Caller) -> Iterable[Obstacle]:
    import torch

    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not isinstance(optimizer, torch.optim.Optimizer):
        yield Obstacle(
            f"the optimizer is {name}",
            "it is not a torch.optim.Optimizer, so its step cannot run for one parameter",
            "use a class of torch, torchao or bitsandbytes",
        )
        return
    step = _unwrapped_step(kind.step)
    package, owner = step.__module__.partition(".")[0], step.__qualname__.rpartition(".")[0]
    steps = {**KNOWN_STEPS, **caller.steps}
    if owner not in steps.get(package, ()):
        known = "; ".join(f"{package}: {', '.join(sorted(owners))}" for package, owners in steps.items())
        yield Obstacle(
            f"the step of the optimizer {name} is {step.__module__}.{step.__qualname__}",
            "it is not known to update each parameter from that parameter alone (a closure, or a statistic over all "
            "parameters, is not possible inside backward)",
            f"use one of the classes with a known step, or a subclass that keeps it ({known})",
        )
    yield from _of_step(optimizer)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        yield Obstacle(
            "the optimizer has differentiable=True",
            "autograd would have to record updates that are made while it runs",
            "set differentiable=False",
        )
    manager = getattr(optimizer, "mng", None)
    if package == "bitsandbytes" and (
        getattr(manager, "module_weight_config_triple", ()) or getattr(manager, "index2config", ())
    ):
        yield Obstacle(
            "bitsandbytes' GlobalOptimManager overrides settings of single parameters",
            "it finds them by their place in the param groups (frameworks register some for embeddings with their own "
            "names of 8-bit classes)",
            f"pass the class instead, without overrides ({caller.optimizer_class}bitsandbytes.optim.AdamW8bit), or "
            "take torchao.optim.AdamW8bit",
        )


def _of_step(optimizer: torch.optim.Optimizer) -> Iterable[Obstacle]:
    """What others have put around or in place of the step, which in-backward would leave out."""
    kind = type(optimizer)
    of_class = _foreign_wrapper(kind.step)
    if of_class is not None:
        yield _replaced(f"{kind.__module__}.{kind.__qualname__}.step is wrapped", of_class)
    yield from of_own_step(optimizer)
    for hook in _pre_hooks(optimizer).values():
        if not _is_ours(hook):
            yield Obstacle(
                f"a step pre-hook is registered ({_described(_innermost(hook))})",
                "it runs in step(), when the parameters are updated and the gradients gone, so whatever it does to "
                "gradients (clipping, masking, averaging) would be lost",
                "remove it, and change gradients in hooks of the parameters (Tensor.register_hook), which run before "
                "the update",
            )


def of_own_step(optimizer: Any) -> Iterable[Obstacle]:
    """A `step` that was set on an optimizer, or on a framework's wrapper of one, and does something of its own."""
    own = vars(optimizer).get("step")
    if own is None:
        return
    if _is_compiled(own):
        yield Obstacle(
            "optimizer.step is compiled (torch.compile)",
            "the compiled step takes all parameters at once",
            "leave the step uncompiled",
        )
        return
    wrapper = _foreign_wrapper(own)
    if wrapper is None and _unwrapped_step(own) is not _unwrapped_step(type(optimizer).step):
        wrapper = _unwrapped_step(own)
    if wrapper is not None:
        yield _replaced(f"step was replaced on this {type(optimizer).__qualname__}", wrapper)


def _replaced(found: str, by: Any) -> Obstacle:
    return Obstacle(
        f"{found} ({_described(by)})",
        "in-backward takes the class's own step for each parameter, so whatever that function does besides would be "
        "lost",
        "leave the step as it is",
    )


def _pre_hooks(optimizer: torch.optim.Optimizer) -> dict[int, Callable[..., Any]]:
    from torch.optim import optimizer as module

    return {**module._global_optimizer_pre_hooks, **optimizer._optimizer_step_pre_hooks}


def _innermost(hook: Any) -> Any:
    return inspect.unwrap(hook.func if isinstance(hook, functools.partial) else hook)


def _is_ours(hook: Any) -> bool:
    return str(getattr(_innermost(hook), "__module__", "")).partition(".")[0] == "fusepatch"


def _plain(step: Any) -> Any:
    return step.__func__ if isinstance(step, MethodType) else step


def _unwrapped_step(step: Any) -> Any:
    """The function that updates: wrappers around it (`functools.wraps`) taken off."""
    return inspect.unwrap(_plain(step))


def _foreign_wrapper(step: Any) -> Any:
    """The outermost wrapper of a step that is not torch's own; None where there is none.

    `functools.wraps` copies names, so the module that a wrapper says it is from is that of what it wraps. Its globals
    are its own.
    """
    step = _plain(step)
    while hasattr(step, "__wrapped__"):
        if not isinstance(step, FunctionType) or step.__globals__.get("__name__") not in _WRAPPERS_OF_STEP:
            return step
        step = _plain(step.__wrapped__)  # type: ignore[attr-defined]
    return None


def _described(function: Any) -> str:
    if isinstance(function, FunctionType):
        return f"{function.__code__.co_name} in {function.__globals__.get('__name__')}"
    return f"an object of {type(function).__module__}.{type(function).__qualname__}"


def _is_compiled(step: Any) -> bool:
    while step is not None:
        if hasattr(step, "_torchdynamo_orig_callable"):
            return True
        step = getattr(step, "__wrapped__", None)
    return False


def _of_model(model: torch.nn.Module, caller: Caller) -> Iterable[Obstacle]:
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for module in model.modules() for kind in type(module).__mro__}
    wrappers = {**WRAPPERS, **caller.wrappers}
    for name in sorted(kinds & wrappers.keys()):
        yield Obstacle(*wrappers[name])


def _of_parameters(optimizer: Any) -> Iterable[Obstacle]:
    parameters = [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]
    meshes = [getattr(parameter, "device_mesh", None) for parameter in parameters]
    offloaded = any(
        mesh is not None and mesh.device_type != "cpu" and parameter.device.type == "cpu"
        for mesh, parameter in zip(meshes, parameters, strict=True)
    )
    if offloaded or any(parameter.is_meta for parameter in parameters):
        yield Obstacle(
            "parameters are offloaded to the CPU or the disk",
            "their gradients are still on the way when the hook runs",
            "switch the offload off",
        )


def _of_process() -> Iterable[Obstacle]:
    config = sys.modules.get("torch._dynamo.config")
    if getattr(config, "compiled_autograd", False):
        yield Obstacle(
            "compiled autograd is on (torch._dynamo.config.compiled_autograd)",
            "hooks are traced into the compiled backward, where they would run on fake tensors",
            "switch it off",
        )


class InBackward:
    """Hooks on every trainable parameter of an optimizer that update it inside backward. `remove` takes them away.

    Args:
        optimizer: a torch optimizer without `obstacles`.
        names: the parameters' names, for messages.
        leave: parameters that the ordinary step is to update, since their gradients arrive in several parts.
        armed: whether backward passes from now on update parameters; the attribute can be set at any time between them.
        on_skipped: makes each gradient whose norm is not finite leave its parameter and state as they are, and is
            called after a step with the names of such parameters.
        stepped: returns the optimizer that the training is about to step, which must still be this one.
        caller: the words of its messages.

    Raises:
        InBackwardError: out of backward, where a parameter's hook runs a second time before the optimizer's step; where
            the step was replaced, a step pre-hook was added or another optimizer is stepped since (before anything is
            updated); and where a checkpointed region reads an updated parameter when it is computed again.
        RuntimeError: autograd's own, where a parameter that was saved for backward has been updated.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[torch.Tensor, str],
        leave: Collection[torch.Tensor] = (),
        armed: bool = True,
        on_skipped: Callable[[list[str]], None] | None = None,
        stepped: Callable[[], Any] | None = None,
        caller: Caller = _NOBODY,
    ) -> None:
        self.armed = armed
        self.caller = caller
        self.optimizer = optimizer
        self._names = names
        self._step = _without_hooks(type(optimizer).step)
        self._around = self._around_step()
        self._on_skipped = on_skipped
        self._stepped = stepped
        self.updated: set[torch.Tensor] = set()
        self._by_storage: dict[int, list[torch.Tensor]] = {}
        self._groups: dict[torch.Tensor, dict[str, Any]] = {}
        self._not_finite: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Autograd has one thread per device, and a model may be spread over several.
        self._lock = threading.Lock()
        left = set(leave)
        hooked = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p not in left]
        self.number_of_parameters = len(hooked)
        self._handles: list[RemovableHandle] = [p.register_post_accumulate_grad_hook(self._hook()) for p in hooked]
        self._handles.append(optimizer.register_step_post_hook(self._step_ended))
        _live.add(self)

    def _hook(self) -> Callable[[torch.Tensor], None]:
        # The garbage collector does not see through a parameter's hooks: one that held this object, and with it the
        # optimizer and all parameters, would keep them in memory for good. The optimizer's own hook keeps this object.
        this = weakref.ref(self)

        def update(parameter: torch.Tensor) -> None:
            alive = this()
            if alive is not None:
                alive._update(parameter)

        return update

    def remove(self) -> None:
        """Make every later backward an ordinary one."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _live.discard(self)

    def updated_in(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The parameter whose memory a tensor shares, if it has been updated since the optimizer's last step."""
        if tensor in self.updated:
            return tensor
        for parameter in self._by_storage.get(_storage(tensor), ()):
            (start, end), (first, last) = _extent(parameter), _extent(tensor)
            if start < last and first < end:
                return parameter
        return None

    def name(self, parameter: torch.Tensor) -> str:
        """The parameter's name, or its shape where it has none."""
        return self._names.get(parameter, f"a parameter of shape {tuple(parameter.shape)}")

    def _update(self, parameter: torch.Tensor) -> None:
        if not self.armed:
            return
        with self._lock:
            if not self.updated:
                self._look_again()
                # Checkpoints that were loaded and groups that were added since replace the groups.
                self._groups = {p: group for group in self.optimizer.param_groups for p in group["params"]}
            group = self._groups.get(parameter)
            if group is None or parameter.grad is None:
                return
            if parameter in self.updated:
                raise InBackwardError(
                    f"the gradient of {self.name(parameter)} arrived a second time before the optimizer's step, but "
                    f"its first part has already updated the parameter ({self.caller.asked}). In-backward needs one "
                    "backward per optimizer step: no gradient accumulation, one loss.backward() in each training step, "
                    f"a step of this {type(self.optimizer).__qualname__} (and of no other optimizer) after it, and "
                    f"{self.caller.without_reentrant} where a module runs more than once in a forward. Change that, or "
                    f"{self.caller.undo}; the weights after this step differ from those of an ordinary step."
                )
            self.updated.add(parameter)
            if _storage(parameter):
                self._by_storage.setdefault(_storage(parameter), []).append(parameter)
            self._take_step({**group, "params": [parameter]}, parameter)
            parameter.grad = None
            _raise_version(parameter)

    def _around_step(self) -> tuple[Any, ...]:
        """What others can put around or in place of the step, as something to compare."""
        return (vars(self.optimizer).get("step"), type(self.optimizer).step, *_pre_hooks(self.optimizer))

    def _look_again(self) -> None:
        """Before the first update of a backward: whether the step is still the one that was judged, and will be
        taken."""
        kind = type(self.optimizer)
        around = self._around_step()
        if around != self._around:
            refuse(
                f"this training ({kind.__module__}.{kind.__qualname__})",
                [*_of_step(self.optimizer)],
                self.caller,
                begun=True,
            )
            self._around, self._step = around, _without_hooks(kind.step)
        if self._stepped is not None and self._stepped() is not self.optimizer:
            now = type(self._stepped())
            raise InBackwardError(
                f"the training now steps another optimizer ({now.__module__}.{now.__qualname__}) than the "
                f"{kind.__module__}.{kind.__qualname__} whose step runs inside backward "
                f"({self.caller.asked}): it was replaced during the forward. This step has changed no "
                f"parameter. Replace it between two steps, or {self.caller.undo}."
            )
        for hook in _pre_hooks(self.optimizer).values():
            if _is_ours(hook):  # they judge parameters and states before the first step
                hook(self.optimizer, (), {})

    def _take_step(self, view: dict[str, Any], parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse and view.get("fused"):
            view["fused"] = None  # the fused kernels take no sparse gradients, which nothing showed before
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        flag = self._flag_not_finite(parameter, gradient) if self._on_skipped is not None else None
        if flag is not None and not view.get("fused"):
            if flag.item():
                return
            flag = None
        optimizer.param_groups = [view]
        if flag is not None:
            # The fused kernels read this and leave parameter and state alone, without the host waiting for the device.
            optimizer.found_inf = flag  # type: ignore[attr-defined]
        try:
            self._step(optimizer)
        finally:
            optimizer.param_groups = groups
            if flag is not None:
                del optimizer.found_inf  # type: ignore[attr-defined]

    def _flag_not_finite(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """A float32 scalar on the gradient's device: 1 where the norm of this rank's part is not finite, else 0."""
        import torch

        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        values = local.coalesce().values() if local.is_sparse else local
        flag = (~torch.isfinite(torch.linalg.vector_norm(values, dtype=torch.float32))).float()
        self._not_finite.append((parameter, flag))
        return flag

    def _step_ended(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.updated.clear()
        self._by_storage.clear()
        flags, self._not_finite = self._not_finite, []
        if self._on_skipped is not None and flags:
            import torch

            device = flags[0][1].device
            told = torch.stack([flag.to(device) for _, flag in flags]).tolist()
            skipped = [self.name(parameter) for (parameter, _), value in zip(flags, told, strict=True) if value]
            if skipped:
                self._on_skipped(skipped)


def _without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """The class's step without the wrapper in which torch calls the hooks of others."""
    while getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step


_live: weakref.WeakSet[InBackward] = weakref.WeakSet()


def any_live() -> bool:
    """Whether hooks are in place anywhere."""
    return bool(_live)


def early() -> list[InBackward]:
    """Those that have updated parameters in a backward after which the optimizer has not been stepped yet."""
    return [attached for attached in _live if attached.armed and attached.updated]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or this rank's part of a DTensor."""
    return getattr(tensor, "_local_tensor", tensor)


def _storage(tensor: torch.Tensor) -> int:
    """What tells one storage from another; 0 for a tensor that has none of its own (sparse ones, some subclasses)."""
    try:
        return int(_local(tensor).untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage and the one after the last."""
    tensor = _local(tensor)
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset()
    return int(start * tensor.itemsize), int((start + last + 1) * tensor.itemsize)


def _raise_version(parameter: torch.Tensor) -> None:
    """Make autograd see that a parameter has changed, which torch's fused kernels and those of other packages do
    not."""
    from torch.autograd.graph import increment_version

    increment_version(parameter)
    local = _local(parameter)
    if local is not parameter:
        increment_version(local)


@contextmanager
def explained() -> Iterator[None]:
    """Turn autograd's error about a weight that was updated too early into an InBackwardError that says what to do."""
    try:
        yield
    except RuntimeError as error:
        found = _updated_that_it_names(str(error))
        if not found:
            raise
        names = " or ".join(attached.name(parameter) for attached, parameter in found)
        caller = found[0][0].caller
        raise InBackwardError(
            f"autograd needs a weight in backward that its gradient has already updated ({caller.asked}): by shape and "
            f"version it is {names}. {read_detached(caller)} Autograd's message: {error}"
        ) from error


def _updated_that_it_names(message: str) -> list[tuple[InBackward, torch.Tensor]]:
    """The updated parameters that autograd's error can be about: the same version, and as many elements or a part of
    them."""
    found = re.search(r"modified by an inplace operation: \[\S+ \[([\d, ]*)\]\].* is at version (\d+);", message)
    if found is None:
        return []
    size = math.prod(int(length) for length in found[1].split(", ") if length)
    return [
        (attached, parameter)
        for attached in early()
        for parameter in attached.updated
        if parameter._version == int(found[2]) and size and parameter.numel() % size == 0
    ]


def read_detached(caller: Caller) -> str:
    """What may have read a weight after its update, and what to do."""
    return (
        "A weight that is also used without its gradient (weight.detach(), requires_grad switched off for a part of "
        "the forward) may be read after its update; the weights after this step differ from those of an ordinary step. "
        f"Use a copy there (weight.detach().clone()), or {caller.undo}."
    )
