"""Every model type: a row that is moved to the left gives what its padded row gives, or the obstacle is named."""

from __future__ import annotations

from typing import Any

import pytest

from fusepatch.patches.grpo_live_tokens import obstacles, rows
from kits.tiny_types import TYPES, VOCABULARY, tiny_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROMPTS, COMPLETIONS = (3, 11, 7), (9, 2, 14)


def made(kind: str, **changes: Any) -> Any:
    if kind.removesuffix("_text") not in transformers.CONFIG_MAPPING and kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"the installed transformers has no {kind}")
    return tiny_model(kind, **changes).eval()


def batch() -> tuple[Any, Any, int]:
    border, width = max(PROMPTS), max(COMPLETIONS)
    ids = torch.randint(4, VOCABULARY - 8, (3, border + width), generator=torch.Generator().manual_seed(3))
    columns = torch.arange(border + width)
    mask = torch.stack(
        [((columns >= border - p) & (columns < border + c)).long() for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    )
    return ids * mask, mask, width


def log_probabilities(model: Any, ids: Any, mask: Any, width: int) -> Any:
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[:, -width:, 0]


def difference(model: Any) -> float:
    """Between a padded batch with its mask and the moved one without, over the tokens of the completions."""
    ids, mask, width = batch()
    layout = rows.read_layout(mask, width)
    part = rows.move(ids, mask, layout, None)
    padded = log_probabilities(model, ids, mask, width)
    moved = rows.put_back([log_probabilities(model, part.input_ids, None, part.logits_to_keep)], [part], 3)
    assert padded[part.real].std() > 0.1, "the model says the same of every token"
    return float((padded - moved)[part.real].abs().max())


@pytest.mark.parametrize("kind", sorted(obstacles.MOVED))
def test_a_type_that_is_moved_gives_what_upstream_gives(kind: str) -> None:
    model = made(kind)
    assert obstacles.of_model(model, model) is None
    assert difference(model) < 1e-5


@pytest.mark.parametrize("kind", sorted(obstacles.NOT_MOVED))
def test_a_type_that_would_give_something_else_is_left_with_the_reason(kind: str) -> None:
    model = made(kind)
    assert difference(model) > 1e-3
    assert obstacles.NOT_MOVED[kind] in obstacles.of_model(model, model)


def test_every_type_is_one_or_the_other() -> None:
    assert TYPES.keys() == obstacles.MOVED | obstacles.NOT_MOVED.keys()
    assert not obstacles.MOVED & obstacles.NOT_MOVED.keys()
