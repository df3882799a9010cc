"""Liger's fused linear GRPO loss: loss, metrics and every gradient with the patch against the same without it.

In float32 and float64 the unpatched call itself is what must come out. In half precision upstream rounds the logits, so
the patched call is compared with the unpatched one in float64 on the same rounded values. Where upstream raises, the
type of its exception must come out.
"""

from __future__ import annotations

import inspect
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

os.environ.setdefault("FUSEPATCH", "0")

import torch
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction, LigerFusedLinearGRPOLoss

import fusepatch
from fusepatch import settings
from fusepatch.engine import ledger
from kits.layouts import LAYOUTS, laid_out

os.environ.pop("FUSEPATCH")

ID = "liger.grpo_loss"

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
DTYPES = ("float32", "float64", "bfloat16", "float16")
MASK_DTYPES = ("bool", "uint8", "int32", "int64", "float32", "float64", "bfloat16", "float16")
MASKS = ("ragged", "full", "none", "scattered", "weighted")
LOG_RATIOS = (-3.0, -1.2, -0.35, -0.1, 0.0, 0.05, 0.13, 0.3, 1.5)
"""Ratios between and beyond the bounds of every clip below, none of them near one."""

POLICIES = ("chunk", "scaled", "whole_mask", "neighbours", "shape")
"""Policies of a user's own, see below; the empty string is Liger's."""

MISTAKES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "ids float": lambda a: a.update(selected_token_ids=a["selected_token_ids"] + 0.5),
    "ids bool": lambda a: a.update(selected_token_ids=a["selected_token_ids"] > 1),
    "ids int16": lambda a: a.update(selected_token_ids=a["selected_token_ids"].to(torch.int16)),
    "ids long": lambda a: a.update(selected_token_ids=_longer(a["selected_token_ids"], 1)),
    "mask long": lambda a: a.update(attention_mask=_longer(a["attention_mask"], 1)),
    "old wide": lambda a: a.update(old_per_token_logps=torch.zeros(len(a["advantages"]), 1)),
    "advantages short": lambda a: a.update(advantages=a["advantages"][1:]),
    "advantages by token": lambda a: a.update(advantages=a["attention_mask"].float() - 0.5),
    "weight narrow": lambda a: a.update(lin_weight=a["lin_weight"].detach()[:, 1:]),
    "weight flat": lambda a: a.update(lin_weight=a["lin_weight"].detach().reshape(-1)),
    "bias long": lambda a: a.update(bias=torch.linspace(-1, 1, len(a["lin_weight"]) + 3)),
    "bias one": lambda a: a.update(bias=torch.tensor([0.5])),
    "ratio wide": lambda a: a.update(vllm_is_ratio=torch.ones(len(a["advantages"]), 1 + a["attention_mask"].shape[1])),
    "ratio short": lambda a: a.update(vllm_is_ratio=torch.ones(len(a["advantages"]) + 1)),
    "ref_input long": lambda a: a.update(_reference(a, ref_input=_longer(a["_input"].detach(), 1))),
    "ref_input batch": lambda a: a.update(_reference(a, ref_input=_longer(a["_input"].detach(), 0))),
    "ref_weight none": lambda a: a.update(_reference(a, ref_weight=None)),
    "ref_weight narrow": lambda a: a.update(_reference(a, ref_weight=a["lin_weight"].detach()[:, 1:])),
    "ref_bias long": lambda a: a.update(_reference(a, ref_bias=torch.linspace(-1, 1, len(a["lin_weight"]) + 7))),
    "ref_bias one": lambda a: a.update(_reference(a, ref_bias=torch.tensor([0.25]))),
    "both references": lambda a: a.update(_reference(a, ref_per_token_logps=a["attention_mask"].float() - 3)),
    "meta mask": lambda a: a.update(attention_mask=a["attention_mask"].to("meta")),
}
"""What upstream refuses, or gives a meaning of its own."""


@dataclass(frozen=True)
class Case:
    seed: int = 0
    batch: int = 3
    length: int = 5
    width: int = 6
    vocabulary: int = 11
    loss_type: str = "dapo"
    level: str = "token"
    beta: float = 0.0
    old: bool = False
    ref: str = "none"
    ratio: str = "none"
    delta: float | None = None
    bias_correction: bool = False
    temperature: float = 1.0
    chunk_size: int = 1
    num_items: float | None = None
    bias: bool = False
    dtype: str = "float32"
    weight_dtype: str = "float32"
    mask: str = "ragged"
    mask_dtype: str = "int64"
    ids_dtype: str = "int64"
    outside_ids: bool = False
    layouts: tuple[tuple[str, str], ...] = ()
    wanted: tuple[str, ...] = ("hidden", "weight", "bias")
    grad: bool = True
    policy: str = ""
    mistake: str = ""
    garbage: str = ""
    form: str = "torch"
    prefer: str = "speed"
    chunk_mib: float = 256.0
    scale: float = 1.0


def sample(rng: random.Random) -> Case:
    """A case of its own in most respects and the plain one in the others, so that rare things meet."""

    def often(plain: Any, *others: Any) -> Any:
        return plain if rng.random() < 0.6 else rng.choice(others)

    loss_type = rng.choice(LOSS_TYPES)
    level = often("token", "sequence")
    dtype = often("float32", *DTYPES)
    form = "triton" if dtype != "float64" and rng.random() < 0.08 else "torch"
    # More than one group of rows, now and then: a chunk is never smaller than 128 rows.
    large = form == "torch" and rng.random() < 0.12
    batch, length = (rng.randint(2, 5), rng.randint(60, 110)) if large else (rng.randint(1, 5), rng.randint(1, 9))
    if rng.random() < 0.02:
        batch, length = rng.choice(((0, 3), (2, 0)))
    beta = often(0.0, 0.04, 0.5)
    named = ("hidden", "weight", "bias", "ids", "mask", "advantages", "old", "ref", "ratio", "ref_hidden", "ref_weight")
    strided = [name for name in (*named, "ref_bias") if rng.random() < 0.25]
    return Case(
        seed=rng.randrange(10**6),
        batch=batch,
        length=length,
        width=rng.choice((1, 3, 8, 16)),
        vocabulary=rng.choice((1, 2, 11, 37, 130)),
        loss_type=loss_type,
        level=level,
        beta=beta,
        old=rng.random() < 0.5,
        ref=rng.choice(("given", "input", "input+bias")) if beta else often("none", "unused", "given", "input"),
        ratio=often("none", "B", "B1", "BT"),
        delta=often(None, 1.1, 2.0),
        bias_correction=rng.random() < 0.2,
        temperature=often(1.0, 0.7, 1.3),
        chunk_size=often(1, 2, 3, 7),
        num_items=often(None, 9.0),
        bias=rng.random() < 0.4,
        dtype=dtype,
        weight_dtype=dtype if rng.random() < 0.9 else rng.choice(DTYPES[:3]),
        mask=rng.choice(MASKS),
        mask_dtype=rng.choice(MASK_DTYPES),
        ids_dtype=often("int64", "int32"),
        outside_ids=rng.random() < 0.1,
        layouts=tuple((name, rng.choice(LAYOUTS[1:])) for name in strided),
        wanted=often(
            ("hidden", "weight", "bias"),
            ("hidden",),
            ("weight",),
            ("hidden", "bias"),
            ("bias",),
            ("hidden", "old"),
            ("old",),
            ("advantages", "ref_weight"),
            (),
        ),
        grad=rng.random() < 0.95,
        policy=often("", *POLICIES) if rng.random() < 0.25 else "",
        mistake=rng.choice(tuple(MISTAKES)) if rng.random() < 0.12 else "",
        garbage=rng.choice(("nan row", "nan masked", "forbidden token")) if rng.random() < 0.08 else "",
        form=form,
        prefer=often("speed", "memory"),
        chunk_mib=0.001 if large else 256.0,
        scale=often(1.0, 0.7, -3.0),
    )


class Outcome(NamedTuple):
    """What a call gives: values by name, or the exception that it raised."""

    values: dict[str, torch.Tensor | None]
    raised: Exception | None = None


def check(case: Case) -> None:
    """Raise AssertionError where the patched loss differs from the unpatched one."""
    if case.form == "triton":
        assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1 before Triton is imported"
    theirs = _outcome(case, case.dtype)
    fusepatch.activate()
    try:
        # The line at the first call reads the source of every upstream, which takes longer than the case.
        ledger.reset(False, str)
        settings.use(
            settings.current()._replace(head=case.form, head_prefer=case.prefer, head_chunk_mib=case.chunk_mib)
        )
        ours = _outcome(case, case.dtype)
        fallbacks = [note.text for note in ledger.fallbacks(ID)]
    finally:
        fusepatch.deactivate()
        os.environ.pop("FUSEPATCH", None)
    failed = [text for text in fallbacks if "failed" in text]
    assert not failed, failed[0]
    if theirs.raised is not None or ours.raised is not None:
        kinds = type(ours.raised), type(theirs.raised)
        assert kinds[0] is kinds[1], f"patched {ours.raised!r}, unpatched {theirs.raised!r}"
        return
    left = any(text.startswith("upstream's own forward") for text in fallbacks)
    if left:
        _compare(case, ours, theirs, 0.0)
    elif case.garbage:
        _compare_finiteness(case, ours, theirs)
    elif case.dtype in ("float32", "float64") and _same_products(case):
        _compare(case, ours, theirs, _tolerance(case.mask_dtype))
    else:
        _compare(case, ours, _outcome(case, "float64"), _tolerance(case.dtype, case.weight_dtype, case.mask_dtype))


def _same_products(case: Case) -> bool:
    return case.weight_dtype == case.dtype or DTYPES.index(case.weight_dtype) < 2


def _tolerance(*dtypes: str) -> float:
    """Some roundings of gradients, of what a product takes, and of a mask whose sums upstream makes in its dtype."""
    kinds = [getattr(torch, name) for name in dtypes]
    return max([3e-5] + [4 * torch.finfo(kind).eps for kind in kinds if kind.is_floating_point])


def _compare(case: Case, ours: Outcome, theirs: Outcome, tolerance: float) -> None:
    assert ours.values.keys() == theirs.values.keys()
    for name, found in ours.values.items():
        expected = theirs.values[name]
        assert (found is None) == (expected is None), f"{name}: patched {found}, unpatched {expected}"
        if found is None or expected is None:
            continue
        assert found.shape == expected.shape, f"{name}: shape {found.shape}, unpatched {expected.shape}"
        mine, other = found.double(), expected.double()
        same = (mine == other) | (mine.isnan() & other.isnan())
        difference = float(torch.where(same, 0.0, mine - other).norm())
        floor = 1e-6 * math.sqrt(max(found.numel(), 1)) * max(1.0, case.beta * 1e2)
        size = float(torch.nan_to_num(other, nan=0.0, posinf=0.0, neginf=0.0).norm())
        allowed = tolerance * size + floor if tolerance else 0.0
        # Not `difference > allowed`: the difference is NaN where only one of the two is.
        assert difference <= allowed, (
            f"{name}: {difference:.3g} apart, {allowed:.3g} allowed\npatched {found}\nunpatched {expected}"
        )


def _compare_finiteness(case: Case, ours: Outcome, theirs: Outcome) -> None:
    """A row that counts and is not finite shows in loss and gradients as upstream's does; one that is left out shows
    nowhere."""
    if case.garbage == "nan masked":
        if case.loss_type != "luspo":
            assert all(value is None or bool(value.isfinite().all()) for value in ours.values.values())
        return
    for name in ("loss", "hidden", "weight"):
        found, expected = ours.values.get(name), theirs.values.get(name)
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            finite = bool(found.isfinite().all()), bool(expected.isfinite().all())
            assert finite[0] == finite[1], f"{name} finite: patched {finite[0]}, unpatched {finite[1]}"


def _longer(values: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat((values, values.narrow(dim, 0, 1)), dim)


def _reference(arguments: dict[str, Any], **changes: Any) -> dict[str, Any]:
    plain = {"ref_per_token_logps": None, "ref_bias": None}
    plain |= {"ref_input": arguments["_input"].detach(), "ref_weight": arguments["lin_weight"].detach()}
    return plain | changes


def _mask(case: Case, generator: torch.Generator) -> torch.Tensor:
    shape = (case.batch, case.length)
    lengths = torch.randint(0, case.length + 1, (case.batch, 1), generator=generator)
    ragged = (torch.arange(case.length) < lengths).to(torch.float32)
    scattered = (torch.rand(shape, generator=generator) < 0.6).to(torch.float32)
    made = {
        "ragged": ragged,
        "full": torch.ones(shape),
        "none": torch.zeros(shape),
        "scattered": scattered,
        # Whole numbers, which every dtype of a mask holds.
        "weighted": scattered * torch.randint(1, 4, shape, generator=generator),
    }
    return made[case.mask]


def _tensors(case: Case) -> dict[str, torch.Tensor]:
    """Everything that the call can be given, by name, with the values that its dtypes hold."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def laid(name: str, values: torch.Tensor) -> torch.Tensor:
        return laid_out(values, dict(case.layouts).get(name, "dense"))

    tokens, width, vocabulary = (case.batch, case.length), case.width, case.vocabulary
    dtype, weight_dtype = getattr(torch, case.dtype), getattr(torch, case.weight_dtype)
    advantages = normal(case.batch)
    advantages[torch.rand(case.batch, generator=generator) < 0.25] = 0.0
    ids = torch.randint(0, vocabulary, tokens, generator=generator)
    if case.outside_ids:
        ids = torch.where(torch.rand(tokens, generator=generator) < 0.2, -100, ids)
    given = {
        "hidden": normal(*tokens, width).to(dtype),
        "weight": (normal(vocabulary, width) * 0.7).to(weight_dtype),
        "bias": normal(vocabulary).to(weight_dtype),
        "ids": ids.to(getattr(torch, case.ids_dtype)),
        "mask": _mask(case, generator).to(getattr(torch, case.mask_dtype)),
        "advantages": advantages,
        "ratio": (normal(*tokens) * 0.5).exp(),
        "ref_hidden": normal(*tokens, width).to(dtype),
        "ref_weight": (normal(vocabulary, width) * 0.7).to(weight_dtype),
        "ref_bias": normal(vocabulary).to(weight_dtype),
    }
    given = {name: laid(name, values) for name, values in given.items()}
    exact = _log_probabilities(case, given)
    shape = (case.batch, 1) if case.level == "sequence" else tokens
    log_ratio = torch.tensor(LOG_RATIOS)[torch.randint(0, len(LOG_RATIOS), shape, generator=generator)]
    noise = normal(*tokens) * 0.4
    given["old"] = laid("old", exact - log_ratio) if dict(case.layouts).get("old") != "expanded" else exact - log_ratio
    given["ref"] = laid("ref", exact + noise)
    return _with_garbage(case, given)


def _log_probabilities(case: Case, given: dict[str, torch.Tensor]) -> torch.Tensor:
    weight = given["weight"].to(given["hidden"].dtype).double()
    logits = given["hidden"].double() @ weight.t()
    if case.bias:
        logits = logits + given["bias"].double()
    logits = logits / case.temperature
    ids = given["ids"].long().unsqueeze(-1)
    inside = (ids >= 0) & (ids < case.vocabulary)
    chosen = torch.where(inside, logits.gather(-1, ids.clamp(0)), 0.0)
    return (chosen - logits.logsumexp(-1, keepdim=True)).squeeze(-1).float()


def _with_garbage(case: Case, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    counts = (given["mask"] != 0) & (given["advantages"] != 0).unsqueeze(1)
    where = counts if case.garbage in ("nan row", "forbidden token") else given["mask"] == 0
    if not case.garbage or not bool(where.any()):
        return given
    row = tuple(where.nonzero()[0].tolist())
    if case.garbage == "forbidden token":
        token = int(given["ids"][row])
        # Upstream reads the logit of the first or the last token for an id outside the vocabulary, times 0: NaN for
        # -inf.
        if token <= 0 or token == case.vocabulary - 1:
            return given
        ids = given["ids"].clone()
        ids[ids == token] = -100
        ids[row] = token
        bias = given["bias"].clone()
        bias[token] = -float("inf")
        return given | {"ids": ids, "bias": bias}
    hidden = given["hidden"].clone()
    hidden[row] = float("nan")
    return given | {"hidden": hidden}


def _outcome(case: Case, dtype: str) -> Outcome:
    """One call and its backward, with the values of the case's dtypes held in ``dtype`` where that is another."""
    given = _tensors(case)
    if dtype != case.dtype:
        wider = getattr(torch, dtype)
        for name in ("weight", "bias", "ref_weight", "ref_bias"):
            # Upstream rounds a weight, not a bias, to the dtype of the hidden states.
            narrow = given["hidden"].dtype if "weight" in name else given[name].dtype
            given[name] = given[name].to(narrow).to(wider)
        given |= {name: given[name].to(wider) for name in ("hidden", "ref_hidden")}

    def leaf(name: str) -> torch.Tensor:
        values = given[name].detach()
        return values.requires_grad_() if name in case.wanted and values.is_floating_point() else values

    leaves = {name: leaf(name) for name in ("hidden", "weight", "bias", "old", "advantages", "ref_weight")}
    ratio = {"none": None, "B": given["ratio"][:, :1].reshape(-1), "B1": given["ratio"][:, :1], "BT": given["ratio"]}
    arguments: dict[str, Any] = {
        "_input": leaves["hidden"],
        "lin_weight": leaves["weight"],
        "selected_token_ids": given["ids"],
        "attention_mask": given["mask"],
        "advantages": leaves["advantages"],
        "bias": leaves["bias"] if case.bias or case.garbage == "forbidden token" else None,
        "old_per_token_logps": leaves["old"] if case.old else None,
        "ref_per_token_logps": given["ref"] if case.ref in ("given", "unused") else None,
        "ref_input": given["ref_hidden"] if case.ref.startswith("input") else None,
        "ref_weight": leaves["ref_weight"] if case.ref.startswith("input") else None,
        "ref_bias": given["ref_bias"] if case.ref == "input+bias" else None,
        "vllm_is_ratio": ratio[case.ratio] if case.length else None,
        "num_items_in_batch": case.num_items,
    }
    if case.mistake and case.batch and case.length:
        MISTAKES[case.mistake](arguments)
    module = LigerFusedLinearGRPOLoss(
        beta=case.beta,
        compiled=False,
        use_ref_model=case.ref not in ("none", "unused") or "ref" in case.mistake,
        chunk_size=case.chunk_size,
        loss_type=case.loss_type,
        max_completion_length=max(case.length, 1),
        importance_sampling_level=case.level,
        temperature=case.temperature,
        delta=case.delta,
        use_bias_correction_kl=case.bias_correction,
    )
    try:
        with torch.set_grad_enabled(case.grad):
            loss, metrics = _apply(case, module, arguments)
        if loss.requires_grad:
            (loss * case.scale).backward()
    except Exception as error:
        return Outcome({}, error)
    values = {"loss": loss.detach(), **{f"metric {index}": metric for index, metric in enumerate(metrics)}}
    return Outcome(values | {name: leaf.grad for name, leaf in leaves.items()})


def _apply(case: Case, module: Any, arguments: dict[str, Any]) -> Any:
    if not case.policy:
        return module(**arguments)
    given = {**vars(module), **arguments, "weight": arguments["lin_weight"]}
    parameters = list(inspect.signature(LigerFusedLinearGRPOFunction.forward).parameters.values())[1:]
    return _POLICIES[case.policy].apply(*[given.get(p.name, p.default) for p in parameters])


class _Chunk(LigerFusedLinearGRPOFunction):
    """Normalises by the chunk that it sees."""

    @staticmethod
    def ppo_loss_fn(per_token_logps: Any, attention_mask: Any, advantages: Any, **_: Any) -> Any:
        loss = -(per_token_logps * attention_mask * advantages.unsqueeze(1)).sum() / attention_mask.sum().clamp(min=1)
        return loss, [attention_mask.sum() * 1.0, per_token_logps.detach().sum(-1)]


class _Scaled(LigerFusedLinearGRPOFunction):
    """Liger's own, times a number."""

    @staticmethod
    def ppo_loss_fn(*args: Any, **kwargs: Any) -> Any:
        loss, metrics = LigerFusedLinearGRPOFunction.ppo_loss_fn(*args, **kwargs)
        return 2.0 * loss, metrics


class _WholeMask(LigerFusedLinearGRPOFunction):
    """Every position of the batch counts, masked ones too."""

    @staticmethod
    def ppo_loss_fn(
        per_token_logps: Any, attention_mask: Any, advantages: Any, full_attention_mask: Any, **_: Any
    ) -> Any:
        own = -(per_token_logps * per_token_logps * advantages.unsqueeze(1)).sum(-1)
        return own.sum() / max(full_attention_mask.numel(), 1), [own.detach()]


class _Neighbours(LigerFusedLinearGRPOFunction):
    """A token's coefficient depends on the next token, and on an argument of the loss."""

    @staticmethod
    def ppo_loss_fn(
        per_token_logps: Any, attention_mask: Any, advantages: Any, epsilon_low: float = 0.2, **_: Any
    ) -> Any:
        following = per_token_logps.roll(-1, 1)
        return (per_token_logps * following * attention_mask).sum() * epsilon_low + advantages.sum() * 0.0, []


class _Shape(LigerFusedLinearGRPOFunction):
    """A loss of shape [1], which upstream refuses."""

    @staticmethod
    def ppo_loss_fn(per_token_logps: Any, attention_mask: Any, **_: Any) -> Any:
        return (per_token_logps * attention_mask).sum().reshape(1), []


_POLICIES = dict(zip(POLICIES, (_Chunk, _Scaled, _WholeMask, _Neighbours, _Shape), strict=True))
