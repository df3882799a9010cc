"""Rows moved to the left, put back, and sorted: on tensors alone, against what each row says by itself."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fusepatch.patches.grpo_live_tokens import model_check, obstacles, regroup, rows

torch = pytest.importorskip("torch")


def batch(prompts: list[int], completions: list[int], border: int, width: int) -> tuple[Any, Any]:
    """Tokens that are different everywhere, and the mask."""
    columns = torch.arange(border + width)
    mask = torch.stack(
        [
            ((columns >= border - prompt) & (columns < border + completion)).long()
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
    )
    return torch.arange(1, mask.numel() + 1).view_as(mask) * mask, mask


def drawn(seed: int) -> tuple[list[int], list[int], int, int]:
    numbers = random.Random(seed)
    size, border, width = numbers.randint(1, 5), numbers.randint(1, 9), numbers.randint(1, 9)
    prompts = [numbers.randint(1, border) for _ in range(size)]
    return prompts, [numbers.choice((0, width, numbers.randint(0, width))) for _ in range(size)], border, width


def through(ids: Any, part: rows.Part) -> Any:
    """What a causal model would say of the kept columns: the token before, and the token itself."""
    before = torch.cat([torch.zeros_like(part.input_ids[:, :1]), part.input_ids[:, :-1]], 1)
    both = torch.stack([before, part.input_ids], -1)
    assert part.logits_to_keep + 1 <= part.input_ids.shape[1], "the first of the kept tokens has one before it"
    return both[:, -part.logits_to_keep :].double()


@pytest.mark.parametrize("seed", range(60))
def test_each_completion_token_comes_back_to_its_place(seed: int) -> None:
    prompts, completions, border, width = drawn(seed)
    ids, mask = batch(prompts, completions, border, width)
    layout = rows.read_layout(mask, width)
    assert layout is not None
    assert (list(layout.prompts), list(layout.completions)) == (prompts, completions)
    chosen = None if seed % 3 else sorted(random.Random(seed).sample(range(len(prompts)), max(1, len(prompts) - 1)))
    part = rows.move(ids, mask, layout, chosen)
    assert part.input_ids.shape[1] <= max(border + width, border + 1)
    needed = max(prompts[row] + completions[row] for row in chosen or range(len(prompts)))
    assert part.input_ids.shape[1] < needed + rows.MULTIPLE
    fill = -torch.ones(len(prompts), width)
    back = rows.put_back([through(ids, part)[..., 1]], [part], len(prompts), fill)
    both = rows.put_back([through(ids, part)], [part], len(prompts))
    for row, completion in enumerate(completions):
        if chosen is not None and row not in chosen:
            assert back[row].tolist() == [-1] * width
            assert not both[row].any()
            continue
        assert back[row, :completion].tolist() == ids[row, border : border + completion].tolist()
        assert back[row, completion:].tolist() == [-1] * (width - completion)
        assert both[row, :completion, 0].tolist() == ids[row, border - 1 : border - 1 + completion].tolist()
        assert not both[row, completion:].any()


def test_without_any_completion_one_column_is_kept() -> None:
    """TRL would take the last 0 columns for all of them."""
    ids, mask = batch([8, 8], [0, 0], 8, 1)
    part = rows.move(ids, mask, rows.read_layout(mask, 1), None)
    assert (part.logits_to_keep, part.input_ids.shape[1]) == (1, 9)
    assert rows.put_back([torch.ones(2, 1)], [part], 2).tolist() == [[0.0]] * 2


@pytest.mark.parametrize("seed", range(20))
def test_the_mask_of_a_moved_row_is_1_at_its_completion(seed: int) -> None:
    prompts, completions, border, width = drawn(seed)
    ids, mask = batch(prompts, completions, border, width)
    part = rows.move(ids, mask, rows.read_layout(mask, width), None)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        assert part.attention_mask[row].nonzero().flatten().tolist() == list(range(prompt, prompt + completion))


def test_the_gradient_comes_back_too() -> None:
    ids, mask = batch([2, 4], [3, 1], 4, 5)
    part = rows.move(ids, mask, rows.read_layout(mask, 5), None)
    values = torch.randn(2, part.logits_to_keep, requires_grad=True)
    rows.put_back([values], [part], 2).sum().backward()
    assert float(values.grad.sum()) == 4, "one for each token of a completion"


@pytest.mark.parametrize(
    ("row", "columns"), [(1, [0, 1, 2, 3]), (1, [2]), (0, [5]), (0, [3])], ids=["no prompt", "hole", "gap", "cut off"]
)
def test_a_row_that_is_not_one_run_is_not_moved(row: int, columns: list[int]) -> None:
    _, mask = batch([2, 4], [3, 2], 4, 5)
    assert rows.read_layout(mask, 5) is not None
    mask[row, columns] = 0
    assert rows.read_layout(mask, 5) is None


def test_parts_of_other_widths_become_one_batch() -> None:
    ids, mask = batch([2, 4, 1], [3, 1, 5], 4, 5)
    layout = rows.read_layout(mask, 5)
    order = rows.by_length(layout, None)
    assert order == [2, 0, 1]
    parts = [rows.move(ids, mask, layout, order[:2]), rows.move(ids, mask, layout, order[2:])]
    back = rows.put_back([through(ids, part)[..., 1] for part in parts], parts, 3)
    assert back.tolist() == (ids[:, 4:] * mask[:, 4:]).tolist()


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_sorted_inside_their_windows(seed: int) -> None:
    numbers = random.Random(seed)
    size, window = numbers.randint(1, 17), numbers.randint(1, 6)
    lengths = [numbers.randint(1, 4) for _ in range(size)]
    found = regroup.order(torch.tensor(lengths), window).tolist()
    for start in range(0, size, window):
        inside = list(range(start, min(start + window, size)))
        whole = len(inside) == window
        wanted = sorted(inside, key=lambda row: -lengths[row]) if whole else inside
        assert found[start : start + window] == wanted


@pytest.mark.parametrize(
    ("slices", "accumulation", "found"), [(8, 8, 8), (8, 2, 2), (2, 8, 2), (1, 4, 1), (6, 4, None), (3, 2, None)]
)
def test_a_window_is_inside_of_one_optimizer_step(slices: int, accumulation: int, found: int | None) -> None:
    assert regroup.window(slices, accumulation) == found
    steps = [
        {micro // accumulation for micro in range(first, first + (found or 1))} for first in range(0, 48, found or 1)
    ]
    assert all(len(step) == 1 for step in steps)


def test_a_batch_with_something_else_than_rows_keeps_its_order() -> None:
    fine = {"ids": torch.zeros(4, 2), "items": torch.tensor(3), "old": None}
    assert regroup.why_not_per_row(fine, 4) is None
    assert "num_images" in str(regroup.why_not_per_row({**fine, "num_images": [1, 1, 0, 0]}, 4))
    assert "pixel_values" in str(regroup.why_not_per_row({**fine, "pixel_values": torch.zeros(7, 3)}, 4))


@pytest.mark.parametrize("name", ["pixel_values", "token_type_ids", "something_new"])
def test_what_the_model_gets_beside_tokens_is_an_obstacle(name: str) -> None:
    assert obstacles.of_call({"compute_entropy": True, "num_images": None, "compute_aux_loss": False}) is None
    assert name in str(obstacles.of_call({name: torch.zeros(2, 3)}))


def test_the_two_rows_of_the_check_are_padded_whatever_the_batch_is() -> None:
    ids = torch.arange(20).view(1, 20)
    tokens, mask, width = model_check.two_rows(ids, torch.ones_like(ids), 12)
    assert tokens.tolist() == ids.expand(2, 20).tolist()
    assert mask[0].all()
    assert mask[1].nonzero().flatten().tolist() == list(range(4, 14))
    assert rows.read_layout(mask, width) is not None
    for width, prompt, found in ((19, 2, 19), (20, 2, 20), (0, 20, 1)):  # ranks have the check in common
        tokens, mask, completion = model_check.two_rows(ids, torch.ones_like(ids), width)
        assert (tuple(tokens.shape), completion) == ((2, prompt + found), found)
        assert rows.read_layout(mask, completion) is not None
        assert not mask[1].all()
    long = torch.ones(2, 3000, dtype=torch.long)
    assert model_check.two_rows(long, long, 2000)[0].shape == (2, 2 * model_check.LONGEST)
