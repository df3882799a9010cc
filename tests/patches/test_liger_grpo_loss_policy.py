"""A policy that is not the installed Liger's own, in any of its parts, gets upstream's own code; Liger's own is
recognised."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("liger_kernel.chunked_loss.grpo_loss")

import fusepatch  # noqa: E402
from fusepatch.engine import ledger  # noqa: E402
from fusepatch.patches.liger_grpo_loss import own_code  # noqa: E402
from kits import liger_grpo as kit  # noqa: E402
from kits.liger_grpo import Case, Result, patched, run, tensors  # noqa: E402

GRPO = importlib.import_module("liger_kernel.chunked_loss.grpo_loss")
PPO = importlib.import_module("liger_kernel.chunked_loss.fused_linear_ppo")
FUNCTION: Any = GRPO.LigerFusedLinearGRPOFunction
BASE: Any = PPO.LigerFusedLinearPPOBase
KIND = kit.loss_class()
WHOLE_VOCABULARY = "log_probs" in inspect.signature(FUNCTION.ppo_loss_fn).parameters
LOSS = "dapo" if ("dapo", "token") in kit.combinations(KIND) else "bnpo"
CASE = Case(loss_type=LOSS, beta=0.04, ref="given", old=True)


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    fusepatch.deactivate()
    os.environ.pop("FUSEPATCH", None)
    yield
    fusepatch.deactivate()


def left_to_upstream() -> list[str]:
    """The reasons so far. `fusepatch.status()` reads the sources of modules that wait to be imported, for a second."""
    notes = ledger.fallbacks("liger.grpo_loss")
    return [note.text for note in notes if note.text.startswith("upstream's own forward: ")]


def chosen(given: Any) -> Any:
    if not WHOLE_VOCABULARY:
        return given["per_token_logps"]
    return given["log_probs"].gather(-1, given["selected_token_ids"].unsqueeze(-1)).squeeze(-1)


class MeanOfItsChunk(FUNCTION):  # type: ignore[misc]
    @staticmethod
    def ppo_loss_fn(*_: Any, **given: Any) -> Any:
        return -(chosen(given) * given["advantages"].unsqueeze(1)).mean(), []


class NormalisedByItsChunk(FUNCTION):  # type: ignore[misc]
    @staticmethod
    def ppo_loss_fn(*_: Any, **given: Any) -> Any:
        each = -chosen(given) * given["advantages"].unsqueeze(1) * given["attention_mask"]
        return each.sum() / given["attention_mask"].sum().clamp(min=1) / given["full_attention_mask"].shape[0], []


class MetricOfEachSequence(FUNCTION):  # type: ignore[misc]
    @staticmethod
    def ppo_loss_fn(*_: Any, **given: Any) -> Any:
        each = -(chosen(given).square() * given["advantages"].unsqueeze(1)).sum(-1)
        return each.sum() / given["full_attention_mask"].numel(), [each.detach().mean(), each.detach()]


class Entropy(FUNCTION):  # type: ignore[misc]
    @staticmethod
    def ppo_loss_fn(*_: Any, **given: Any) -> Any:
        entropy = -(given["log_probs"].exp() * given["log_probs"]).sum(-1)
        count = given["full_attention_mask"].sum()
        return ((-chosen(given) - 0.1 * entropy) * given["attention_mask"]).sum() / count, [entropy.detach().sum()]


OWN_POLICIES = [MeanOfItsChunk, NormalisedByItsChunk, MetricOfEachSequence, *([Entropy] if WHOLE_VOCABULARY else [])]


def call(function: Any, chunk_size: int = 2) -> Result:
    given = tensors()
    hidden = given["hidden"].clone().requires_grad_()
    values = {
        "_input": hidden,
        "weight": given["weight"],
        "selected_token_ids": given["ids"],
        "attention_mask": given["mask"],
        "advantages": given["advantages"],
        "beta": 0.0,
        "compiled": False,
        "use_ref_model": False,
        "chunk_size": chunk_size,
    }
    parameters = inspect.signature(FUNCTION.forward).parameters.values()
    loss, metrics = function.apply(*[values.get(p.name, p.default) for p in parameters if p.name != "ctx"])
    (loss * 0.7).backward()
    return Result(loss.detach(), tuple(metrics), {"hidden": hidden.grad})


def test_a_policy_of_the_users_own_gets_upstreams_chunks_and_log_probabilities() -> None:
    calls = [(policy, chunk_size) for policy in OWN_POLICIES for chunk_size in (1, 2)]
    theirs = [call(*one) for one in calls]
    with patched():
        for one, expected in zip(calls, theirs, strict=True):
            kit.assert_equal(call(*one), expected, tolerance=0.0)
        said = left_to_upstream()
    assert len(said) == len(OWN_POLICIES)
    for policy, text in zip(OWN_POLICIES, said, strict=True):
        assert f"the ppo_loss_fn of {__name__}.{policy.__name__} is not liger_kernel.chunked_loss's own" in text


def test_a_subclass_that_changes_nothing_is_served() -> None:
    inheriting = type("Inheriting", (FUNCTION,), {"note": 1})
    theirs = call(FUNCTION)
    with patched():
        kit.assert_equal(call(inheriting), theirs)
        assert not left_to_upstream()
        inheriting.chunk_forward = staticmethod(BASE.chunk_forward)
        kit.assert_equal(call(inheriting), theirs)
        assert left_to_upstream() == ["upstream's own forward: Inheriting has a chunk_forward of its own"]


def double(function: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement under the same name, module and signature, that gives something else."""

    @functools.wraps(function)
    def doubled(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        return (
            tuple(2 * part if torch.is_tensor(part) else part for part in found)
            if isinstance(found, tuple)
            else 2 * found
        )

    return doubled


def with_other_defaults(function: Any) -> Any:
    defaults = (*function.__defaults__[:-1], "other")
    return types.FunctionType(function.__code__, function.__globals__, function.__name__, defaults)


def with_other_globals(function: Any) -> Any:
    names = {**function.__globals__, "k3_loss_fn": double(GRPO.k3_loss_fn)}
    return types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)


REPLACEMENTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "k3_loss_fn": (GRPO, "k3_loss_fn", double),
    "clip_coef_fn": (GRPO, "clip_coef_fn", double),
    "ppo_loss_fn": (FUNCTION, "ppo_loss_fn", double),
    "its globals": (FUNCTION, "ppo_loss_fn", with_other_globals),
    "its defaults": (FUNCTION, "ppo_loss_fn", with_other_defaults),
    "chunk_forward": (BASE, "chunk_forward", double),
    "forward": (BASE, "forward", double),
    "a module": (GRPO, "torch", lambda found: types.SimpleNamespace(**vars(found))),
}
if "ValueError" in FUNCTION.ppo_loss_fn.__code__.co_names:
    REPLACEMENTS["a builtin"] = (GRPO, "ValueError", lambda _: TypeError)
for helper in ("_compute_dapo_normalizer", "_compute_loss_from_logps", "_compute_chunk_loss"):
    if hasattr(BASE, helper):
        REPLACEMENTS[helper] = (BASE, helper, double)
if hasattr(PPO, "_selective_logprob_forward"):
    REPLACEMENTS["_selective_logprob_forward"] = (PPO, "_selective_logprob_forward", double)
    REPLACEMENTS["a constant"] = (PPO, "_SELECTIVE_LOGPROB_VOCAB_CHUNK_SIZE", lambda _: 16)


def replace(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    owner, attribute, other = REPLACEMENTS[name]
    own = inspect.getattr_static(owner, attribute, None)
    plain = own.__func__ if isinstance(own, staticmethod) else own
    made = other(plain)
    monkeypatch.setattr(owner, attribute, staticmethod(made) if isinstance(owner, type) else made, raising=False)


@pytest.mark.parametrize("name", ["k3_loss_fn", "ppo_loss_fn", "chunk_forward", "forward"])
def test_a_part_that_was_replaced_before_fusepatch_came(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    replace(monkeypatch, name)
    theirs = run(CASE, KIND)
    with patched():
        kit.assert_equal(run(CASE, KIND), theirs, tolerance=0.0)
        assert ["has been replaced" in text for text in left_to_upstream()] == [True]


def test_a_part_that_is_replaced_later(monkeypatch: pytest.MonkeyPatch) -> None:
    # A wrapper around the patched forward has the last word, whatever runs within it.
    names = [name for name in REPLACEMENTS if name != "forward"]
    theirs = {}
    for name in names:
        replace(monkeypatch, name)
        theirs[name] = run(CASE, KIND)
        monkeypatch.undo()
    with patched():
        for count, name in enumerate(names):
            run(CASE, KIND)
            assert sum(note.times for note in ledger.fallbacks("liger.grpo_loss") if "replaced" in note.text) == count
            replace(monkeypatch, name)
            kit.assert_equal(run(CASE, KIND), theirs[name], tolerance=0.0)
            monkeypatch.undo()
        assert all("has been replaced" in text for text in left_to_upstream())
        assert any(f"by {GRPO.k3_loss_fn.__module__}.k3_loss_fn of {__file__}:" in text for text in left_to_upstream())


def test_code_that_is_exchanged_within_a_function_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(log_p: Any, log_q: Any) -> Any:
        return log_p - log_q

    with patched():
        run(CASE, KIND)
        monkeypatch.setattr(GRPO.k3_loss_fn, "__code__", other.__code__)
        run(CASE, KIND)
        assert ["k3_loss_fn has been replaced" in text for text in left_to_upstream()] == [True]


def test_a_backward_of_someone_elses_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = inspect.getattr_static(BASE, "backward").__func__

    def theirs(ctx: Any, grad_output: Any, *grad_metrics: Any) -> Any:
        seen.append(float(grad_output))
        return original(ctx, grad_output, *grad_metrics)

    monkeypatch.setattr(BASE, "backward", staticmethod(theirs))
    expected = run(CASE, KIND)
    with patched():
        kit.assert_equal(run(CASE, KIND), expected, tolerance=0.0)
        assert ["LigerFusedLinearPPOBase.backward has been replaced" in text for text in left_to_upstream()] == [True]
    assert seen == [pytest.approx(0.7)] * 2


def test_what_was_seen_to_be_ligers_own_is_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    compare = own_code._compare
    monkeypatch.setattr(own_code, "_found", {})
    monkeypatch.setattr(own_code, "_compare", lambda *given: (compared.append(given), compare(*given))[1])
    with patched():
        run(CASE, KIND)
        run(CASE, KIND)
    assert len(compared) == 1


def test_a_module_without_its_source_is_not_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_code, "_found", {})
    monkeypatch.setattr(GRPO, "__spec__", None)
    own_code._from_source.cache_clear()
    try:
        with patched():
            run(CASE, KIND)
            assert left_to_upstream() == [
                "upstream's own forward: the source of liger_kernel.chunked_loss.grpo_loss cannot be read"
            ]
    finally:
        own_code._from_source.cache_clear()


def test_a_way_to_compute_it_that_the_user_chose_is_not_dropped_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    with patched(FUSEPATCH_HEAD="torch"):
        call(MeanOfItsChunk)
        call(MeanOfItsChunk)
    assert caplog.text.count("FUSEPATCH_HEAD=torch cannot be followed in this call") == 1
    with patched(FUSEPATCH_HEAD="torch", FUSEPATCH_STRICT="1"), pytest.raises(fusepatch.StrictError):
        call(MeanOfItsChunk)
