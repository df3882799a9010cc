"""The driver against Liger's own forward and backward, against float64, and on bad or odd input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import fusepatch.loss.policy_loss as driver
from fusepatch.loss import (
    LogitMap,
    PolicyInputs,
    PolicyTraits,
    ReferenceHead,
    Wanted,
    linear_policy_loss,
    products,
    saved_tensors_are_shared,
    scale_gradients,
    steps,
)
from fusepatch.loss.logit_map import RawLogits
from kits.loss_cases import (
    ALL,
    FROZEN,
    LEVELS,
    NOTHING,
    SMALL_CHUNK_MIB,
    Setting,
    assert_equal,
    error,
    liger,
    log_probabilities_like,
    make_batch,
    reference,
    reference_log_probabilities,
    run,
)

BATCH = make_batch()
OLD = log_probabilities_like(BATCH, 1)
REFERENCE = log_probabilities_like(BATCH, 2)
RATIO = torch.rand(BATCH.mask.shape, generator=torch.Generator().manual_seed(3)) + 0.5

VARIANTS: list[dict[str, Any]] = [
    {},
    {"old": OLD},
    {"old": OLD, "ratio": RATIO, "delta": 1.1},
    {"ratio": RATIO[:, :1], "temperature": 0.7},
    {"beta": 0.04, "reference": REFERENCE},
    {"beta": 0.04, "reference": REFERENCE, "bias_correction": True, "num_items": 40.0},
    {"beta": 0.04, "reference": REFERENCE, "old": OLD, "bias_correction": True, "ratio": RATIO},
    {"beta": 0.04, "reference": REFERENCE, "old": OLD, "delta": 1.1, "temperature": 1.3},
    {"beta": 0.04, "old": OLD},
]


@pytest.mark.parametrize(("loss_type", "level"), LEVELS)
@pytest.mark.parametrize("chunk_mib", [256.0, SMALL_CHUNK_MIB])
def test_equals_liger(loss_type: str, level: str, chunk_mib: float) -> None:
    for variant in VARIANTS:
        setting = Setting(loss_type=loss_type, level=level, **variant)
        expected = liger(BATCH, setting)
        for wanted in (ALL, FROZEN, NOTHING):
            for prefer in ("speed", "memory"):
                found = run(BATCH, setting, wanted, chunk_mib=chunk_mib, prefer=prefer)
                assert_equal(found, expected, wanted)


@pytest.mark.parametrize(("loss_type", "level"), LEVELS)
def test_nothing_assumed_gives_the_same(loss_type: str, level: str) -> None:
    for variant in VARIANTS[:7]:
        setting = Setting(loss_type=loss_type, level=level, **variant)
        assert_equal(
            run(BATCH, setting, traits=PolicyTraits(), chunk_mib=SMALL_CHUNK_MIB),
            reference(BATCH, setting),
        )


@pytest.mark.parametrize(
    "logit_map",
    [LogitMap(final_logit_softcapping=3.0), LogitMap(0.6, 0.25), LogitMap(1.5, 2.0, 2.0)],
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefer", ["speed", "memory"])
@pytest.mark.parametrize("wanted", [ALL, FROZEN])
def test_logit_map(logit_map: LogitMap, bias: bool, prefer: str, wanted: Wanted) -> None:
    batch = make_batch(bias=bias, spread=2.0)
    old, other = log_probabilities_like(batch, 1), log_probabilities_like(batch, 2)
    setting = Setting(beta=0.04, reference=other, old=old)
    found = run(batch, setting, wanted, logit_map=logit_map, prefer=prefer, chunk_mib=SMALL_CHUNK_MIB)
    assert_equal(found, reference(batch, setting, logit_map), wanted)


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefer", ["speed", "memory"])
def test_each_subset_of_gradients(hidden: bool, weight: bool, bias: bool, prefer: str) -> None:
    wanted = Wanted(hidden, weight, bias)
    for setting in (Setting(), Setting(old=OLD), Setting(old=OLD, level="sequence")):
        found = run(BATCH, setting, wanted, prefer=prefer, chunk_mib=SMALL_CHUNK_MIB)
        assert_equal(found, liger(BATCH, setting), wanted)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "luspo"])
def test_masks_of_every_dtype(dtype: torch.dtype, loss_type: str) -> None:
    batch = replace(BATCH, mask=BATCH.mask.to(dtype))
    setting = Setting(loss_type=loss_type, beta=0.04, reference=REFERENCE, old=OLD)
    assert_equal(run(batch, setting), liger(batch, setting))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("prefer", ["speed", "memory"])
def test_half_precision_is_closer_to_float64_than_upstream(dtype: torch.dtype, prefer: str) -> None:
    batch = make_batch(vocabulary=211, width=64, spread=2.0).to(dtype)
    old, other = log_probabilities_like(batch, 1), log_probabilities_like(batch, 2)
    setting = Setting(beta=0.04, reference=other, old=old)
    exact = reference(batch, setting)
    upstream = liger(batch, setting)
    found = run(batch, setting, prefer=prefer, chunk_mib=0.05)
    for name in ("hidden", "weight", "bias"):
        gradient = getattr(found.gradients, name)
        assert gradient.dtype == dtype
        assert error(gradient, getattr(exact, name)) <= error(getattr(upstream, name), getattr(exact, name)) * 1.001
    assert error(found.loss, exact.loss) <= error(upstream.loss, exact.loss)
    assert exact.log_probabilities is not None
    assert ((found.log_probabilities - exact.log_probabilities) * batch.mask)[:2].abs().max() < 1e-5


@pytest.mark.parametrize(
    ("hidden", "weight"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.float32)],
)
@pytest.mark.parametrize("prefer", ["speed", "memory"])
def test_mixed_dtypes(hidden: torch.dtype, weight: torch.dtype, prefer: str) -> None:
    batch = make_batch(width=64)
    batch = replace(batch, hidden=batch.hidden.to(hidden), weight=batch.weight.to(weight))
    setting = Setting(old=log_probabilities_like(batch, 1))
    found = run(batch, setting, prefer=prefer, chunk_mib=SMALL_CHUNK_MIB)
    assert found.gradients.hidden is not None
    assert found.gradients.hidden.dtype == hidden
    assert found.gradients.weight is not None
    assert found.gradients.weight.dtype == weight
    # As Liger 0.8, which rounds the weight to the dtype of the hidden states.
    rounded = replace(batch, weight=batch.weight.to(hidden))
    assert_equal(found, reference(rounded, setting), tolerance=4e-3)


def test_autocast_decides_the_dtype_of_the_products() -> None:
    setting = Setting(old=OLD)
    exact = run(BATCH, setting)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(BATCH, setting)
        expected = liger(BATCH, setting)
    assert found.gradients.weight is not None
    assert found.gradients.weight.dtype == torch.float32
    assert_equal(found, expected, tolerance=2e-2)
    rounded = replace(BATCH, hidden=BATCH.hidden.bfloat16(), weight=BATCH.weight.bfloat16())
    assert_equal(found, reference(rounded, setting), tolerance=1e-4)
    assert error(found.gradients.weight, exact.gradients.weight) > 1e-4


def test_float64_stays_float64() -> None:
    batch = BATCH.to(torch.float64)
    setting = Setting(loss_type="dr_grpo", old=OLD)
    found = run(batch, setting)
    assert found.gradients.hidden is not None
    assert found.gradients.hidden.dtype == torch.float64
    assert_equal(found, reference(batch, setting), tolerance=1e-6)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("loss_type", "level"), [pair for pair in LEVELS if pair[0] != "luspo"])
def test_garbage_at_masked_positions_is_not_seen(garbage: float, loss_type: str, level: str) -> None:
    clean = Setting(loss_type=loss_type, level=level, beta=0.04, old=OLD, reference=REFERENCE, bias_correction=True)
    masked = BATCH.mask == 0
    dirty = replace(
        clean,
        old=torch.where(masked, garbage, OLD),
        reference=torch.where(masked, garbage, REFERENCE),
        ratio=None,
    )
    batch = replace(BATCH, hidden=torch.where(masked.unsqueeze(-1), garbage, BATCH.hidden))
    for prefer in ("speed", "memory"):
        for wanted in (ALL, FROZEN):
            found = run(batch, dirty, wanted, prefer=prefer, chunk_mib=SMALL_CHUNK_MIB)
            assert_equal(found, liger(BATCH, clean), wanted)


def test_garbage_in_the_sampling_ratio_is_not_seen() -> None:
    masked = BATCH.mask == 0
    ratio = torch.where(masked, float("nan"), RATIO)
    found = run(BATCH, Setting(ratio=ratio, old=OLD))
    assert_equal(found, liger(BATCH, Setting(ratio=torch.where(masked, 1.0, RATIO), old=OLD)))


def test_finite_masked_ratios_reach_vespo() -> None:
    setting = Setting(loss_type="vespo", ratio=RATIO, old=OLD)
    changed = replace(setting, ratio=torch.where(BATCH.mask == 0, 2.0 * RATIO, RATIO))
    assert error(liger(BATCH, changed).hidden, liger(BATCH, setting).hidden) > 1e-3
    assert_equal(run(BATCH, changed), liger(BATCH, changed))


@pytest.mark.parametrize("value", [float("inf"), 0.0, float("nan")])
def test_vespo_reads_every_ratio_as_upstream_does(value: float) -> None:
    ratio = torch.where(BATCH.mask == 0, value, RATIO)
    setting = Setting(loss_type="vespo", ratio=ratio, old=OLD)
    assert liger(BATCH, setting).loss.isfinite()
    assert_equal(run(BATCH, setting), liger(BATCH, setting))


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("wanted", [ALL, FROZEN])
def test_garbage_of_a_sequence_of_advantage_zero_is_not_seen(garbage: float, wide: bool, wanted: Wanted) -> None:
    out = (BATCH.advantages == 0).unsqueeze(1)
    assert (BATCH.mask * out).any()
    clean = Setting(old=OLD, ratio=RATIO if wide else RATIO[:, :1])
    assert clean.ratio is not None
    dirty = replace(clean, old=torch.where(out, garbage, OLD), ratio=torch.where(out, garbage, clean.ratio))
    batch = replace(BATCH, hidden=torch.where(out.unsqueeze(-1), garbage, BATCH.hidden))
    assert liger(batch, dirty).loss.isnan()
    assert_equal(run(batch, dirty, wanted), liger(BATCH, clean), wanted)


FAILING = {
    "NaN": {"hidden": float("nan")},
    "overflow": {"hidden": float("inf")},
    "a forbidden token": {"bias": -float("inf")},
}


def failing(kind: str) -> Any:
    """A batch of which the first row, which counts, cannot be computed."""
    hidden, targets = BATCH.hidden.clone(), BATCH.targets.clone()
    assert BATCH.bias is not None
    bias = BATCH.bias.clone()
    assert BATCH.mask[0, 0] == 1
    if "bias" in FAILING[kind]:
        # Not under the mask, where it would make upstream's loss NaN.
        targets[targets == targets[0, 0]] += 1
        bias[BATCH.targets[0, 0]] = FAILING[kind]["bias"]
        targets[0, 0] = BATCH.targets[0, 0]
    else:
        hidden[0, 0] = FAILING[kind]["hidden"]
    return replace(BATCH, hidden=hidden, bias=bias, targets=targets)


@pytest.mark.parametrize("kind", FAILING)
@pytest.mark.parametrize(("loss_type", "level"), LEVELS)
@pytest.mark.parametrize("old", [None, OLD])
def test_a_guard_that_watches_gradients_fires_where_upstreams_does(
    kind: str, loss_type: str, level: str, old: torch.Tensor | None
) -> None:
    batch, setting = failing(kind), Setting(loss_type, level, old=old)
    expected = liger(batch, setting)
    for wanted in (ALL, FROZEN):
        for prefer in ("speed", "memory"):
            for chunk_mib in (256.0, SMALL_CHUNK_MIB):
                found = run(batch, setting, wanted, prefer=prefer, chunk_mib=chunk_mib)
                assert bool(found.loss.isfinite()) == bool(expected.loss.isfinite())
                assert found.gradients.hidden is not None
                # VESPO makes a weight of 0 of a log-probability that is not finite.
                if kind == "a forbidden token" and loss_type == "vespo" and old is None:
                    continue
                ours, theirs = found.gradients.hidden[0, 0], expected.hidden[0, 0]
                assert bool(ours.isfinite().all()) == bool(theirs.isfinite().all())
                if wanted.weight:
                    assert found.gradients.weight is not None
                    assert bool(found.gradients.weight.isfinite().all()) == bool(expected.weight.isfinite().all())


def test_luspo_computes_masked_rows() -> None:
    setting = Setting(loss_type="luspo")
    found = run(BATCH, setting)
    assert found.gradients.hidden is not None
    # The third sequence has advantage 0; the second is masked throughout, but its weight is its length, 0.
    assert found.gradients.hidden[0][BATCH.mask[0] == 0].abs().sum() > 0
    assert_equal(found, liger(BATCH, setting))


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 1)])
@pytest.mark.parametrize("prefer", ["speed", "memory"])
def test_smallest_batches(shape: tuple[int, int], prefer: str) -> None:
    batch = make_batch(*shape, width=3, vocabulary=5)
    setting = Setting(old=log_probabilities_like(batch, 5))
    assert_equal(run(batch, setting, prefer=prefer), liger(batch, setting))


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0, 0)])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "luspo", "vespo"])
@pytest.mark.parametrize("prefer", ["speed", "memory"])
def test_an_empty_batch_gives_what_upstream_gives(shape: tuple[int, int], loss_type: str, prefer: str) -> None:
    batch, setting = make_batch(*shape), Setting(loss_type=loss_type, beta=0.04)
    # 0 divided by 0 for the types that divide by the number of sequences or positions.
    expected = liger(batch, setting)
    for wanted in (ALL, FROZEN, NOTHING):
        found = run(batch, setting, wanted, prefer=prefer)
        torch.testing.assert_close((found.loss, found.metrics), (expected.loss, expected.metrics), equal_nan=True)
        for gradient, like in ((found.gradients.weight, batch.weight), (found.gradients.bias, batch.bias)):
            assert gradient is None or torch.equal(gradient, torch.zeros_like(like))
        assert found.gradients.hidden is None or found.gradients.hidden.shape == batch.hidden.shape


@pytest.mark.parametrize(("loss_type", "level"), LEVELS)
@pytest.mark.parametrize("prefer", ["speed", "memory"])
def test_only_empty_completions(loss_type: str, level: str, prefer: str) -> None:
    batch = replace(BATCH, mask=torch.zeros_like(BATCH.mask))
    setting = Setting(loss_type=loss_type, level=level)
    found = run(batch, setting, prefer=prefer)
    assert_equal(found, liger(batch, setting))
    assert found.loss.item() == 0.0
    if loss_type != "luspo":
        assert found.rows == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda hidden: torch.cat([hidden, hidden], dim=1)[:, : hidden.shape[1]],
        lambda hidden: torch.cat([hidden, hidden], dim=2)[:, :, : hidden.shape[2]],
        lambda hidden: hidden.transpose(0, 1).contiguous().transpose(0, 1),
        lambda hidden: hidden.transpose(1, 2).contiguous().transpose(1, 2),
        lambda hidden: torch.cat([torch.zeros(1), hidden.flatten()])[1:].view(hidden.shape),
    ],
)
@pytest.mark.parametrize("full", [True, False])
def test_strides_of_hidden(change: Callable[[torch.Tensor], torch.Tensor], full: bool) -> None:
    batch = replace(BATCH, mask=torch.ones_like(BATCH.mask)) if full else BATCH
    if full:
        batch = replace(batch, advantages=torch.tensor([1.0, -0.5, 0.3]))
    changed = replace(batch, hidden=change(batch.hidden))
    assert torch.equal(changed.hidden, batch.hidden)
    for prefer in ("speed", "memory"):
        found = run(changed, Setting(old=OLD), prefer=prefer, chunk_mib=SMALL_CHUNK_MIB)
        assert_equal(found, liger(batch, Setting(old=OLD)))


def test_strides_of_the_weight() -> None:
    changed = replace(BATCH, weight=BATCH.weight.t().contiguous().t())
    for prefer in ("speed", "memory"):
        assert_equal(run(changed, Setting(old=OLD), prefer=prefer), liger(BATCH, Setting(old=OLD)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_targets_outside_the_vocabulary(dtype: torch.dtype) -> None:
    targets = BATCH.targets.clone()
    targets[BATCH.mask == 0] = -100
    targets[0, :3] = torch.tensor([-1, 53, 10**6])
    assert BATCH.mask[0, :3].all()
    batch = replace(BATCH, targets=targets.to(dtype))
    setting = Setting(beta=0.04, reference=REFERENCE)
    for prefer in ("speed", "memory"):
        assert_equal(run(batch, setting, prefer=prefer), liger(replace(batch, targets=targets), setting))


@pytest.mark.parametrize("prefer", ["speed", "memory"])
@pytest.mark.parametrize("wanted", [ALL, FROZEN, NOTHING])
def test_nothing_of_the_caller_is_modified(prefer: str, wanted: Wanted) -> None:
    setting = Setting(old=OLD.clone(), reference=REFERENCE.clone(), beta=0.04, ratio=RATIO.clone())
    batch = make_batch()
    given = [*vars(batch).values(), setting.old, setting.reference, setting.ratio]
    before = [(value.clone(), value._version) for value in given]
    run(batch, setting, wanted, prefer=prefer, chunk_mib=SMALL_CHUNK_MIB)
    for value, (copy, version) in zip(given, before, strict=True):
        assert torch.equal(value, copy)
        assert value._version == version


class Counter:
    """Counts the rows that reach a step or a product, and calls through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
        self.calls = 0
        self.rows = 0
        original = getattr(module, name)

        def counted(first: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self.rows += (first.raw if isinstance(first, RawLogits) else first).shape[0]
            return original(first, *args, **kwargs)

        monkeypatch.setattr(module, name, counted)


def test_no_gradient_work_where_autograd_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = Counter(monkeypatch, products, "logits_into")
    others = [
        Counter(monkeypatch, module, name)
        for module, name in (
            (products, "hidden_gradient_into"),
            (products, "product_into"),
            (products, "add_product"),
            (steps, "exponentials"),
            (steps, "gradient_of_logits"),
        )
    ]
    grad_modes: list[bool] = []
    policy = Setting(old=OLD).policy(BATCH.mask)

    def watched(inputs: PolicyInputs) -> Any:
        grad_modes.append(torch.is_grad_enabled())
        return policy(inputs)

    # In float32 every product but the logits' would go through one of the counted functions.
    run(BATCH, Setting(old=OLD), NOTHING, policy=watched)
    assert grad_modes == [False]
    assert logits.rows == int(((BATCH.mask != 0) & (BATCH.advantages != 0).unsqueeze(1)).sum())
    assert [other.calls for other in others if other is not others[1]] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("setting", "wanted", "calls"),
    [
        (Setting(), FROZEN, 1),
        (Setting(old=OLD), FROZEN, 1),
        (Setting(old=OLD, level="sequence"), FROZEN, 1),
        (Setting(), ALL, 2),
        # Three groups and the whole.
        (Setting(old=OLD, beta=0.04), ALL, 4),
        (Setting(old=OLD, beta=0.04, level="sequence"), ALL, 4),
    ],
)
def test_calls_of_the_policy(setting: Setting, wanted: Wanted, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = replace(BATCH, mask=torch.ones_like(BATCH.mask), advantages=torch.tensor([1.0, -0.5, 0.3]))
    policy = setting.policy(batch.mask)
    count = 0

    def counted(inputs: PolicyInputs) -> Any:
        nonlocal count
        count += 1
        return policy(inputs)

    found = run(batch, setting, wanted, policy=counted, chunk_mib=SMALL_CHUNK_MIB)
    assert count == calls
    assert_equal(found, liger(batch, setting), wanted)


@pytest.mark.parametrize("setting", [Setting(), Setting(old=OLD), Setting(old=OLD, level="sequence")])
def test_a_frozen_head_allocates_nothing_of_its_size(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    for name in ("empty", "zeros", "empty_like", "zeros_like", "full"):
        original = getattr(torch, name)

        def watched(*args: Any, original: Any = original, **kwargs: Any) -> torch.Tensor:
            nonlocal largest
            made: torch.Tensor = original(*args, **kwargs)
            if made.dim() == 2 and made.shape[1] == 257:
                largest = max(largest, made.shape[0])
            return made

        monkeypatch.setattr(torch, name, watched)
    batch = make_batch(width=257, vocabulary=1999)
    setting = replace(setting, old=None if setting.old is None else log_probabilities_like(batch, 4))
    run(batch, setting, FROZEN)
    assert 0 < largest <= batch.mask.numel()
    run(batch, setting, ALL)
    assert largest == 1999


def test_rows_of_zero_advantage_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = Counter(monkeypatch, products, "logits_into")
    valid = BATCH.mask.sum(dim=1)
    for wanted in (ALL, FROZEN):
        before = logits.rows
        found = run(BATCH, Setting(old=OLD), wanted)
        assert found.rows == logits.rows - before == int(valid[:2].sum())
        assert_equal(found, liger(BATCH, Setting(old=OLD)), wanted)
    # With a KL term they carry gradient.
    setting = Setting(old=OLD, beta=0.04, reference=REFERENCE)
    found = run(BATCH, setting)
    assert found.rows == int(valid.sum())
    assert_equal(found, liger(BATCH, setting))


def test_clipped_rows_need_no_parameter_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(old=OLD)
    coefficients = torch.autograd.functional.jacobian(
        lambda values: setting.policy(BATCH.mask)(PolicyInputs(values, BATCH.mask, BATCH.advantages, OLD))[0],
        run(BATCH, setting, NOTHING).log_probabilities,
    )
    carrying = int((coefficients != 0).sum())
    assert 0 < carrying < run(BATCH, setting, NOTHING).rows
    gradient = Counter(monkeypatch, steps, "gradient_of_logits")
    assert_equal(run(BATCH, setting, prefer="memory"), liger(BATCH, setting))
    assert gradient.rows == carrying * gradient.calls


def test_chunks_do_not_change_the_result() -> None:
    setting = Setting(old=OLD, beta=0.04, reference=REFERENCE)
    whole = run(BATCH, setting)
    for chunk_mib in (SMALL_CHUNK_MIB, 0.05, 0.07, 4096.0):
        for prefer in ("speed", "memory"):
            found = run(BATCH, setting, prefer=prefer, chunk_mib=chunk_mib)
            assert error(found.gradients.weight, whole.gradients.weight) < 1e-5
            assert error(found.gradients.hidden, whole.gradients.hidden) < 1e-5
            assert torch.equal(found.log_probabilities, whole.log_probabilities)


@pytest.mark.parametrize("loss_type", ["grpo", "luspo"])
def test_a_policy_over_sequences_takes_one_pass(loss_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(7)
    setting = Setting(loss_type, "sequence", old=log_probabilities_like(batch, 1))
    logits = Counter(monkeypatch, products, "logits_into")
    found = run(batch, setting, chunk_mib=SMALL_CHUNK_MIB)
    assert found.rows > 2 * 128
    assert logits.rows == found.rows
    assert_equal(found, liger(batch, setting))
    # A group holds two chunks: a sequence that does not fit has to come twice.
    long = replace(make_batch(1, 700), mask=torch.ones(1, 700))
    setting = Setting(loss_type, "sequence", old=log_probabilities_like(long, 1))
    logits.rows = 0
    found = run(long, setting, chunk_mib=SMALL_CHUNK_MIB)
    assert found.rows == 700
    assert 700 < logits.rows <= 1400
    assert_equal(found, liger(long, setting))


def test_reference_head() -> None:
    other = make_batch(width=9, seed=7)
    with torch.no_grad():
        found = linear_policy_loss(
            *(BATCH.hidden, BATCH.weight, BATCH.targets, BATCH.mask, BATCH.advantages),
            Setting(beta=0.04).policy(BATCH.mask),
            Setting(beta=0.04).traits(),
            ALL,
            bias=BATCH.bias,
            reference_head=ReferenceHead(other.hidden, other.weight, other.bias),
            chunk_mib=SMALL_CHUNK_MIB,
        )
    given = replace(other, targets=BATCH.targets)
    exact = reference_log_probabilities(given, LogitMap()).float()
    assert_equal(found, liger(BATCH, Setting(beta=0.04, reference=exact)))


class PatchLike(torch.autograd.Function):
    """How a caller uses the driver: gradients in forward, scaled in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, prefer: str, seen: list[Wanted]) -> Any:
        needed = ctx.needs_input_grad
        wanted = Wanted(needed[0], needed[1], needed[2]) if ctx.next_functions else NOTHING
        seen.append(wanted)
        result = run(replace(BATCH, hidden=hidden, weight=weight, bias=bias), Setting(old=OLD), wanted, prefer=prefer)
        ctx.save_for_backward(result.gradients.hidden, result.gradients.weight, result.gradients.bias)
        return result.loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return (*scale_gradients(ctx.saved_tensors, grad_outputs[0], shared=False), None, None)


def leaves() -> list[torch.Tensor]:
    assert BATCH.bias is not None
    return [value.clone().requires_grad_() for value in (BATCH.hidden, BATCH.weight, BATCH.bias)]


@pytest.mark.parametrize("prefer", ["speed", "memory"])
def test_backward_scales(prefer: str) -> None:
    expected = liger(BATCH, Setting(old=OLD))
    values = leaves()
    loss = PatchLike.apply(*values, prefer, [])
    (loss * 3.0).backward(retain_graph=True)
    for value, exact in zip(values, (expected.hidden, expected.weight, expected.bias), strict=True):
        assert error(value.grad, 3.0 * exact) < 2e-5
        value.grad = None
    # The first backward kept the graph, so it must not have scaled what was saved.
    (loss * 0.5).backward()
    for value, exact in zip(values, (expected.hidden, expected.weight, expected.bias), strict=True):
        assert error(value.grad, 0.5 * exact) < 2e-5


def test_backward_is_in_place_where_the_graph_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[torch.Tensor] = []
    original = driver.scale_gradients

    def watched(gradients: Any, grad_output: torch.Tensor, *, shared: bool) -> Any:
        saved.extend(gradients)
        result = original(gradients, grad_output, shared=shared)
        assert [a.data_ptr() for a in result] == [a.data_ptr() for a in gradients]
        return result

    monkeypatch.setitem(globals(), "scale_gradients", watched)
    PatchLike.apply(*leaves(), "speed", []).backward()
    assert len(saved) == 3


def test_what_hooks_may_have_kept_is_not_scaled() -> None:
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> int:
        kept.append(tensor)
        return len(kept) - 1

    assert not saved_tensors_are_shared()
    with torch.autograd.graph.saved_tensors_hooks(keep, kept.__getitem__):
        assert saved_tensors_are_shared()
    kept.append(torch.ones(3))
    (scaled,) = scale_gradients([kept[0]], torch.tensor(3.0), shared=True)
    assert scaled is not None
    assert torch.equal(scaled, torch.full((3,), 3.0))
    assert torch.equal(kept[0], torch.ones(3))


def test_backward_with_create_graph_differentiates_the_scale() -> None:
    values = leaves()
    scale = torch.tensor(2.0, requires_grad=True)
    (gradient,) = torch.autograd.grad(PatchLike.apply(*values, "speed", []) * scale, values[0], create_graph=True)
    (by_scale,) = torch.autograd.grad(gradient.sum(), scale)
    assert torch.allclose(by_scale, gradient.detach().sum() / 2.0)


def test_next_functions_tell_that_no_gradient_is_wanted() -> None:
    seen: list[Wanted] = []
    values = leaves()
    with torch.no_grad():
        PatchLike.apply(*values, "speed", seen)
    values[1].requires_grad_(False)
    PatchLike.apply(*values, "speed", seen)
    assert seen == [NOTHING, Wanted(True, False, True)]


def test_inference_mode() -> None:
    with torch.inference_mode():
        found = run(make_batch(), Setting(old=OLD.clone()), NOTHING)
    assert_equal(found, liger(BATCH, Setting(old=OLD)), NOTHING)


def test_a_policy_without_gradient() -> None:
    def constant(inputs: PolicyInputs) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return torch.tensor(2.0), [torch.tensor(1.0)]

    found = run(BATCH, Setting(), policy=constant, traits=PolicyTraits())
    assert found.loss.item() == 2.0
    assert found.gradients.weight is not None
    assert found.gradients.weight.abs().sum() == 0


def test_a_failing_logit_shows() -> None:
    hidden = BATCH.hidden.clone()
    hidden[0, 0] = float("nan")
    for wanted in (ALL, FROZEN, NOTHING):
        assert run(replace(BATCH, hidden=hidden), Setting(), wanted).loss.isnan()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"hidden": BATCH.hidden[0]}, "hidden"),
        ({"weight": BATCH.weight[:, :3]}, "weight"),
        ({"targets": BATCH.targets[:2]}, "targets"),
        ({"mask": BATCH.mask[:, :5]}, "mask"),
        ({"advantages": BATCH.mask}, "advantages"),
        ({"bias": torch.zeros(4)}, "bias"),
        ({"bias": torch.zeros(53, device="meta")}, "bias"),
        ({"targets": BATCH.targets.float()}, "targets"),
    ],
)
def test_wrong_shapes_are_named(change: dict[str, torch.Tensor], name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must"):
        run(replace(BATCH, **change), Setting(), policy=lambda inputs: None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden": torch.zeros(3, 102, 17)}, r"reference_head.hidden must have shape \(3, 101, 17\)"),
        ({"hidden": torch.zeros(3, 17)}, r"reference_head.hidden must be \[B, T, H\]"),
        ({"weight": torch.zeros(53, 4)}, r"reference_head.weight must have shape \(53, 17\)"),
        ({"bias": torch.zeros(60)}, r"reference_head.bias must have shape \(53,\)"),
    ],
)
def test_a_reference_head_of_another_shape_is_named(change: dict[str, torch.Tensor], said: str) -> None:
    head = ReferenceHead(BATCH.hidden, BATCH.weight, BATCH.bias)
    with pytest.raises(ValueError, match=said):
        run(BATCH, Setting(beta=0.04), reference_head=replace(head, **change))


@pytest.mark.parametrize("name", ["old", "reference", "ratio"])
def test_log_probabilities_of_another_shape_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=r"must have shape \(3, 101\)"):
        run(BATCH, replace(Setting(beta=0.04), **{name: torch.zeros(3, 100)}))


def test_wrong_choices_are_named() -> None:
    with pytest.raises(ValueError, match="prefer must be 'speed' or 'memory', found 'fast'"):
        run(BATCH, Setting(), prefer="fast")
    with pytest.raises(ValueError, match="temperature must be a positive number"):
        LogitMap(temperature=0.0)
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        LogitMap(final_logit_softcapping=-1.0)
