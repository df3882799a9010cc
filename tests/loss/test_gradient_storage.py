"""grad-weight made within its own memory: the sums and the group that lie there, the cast over them, and the result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fusepatch.loss.policy_loss as driver
from fusepatch.loss import LogitMap, PolicyTraits, Wanted, gradient_storage
from fusepatch.loss.linear import make_head
from kits.loss_cases import (
    ALL,
    SMALL_CHUNK_MIB,
    Setting,
    assert_equal,
    error,
    log_probabilities_like,
    make_batch,
    reference,
    run,
)

BATCH = make_batch(3, 211, 256, 700, spread=0.1)
OLD = log_probabilities_like(BATCH, 1)
REFERENCE = log_probabilities_like(BATCH, 2)


@pytest.fixture
def first_columns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Groups of one chunk of 128 rows, so that sums are added to; the columns that each call made in the first pass."""
    monkeypatch.setattr(gradient_storage, "GROUP_ROWS", 128)
    found: list[int] = []

    def seen(*arguments: Any) -> Any:
        part = gradient_storage.first_columns_pass(*arguments)
        found.append(part.begun.columns)
        return part

    monkeypatch.setattr(driver, "first_columns_pass", seen)
    return found


SETTINGS = {
    "fixed coefficients": Setting(),
    "separable": Setting(old=OLD),
    "separable with a reference": Setting(old=OLD, beta=0.04, reference=REFERENCE, temperature=0.8),
    "masked rows matter": Setting(loss_type="luspo", old=OLD),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_reference(name: str, hidden: bool, bias: bool, first_columns: list[int]) -> None:
    wanted = Wanted(hidden, True, bias)
    found = run(BATCH, SETTINGS[name], wanted, prefer="memory", chunk_mib=SMALL_CHUNK_MIB)
    # 2 * 700 * 256 * 4 bytes would be needed for all; 256 * 4 + 128 * 4 for each column of the first part.
    assert first_columns == [384]
    assert found.rows > 128
    assert_equal(found, reference(BATCH, SETTINGS[name]), wanted)


def test_soft_cap_and_scale(first_columns: list[int]) -> None:
    logit_map = LogitMap(0.6, 0.25, 3.0)
    found = run(BATCH, Setting(old=OLD), logit_map=logit_map, prefer="memory", chunk_mib=SMALL_CHUNK_MIB)
    assert first_columns == [384]
    assert_equal(found, reference(BATCH, Setting(old=OLD), logit_map))


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("hidden", [torch.bfloat16, torch.float32, torch.float64])
def test_every_pair_of_dtypes(hidden: torch.dtype, weight: torch.dtype, first_columns: list[int]) -> None:
    batch = replace(BATCH, hidden=BATCH.hidden.to(hidden), weight=BATCH.weight.to(weight), bias=None)
    wanted = Wanted(True, True, False)
    found = run(batch, Setting(loss_type="bnpo"), wanted, prefer="memory", chunk_mib=SMALL_CHUNK_MIB)
    # Two bytes for each number of the weight have no room for a tile of float64 sums; float32 sums are narrower than
    # float64.
    left_out = (hidden == torch.float64 and weight.itemsize == 2) or weight == torch.float64 != hidden
    assert [columns >= 128 for columns in first_columns] == [True] * (not left_out)
    assert found.gradients.weight.dtype == weight
    usual = run(batch, Setting(loss_type="bnpo"), wanted, prefer="speed", chunk_mib=SMALL_CHUNK_MIB)
    tolerance = max(torch.finfo(weight).eps, 1e-6)
    assert error(found.gradients.weight, usual.gradients.weight) < tolerance
    assert error(found.gradients.hidden, usual.gradients.hidden) < max(torch.finfo(hidden).eps, 1e-6)


def test_nothing_else_is_kept_in_memory(first_columns: list[int]) -> None:
    batch = BATCH.to(torch.bfloat16)
    found = run(batch, Setting(), prefer="memory", chunk_mib=SMALL_CHUNK_MIB)
    gradient = found.gradients.weight
    assert first_columns
    assert gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
    assert gradient.is_contiguous()


def test_whole_sequences_longer_than_a_group(first_columns: list[int]) -> None:
    setting = Setting(old=OLD, level="sequence")
    assert BATCH.mask.sum(1).max() > 128
    found = run(BATCH, setting, prefer="memory", chunk_mib=SMALL_CHUNK_MIB)
    assert first_columns == [384]
    assert_equal(found, reference(BATCH, setting))


def test_policies_that_nothing_is_known_of(first_columns: list[int]) -> None:
    setting = Setting(old=OLD, level="sequence")
    found = run(BATCH, setting, traits=PolicyTraits(), prefer="memory", chunk_mib=SMALL_CHUNK_MIB)
    assert first_columns == []
    assert_equal(found, reference(BATCH, setting))


def test_rows_without_a_coefficient(first_columns: list[int]) -> None:
    # Far outside the clipping range on the side where nothing flows: every coefficient is zero.
    clipped = replace(BATCH, advantages=BATCH.advantages.abs() + 0.1)
    setting = Setting(old=OLD - 5.0)
    found = run(clipped, setting, ALL, prefer="memory", chunk_mib=SMALL_CHUNK_MIB)
    assert first_columns == [384]
    assert not found.gradients.weight.any()
    assert not found.gradients.bias.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scratch_bytes", [1, 5_000, 1 << 30])
def test_the_cast_reads_every_sum_before_it_is_overwritten(dtype: torch.dtype, scratch_bytes: int) -> None:
    batch = BATCH.to(dtype)
    head = make_head(batch.hidden, batch.weight, None, LogitMap(), "torch", SMALL_CHUNK_MIB)
    storage = gradient_storage.allocate(head, 128)
    sums = torch.randn(storage.sums.shape, generator=torch.Generator().manual_seed(0))
    storage.sums.copy_(sums)
    storage.group.fill_(float("nan"))
    assert torch.equal(storage.sums, sums)
    storage.cast_in_place(scratch_bytes)
    assert torch.equal(storage.grad_weight[: storage.columns], sums.to(dtype))


def test_no_room_for_a_tile_of_columns(first_columns: list[int]) -> None:
    batch = make_batch(2, 50, 17, 53)
    assert_equal(run(batch, Setting(), prefer="memory"), reference(batch, Setting()))
    assert first_columns == []
