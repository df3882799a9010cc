"""Batches, policies and references for the tests of the loss."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fusepatch.loss import (
    LogitMap,
    PolicyInputs,
    PolicyLoss,
    PolicyTraits,
    Wanted,
    linear_policy_loss,
    policy_traits,
)


def _upstream() -> Any:
    """Liger's own classes from its files under other module names, so that no patch, active or not, is in them."""
    (folder,) = importlib.util.find_spec("liger_kernel.chunked_loss").submodule_search_locations  # type: ignore[union-attr]
    for name in ("fused_linear_ppo", "grpo_loss"):
        module = types.ModuleType(f"upstream_{name}")
        source = (Path(folder) / f"{name}.py").read_text()
        source = source.replace("liger_kernel.chunked_loss.fused_linear_ppo", "upstream_fused_linear_ppo")
        sys.modules[module.__name__] = module
        exec(compile(source, module.__name__, "exec"), vars(module))
    return sys.modules["upstream_grpo_loss"].LigerFusedLinearGRPOFunction


Upstream = _upstream()

ALL = Wanted(True, True, True)
FROZEN = Wanted(True, False, False)
NOTHING = Wanted(False, False, False)
# With these sizes a chunk of 128 rows is the smallest, and the batch takes three.
SMALL_CHUNK_MIB = 0.01

LEVELS = [
    *((loss_type, "token") for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")),
    *((loss_type, "sequence") for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")),
]


@dataclass(frozen=True)
class Batch:
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    targets: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor

    def to(self, dtype: torch.dtype) -> Batch:
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, hidden=self.hidden.to(dtype), weight=self.weight.to(dtype), bias=bias)


def make_batch(
    batch: int = 3,
    length: int = 101,
    width: int = 17,
    vocabulary: int = 53,
    *,
    bias: bool = True,
    seed: int = 0,
    spread: float = 1.0,
) -> Batch:
    """Ragged, with one empty completion and one advantage of zero where there are sequences enough."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    lengths = torch.randint(1, max(length, 1) + 1, (batch,), generator=generator)
    if batch > 1:
        lengths[1] = 0
    mask = (torch.arange(length) < lengths.unsqueeze(1)).float()
    advantages = normal(batch) + 0.1
    if batch > 2:
        advantages[2] = 0.0
    return Batch(
        normal(batch, length, width) * spread,
        normal(vocabulary, width) * 0.5,
        normal(vocabulary) if bias else None,
        torch.randint(0, vocabulary, (batch, length), generator=generator),
        mask,
        advantages,
    )


@dataclass(frozen=True)
class Setting:
    """Arguments of a GRPO-family loss, with Liger's meaning."""

    loss_type: str = "dapo"
    level: str = "token"
    beta: float = 0.0
    old: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    ratio: torch.Tensor | None = None
    delta: float | None = None
    bias_correction: bool = False
    temperature: float = 1.0
    num_items: float | None = None

    def traits(self) -> PolicyTraits:
        return policy_traits(
            self.loss_type,
            self.level,
            old_given=self.old is not None,
            beta=self.beta,
            bias_correction_kl=self.bias_correction,
        )

    def policy(self, full_mask: torch.Tensor) -> Callable[[PolicyInputs], Any]:
        def policy(inputs: PolicyInputs) -> Any:
            return Upstream.ppo_loss_fn(
                per_token_logps=inputs.log_probabilities,
                attention_mask=inputs.mask,
                advantages=inputs.advantages,
                full_attention_mask=full_mask,
                ref_per_token_logps=inputs.reference_log_probabilities,
                old_per_token_logps=inputs.old_log_probabilities,
                vllm_is_ratio=inputs.sampling_ratio,
                beta=self.beta,
                loss_type=self.loss_type,
                importance_sampling_level=self.level,
                max_completion_length=full_mask.shape[1],
                delta=self.delta,
                use_bias_correction_kl=self.bias_correction,
                num_items_in_batch=self.num_items,
            )

        return policy


def log_probabilities_like(batch: Batch, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    exact = reference_log_probabilities(batch, LogitMap()).detach().float()
    return exact + 0.4 * torch.randn(exact.shape, generator=generator)


def reference_log_probabilities(batch: Batch, logit_map: LogitMap) -> torch.Tensor:
    """In float64, differentiable, with the whole logits in memory."""
    logits = batch.hidden.double() @ batch.weight.double().t()
    if batch.bias is not None:
        logits = logits + batch.bias.double()
    logits = logits * logit_map.logit_scale
    if logit_map.final_logit_softcapping is not None:
        logits = logit_map.final_logit_softcapping * torch.tanh(logits / logit_map.final_logit_softcapping)
    logits = logits / logit_map.temperature
    vocabulary = logits.shape[-1]
    inside = (batch.targets >= 0) & (batch.targets < vocabulary)
    chosen = logits.gather(-1, batch.targets.clamp(0, vocabulary - 1).unsqueeze(-1)).squeeze(-1)
    return torch.where(inside, chosen, 0.0) - logits.logsumexp(-1)


@dataclass(frozen=True)
class Expected:
    loss: torch.Tensor
    metrics: tuple[torch.Tensor, ...]
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    log_probabilities: torch.Tensor | None = None


def reference(batch: Batch, setting: Setting, logit_map: LogitMap | None = None) -> Expected:
    """Loss, metrics and gradients in float64 from the same inputs."""
    leaves = replace(
        batch,
        hidden=batch.hidden.double().detach().requires_grad_(),
        weight=batch.weight.double().detach().requires_grad_(),
        bias=None if batch.bias is None else batch.bias.double().detach().requires_grad_(),
    )
    logit_map = logit_map or LogitMap(temperature=setting.temperature)
    with torch.enable_grad():
        log_probabilities = reference_log_probabilities(leaves, logit_map)
        inputs = PolicyInputs(
            log_probabilities, batch.mask, batch.advantages, setting.old, setting.reference, setting.ratio
        )
        loss, metrics = setting.policy(batch.mask)(inputs)
        loss.backward()
    assert leaves.hidden.grad is not None
    assert leaves.weight.grad is not None
    return Expected(
        loss.detach(),
        tuple(metric.detach() for metric in metrics),
        leaves.hidden.grad,
        leaves.weight.grad,
        None if leaves.bias is None else leaves.bias.grad,
        log_probabilities.detach(),
    )


def liger(batch: Batch, setting: Setting) -> Expected:
    """The installed Liger's own forward and backward."""
    hidden = batch.hidden.detach().clone().requires_grad_()
    weight = batch.weight.detach().clone().requires_grad_()
    bias = None if batch.bias is None else batch.bias.detach().clone().requires_grad_()
    loss, metrics = Upstream.apply(
        *(hidden, weight, batch.targets, batch.mask, batch.advantages, bias),
        *(setting.reference, setting.old, None, None, None, setting.beta, 0.2, 0.2, setting.loss_type),
        *(batch.mask.shape[1], setting.level, 1.0, 1.05, setting.temperature, False, setting.reference is not None, 1),
        *(setting.ratio, setting.delta, setting.bias_correction, 2.0, 3.0, 3.0, 2.0, setting.num_items),
    )
    loss.backward()
    return Expected(loss.detach(), metrics, hidden.grad, weight.grad, None if bias is None else bias.grad)


def run(
    batch: Batch,
    setting: Setting,
    wanted: Wanted = ALL,
    *,
    traits: PolicyTraits | None = None,
    logit_map: LogitMap | None = None,
    policy: Callable[[PolicyInputs], Any] | None = None,
    backend: str = "torch",
    **arguments: Any,
) -> PolicyLoss:
    with torch.no_grad():
        return linear_policy_loss(
            batch.hidden,
            batch.weight,
            batch.targets,
            batch.mask,
            batch.advantages,
            policy or setting.policy(batch.mask),
            traits or setting.traits(),
            wanted,
            bias=batch.bias,
            old_log_probabilities=setting.old,
            reference_log_probabilities=setting.reference,
            sampling_ratio=setting.ratio,
            logit_map=logit_map or LogitMap(temperature=setting.temperature),
            backend=backend,
            **arguments,
        )


def error(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """Relative in the norm; absolute where nothing but zeros is expected."""
    assert found is not None
    assert expected is not None
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-7))


def assert_equal(found: PolicyLoss, expected: Expected, wanted: Wanted = ALL, tolerance: float = 2e-5) -> None:
    assert error(found.loss, expected.loss) < tolerance
    assert len(found.metrics) == len(expected.metrics)
    for metric, other in zip(found.metrics, expected.metrics, strict=True):
        assert metric.shape == other.shape
        assert error(metric, other) < tolerance
    for name in ("hidden", "weight", "bias"):
        gradient = getattr(found.gradients, name)
        if getattr(wanted, name) and getattr(expected, name) is not None:
            assert error(gradient, getattr(expected, name)) < tolerance, name
        else:
            assert gradient is None, name
