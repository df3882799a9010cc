"""Where the coefficients of a group of rows come from, and which groups they can be found for.

A row's coefficient is the derivative of the loss by its log-probability. The product that makes grad-weight mixes rows,
so the coefficients of a group must be known when its product is made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from fusepatch.loss.chunks import ranges, whole_sequences
from fusepatch.loss.left_out_rows import fixed_coefficients_of, inputs_of_group
from fusepatch.loss.linear import CoefficientSource, coefficient_limit
from fusepatch.loss.policy import LossAndMetrics, PolicyCall, PolicyInputs


class Coefficients(NamedTuple):
    """A source of coefficients.

    of_rows: gives those of a group of rows.
    loss: gives the policy's loss and metrics once all log-probabilities are known.
    limit: the largest coefficient, where several groups of float16 products need it.
    """

    of_rows: CoefficientSource
    loss: Callable[[PolicyInputs], LossAndMetrics]
    limit: torch.Tensor | None = None


def fixed(call: PolicyCall) -> Coefficients:
    """Coefficients that do not depend on the log-probabilities, for groups of any rows."""
    # Found for the first group and not before it, so that the launches run ahead of that group's products.
    known = cache(lambda: call.plan.take(call.loss_and_coefficients(call.inputs)[1]))

    def of_rows(values: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return fixed_coefficients_of(known()[start:stop], values[start:stop])

    limit = coefficient_limit(call.head, known()) if call.head.precision.narrow_range else None
    return Coefficients(of_rows, call.loss, limit)


def of_whole_batch(call: PolicyCall) -> Coefficients:
    """Coefficients of any policy, for one group of all rows. The policy is called once for them and the loss."""
    found: list[LossAndMetrics] = []

    def of_rows(values: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        loss, coefficients = call.loss_and_coefficients(call.inputs_with(values))
        found.append(loss)
        return call.plan.take(coefficients)

    return Coefficients(of_rows, lambda inputs: found[0] if found else call.loss(inputs))


def of_each_group(call: PolicyCall) -> Coefficients:
    """Coefficients of a separable policy, called on the sequences of each group from :func:`separable_groups`."""

    def of_rows(values: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        inputs, positions = inputs_of_group(call.plan, call.inputs, values, start, stop)
        return call.loss_and_coefficients(inputs)[1].reshape(-1).index_select(0, positions)

    return Coefficients(of_rows, call.loss)


def separable_groups(call: PolicyCall, limit: int) -> list[tuple[int, int]] | None:
    """Groups of at most ``limit`` rows whose coefficients depend on no row outside the group, None if impossible."""
    if call.head.precision.narrow_range:
        return None
    if call.traits.separable or call.traits.fixed_coefficients:
        return ranges(0, call.plan.rows, limit, call.head.chunk_rows)
    return whole_sequences(call.plan.counts, limit) if call.traits.separable_by_sequence else None
