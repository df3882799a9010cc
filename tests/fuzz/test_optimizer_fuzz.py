"""A bounded run of `fuzz.optimizer` with fixed seeds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import fusepatch
from fuzz import optimizer

CASES = 300


@pytest.fixture(autouse=True)
def active() -> Iterator[None]:
    fusepatch.activate()
    yield
    fusepatch.deactivate()


@pytest.mark.parametrize("seed", range(4))
def test_frameworks_optimizers_train_as_torchs_default(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(CASES // 4):
        case = optimizer.sample(rng)
        try:
            optimizer.check(case)
        except AssertionError as error:
            raise AssertionError(f"{case}\n{error}") from error


def test_the_sampled_cases_reach_what_they_are_for() -> None:
    rng = random.Random(0)
    cases = [optimizer.sample(rng) for _ in range(CASES)]
    layouts = Counter(parameter.layout for case in cases for parameter in case.parameters)
    gradients = Counter(kind for case in cases for step in case.gradients for kind in step)
    events = Counter(event for case in cases for event in case.events)
    assert set(layouts) == set(optimizer.LAYOUTS)
    assert set(gradients) == set(optimizer.GRADIENTS)
    assert set(events) == set(optimizer.EVENTS)
    assert sum(case.scaled for case in cases) > 20


def test_a_case_is_printed_as_a_program() -> None:
    case = optimizer.sample(random.Random(5))
    assert eval(repr(case), vars(optimizer)) == case
