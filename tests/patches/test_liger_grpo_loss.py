"""`liger.grpo_loss` against the installed Liger on the CPU: same loss, metrics and gradients, and each known
exception."""

from __future__ import annotations

import importlib
import inspect
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("liger_kernel.chunked_loss.grpo_loss")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import fusepatch  # noqa: E402
from fusepatch import settings  # noqa: E402
from kits import liger_grpo as kit  # noqa: E402
from kits.liger_grpo import Case, assert_equal, patched, record, run, tensors  # noqa: E402

KIND = kit.loss_class()
FUNCTION = importlib.import_module("liger_kernel.chunked_loss.grpo_loss").LigerFusedLinearGRPOFunction
BASE = importlib.import_module("liger_kernel.chunked_loss.fused_linear_ppo").LigerFusedLinearPPOBase
MADE, CALLED = kit.accepted(KIND)
PAIRS = kit.combinations(KIND)
CASES_PER_PAIR = 18

newest = pytest.mark.skipif("num_items_in_batch" not in CALLED, reason="this Liger is older than 0.8.1")


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    fusepatch.deactivate()
    os.environ.pop("FUSEPATCH", None)
    yield
    fusepatch.deactivate()


def small_chunks() -> None:
    settings.use(settings.current()._replace(head_chunk_mib=kit.SMALL_CHUNK_MIB))


def left_to_upstream() -> list[str]:
    return [note.text for note in record().fallbacks if note.text.startswith("upstream's own forward: ")]


@pytest.mark.parametrize(("loss_type", "level"), PAIRS)
def test_loss_metrics_and_gradients_are_upstreams(loss_type: str, level: str) -> None:
    cases = kit.sample(loss_type, level, CASES_PER_PAIR, KIND)
    assert not kit.differences(cases, KIND)


def test_what_is_compared_would_show_a_difference() -> None:
    theirs = run(Case(), KIND)
    ours = run(Case(beta=0.04, ref="given"), KIND)
    with pytest.raises(AssertionError):
        assert_equal(ours, theirs)


class Made(TorchDispatchMode):
    """Counts matrix products, and the memory of the head's size that is not the head's own."""

    def __init__(self, head: torch.Tensor) -> None:
        super().__init__()
        self.products = 0
        self.own = head.untyped_storage().data_ptr()
        self.of_its_size: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        of_its_size = isinstance(made, torch.Tensor) and made.shape[-2:] == (kit.VOCABULARY, kit.WIDTH)
        if of_its_size and made.untyped_storage().data_ptr() != self.own:
            self.of_its_size.append(made)
        return made


def made_by(case: Case) -> Made:
    keywords = kit.arguments(case, tensors(), KIND)
    with Made(keywords["lin_weight"]) as made:
        kit.build(case, KIND)(**keywords)
    return made


def test_only_what_autograd_needs_is_made() -> None:
    with patched():
        assert made_by(Case(trainable="all")).products == 3
        assert made_by(Case(trainable="hidden")).products == 2
        with torch.no_grad():
            assert made_by(Case(trainable="all")).products == 1
        assert made_by(Case(trainable="nothing")).products == 1


def test_a_frozen_head_makes_nothing_of_its_size() -> None:
    with patched():
        assert made_by(Case(trainable="all")).of_its_size
        assert not made_by(Case(trainable="hidden")).of_its_size


@pytest.mark.parametrize("loss_type", [pair[0] for pair in PAIRS if pair[1] == "token" and pair[0] != "luspo"])
def test_garbage_at_masked_positions_changes_nothing(loss_type: str) -> None:
    case = Case(loss_type=loss_type, beta=0.04, ref="given", old=True)
    clean = tensors()
    padding = clean["mask"] == 0
    dirty = dict(clean)
    for name, value in (("hidden", float("nan")), ("old", float("-inf")), ("ref", float("nan"))):
        dirty[name] = clean[name].clone()
        dirty[name][padding] = value
    theirs = run(case, KIND, clean)
    with patched():
        assert_equal(run(case, KIND, dirty), theirs)


@pytest.mark.skipif(("luspo", "token") not in PAIRS, reason="this Liger has no luspo")
@pytest.mark.parametrize(("level", "beta"), [("token", 0.0), ("token", 0.04), ("sequence", 0.04)])
def test_luspo_gives_masked_positions_their_gradient(level: str, beta: float) -> None:
    case = Case(loss_type="luspo", level=level, beta=beta, ref="given" if beta else "none", old=True)
    theirs = run(case, KIND)
    with patched():
        small_chunks()
        ours = run(case, KIND)
    assert_equal(ours, theirs)
    hidden = ours.gradients["hidden"]
    assert hidden is not None
    assert float(hidden[tensors()["mask"] == 0].abs().max()) > 1e-4


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float16]
)
def test_masks_of_every_dtype(dtype: torch.dtype) -> None:
    given = tensors()
    given["mask"] = given["mask"].to(dtype)
    case = Case(loss_type="bnpo", beta=0.04, ref="given", old=True)
    try:
        theirs = run(case, KIND, given)
    except Exception as error:
        pytest.skip(f"this Liger raises {type(error).__name__}")
    with patched():
        ours = run(case, KIND, given)
        assert not left_to_upstream()
    # Upstream adds numbers that were rounded to the mask's dtype sequence by sequence.
    assert_equal(ours, theirs, {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(dtype, 5e-6))


def test_targets_of_minus_100_under_the_mask() -> None:
    given = tensors()
    theirs = run(Case(), KIND, given)
    given["ids"] = torch.where(given["mask"] == 0, -100, given["ids"])
    with patched():
        assert_equal(run(Case(), KIND, given), theirs)


@pytest.mark.parametrize(("batch", "length"), [(0, 5), (3, 0), (0, 0)])
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_an_empty_batch_gives_upstreams_zeros(batch: int, length: int, beta: float) -> None:
    given = {name: value[:batch] if name not in ("weight", "bias") else value for name, value in tensors().items()}
    for name in ("hidden", "ids", "mask", "old", "ref", "ratio"):
        given[name] = given[name][:, :length]
    case = Case(beta=beta, ref="given" if beta else "none")
    theirs = run(case, KIND, given)
    with patched():
        ours = run(case, KIND, given)
    assert_equal(ours, theirs)
    assert float(ours.loss) == 0.0
    assert all(bool((gradient == 0).all()) for gradient in ours.gradients.values() if gradient is not None)


def test_a_batch_of_masked_tokens_gives_zeros() -> None:
    given = tensors()
    given["mask"] = torch.zeros_like(given["mask"])
    theirs = run(Case(beta=0.04, ref="given"), KIND, given)
    with patched():
        assert_equal(run(Case(beta=0.04, ref="given"), KIND, given), theirs)


def test_hidden_states_that_are_not_contiguous() -> None:
    given = tensors()
    theirs = run(Case(), KIND, given)
    # TRL drops the last position of what the model returns.
    wider = torch.cat([given["hidden"], given["hidden"][:, :1]], dim=1)
    with patched():
        leaf = wider.clone().requires_grad_()
        keywords = {**kit.arguments(Case(), given, KIND), "_input": leaf[:, :-1]}
        loss, metrics = kit.build(Case(), KIND)(**keywords)
        (loss * 0.7).backward()
    gradients = {"hidden": leaf.grad[:, :-1], "weight": keywords["lin_weight"].grad, "bias": None}
    assert_equal(kit.Result(loss.detach(), tuple(metrics), gradients), theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_closer_to_float32_than_upstream(dtype: torch.dtype) -> None:
    case = Case(loss_type="bnpo", beta=0.04, ref="given", old=True, bias=True)
    rounded = {
        name: value.to(dtype).float() if value.is_floating_point() else value for name, value in tensors().items()
    }
    exact = run(case, KIND, rounded)
    given = {**rounded, **{name: rounded[name].to(dtype) for name in ("hidden", "weight", "bias")}}
    theirs = run(case, KIND, given)
    with patched():
        ours = run(case, KIND, given)

    def error(result: kit.Result, name: str) -> float:
        gradient, wanted = result.gradients[name], exact.gradients[name]
        assert gradient is not None
        assert wanted is not None
        assert gradient.dtype == dtype
        return float((gradient.float() - wanted).norm() / wanted.norm())

    assert abs(float(ours.loss - exact.loss)) <= abs(float(theirs.loss - exact.loss)) + 1e-6
    for name in ("hidden", "weight", "bias"):
        # Rounding the exact gradient to the dtype is the floor.
        assert error(ours, name) <= error(theirs, name) * 1.02
        assert error(ours, name) < 4e-3


@newest
def test_a_head_in_another_dtype_than_the_hidden_states() -> None:
    for hidden, weight in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        given = tensors()
        given["hidden"], given["weight"] = given["hidden"].to(hidden), given["weight"].to(weight)
        theirs = run(Case(), KIND, given)
        with patched():
            ours = run(Case(), KIND, given)
            assert not left_to_upstream()
        assert_equal(ours, theirs, 2e-2)


def test_autocast_is_honoured() -> None:
    plain = run(Case(), KIND)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = run(Case(), KIND)
        with patched():
            ours = run(Case(), KIND)
    assert_equal(ours, theirs, 3e-2)
    weight = ours.gradients["weight"]
    assert weight is not None
    assert plain.gradients["weight"] is not None
    # In float32 all the way, it would be equal to the last digits.
    assert float((weight - plain.gradients["weight"]).abs().max()) > 1e-5


# Delegation, errors


@pytest.mark.skipif("vllm_is_ratio" not in CALLED, reason="older releases fail on these shapes themselves")
def test_advantages_for_each_token_are_left_to_upstream() -> None:
    given = tensors()
    given["advantages"] = given["ratio"] - 1.0
    case = Case(loss_type="bnpo", old=True)
    theirs = run(case, KIND, given)
    with patched():
        ours = run(case, KIND, given)
        assert "2 dimensions" in left_to_upstream()[0]
    assert_equal(ours, theirs, 0.0)


def test_both_references_are_left_to_upstream() -> None:
    case = Case(beta=0.04, ref="input")

    def outcome() -> tuple[str, list[str]]:
        keywords = {**kit.arguments(case, tensors(), KIND), "ref_per_token_logps": tensors()["ref"]}
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            try:
                loss, _ = kit.build(case, KIND)(**keywords)
                said = f"{float(loss):.6f}"
            except Warning as error:
                said = f"{type(error).__name__}: {error}"
        return said, [str(entry.message) for entry in shown if "Both ref" in str(entry.message)]

    theirs = outcome()
    with patched():
        assert outcome() == theirs
        assert left_to_upstream() == [
            "upstream's own forward: use_ref_model=True and both ref_per_token_logps and ref_input are given"
        ]


def error_of(case: Case, **changes: Any) -> tuple[type, str]:
    with pytest.raises(Exception) as raised:
        kit.build(case, KIND)(**{**kit.arguments(case, tensors(), KIND), **changes})
    return raised.type, str(raised.value)


@pytest.mark.parametrize(
    ("case", "changes", "said"),
    [
        (Case(loss_type="nonsense"), {}, "Unknown loss type"),
        (Case(beta=0.04, ref="given"), {"ref_per_token_logps": None}, "ref_per_token_logps or ref_input"),
        (Case(), {"lin_weight": torch.zeros(0)}, "weight has shape (0,), wanted [V, 12]"),
        (Case(), {"lin_weight": torch.zeros(198)}, "weight has shape (198,), wanted [V, 12], the whole lm_head"),
        (Case(), {"lin_weight": torch.zeros(33, 7)}, "weight has shape (33, 7)"),
        (Case(), {"attention_mask": torch.ones(6, 49)}, "attention_mask has shape (6, 49), wanted [6, 50]"),
    ],
)
def test_what_upstream_refuses_raises_its_exception(case: Case, changes: dict[str, Any], said: str) -> None:
    if case.loss_type == "nonsense" and "loss_type" not in MADE:
        pytest.skip("this Liger has one loss type")
    kind, text = error_of(case, **changes)
    with patched():
        ours, our_text = error_of(case, **changes)
        assert not [note for note in record().fallbacks if "the patch itself failed" in note.text]
    assert ours is kind
    assert said in our_text
    assert text in our_text


def outcome(case: Case, given: dict[str, torch.Tensor], changes: dict[str, Any], **arguments: Any) -> Any:
    """What a call gives: the loss, or the kind of the exception and its text."""
    keywords = {**kit.arguments(case, given, KIND), **changes}
    loss_module = kit.build(case, KIND)
    for name, value in arguments.items():
        assert hasattr(loss_module, name)
        setattr(loss_module, name, value)
    try:
        loss, _ = loss_module(**keywords)
        if loss.requires_grad:
            loss.backward()
    except Exception as error:
        return type(error), str(error)
    return loss.detach(), None


REFERENCE_CHANGES: dict[str, Any] = {
    "ref_input too long": {"ref_input": torch.zeros(6, 51, 12)},
    "ref_input too short": {"ref_input": torch.zeros(6, 49, 12)},
    "ref_input of another batch": {"ref_input": torch.zeros(7, 50, 12)},
    "ref_input flat": {"ref_input": torch.zeros(300, 12)},
    "ref_input of another width": {"ref_input": torch.zeros(6, 50, 11)},
    "no ref_weight": {"ref_weight": None},
    "ref_weight flat": {"ref_weight": torch.zeros(396)},
    "ref_bias longer than the vocabulary": {"ref_bias": torch.linspace(-1, 1, 40)},
    "ref_bias shorter than the vocabulary": {"ref_bias": torch.zeros(32)},
    "ref_bias of one number": {"ref_bias": torch.tensor([0.3])},
}


@pytest.mark.parametrize("name", REFERENCE_CHANGES)
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_a_reference_of_another_shape_gives_what_upstream_gives(name: str, beta: float) -> None:
    case = Case(beta=beta, ref="input+bias", loss_type="bnpo")
    value, said = outcome(case, tensors(), REFERENCE_CHANGES[name])
    with patched():
        ours, our_text = outcome(case, tensors(), REFERENCE_CHANGES[name])
        assert left_to_upstream()
        assert not [note for note in record().fallbacks if "failed" in note.text]
    if said is None:
        assert torch.equal(ours, value)
    else:
        assert ours is value
        assert said in our_text


@newest
@pytest.mark.parametrize(
    ("changes", "arguments"),
    [
        ({"selected_token_ids": torch.full((6, 50), 2.7)}, {}),
        ({"selected_token_ids": torch.ones(6, 50, dtype=torch.bool)}, {}),
        ({"selected_token_ids": torch.ones(6, 50, dtype=torch.int16)}, {}),
        ({"selected_token_ids": torch.ones(6, 50, dtype=torch.uint8)}, {}),
        ({"_input": torch.ones(6, 50, 12, dtype=torch.int64)}, {}),
        ({}, {"chunk_size": 0}),
        ({}, {"chunk_size": 2.0}),
        ({}, {"chunk_size": -2}),
        ({}, {"temperature": 0.0}),
        ({"bias": torch.linspace(-1, 1, 40)}, {}),
        ({"bias": torch.zeros(1)}, {}),
        ({"advantages": torch.ones(5)}, {}),
        ({"old_per_token_logps": torch.zeros(6, 1)}, {}),
        ({"ref_input": torch.zeros(3)}, {}),
        ({"ref_per_token_logps": torch.zeros(6, 1), "ref_input": None, "ref_weight": None}, {"use_ref_model": True}),
    ],
)
def test_other_arguments_give_what_upstream_gives(changes: dict[str, Any], arguments: dict[str, Any]) -> None:
    case = Case(loss_type="bnpo", trainable="hidden")
    if "_input" in changes:
        case = case._replace(trainable="nothing")
    value, said = outcome(case, tensors(), changes, **arguments)
    with patched():
        ours, our_text = outcome(case, tensors(), changes, **arguments)
        assert not [note for note in record().fallbacks if "failed" in note.text]
    if said is None:
        torch.testing.assert_close(ours, value, rtol=5e-6, atol=1e-7, equal_nan=True)
    else:
        assert ours is value
        assert said in our_text


@newest
def test_int32_ids_are_served() -> None:
    given = tensors()
    theirs = run(Case(), KIND, given)
    given["ids"] = given["ids"].to(torch.int32)
    with patched():
        assert_equal(run(Case(), KIND, given), theirs)
        assert not left_to_upstream()


@newest
def test_a_ratio_of_a_wrong_shape_raises_upstreams_assertion() -> None:
    with patched():
        kind, text = error_of(Case(), vllm_is_ratio=torch.ones(6, 3))
    assert kind is AssertionError
    assert "vllm_is_ratio shape must be" in text


def test_triton_where_it_cannot_run_is_an_error_at_the_call() -> None:
    with patched(FUSEPATCH_HEAD="triton"):
        kind, text = error_of(Case())
    assert issubclass(kind, fusepatch.FusepatchError)
    assert "FUSEPATCH_HEAD=triton cannot be followed" in text
    assert "unset the variable" in text


def test_keep_leaves_upstream_alone() -> None:
    theirs = run(Case(trainable="all"), KIND)
    with patched(FUSEPATCH_HEAD="keep"):
        ours = run(Case(trainable="all"), KIND)
        assert left_to_upstream() == ["upstream's own forward: FUSEPATCH_HEAD=keep"]
    assert_equal(ours, theirs, 0.0)


def test_a_device_that_is_not_served_is_left_to_upstream() -> None:
    given = {name: value.to("meta") for name, value in tensors().items()}
    with patched():
        loss, _ = kit.build(Case(), KIND)(**kit.arguments(Case(), given, KIND))
        assert "the device type is 'meta'" in left_to_upstream()[0]
    assert loss.device.type == "meta"


def test_the_form_on_the_cpu_is_recorded() -> None:
    with patched():
        run(Case(), KIND)
        run(Case(), KIND)
        notes = record()
    assert notes.calls == 2
    assert [(note.times, "Triton kernels run on NVIDIA GPUs" in note.text) for note in notes.fallbacks] == [(2, True)]


def test_a_parameter_that_is_not_known_leaves_the_call_to_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusepatch.patches.liger_grpo_loss import fused_linear_ppo

    monkeypatch.setattr(fused_linear_ppo, "KNOWN_PARAMETERS", fused_linear_ppo.KNOWN_PARAMETERS - {"epsilon_low"})
    with patched():
        run(Case(), KIND)
        assert not left_to_upstream()
        loss = kit.build(Case(), KIND)
        loss.epsilon_low = 0.3
        loss(**kit.arguments(Case(), tensors(), KIND))
        assert left_to_upstream() == [
            "upstream's own forward: epsilon_low is in use, an argument that fusepatch does not know"
        ]


# Backward


def scales(case: Case) -> list[torch.Tensor]:
    """Gradients of a kept graph after 2, after 3, and after a last 1."""
    keywords = kit.arguments(case, tensors(), KIND)
    loss, _ = kit.build(case, KIND)(**keywords)
    found = []
    for factor, keep in ((2.0, True), (3.0, True), (1.0, False)):
        keywords["lin_weight"].grad = keywords["_input"].grad = None
        (loss * factor).backward(retain_graph=keep)
        found += [keywords["_input"].grad.clone(), keywords["lin_weight"].grad.clone()]
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    return found


def test_a_kept_graph_can_run_backward_again() -> None:
    theirs = scales(Case())
    with patched():
        ours = scales(Case())
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=5e-6, atol=1e-7)
    torch.testing.assert_close(ours[0] / 2, ours[4])


@pytest.mark.parametrize(
    "name", ["advantages", "old_per_token_logps", "ref_per_token_logps", "ref_weight", "ref_input", "vllm_is_ratio"]
)
@pytest.mark.parametrize("trainable", ["nothing", "hidden"])
def test_another_input_that_requires_a_gradient_gets_none(name: str, trainable: str) -> None:
    if name not in CALLED or (name == "vllm_is_ratio" and "num_items_in_batch" not in CALLED):
        pytest.skip("this Liger has no such argument")
    ref = "input" if name in ("ref_weight", "ref_input") else "given"
    case = Case(loss_type="bnpo", beta=0.04, ref=ref, old=True, ratio="BT", trainable=trainable)

    def gradients() -> list[Any]:
        keywords = kit.arguments(case, tensors(), KIND)
        other = keywords[name].clone().requires_grad_()
        loss, _ = kit.build(case, KIND)(**{**keywords, name: other})
        loss.backward(retain_graph=True)
        loss.backward()
        return [other.grad, keywords["_input"].grad]

    theirs = gradients()
    with patched():
        ours = gradients()
        assert not left_to_upstream()
    assert ours[0] is None
    assert theirs[0] is None
    torch.testing.assert_close(ours[1], theirs[1], rtol=5e-6, atol=1e-7)


@pytest.mark.parametrize("bias", [False, True])
def test_tensors_that_hooks_have_kept_are_left_as_they_were(bias: bool) -> None:
    case = Case(bias=bias)
    theirs = run(case, KIND)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> int:
        kept.append(tensor)
        return len(kept) - 1

    with patched():
        keywords = kit.arguments(case, tensors(), KIND)
        with torch.autograd.graph.saved_tensors_hooks(keep, kept.__getitem__):
            loss, metrics = kit.build(case, KIND)(**keywords)
        before = [tensor.clone() for tensor in kept]
        # Out of the hooks: what counts is who could have taken them when they were saved.
        (loss * 0.7).backward()
    assert len(kept) == 2 + bias
    assert all(torch.equal(mine, other) for mine, other in zip(kept, before, strict=True))
    leaves = {"hidden": keywords["_input"], "weight": keywords["lin_weight"], "bias": keywords["bias"]}
    gradients = {name: None if leaf is None else leaf.grad for name, leaf in leaves.items()}
    assert_equal(kit.Result(loss.detach(), tuple(metrics), gradients), theirs)


def test_without_hooks_saved_tensors_are_the_patchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import fusepatch.loss

    seen: list[bool] = []
    original = fusepatch.loss.scale_gradients

    def watched(gradients: Any, grad_output: torch.Tensor, *, shared: bool) -> Any:
        seen.append(shared)
        return original(gradients, grad_output, shared=shared)

    monkeypatch.setattr(fusepatch.loss, "scale_gradients", watched)
    before = kit.build(Case(), KIND)(**kit.arguments(Case(), tensors(), KIND))[0]
    with patched():
        run(Case(), KIND)
        # A graph that upstream built, under hooks that nobody asked about.
        before.backward()
    assert seen == [False, True]


def test_the_gradient_of_the_scale() -> None:
    def gradient() -> torch.Tensor:
        keywords = kit.arguments(Case(), tensors(), KIND)
        loss, _ = kit.build(Case(), KIND)(**keywords)
        scale = torch.tensor(1.5, requires_grad=True)
        (weight,) = torch.autograd.grad(loss * scale, keywords["lin_weight"], create_graph=True)
        (found,) = torch.autograd.grad(weight.square().sum(), scale)
        return found

    theirs = gradient()
    with patched():
        torch.testing.assert_close(gradient(), theirs, rtol=1e-5, atol=0)


@pytest.mark.parametrize("trainable", ["all", "hidden", "weight"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_graph_outlives_the_patch_both_ways(trainable: str, bias: bool) -> None:
    case = Case(trainable=trainable, bias=bias)
    names = ("_input", "lin_weight", "bias")

    def build() -> tuple[torch.Tensor, list[Any]]:
        keywords = kit.arguments(case, tensors(), KIND)
        return kit.build(case, KIND)(**keywords)[0] * 0.7, [keywords[name] for name in names]

    def gradients(loss: torch.Tensor, leaves: list[Any]) -> list[Any]:
        loss.backward()
        return [None if leaf is None else leaf.grad for leaf in leaves]

    theirs = gradients(*build())
    before = build()
    with patched():
        ours = [gradients(*before)]
        after = build()
    ours.append(gradients(*after))
    for found in ours:
        for mine, other in zip(found, theirs, strict=True):
            assert (mine is None) == (other is None)
            if mine is not None:
                torch.testing.assert_close(mine, other, rtol=5e-6, atol=1e-7)


def test_a_head_that_is_emptied_after_the_forward() -> None:
    theirs = run(Case(bias=True), KIND)
    with patched():
        keywords = kit.arguments(Case(bias=True), tensors(), KIND)
        loss, metrics = kit.build(Case(), KIND)(**keywords)
        with torch.no_grad():
            # As ZeRO-3 does, not a change that autograd counts.
            keywords["lin_weight"].data.fill_(float("nan"))
            keywords["_input"].data.fill_(float("nan"))
        (loss * 0.7).backward()
    leaves = {"hidden": keywords["_input"], "weight": keywords["lin_weight"], "bias": keywords["bias"]}
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    assert_equal(kit.Result(loss.detach(), tuple(metrics), gradients), theirs)


def test_nothing_that_the_caller_owns_is_modified() -> None:
    given = tensors()
    before = {name: value.clone() for name, value in given.items()}
    with patched():
        keywords = kit.arguments(Case(old=True, beta=0.04, ref="given", bias=True), given, KIND)
        versions = {name: value._version for name, value in keywords.items() if isinstance(value, torch.Tensor)}
        loss, _ = kit.build(Case(old=True, beta=0.04, ref="given"), KIND)(**keywords)
        loss.backward()
    assert versions == {name: keywords[name]._version for name in versions}
    for name, value in given.items():
        assert torch.equal(value, before[name])


def test_backward_returns_as_many_gradients_as_upstreams() -> None:
    class Saved:
        saved_tensors = (torch.ones(2), None, None)

    theirs = len(BASE.backward(Saved(), torch.tensor(1.0)))
    with patched():
        ours = BASE.backward(Saved(), torch.tensor(2.0))
    assert len(ours) == theirs
    torch.testing.assert_close(ours[0], torch.full((2,), 2.0))


# Reach


def test_what_existed_before_the_patch_is_reached() -> None:
    functional = importlib.import_module("liger_kernel.chunked_loss.functional")
    instance = kit.build(Case(), KIND)
    keywords = kit.arguments(Case(), tensors(), KIND)
    captured = FUNCTION.apply
    first = [keywords[name] for name in ("_input", "lin_weight", "selected_token_ids", "attention_mask", "advantages")]
    theirs = instance(**keywords)[0].detach()
    with patched():
        torch.testing.assert_close(instance(**keywords)[0].detach(), theirs, rtol=5e-6, atol=1e-7)
        assert record().calls == 1
        rest: dict[str, Any] = {"beta": 0.0, "compiled": False, "use_ref_model": False}
        names = list(inspect.signature(FUNCTION.forward).parameters)[1:]
        defaults = {n: p.default for n, p in inspect.signature(FUNCTION.forward).parameters.items()}
        tail = [rest.get(name, defaults[name]) for name in names[len(first) :]]
        for calls, apply in ((2, captured), (3, functional.liger_fused_linear_grpo)):
            loss, _ = apply(*first, *tail)
            torch.testing.assert_close(loss.detach(), theirs, rtol=5e-6, atol=1e-7)
            assert record().calls == calls


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def step(checkpointed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        keywords = kit.arguments(Case(), tensors(), KIND)
        loss_module = kit.build(Case(), KIND)

        def inner(hidden: torch.Tensor) -> torch.Tensor:
            return loss_module(**{**keywords, "_input": hidden * 2.0})[0]

        hidden = keywords["_input"]
        loss = checkpoint(inner, hidden, use_reentrant=reentrant) if checkpointed else inner(hidden)
        loss.backward()
        return loss.detach(), hidden.grad

    # Releases up to 0.7 cannot be computed again without re-entering.
    theirs = step(checkpointed=False)
    with patched():
        ours = step(checkpointed=True)
        assert record().calls == 2
        assert not left_to_upstream()
    torch.testing.assert_close(ours, theirs, rtol=5e-6, atol=1e-7)


def test_no_grad_and_inference_mode_give_the_same_values() -> None:
    case = Case(beta=0.04, ref="given")
    theirs = run(case, KIND)
    with patched():
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                loss, metrics = kit.build(case, KIND)(**kit.arguments(case, tensors(), KIND))
            assert not loss.requires_grad
            torch.testing.assert_close((loss, *metrics), (theirs.loss, *theirs.metrics), rtol=5e-6, atol=1e-7)


def test_undo_restores_what_was_there() -> None:
    before = {name: vars(BASE)[name] for name in ("forward", "backward", "chunk_forward")}
    with patched():
        assert vars(BASE)["forward"] is not before["forward"]
        assert vars(BASE)["chunk_forward"] is before["chunk_forward"]
        assert inspect.signature(BASE.forward) == inspect.signature(before["forward"].__func__)
        assert record().sites[0].outcome.value == "APPLIED"
        assert record().sites[0].flags == ("late",)
    assert {name: vars(BASE)[name] for name in before} == before
