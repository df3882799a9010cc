"""Which rows enter, how they are cut, and what memory they take."""

from __future__ import annotations

import pytest
import torch

from fusepatch.loss import chunks


@pytest.mark.parametrize(("budget", "expected"), [(0, 128), (128 * 10 - 1, 128), (1280, 128), (2559, 128), (2560, 256)])
def test_rows_within_a_budget(budget: int, expected: int) -> None:
    assert chunks.rows_within(budget, 10) == expected


def test_the_default_budget_at_the_benchmark_shape() -> None:
    assert chunks.rows_within(256 * chunks.MIB, 128_256 * 4) == 512


@pytest.mark.parametrize("total", [0, 1, 127, 128, 129, 500, 1000, 8192, 8193])
@pytest.mark.parametrize("limit", [128, 256, 512, 3072])
def test_ranges_cover_everything_once_in_even_pieces(total: int, limit: int) -> None:
    pieces = chunks.ranges(7, 7 + total, limit)
    covered = [row for start, stop in pieces for row in range(start, stop)]
    assert covered == list(range(7, 7 + total))
    sizes = [stop - start for start, stop in pieces]
    assert all(size <= limit for size in sizes)
    assert all(size == sizes[0] and size % 128 == 0 for size in sizes[:-1])
    assert len(pieces) == -(-total // limit)


def test_plan_keeps_order_and_counts() -> None:
    keep = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    plan = chunks.plan_rows(keep)
    assert plan.counts == (2, 0, 3)
    assert plan.rows == 5
    assert plan.index is not None
    assert plan.index.tolist() == [0, 2, 6, 7, 8]
    values = torch.arange(9.0).view(3, 3) + 1
    taken = plan.take(values)
    assert taken.tolist() == [1, 3, 7, 8, 9]
    assert torch.equal(plan.put(taken), torch.where(keep, values, 0.0))


@pytest.mark.parametrize(
    ("start", "stop", "expected"), [(0, 1, (0, 1)), (0, 3, (0, 3)), (1, 2, (0, 1)), (2, 5, (2, 3)), (1, 5, (0, 3))]
)
def test_sequences_of_a_range(start: int, stop: int, expected: tuple[int, int]) -> None:
    keep = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    assert chunks.plan_rows(keep).sequences(start, stop) == expected


def test_a_full_plan_needs_no_index() -> None:
    plan = chunks.plan_rows(torch.ones(2, 3, dtype=torch.bool))
    assert plan.index is None
    assert plan.computed is None
    assert plan.rows == 6
    assert plan.sequences(2, 4) == (0, 2)


def test_no_row_at_all() -> None:
    plan = chunks.plan_rows(torch.zeros(2, 3, dtype=torch.bool))
    assert plan.rows == 0
    assert plan.take(torch.ones(2, 3)).shape == (0,)
    assert torch.equal(plan.put(torch.ones(0)), torch.zeros(2, 3))


def test_a_narrow_gradient_shares_the_memory_of_its_logits() -> None:
    buffer = chunks.logit_buffer(4, 70, torch.float32, torch.bfloat16, torch.device("cpu"), narrow_in_place=True)
    logits, gradients = buffer.logits(3, 70), buffer.gradients(3, 70)
    assert logits.data_ptr() == gradients.data_ptr()
    assert gradients.stride() == (2 * logits.stride(0), 1)
    assert logits.stride(0) % 64 == 0
    apart = chunks.logit_buffer(4, 70, torch.float32, torch.bfloat16, torch.device("cpu"), narrow_in_place=False)
    assert apart.logits(3, 70).data_ptr() != apart.gradients(3, 70).data_ptr()


@pytest.mark.parametrize(
    ("counts", "groups"),
    [
        ((4, 4, 4, 4), [(0, 8), (8, 16)]),
        ((3, 0, 5, 9, 1), [(0, 8), (8, 18)]),
        ((6, 6, 6), [(0, 6), (6, 12), (12, 18)]),
        ((0, 0), []),
        ((), []),
        ((0, 10, 0), [(0, 10)]),
        ((2, 11), None),
    ],
)
def test_whole_sequences(counts: tuple[int, ...], groups: list[tuple[int, int]] | None) -> None:
    assert chunks.whole_sequences(counts, 10) == groups
