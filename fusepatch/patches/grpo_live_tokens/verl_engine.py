"""verl's FSDP engine, on request: sequences whose advantages are all 0 are left out of the update.

`FSDPEngine.forward_backward_batch` counts the tokens of the whole batch over all ranks, then calls
`prepare_micro_batches`. The rows are left out there, so that every denominator of the loss is that of the whole batch.
What the loss is made of is seen in the first, and the rows in the second.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from fusepatch import settings
from fusepatch.engine import ledger, versions
from fusepatch.engine.patch import Proceed
from fusepatch.patches.grpo_live_tokens import obstacles
from fusepatch.patches.grpo_live_tokens.handlers import ID, ZERO_ADVANTAGE
from fusepatch.patches.upstreams import VERL

KNOWN = ">=0.7.1"
LOSSES = frozenset({"vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "cispo"})
"""verl's policy losses that are a sum over tokens, each proportional to the token's advantage. `geo_mean` divides by
the rows of the micro-batch, `clip_cov` and `kl_cov` choose tokens by statistics of it, `dro` adds a penalty that
advantages do not scale."""
AGGREGATIONS = frozenset(
    {"token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"}
)

_dropping: ContextVar[bool] = ContextVar("fusepatch_dropping", default=False)


def forward_backward_batch(
    proceed: Proceed, engine: Any, data: Any, loss_function: Any, forward_only: bool = False, **kwargs: Any
) -> Any:
    """Handler of `FSDPEngine.forward_backward_batch`: decides whether rows of this batch may be left out."""
    if forward_only or "advantages" not in data or settings.current().grpo_zero_advantage != "drop":
        return proceed(engine, data, loss_function, forward_only=forward_only, **kwargs)
    ledger.count_call(ID)
    found = list(_obstacles(engine, data, loss_function))
    for obstacle in found:
        ledger.refused(ID, f"verl: sequences of advantage 0 stay in the update ({ZERO_ADVANTAGE}=drop): {obstacle}")
    token = _dropping.set(not found)
    try:
        return proceed(engine, data, loss_function, forward_only=forward_only, **kwargs)
    finally:
        _dropping.reset(token)


def prepare_micro_batches(proceed: Proceed, data: Any, dp_group: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Handler of `verl.workers.engine.utils.prepare_micro_batches`: gives it the rows that the update needs."""
    if _dropping.get():
        data = _without_dead_rows(data, dp_group)
    return proceed(data, dp_group, *args, **kwargs)


def update_policy(proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
    """Handler of `DataParallelPPOActor.update_policy` of verl up to 0.7.1: says what cannot be done there."""
    if settings.current().grpo_zero_advantage == "drop":
        ledger.count_call(ID)
        ledger.refused(
            ID,
            "verl: sequences of advantage 0 stay in the update (FUSEPATCH_GRPO_ZERO_ADVANTAGE=drop): the legacy worker "
            "divides the loss by the tokens of each micro-batch, so it would not be the same without them; set "
            "trainer.use_legacy_worker_impl=disable (verl 0.7.1), or use verl 0.8 or later",
        )
    return proceed(*args, **kwargs)


def rows_to_run(live: Sequence[bool], lengths: Sequence[int], number: int) -> list[int]:
    """The rows that enter the model, in their order: all live ones, and the shortest of the others until there are
    `number`.

    `live` says of each row whether it carries a gradient, `lengths` has its tokens.
    """
    dead = sorted((row for row, is_live in enumerate(live) if not is_live), key=lambda row: lengths[row])
    kept = [row for row, is_live in enumerate(live) if is_live]
    return sorted(kept + dead[: max(number - len(kept), 0)])


def _without_dead_rows(data: Any, dp_group: Any) -> Any:
    import torch
    from verl.utils import tensordict_utils

    carries = (_padded(data["advantages"]) != 0) & _padded(data["response_mask"]).bool()  # NaN is not 0, and stays
    live = carries.any(dim=-1).tolist()
    # Every rank runs as many rows as the one that needs most: the number of micro-batches must be the same on all, and
    # a rank with fewer rows than another has micro-batches could not form them. The slowest rank sets the time anyway.
    number = torch.tensor([sum(live)], device=data["advantages"].device)
    torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MAX, group=dp_group)
    wanted = max(int(number.item()), 1)
    if not tensordict_utils.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
        micro_batch = data["micro_batch_size_per_gpu"]
        wanted = -(-wanted // micro_batch) * micro_batch
    if wanted >= len(live):
        return data
    rows = rows_to_run(live, data["input_ids"].offsets().diff().tolist(), wanted)
    ledger.replaced(ID, "verl: an update ran without sequences whose advantages are all 0")
    return tensordict_utils.index_select_tensor_dict(data, rows)


def _padded(tensor: Any) -> Any:
    return tensor.to_padded_tensor(0) if tensor.is_nested else tensor


def _obstacles(engine: Any, data: Any, loss_function: Any) -> Iterator[str]:
    """Why the gradient might not be the same without the rows of advantage 0."""
    found = versions.find(VERL)
    if found is None or versions.is_within(found.version, KNOWN) is not True:
        yield f"{found} is none of the releases {KNOWN}, of which it is known what the loss divides by"
        return
    from verl.trainer.ppo import core_algos
    from verl.utils import tensordict_utils
    from verl.workers.utils.losses import ppo_loss

    def of_batch(key: str, default: Any) -> Any:
        return tensordict_utils.get_non_tensor_data(data=data, key=key, default=default)

    if not isinstance(loss_function, functools.partial) or loss_function.func is not ppo_loss:
        yield f"the loss is {_name(loss_function)}, not verl's ppo_loss, and what it divides by is not known"
        return
    config = loss_function.keywords.get("config")
    if config is None or loss_function.args or set(loss_function.keywords) != {"config"}:
        yield "verl's ppo_loss was bound to other arguments than config"
        return
    mode = config.policy_loss.get("loss_mode", "vanilla")
    function = core_algos.POLICY_LOSS_REGISTRY.get(mode)
    if mode not in LOSSES or getattr(function, "__module__", None) != core_algos.__name__:
        yield (
            f"policy_loss.loss_mode={mode} ({_name(function)}) is not known to be a sum over tokens, each times its "
            "advantage"
        )
    if config.loss_agg_mode not in AGGREGATIONS:
        yield f"loss_agg_mode={config.loss_agg_mode} is not known"
    if of_batch("global_batch_size", None) is None and config.loss_agg_mode.startswith("seq-mean"):
        yield "the batch has no global_batch_size, so the loss divides by the rows of each micro-batch"
    if (
        config.loss_agg_mode == "seq-mean-token-sum-norm"
        and config.loss_scale_factor is None
        and data["response_mask"].is_nested
    ):
        yield "loss_scale_factor is not set, so the loss divides by the longest response of each micro-batch"
    if config.entropy_coeff != 0 or config.use_kl_loss:
        yield (
            f"entropy_coeff={config.entropy_coeff} and use_kl_loss={config.use_kl_loss}: their gradient does not "
            "depend on the advantage"
        )
    elif of_batch("calculate_entropy", False):
        yield "calculate_entropy is on, and the entropy that is logged is that of all sequences"
    if of_batch("return_model_output", False):
        yield "the caller asked for the model's output of every sequence (return_model_output)"
    if of_batch("force_group_size", 1) != 1:
        yield "force_group_size is not 1: rows stand in groups that must not be cut"
    if data["advantages"].dim() != 2 or not data["input_ids"].is_nested:
        yield "advantages are not [sequences, tokens], or input_ids are padded"
    if engine.get_data_parallel_size() > 1 and obstacles.has_list_of_experts(engine.module):
        yield (
            "the model has experts in a ModuleList, and a rank whose tokens miss one would have no gradient to exchange"
        )


def _name(value: Any) -> str:
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
