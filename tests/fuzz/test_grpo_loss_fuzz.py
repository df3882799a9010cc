"""The differential test of the loss at fixed seeds."""

from __future__ import annotations

import inspect
import random
from pathlib import Path

import pytest

from kits.helpers import fresh

pytest.importorskip("torch")
grpo = pytest.importorskip("liger_kernel.chunked_loss.grpo_loss")
if "num_items_in_batch" not in inspect.signature(grpo.LigerFusedLinearGRPOLoss.forward).parameters:
    pytest.skip("needs Liger 0.8.1", allow_module_level=True)

from fuzz import grpo_loss  # noqa: E402

CASES = 500
# In a process of its own: the interpreter of the kernels has to be chosen before Triton is imported.
SAMPLED = f"""
import sys
from fuzz.__main__ import modules, run
sys.exit(run(modules("grpo_loss"), 0, range({CASES})))
"""


def test_the_patched_loss_is_the_unpatched_one() -> None:
    done = fresh(SAMPLED, env={"PYTHONPATH": str(Path(__file__).parents[1])})
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert f"grpo_loss: {CASES} cases" in done.stdout


def test_what_is_sampled_is_reached() -> None:
    cases = [grpo_loss.sample(random.Random(f"0 {number}")) for number in range(CASES)]
    assert {case.policy for case in cases} == {"", *grpo_loss.POLICIES}
    assert {case.mistake for case in cases} == {"", *grpo_loss.MISTAKES}
    assert {case.form for case in cases} == {"torch", "triton"}
    assert {case.garbage for case in cases} >= {"", "nan row", "nan masked", "forbidden token"}
    assert {case.mask_dtype for case in cases} == set(grpo_loss.MASK_DTYPES)
    assert {layout for case in cases for _, layout in case.layouts} == set(grpo_loss.LAYOUTS[1:])


@pytest.mark.parametrize("other", [{"temperature": 1.001}, {"beta": 0.041, "ref": "given"}, {"wanted": ("weight",)}])
def test_a_difference_is_seen(other: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    original = grpo_loss._outcome
    calls: list[grpo_loss.Case] = []

    def another(case: grpo_loss.Case, dtype: str) -> grpo_loss.Outcome:
        calls.append(case)
        # The second call is the patched one.
        return original(grpo_loss.Case(**{**vars(case), **other}) if len(calls) == 2 else case, dtype)  # type: ignore[arg-type]

    grpo_loss.check(grpo_loss.Case(mask="full"))
    monkeypatch.setattr(grpo_loss, "_outcome", another)
    with pytest.raises(AssertionError):
        grpo_loss.check(grpo_loss.Case(mask="full"))
