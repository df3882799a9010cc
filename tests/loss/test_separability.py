"""The table of traits, checked by perturbation against the installed Liger."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from fusepatch.loss import PolicyInputs, PolicyTraits, policy_traits
from kits.loss_cases import LEVELS, Setting

GENERATOR = torch.Generator().manual_seed(0)
SHAPE = (4, 6)
MASK = (torch.arange(6) < torch.tensor([6, 4, 1, 5]).unsqueeze(1)).float()
ADVANTAGES = torch.tensor([1.5, -0.7, 0.0, 0.4])
VALUES = -torch.rand(SHAPE, generator=GENERATOR) * 3
OLD = VALUES + 0.15 * torch.randn(SHAPE, generator=GENERATOR)
REFERENCE = VALUES + 0.5 * torch.randn(SHAPE, generator=GENERATOR)
CASES = [
    Setting(loss_type, level, beta, old, REFERENCE if beta else None, None, None, correction)
    for (loss_type, level), beta, old, correction in product(LEVELS, (0.0, 0.3), (None, OLD), (False, True))
]


def coefficients(setting: Setting, values: torch.Tensor, mask: torch.Tensor = MASK) -> torch.Tensor:
    leaf = values.clone().requires_grad_()
    inputs = PolicyInputs(leaf, mask, ADVANTAGES, setting.old, setting.reference, setting.ratio)
    loss, _ = setting.policy(mask)(inputs)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient


def name(setting: Setting) -> str:
    old = "old" if setting.old is not None else "no old"
    return f"{setting.loss_type}-{setting.level}-{setting.beta}-{old}-{setting.bias_correction}"


@pytest.mark.parametrize("setting", CASES, ids=name)
def test_what_the_table_claims_holds(setting: Setting) -> None:
    traits = setting.traits()
    before = coefficients(setting, VALUES)
    if traits.fixed_coefficients:
        torch.testing.assert_close(coefficients(setting, torch.zeros(SHAPE)), before)
    if traits.separable:
        moved = VALUES.clone()
        moved[:, ::2] -= 0.4
        torch.testing.assert_close(coefficients(setting, moved)[:, 1::2], before[:, 1::2])
    if traits.separable_by_sequence:
        moved = VALUES.clone()
        moved[::2] -= 0.4
        torch.testing.assert_close(coefficients(setting, moved)[1::2], before[1::2])
    if not traits.masked_rows_matter:
        assert (before[MASK == 0] == 0).all()
        moved = torch.where(MASK == 0, VALUES - 0.4, VALUES)
        torch.testing.assert_close(coefficients(setting, moved), before)
    if not traits.zero_advantage_rows_matter:
        assert (before[2] == 0).all()
        moved = VALUES.clone()
        moved[2] -= 0.4
        torch.testing.assert_close(coefficients(setting, moved), before)


def test_the_known_exceptions_are_real() -> None:
    # A table that claimed more would be caught: each of these moves the coefficient of another token.
    for setting in (
        Setting("grpo", "sequence", old=OLD),
        Setting("vespo", "token", old=OLD),
        Setting("dapo", "sequence", 0.3, None, REFERENCE, bias_correction=True),
    ):
        assert not setting.traits().separable
        moved = VALUES.clone()
        moved[:, ::2] -= 0.05
        change = (coefficients(setting, moved) - coefficients(setting, VALUES))[:, 1::2].abs().max()
        assert change > 1e-4, name(setting)
    for setting in (Setting("luspo"), Setting("luspo", "sequence", 0.3, None, REFERENCE)):
        assert setting.traits().masked_rows_matter
        assert coefficients(setting, VALUES)[MASK == 0].abs().max() > 1e-4


@pytest.mark.parametrize(("loss_type", "level"), [("new", "token"), ("grpo", "turn")])
def test_nothing_is_assumed_of_what_is_not_listed(loss_type: str, level: str) -> None:
    traits = policy_traits(loss_type, level, old_given=False, beta=0.0, bias_correction_kl=False)
    assert traits == PolicyTraits(False, False, False, True, True)


@pytest.mark.parametrize(("loss_type", "level"), LEVELS)
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_ratios_of_rows_that_are_left_out(loss_type: str, level: str, beta: float) -> None:
    ratio = torch.rand(SHAPE, generator=torch.Generator().manual_seed(1)) + 0.5
    setting = Setting(loss_type, level, beta, OLD, REFERENCE if beta else None, ratio)
    changed = replace(setting, ratio=torch.where(MASK == 0, 3.0 * ratio, ratio))
    same = torch.equal(coefficients(setting, VALUES), coefficients(changed, VALUES))
    # Whether or not LUSPO reads them there, what it is given is the caller's.
    assert same or setting.traits().left_out_ratios_matter
    if loss_type in ("vespo", "luspo"):
        assert not same
