"""Handlers of the base class of Liger-Kernel's fused linear GRPO loss, and of the copy of it that TRL 1.13 ships.

Upstream's `ppo_loss_fn` stays the policy: it is plain torch on [B, T] tensors, called here with log-probabilities that
`fusepatch.loss` has computed. What upstream's own forward is needed for (its assertions, shapes that only its chunks
give a meaning to, other devices) is left to it, with the reason recorded.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from fusepatch import settings
from fusepatch.engine import ledger
from fusepatch.engine.patch import Proceed, Target
from fusepatch.errors import LossUnavailableError
from fusepatch.patches.liger_grpo_loss import own_code, sharded
from fusepatch.patches.liger_grpo_loss.model_logits import ModelLogits, model_logits

if TYPE_CHECKING:
    import torch

    from fusepatch.loss import Gradients, LogitMap, Policy, PolicyInputs, PolicyLoss, PolicyTraits, ReferenceHead

ID = "liger.grpo_loss"

HEAD_PARAMETERS = frozenset(
    {
        "cls",
        "ctx",
        "_input",
        "weight",
        "selected_token_ids",
        "attention_mask",
        "advantages",
        "bias",
        "ref_per_token_logps",
        "old_per_token_logps",
        "ref_input",
        "ref_weight",
        "ref_bias",
        "temperature",
        "compiled",
        "use_ref_model",
        "chunk_size",
        "vllm_is_ratio",
    }
)
"""Parameters of upstream's forward that do not go to `ppo_loss_fn` under their own name; every other one does."""

TENSORS = (
    "_input",
    "weight",
    "bias",
    "selected_token_ids",
    "attention_mask",
    "advantages",
    "old_per_token_logps",
    "ref_per_token_logps",
    "ref_input",
    "ref_weight",
    "ref_bias",
    "vllm_is_ratio",
)
"""Parameters of upstream's forward that are tensors, or None."""

KNOWN_PARAMETERS = HEAD_PARAMETERS | {
    "epsilon_low",
    "epsilon_high",
    "beta",
    "loss_type",
    "max_completion_length",
    "importance_sampling_level",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "delta",
    "use_bias_correction_kl",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
    "num_items_in_batch",
}
"""What the table of `fusepatch.loss.policy_traits` was made with. A later parameter that is in use makes it void."""

NORMALISED_OVER_RANKS = ("dapo", "cispo", "vespo")
"""Loss types whose `ppo_loss_fn` sums the number of tokens over all ranks, unless it is given `num_items_in_batch`."""


UPSTREAM = "upstream's own forward: "


class _PolicyRaisedError(Exception):
    """Upstream's `ppo_loss_fn` raised."""


class _Obstacle(NamedTuple):
    """Why upstream's own code takes a call. `mistake`: it will raise, and `text` says what is wrong with the
    argument."""

    text: str
    mistake: bool = False


class _Call(NamedTuple):
    """One call of the base's forward: its arguments by name, with upstream's defaults filled in."""

    cls: Any
    ctx: Any
    arguments: Mapping[str, Any]
    original: Any
    model: ModelLogits = ModelLogits()

    def get(self, name: str, absent: Any = None) -> Any:
        return self.arguments.get(name, absent)

    @property
    def reference_is_used(self) -> bool:
        return bool(self.get("use_ref_model"))

    @property
    def old_api(self) -> bool:
        """Up to 0.7, `ppo_loss_fn` takes log-probabilities of the whole vocabulary and gathers."""
        return "per_token_logps" not in _parameters(self.cls.ppo_loss_fn)


def forward(proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
    """Handler of the base's `forward(cls, ctx, ...)`: returns the loss and the metrics as upstream does."""
    ledger.count_call(ID)
    if settings.current().head == "keep":
        ledger.fallback(ID, f"{UPSTREAM}FUSEPATCH_HEAD=keep")
        return proceed(*args, **kwargs)
    original = proceed.target.original
    try:
        bound = _signature(original).bind(*args, **kwargs)
    except TypeError:
        return proceed(*args, **kwargs)
    bound.apply_defaults()
    model = model_logits(*(bound.arguments[name] for name in ("_input", "weight", "bias")))
    model.report()
    call = _Call(bound.arguments["cls"], bound.arguments["ctx"], bound.arguments, original, model)
    obstacle = _not_known(call, proceed.target) or _obstacle(call)
    if obstacle is not None:
        return _to_upstream(proceed, args, kwargs, model, obstacle)
    try:
        with _hooks_of_others_off():
            result = _compute(call)
    except _PolicyRaisedError as raised:
        error = raised.__cause__
        return _to_upstream(
            proceed, args, kwargs, model, _Obstacle(f"ppo_loss_fn raised {type(error).__name__}: {error}")
        )
    return _finished(call, result)


def backward(proceed: Proceed, ctx: Any, grad_output: Any, *grad_metrics: Any) -> Any:
    """Handler of the base's `backward`: scales what forward saved, without comparing on the host.

    Also serves graphs that upstream's forward has built: the saved tensors have the same layout.
    """
    if settings.current().head == "keep" or not own_code.is_own(proceed.target):
        return proceed(ctx, grad_output, *grad_metrics)
    from fusepatch.loss import scale_gradients

    saved = [None if gradient is None or _is_placeholder(gradient) else gradient for gradient in ctx.saved_tensors]
    scaled = scale_gradients(saved, grad_output, shared=getattr(ctx, "fusepatch_shared", True))
    hidden, weight, bias = sharded.shard_gradients(ctx, scaled)
    rest = _backward_length(proceed.target.original) - 6
    return (hidden, weight, None, None, None, bias, *[None] * rest)


def _finished(call: _Call, result: PolicyLoss) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    import torch

    for reason in result.backend.reasons:
        ledger.fallback(ID, reason)
    _save(call, result.gradients)
    # As upstream's accumulators: a 0-dim metric arrives in the default dtype.
    metrics = tuple(
        torch.zeros((), device=metric.device).add_(metric) if metric.ndim == 0 else metric for metric in result.metrics
    )
    return result.loss.to(torch.float32), metrics


def _save(call: _Call, gradients: Gradients) -> None:
    from fusepatch.loss import saved_tensors_are_shared

    if not _has_backward(call):
        return
    # Upstream's backward up to 0.8.3 multiplies the first two whatever they are. With something to multiply in their
    # place, a graph that was built here outlives the patch. Backward runs, too, where only another input asks for a
    # gradient.
    placeholder = call.get("_input").new_empty(0)
    hidden_gradient = None if gradients.hidden is None else gradients.hidden.to(placeholder.dtype)
    made = (hidden_gradient, gradients.weight, gradients.bias)
    hidden, weight, bias = (placeholder if gradient is None else gradient for gradient in made)
    call.ctx.fusepatch_shared = saved_tensors_are_shared()
    call.ctx.save_for_backward(hidden, weight, bias if call.get("bias") is not None else None)


def _has_backward(call: _Call) -> bool:
    """Whether autograd will run backward for this call: `needs_input_grad` is the same with and without grad mode, but
    a node that nothing will run has no next functions.
    """
    return len(call.ctx.next_functions) > 0


def _is_placeholder(gradient: torch.Tensor) -> bool:
    return tuple(gradient.shape) == (0,)


def _compute(call: _Call) -> PolicyLoss:
    import dataclasses

    from fusepatch.loss import BackendUnavailableError, Wanted, linear_policy_loss

    read = settings.current()
    traits = _traits(call)
    num_items = _global_number_of_items(call)
    if _collective_in_policy(call) and num_items is None:
        # The policy must then be called equally often on every rank, however many rows each has.
        traits = dataclasses.replace(traits, separable=False, separable_by_sequence=False, fixed_coefficients=False)
    ratio = call.get("vllm_is_ratio")
    if ratio is not None and ratio.dim() == 1:
        ratio = ratio.unsqueeze(-1)
    reference = call.get("ref_per_token_logps") if call.reference_is_used else None
    weight, bias = sharded.gather_head(call.ctx, call.get("weight"), call.get("bias"))
    hidden = call.get("_input")
    try:
        return linear_policy_loss(
            hidden.float() if call.model.float32_head else hidden,
            weight,
            call.get("selected_token_ids"),
            call.get("attention_mask"),
            call.get("advantages"),
            _policy(call, num_items),
            traits,
            Wanted(*(_is_wanted(call, name, index) for name, index in (("_input", 0), ("weight", 1), ("bias", 5)))),
            bias=bias,
            old_log_probabilities=call.get("old_per_token_logps"),
            reference_log_probabilities=reference,
            reference_head=_reference_head(call),
            sampling_ratio=ratio,
            logit_map=_logit_map(call),
            prefer=read.head_prefer,
            chunk_mib=read.head_chunk_mib,
            backend=read.head,
        )
    except BackendUnavailableError as error:
        raise LossUnavailableError(
            f"FUSEPATCH_HEAD=triton cannot be followed: {error} Nothing was computed; unset the variable."
        ) from error
    except _PolicyRaisedError:
        raise
    except Exception as error:
        if _collective_in_policy(call):
            # Upstream's forward would begin its collectives anew while the other ranks are past theirs.
            raise LossUnavailableError(f"the loss could not be computed: {type(error).__name__}: {error}") from error
        raise


def _hooks_of_others_off() -> contextlib.AbstractContextManager[Any]:
    """Keep the policy's small graph, which is gone before forward returns, from the saved-tensor hooks of a surrounding
    checkpoint or offload: a checkpoint would compute the whole forward again for it.
    """
    import torch

    from fusepatch.loss import saved_tensors_are_shared

    if not saved_tensors_are_shared():
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _is_wanted(call: _Call, name: str, index: int) -> bool:
    """Whether autograd will ask for the gradient of an argument."""
    tensor = call.get(name)
    if tensor is None or not _has_backward(call):
        return False
    needed = call.ctx.needs_input_grad
    return bool(tensor.requires_grad or (index < len(needed) and needed[index]))


def _reference_head(call: _Call) -> ReferenceHead | None:
    from fusepatch.loss import ReferenceHead

    if not _reference_is_computed(call) or call.get("beta") == 0.0:
        return None
    weight, bias = sharded.gather_reference(call.get("ref_weight"), call.get("ref_bias"))
    return ReferenceHead(call.get("ref_input"), weight, bias)


def _logit_map(call: _Call) -> LogitMap:
    from fusepatch.loss import LogitMap

    return LogitMap(
        temperature=call.get("temperature", 1.0),
        logit_scale=call.model.map.scale,
        final_logit_softcapping=call.model.map.cap,
    )


def _traits(call: _Call) -> PolicyTraits:
    from fusepatch.loss import policy_traits

    return policy_traits(
        call.get("loss_type", "bnpo"),
        call.get("importance_sampling_level", "token"),
        old_given=call.get("old_per_token_logps") is not None,
        beta=call.get("beta"),
        bias_correction_kl=bool(call.get("use_bias_correction_kl", False)),
    )


def _not_known(call: _Call, target: Target) -> _Obstacle | None:
    """Why nothing may be assumed about the policy or the model's logits: only upstream's own forward cuts the batch and
    the log-probabilities as such a policy expects.
    """
    if not call.model.understood:
        return _Obstacle("the model's logits are not what its lm_head gives")
    replaced = own_code.replaced_in(call.cls, target)
    if replaced is not None:
        return _Obstacle(replaced)
    unknown = _unknown_parameter_in_use(call)
    return None if unknown is None else _Obstacle(f"{unknown} is in use, an argument that fusepatch does not know")


def _unknown_parameter_in_use(call: _Call) -> str | None:
    defaults = _signature(call.original).parameters
    plain = (type(None), bool, int, float, str)
    for name, value in call.arguments.items():
        if name not in KNOWN_PARAMETERS:
            default = defaults[name].default
            if not (value is default or (isinstance(value, plain) and value == default)):
                return name
    return None


def _collective_in_policy(call: _Call) -> bool:
    import torch

    sums_over_ranks = call.get("loss_type") in NORMALISED_OVER_RANKS and call.get("num_items_in_batch") is None
    return bool(sums_over_ranks and torch.distributed.is_available() and torch.distributed.is_initialized())


def _global_number_of_items(call: _Call) -> torch.Tensor | None:
    """The number of tokens of all ranks, by one collective for the whole call; None where the policy needs no
    collective or cannot be given the number (before 0.8.1).
    """
    import torch

    if "num_items_in_batch" not in call.arguments or not _collective_in_policy(call):
        return None
    count: torch.Tensor = call.get("attention_mask").to(torch.float32).sum()
    torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.SUM)
    return count


def _policy(call: _Call, num_items: torch.Tensor | None) -> Policy:
    import torch

    function = call.cls.ppo_loss_fn
    old_api = call.old_api
    passed = {name: value for name, value in call.arguments.items() if name not in HEAD_PARAMETERS}
    if num_items is not None:
        passed["num_items_in_batch"] = num_items
    takes_ratio = "vllm_is_ratio" in call.arguments

    def policy(inputs: PolicyInputs) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        values = inputs.log_probabilities
        if old_api:
            # A vocabulary of one token, which is the selected one, leaves upstream's gather nothing to choose.
            index = torch.zeros(values.shape, dtype=torch.int64, device=values.device)
            given = {"log_probs": values.unsqueeze(-1), "selected_token_ids": index, "ref_log_probs": None}
        else:
            given = {"per_token_logps": values}
        if takes_ratio:
            given["vllm_is_ratio"] = inputs.sampling_ratio
        try:
            loss, metrics = function(
                **given,
                attention_mask=inputs.mask,
                advantages=inputs.advantages,
                full_attention_mask=call.get("attention_mask"),
                ref_per_token_logps=inputs.reference_log_probabilities,
                old_per_token_logps=inputs.old_log_probabilities,
                **passed,
            )
        except Exception as error:
            raise _PolicyRaisedError from error
        return loss, metrics

    return policy


def _obstacle(call: _Call) -> _Obstacle | None:
    """Why upstream's own forward has to take this call; None where it need not."""
    return _unsupported(call) or _refused_by_upstream(call) or _misshapen(call)


def _unsupported(call: _Call) -> _Obstacle | None:
    from fusepatch.loss import unsupported_device

    hidden = call.get("_input")
    problem = unsupported_device(hidden.device)
    if problem is not None:
        if settings.current().head == "triton":
            raise LossUnavailableError(
                f"FUSEPATCH_HEAD=triton cannot be followed: {problem}. Nothing was computed; unset the variable."
            )
        return _Obstacle(problem)
    names = _parameters(call.cls.ppo_loss_fn)
    if not {"attention_mask", "advantages", "full_attention_mask"} <= names or not names & {
        "per_token_logps",
        "log_probs",
    }:
        return _Obstacle(f"{call.cls.__name__}.ppo_loss_fn takes other arguments than the known ones")
    if not isinstance(call.get("temperature", 1.0), int | float) or not call.get("temperature", 1.0) > 0:
        return _Obstacle("the temperature is not a positive number")
    gathered = ("weight", "bias", "ref_weight", "ref_bias")
    for name in TENSORS:
        tensor = call.get(name)
        if tensor is not None and name not in gathered and sharded.is_sharded(tensor):
            return _Obstacle(f"{name} is a DTensor")
    problem = sharded.why_not_gathered(*map(call.get, gathered))
    return None if problem is None else _Obstacle(problem)


def _refused_by_upstream(call: _Call) -> _Obstacle | None:
    """Arguments that upstream asserts about, warns of or fails on, in words of its own that differ between releases."""
    import torch

    targets = call.get("selected_token_ids")
    # Up to 0.7, they go to gather.
    if targets.dtype != torch.int64 and (targets.dtype != torch.int32 or call.old_api):
        return _Obstacle(f"selected_token_ids are {targets.dtype}")
    for name in ("_input", "weight"):
        if call.get(name).dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            return _Obstacle(f"{name} is {call.get(name).dtype}")
    chunk_size = call.get("chunk_size", 1)
    if not isinstance(chunk_size, int) or chunk_size < 1:
        return _Obstacle(f"chunk_size={chunk_size!r} is not a positive integer")
    if call.reference_is_used:
        given = [name for name in ("ref_per_token_logps", "ref_input") if call.get(name) is not None]
        if len(given) != 1:
            found = "both ref_per_token_logps and ref_input are given" if given else "no reference is given"
            return _Obstacle(f"use_ref_model=True and {found}")
    if call.get("loss_type") == "dr_grpo" and call.get("max_completion_length") is None:
        return _Obstacle("loss_type='dr_grpo' without max_completion_length")
    return None


def _misshapen(call: _Call) -> _Obstacle | None:
    """A tensor whose shape or device is not the plain one. Upstream refuses most of these, and gives some a meaning
    that depends on its release and on its chunks (a bias that is longer than the vocabulary, or one number for all of
    it).
    """
    hidden, weight = call.get("_input"), call.get("weight")
    if hidden.dim() != 3:
        return _wrong("_input", hidden, "[B, T, H]")
    batch, length, width = hidden.shape
    if weight.dim() != 2 or weight.shape[1] != width:
        shape = tuple(weight.shape)
        return _Obstacle(
            f"weight has shape {shape}, wanted [V, {width}], the whole lm_head: this is a shard (FSDP1 flattens it, "
            f"ZeRO-3 leaves it empty outside its gather context); gather it around the call of the loss",
            mistake=True,
        )
    tokens = (batch, length)
    wanted = {
        "selected_token_ids": tokens,
        "attention_mask": tokens,
        "old_per_token_logps": tokens,
        "bias": (weight.shape[0],),
    }
    if call.reference_is_used:
        wanted["ref_per_token_logps"] = tokens
    for name, shape in wanted.items():
        tensor = call.get(name)
        if tensor is not None and tuple(tensor.shape) != shape:
            return _wrong(name, tensor, str(list(shape)))
    advantages = call.get("advantages")
    if advantages.dim() != 1:
        return _Obstacle(f"advantages have {advantages.dim()} dimensions: upstream's chunks give them their meaning")
    if advantages.shape[0] != batch:
        return _wrong("advantages", advantages, f"[{batch}]")
    ratio = call.get("vllm_is_ratio")
    if ratio is not None and tuple(ratio.shape) not in ((batch,), (batch, 1), tokens):
        return _Obstacle("vllm_is_ratio has none of the shapes [B], [B, 1], [B, T]")
    used = set(TENSORS)
    if not _reference_is_computed(call):
        used -= {"ref_input", "ref_weight", "ref_bias"}
    elif (obstacle := _misshapen_reference(call, tokens)) is not None:
        return obstacle
    if not call.reference_is_used:
        used.discard("ref_per_token_logps")
    for name in TENSORS:
        tensor = call.get(name)
        if name in used and tensor is not None and tensor.device != hidden.device:
            return _Obstacle(f"{name} is on {tensor.device}, _input on {hidden.device}", mistake=True)
    return None


def _reference_is_computed(call: _Call) -> bool:
    """Whether upstream makes the reference's log-probabilities from hidden states."""
    return call.reference_is_used and call.get("ref_per_token_logps") is None


def _misshapen_reference(call: _Call, tokens: tuple[int, int]) -> _Obstacle | None:
    hidden, weight, bias = (call.get(name) for name in ("ref_input", "ref_weight", "ref_bias"))
    if hidden.dim() != 3 or tuple(hidden.shape[:2]) != tokens:
        return _wrong("ref_input", hidden, f"{[*tokens]} and the width of ref_weight")
    if weight is None:
        return _Obstacle("ref_input is given without ref_weight", mistake=True)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[2]:
        return _wrong("ref_weight", weight, f"[V, {hidden.shape[2]}]")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        return _wrong("ref_bias", bias, f"[{weight.shape[0]}]")
    return None


def _wrong(name: str, tensor: torch.Tensor, wanted: str) -> _Obstacle:
    return _Obstacle(f"{name} has shape {tuple(tensor.shape)}, wanted {wanted}", mistake=True)


def _to_upstream(
    proceed: Proceed, args: tuple[Any, ...], kwargs: Mapping[str, Any], model: ModelLogits, obstacle: _Obstacle
) -> Any:
    wanted = settings.current().head
    if wanted == "auto" or obstacle.mistake:
        ledger.fallback(ID, f"{UPSTREAM}{obstacle.text}")
    else:
        ledger.refused(
            ID,
            f"{UPSTREAM}{obstacle.text}; FUSEPATCH_HEAD={wanted} cannot be followed in this call; unset the variable",
        )
    if model.described:
        ledger.refused(
            ID,
            f"the model's {model.described} is left out of the loss, since upstream's own forward computes it "
            f"({obstacle.text}): log-probabilities differ from the model's; train this model without Liger's loss",
            kind=f"left out by upstream's own forward: {model.described}",
        )
    if not obstacle.mistake:
        return proceed(*args, **kwargs)
    try:
        return proceed(*args, **kwargs)
    except Exception as error:
        if type(error) in (AssertionError, IndexError, RuntimeError, TypeError, ValueError):
            raise type(error)(f"{obstacle.text} (upstream: {error})") from error
        raise


@functools.lru_cache(maxsize=32)
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


@functools.lru_cache(maxsize=32)
def _parameters(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


@functools.lru_cache(maxsize=32)
def _backward_length(original: Any) -> int:
    """How many gradients upstream's backward returns: it has one line for each argument, and they differ by release."""
    nothing_saved = SimpleNamespace(saved_tensors=(None, None, None))
    return len(original(nothing_saved, 1.0))
