"""What is said of memory, held against where each element lies."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fusepatch.optim import layout  # noqa: E402


def sampled(generator: random.Random) -> Any:
    """A view of any strides over some memory: permuted, sliced, expanded, empty, with dimensions of size 1."""
    sizes = [generator.choice([0, 1, 1, 2, 3]) for _ in range(generator.randrange(4))]
    tensor = torch.zeros([size + generator.choice([0, 0, 1]) for size in sizes])
    for dimension, size in enumerate(sizes):
        tensor = tensor.narrow(dimension, 0, size)
    tensor = tensor.permute(generator.sample(range(len(sizes)), len(sizes)))
    if tensor.dim() and tensor.shape[0] and generator.random() < 0.2:
        tensor = tensor[:1].expand(2, *tensor.shape[1:])
    return tensor


def test_dense_is_filling_one_range_of_memory_each_place_once() -> None:
    generator = random.Random(0)
    seen = []
    for _ in range(500):
        tensor = sampled(generator)
        offsets = [
            sum(index * stride for index, stride in zip(place, tensor.stride(), strict=True))
            for place in itertools.product(*map(range, tensor.shape))
        ]
        seen.append(sorted(offsets) == list(range(len(offsets))))
        assert layout.is_dense(tensor) == seen[-1], (tensor.shape, tensor.stride())
    assert 50 < sum(seen) < 450


def test_alike_is_having_every_element_at_the_same_place() -> None:
    generator = random.Random(1)
    for _ in range(300):
        tensor = sampled(generator)
        if not layout.is_dense(tensor) or not tensor.numel():
            continue
        other = torch.empty(tensor.shape) if generator.random() < 0.5 else torch.empty_like(tensor)
        numbers = torch.arange(tensor.numel()).reshape(tensor.shape)
        memories = [torch.empty(tensor.numel(), dtype=torch.int64) for _ in range(2)]
        for memory, kind in zip(memories, (tensor, other), strict=True):
            memory.as_strided(kind.shape, kind.stride()).copy_(numbers)
        assert layout.is_alike(tensor, other) == torch.equal(*memories)


def parameter(value: Any) -> Any:
    return torch.nn.Parameter(value)


def test_parameters_apart_in_one_memory_fit_and_overlapping_ones_do_not() -> None:
    flat = torch.zeros(12)
    assert layout.unfit([parameter(flat[:4]), parameter(flat[4:8].view(2, 2)), parameter(flat[8:])]) is None
    assert "share memory" in (layout.unfit([parameter(flat[:5]), parameter(flat[4:8])]) or "")
    assert "share memory" in (layout.unfit([parameter(flat), parameter(flat)]) or "")
    assert layout.unfit([parameter(flat[:0]), parameter(flat[:0]), parameter(flat)]) is None, "nothing lies nowhere"


def test_parameters_without_memory_are_passed_over() -> None:
    lazy = torch.nn.LazyLinear(2)
    meta = torch.nn.Linear(3, 2, device="meta")
    assert layout.unfit([*lazy.parameters(), *meta.parameters()]) is None
    assert len(layout.places([*lazy.parameters()])) == 2


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (torch.zeros(3, 2).t(), "strides (1, 2)"),
        (torch.zeros(2, 4)[:, :3], "strides (4, 1)"),
        (torch.zeros(1).expand(2, 3), "strides (0, 0)"),
        (torch.zeros(2, 3, dtype=torch.float64), "float64"),
        (torch.zeros(2, 3, device="meta"), "meta"),
        (torch.zeros(4, 3), "shape (4, 3)"),
        (torch.zeros(2, 3).to_sparse(), "sparse_coo"),
        (torch.zeros(2, 3).to_sparse_csr(), "sparse_csr"),
    ],
)
def test_what_differs_from_its_parameter_is_named(other: Any, words: str) -> None:
    mine = parameter(torch.zeros(2, 3))
    assert words in (layout.unlike([mine, mine], [torch.zeros(2, 3), other], "gradient") or "")
    assert layout.seen([mine]) != layout.seen([other])


def test_strides_of_dimensions_of_size_one_say_nothing() -> None:
    mine, other = parameter(torch.zeros(1, 3)), torch.zeros(3, 1).t()
    assert mine.stride() != other.stride()
    assert layout.unlike([mine], [other], "gradient") is None


def test_a_copy_lies_as_the_parameter_does() -> None:
    mine = parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))
    state = torch.randn(2, 3, 4, 4)
    copied = layout.like(state, mine)
    assert copied.stride() == mine.stride()
    assert torch.equal(copied, state)
