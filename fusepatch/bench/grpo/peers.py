"""The implementations, each as its own callers use it: one function that loads it and gives the step that is timed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fusepatch.bench.grpo.cases import Case
from fusepatch.bench.grpo.inputs import Inputs, gradient_rows, policy_loss
from fusepatch.engine.patch import PatchRecord

Step = Callable[[], "torch.Tensor | None"]
"""Runs forward and backward once, leaving gradients in the leaves, and returns the loss; None where there is none."""
Maker = Callable[[Inputs, Case], Step]

FLOOR_ROWS = 2048
TRL_CHUNK = 32768
"""The `chunk_size` that TRL 1.15 and 1.16 pass (trl/trainer/utils.py, `_CHUNKED_LOGPROB_CHUNK_SIZE`)."""


class NotInstalledError(Exception):
    """The implementation's library, or the part of it that is measured, is not there."""


class DoesNotApplyError(Exception):
    """The implementation has nothing of its own to show in this case."""


@dataclass(frozen=True)
class Implementation:
    """``distributions`` are the names whose version is shown, the first that is installed."""

    load: Callable[[], Maker]
    distributions: tuple[str, ...] = ()

    def version(self) -> str | None:
        for name in self.distributions:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return f"{name.replace('_', '-')} {importlib.metadata.version(name)}"
        return None


def _liger() -> Maker:
    _require("liger_kernel")
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
    except ImportError as error:
        raise NotInstalledError(f"this liger-kernel has no LigerFusedLinearGRPOLoss ({error})") from error

    def make(inputs: Inputs, case: Case) -> Step:
        options = {"importance_sampling_level": "sequence"} if case.level == "sequence" else {}
        loss_function = LigerFusedLinearGRPOLoss(
            beta=case.beta, loss_type="bnpo", use_ref_model=case.beta != 0, **options
        )
        given = {} if inputs.ratio is None else {"vllm_is_ratio": inputs.ratio}

        def step() -> torch.Tensor:
            loss, _ = loss_function(
                inputs.hidden,
                inputs.weight,
                inputs.targets,
                inputs.mask,
                inputs.advantages,
                ref_per_token_logps=inputs.reference,
                old_per_token_logps=inputs.old,
                **given,
            )
            return _backward(loss)

        return step

    return make


def _fusepatch() -> Maker:
    import fusepatch

    _require("liger_kernel")
    fusepatch.activate()
    make_plain = _liger()

    def make(inputs: Inputs, case: Case) -> Step:
        plain = make_plain(inputs, case)

        before = _patch_record().calls
        plain()
        record = _patch_record()
        if record.calls == before:
            raise RuntimeError(f"the patch did not run; liger.grpo_loss is {record.outcome.value}: {record.reason}")
        delegated = [note.text for note in record.fallbacks if note.text.startswith("upstream's own forward")]
        if delegated:
            raise RuntimeError(f"the patch left the call to upstream: {'; '.join(delegated)}")
        return plain

    return make


def _fusepatch_memory() -> Maker:
    os.environ["FUSEPATCH_HEAD_PREFER"] = "memory"
    make_plain = _fusepatch()

    def make(inputs: Inputs, case: Case) -> Step:
        if not case.trainable:
            raise DoesNotApplyError("FUSEPATCH_HEAD_PREFER changes nothing for a frozen head")
        return make_plain(inputs, case)

    return make


def _patch_record() -> PatchRecord:
    import fusepatch

    return next(record for record in fusepatch.status() if record.id == "liger.grpo_loss")


def _trl() -> Maker:
    _require("trl")
    try:
        module = importlib.import_module("trl.kernels.chunked_logprob")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("trl"):
            raise
        raise NotInstalledError("this TRL has no chunked log-probabilities; TRL 1.15 and later do") from error
    function = module.ChunkedLogProbFunction

    def values(inputs: Inputs, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = function.apply(hidden, inputs.weight, None, targets, 1.0, TRL_CHUNK, None, 1.0, ())[0]
        return found

    return _with_policy(values)


def _verl() -> Maker:
    _require("verl")
    name = "verl.utils.kernel.linear_cross_entropy"
    try:
        module = importlib.import_module(name)
    except ImportError:
        # The package's own __init__ wants Ray and more, which the kernels do not.
        _put_bare_packages("verl", "verl.utils")
        module = importlib.import_module(name)

    def values(inputs: Inputs, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = module.linear_cross_entropy(hidden, inputs.weight, targets, 1.0, "none")[0]
        return found

    return _with_policy(values)


def _put_bare_packages(*names: str) -> None:
    """Put packages in `sys.modules` without what their `__init__` would run."""
    for loaded in [module for module in sys.modules if module.partition(".")[0] == names[0]]:
        del sys.modules[loaded]
    spec = importlib.util.find_spec(names[0])
    if spec is None or not spec.submodule_search_locations:
        raise NotInstalledError(f"{names[0]} is not a package here")
    root = next(iter(spec.submodule_search_locations))
    for name in names:
        package = types.ModuleType(name)
        package.__path__ = [os.path.join(root, *name.split(".")[1:])]
        sys.modules[name] = package


def _cut_cross_entropy() -> Maker:
    _require("cut_cross_entropy")
    linear_cross_entropy = importlib.import_module("cut_cross_entropy").linear_cross_entropy

    def values(inputs: Inputs, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = -linear_cross_entropy(hidden, inputs.weight, targets, reduction="none")
        return found

    return _with_policy(values)


def _full_logits() -> Maker:
    def values(inputs: Inputs, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = hidden @ inputs.weight.t()
        return -torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")

    return _with_policy(values)


def _with_policy(values: Callable[[Inputs, torch.Tensor, torch.Tensor], torch.Tensor]) -> Maker:
    """Log-probabilities of the valid tokens, [N, H] and [N] to [N], and the policy in torch on [B, T]."""

    def make(inputs: Inputs, case: Case) -> Step:
        valid = inputs.mask != 0 if case.ragged else None

        def step() -> torch.Tensor:
            if valid is None:
                found = values(inputs, inputs.hidden.flatten(0, 1), inputs.targets.flatten()).view(inputs.mask.shape)
            else:
                found = values(inputs, inputs.hidden[valid], inputs.targets[valid])
                found = found.new_zeros(valid.shape).masked_scatter(valid, found)
            return _backward(policy_loss(found.float(), inputs, case))

        return step

    return make


def _floor() -> Maker:
    def make(inputs: Inputs, case: Case) -> Step:
        hidden = inputs.hidden.detach()[gradient_rows(inputs, case)]
        weight = inputs.weight.detach()
        rows = min(FLOOR_ROWS, hidden.shape[0])
        logits = hidden.new_empty((rows, weight.shape[0]))
        grad_logits = torch.randn_like(logits)
        grad_hidden = hidden.new_empty((rows, weight.shape[1]))
        grad_weight = torch.empty_like(weight) if case.trainable else None

        def step() -> None:
            for start in range(0, hidden.shape[0], rows):
                part = hidden[start : start + rows]
                count = part.shape[0]
                torch.mm(part, weight.t(), out=logits[:count])
                torch.mm(grad_logits[:count], weight, out=grad_hidden[:count])
                if grad_weight is not None:
                    torch.mm(grad_logits[:count].t(), part, out=grad_weight)

        return step

    return make


def _backward(loss: torch.Tensor) -> torch.Tensor:
    torch.autograd.backward(loss)
    return loss.detach()


def _require(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise NotInstalledError(f"{name} is not installed")


LIGER = ("liger_kernel", "liger_kernel_nightly")
IMPLEMENTATIONS = {
    "floor": Implementation(_floor),
    "fusepatch": Implementation(_fusepatch, LIGER),
    "fusepatch-memory": Implementation(_fusepatch_memory, LIGER),
    "liger": Implementation(_liger, LIGER),
    "trl": Implementation(_trl, ("trl",)),
    "verl": Implementation(_verl, ("verl",)),
    "cut-cross-entropy": Implementation(_cut_cross_entropy, ("cut-cross-entropy",)),
    "full-logits": Implementation(_full_logits),
}
