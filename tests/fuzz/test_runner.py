"""The runner of the differential tests: what it prints of a case that fails."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from fuzz import __main__ as runner
from kits.helpers import fresh


@dataclass(frozen=True)
class Case:
    number: int
    words: tuple[str, ...] = ("a",)


def sample(rng: random.Random) -> Case:
    return Case(rng.randrange(10))


def check(case: Case) -> None:
    assert case.number != 3, "three"


MODULE = SimpleNamespace(sample=sample, check=check)


def test_the_modules_take_turns_until_one_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.run({"one": MODULE, "two": MODULE}, 0, range(1)) == 0
    assert capsys.readouterr().out == "one: 1 cases, two: 1 cases\n"
    assert runner.run({"one": MODULE, "two": MODULE}, 0, range(100)) == 1
    printed = capsys.readouterr().out
    assert "AssertionError: three" in printed
    assert "from fuzz.one import Case, check\ncheck(Case(number=3, words=('a',)))" in printed


def test_the_time_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.run({"one": MODULE}, 0, range(10**9), seconds=0.0) == 0
    assert capsys.readouterr().out == "one: 0 cases\n"


def test_the_printed_program_runs() -> None:
    grpo_loss = pytest.importorskip("fuzz.grpo_loss", exc_type=ImportError)
    case = grpo_loss.sample(random.Random("0 0"))
    assert eval(repr(case), vars(grpo_loss)) == case
    assert fresh(runner.program("grpo_loss", case)).returncode == 0
    broken = runner.program("grpo_loss", case).replace("check(Case(", "check(Case(nonsense=1, ")
    assert "nonsense" in fresh(broken).stderr
