"""`liger.grpo_loss` on two gloo ranks: as many collectives on each whatever its rows, and a head that is a DTensor."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("liger_kernel.chunked_loss.grpo_loss")

import fusepatch  # noqa: E402
from fusepatch import settings  # noqa: E402
from kits import liger_grpo as kit  # noqa: E402
from kits.liger_grpo import Case  # noqa: E402
from kits.ranks import on_ranks  # noqa: E402

KIND = kit.loss_class()
MADE, CALLED = kit.accepted(KIND)
RANKS = 2

pytestmark = pytest.mark.skipif("dapo" not in {pair[0] for pair in kit.combinations(KIND)}, reason="needs Liger 0.6.4")


def plain(result: kit.Result) -> Any:
    """As numbers: a tensor in a queue needs its process to live on."""
    tensors = (result.loss, *result.metrics, *[g for g in result.gradients.values() if g is not None])
    return [tensor.tolist() for tensor in tensors]


def uneven(rank: int) -> dict[str, Any]:
    """Rank 0 has 300 rows in two groups; rank 1 has three rows, or none where `advantages` are all zero."""
    given = kit.tensors(seed=rank)
    if rank == 0:
        given["mask"] = torch.ones_like(given["mask"])
    else:
        given["mask"] = torch.zeros_like(given["mask"])
        given["mask"][0, :3] = 1
        given["advantages"] = torch.zeros_like(given["advantages"])
    return given


def counted_run(rank: int, case: Case) -> tuple[Any, int]:
    """One call and the collectives that it made."""
    calls = 0
    original = torch.distributed.all_reduce

    @functools.wraps(original)
    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    torch.distributed.all_reduce = counting
    try:
        return plain(kit.run(case, KIND, uneven(rank))), calls
    finally:
        torch.distributed.all_reduce = original


def with_and_without(rank: int, cases: list[Case]) -> list[tuple[Any, Any]]:
    theirs = [counted_run(rank, case) for case in cases]
    fusepatch.activate()
    settings.use(settings.current()._replace(head_chunk_mib=kit.SMALL_CHUNK_MIB))
    ours = [counted_run(rank, case) for case in cases]
    assert kit.record().calls == len(cases)
    assert not [note for note in kit.record().fallbacks if "upstream's own" in note.text or "failed" in note.text]
    return list(zip(ours, theirs, strict=True))


def test_the_number_of_collectives_does_not_depend_on_the_rows() -> None:
    types = [loss_type for loss_type, level in kit.combinations(KIND) if level == "token"]
    cases = [
        Case(loss_type=loss_type, old=old, beta=beta, ref="given" if beta else "none", trainable=trainable)
        for loss_type in types
        for old, beta, trainable in ((False, 0.0, "all"), (True, 0.04, "all"), (False, 0.0, "hidden"))
        if loss_type in ("dapo", "cispo", "vespo", "bnpo")
    ]
    ranks = on_ranks(RANKS, with_and_without, cases)
    for index, case in enumerate(cases):
        counts = []
        for rank in range(RANKS):
            (ours, our_count), (theirs, their_count) = ranks[rank][index]
            counts.append(our_count)
            assert their_count == (0 if case.loss_type == "bnpo" else kit.BATCH)
            for mine, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(torch.tensor(mine), torch.tensor(other), rtol=1e-5, atol=1e-6, msg=str(case))
        assert counts == [0, 0] if case.loss_type == "bnpo" else counts[0] == counts[1] >= 1, case
        if "num_items_in_batch" in CALLED and case.loss_type != "bnpo":
            assert counts == [1, 1]


def failure_on_one_rank(rank: int) -> str:
    """After the collective, the call of one rank breaks: upstream's forward would wait for the other for ever."""
    fusepatch.activate()
    if rank == 1:
        settings.use(settings.current()._replace(head_prefer="nonsense"))
    try:
        kit.run(Case(loss_type="dapo"), KIND, uneven(0))
    except fusepatch.FusepatchError as error:
        return f"error: {error}"
    return "computed"


@pytest.mark.skipif("num_items_in_batch" not in CALLED, reason="needs Liger 0.8.1")
def test_a_failure_after_the_collective_is_not_left_to_upstream() -> None:
    first, second = on_ranks(RANKS, failure_on_one_rank)
    assert first == "computed"
    assert second.startswith("error: the loss could not be computed: ValueError: prefer must be")


def longer_reference_bias(rank: int) -> tuple[Any, Any]:
    """Upstream cuts it to the vocabulary; both ranks take upstream's own forward, with its collectives."""
    given = uneven(rank)
    given["ref_bias"] = torch.linspace(-1, 1, kit.VOCABULARY + 7)
    case = Case(loss_type="dapo", beta=0.04, ref="input+bias")
    theirs = plain(kit.run(case, KIND, given))
    fusepatch.activate()
    return plain(kit.run(case, KIND, given)), theirs


@pytest.mark.skipif("num_items_in_batch" not in CALLED, reason="needs Liger 0.8.1")
def test_a_reference_of_another_shape_under_a_process_group() -> None:
    for ours, theirs in on_ranks(RANKS, longer_reference_bias):
        assert ours == theirs


def sharded_head(rank: int, bias: bool) -> Any:
    """A head in shards on two ranks: the mean over ranks of its gradients, in its own placement."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    given = kit.tensors(seed=rank) | {name: kit.tensors()[name] for name in ("weight", "bias")}
    case = Case(loss_type="bnpo", bias=bias, old=True)
    alone = kit.run(case, KIND, given)
    wanted = {}
    for name in ("weight", "bias")[: 1 + bias]:
        wanted[name] = alone.gradients[name].clone()
        torch.distributed.all_reduce(wanted[name])
        wanted[name] /= RANKS
    mesh = init_device_mesh("cpu", (RANKS,))
    keywords = kit.arguments(case, given, KIND)
    keywords["lin_weight"] = distribute_tensor(given["weight"], mesh, [Shard(0)]).requires_grad_()
    if bias:
        keywords["bias"] = distribute_tensor(given["bias"], mesh, [Shard(0)]).requires_grad_()
    with pytest.raises(RuntimeError, match="DTensor"):
        kit.build(case, KIND)(**keywords)
    fusepatch.activate()
    loss, metrics = kit.build(case, KIND)(**keywords)
    (loss * 0.7).backward()
    torch.testing.assert_close(loss.detach(), alone.loss, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(metrics, alone.metrics, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(keywords["_input"].grad, alone.gradients["hidden"], rtol=1e-5, atol=1e-7)
    for name, tensor in {"weight": keywords["lin_weight"], "bias": keywords["bias"]}.items():
        if name in wanted:
            assert isinstance(tensor.grad, DTensor)
            assert tensor.grad.placements == (Shard(0),)
            torch.testing.assert_close(tensor.grad.full_tensor(), wanted[name], rtol=1e-5, atol=1e-7)
    return {"calls": kit.record().calls}


@pytest.mark.skipif(
    importlib.util.find_spec("torch.distributed.tensor") is None, reason="torch 2.5 made DTensor public"
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_sharded_head_is_gathered_and_its_gradient_sharded_again(bias: bool) -> None:
    assert on_ranks(RANKS, sharded_head, bias) == [{"calls": 1}, {"calls": 1}]
