"""Every model type: a row that is moved to the left gives what its padded row gives, or the obstacle is named."""

from __future__ import annotations

from typing import Any

import pytest
from packaging.version import Version

from fusepatch.patches.grpo_live_tokens import obstacles, rows
from kits.tiny_types import TYPES, VOCABULARY, tiny_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROMPTS, COMPLETIONS = (3, 13, 7), (9, 2, 14)


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
    assert obstacles.of_model(model) is None
    assert difference(model) < 1e-5


@pytest.mark.parametrize("kind", sorted(obstacles.NOT_MOVED))
def test_a_type_that_would_give_something_else_is_left_with_the_reason(kind: str) -> None:
    model = made(kind)
    # Some read their positions from the mask in transformers 4, or have no scale yet.
    assert Version(transformers.__version__) < Version("5") or difference(model) > 1e-3
    assert obstacles.NOT_MOVED[kind] in obstacles.of_model(model)


def test_every_type_is_one_or_the_other() -> None:
    assert TYPES.keys() == obstacles.MOVED | obstacles.NOT_MOVED.keys()
    assert not obstacles.MOVED & obstacles.NOT_MOVED.keys()


STATIC = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
}


@pytest.mark.parametrize("name", STATIC)
def test_rotary_embeddings_of_fixed_angles_are_moved(name: str) -> None:
    model = made("llama", rope_parameters={"rope_theta": 10000.0, **STATIC[name]})
    assert obstacles.of_model(model) is None
    assert difference(model) < 1e-5


def test_alibi_is_moved() -> None:
    assert difference(made("falcon", alibi=True)) < 1e-5


ORIGINAL = {"original_max_position_embeddings": 25}
LONG = {
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
}


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}, "type dynamic"),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **LONG}, **ORIGINAL},
            "type longrope",
        ),
    ],
)
def test_rotary_embeddings_that_know_the_width_are_left(kind: str, changes: dict[str, Any], reason: str) -> None:
    model = made(kind, max_position_embeddings=25, **changes)
    assert difference(model) > 1e-3
    assert reason in obstacles.of_model(model)


@pytest.mark.parametrize(("kind", "field"), [("llama", "attn_temperature_tuning"), ("mistral", "llama_4_scaling_beta")])
def test_attention_that_is_scaled_by_the_position_is_left(kind: str, field: str) -> None:
    model = made(kind)
    setattr(model.config, field, 0.1)
    assert f"{field} scales attention by the position" in obstacles.of_model(model)


def test_a_compiled_model_is_left() -> None:
    model = made("llama")
    assert obstacles.of_settings(model, model, model) is None
    whole = torch.compile(model, backend="eager")
    assert "is compiled" in obstacles.of_settings(whole, model, model)
    model.model.layers[0].compile()
    assert "is compiled" in obstacles.of_settings(model, model, model)


def test_prompt_learning_is_left() -> None:
    peft = pytest.importorskip("peft")
    base = made("llama")
    tuned = peft.get_peft_model(base, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert "prompt learning" in obstacles.of_settings(tuned, tuned, base)
    adapted = peft.get_peft_model(made("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    assert obstacles.of_settings(adapted, adapted, adapted.get_base_model()) is None
