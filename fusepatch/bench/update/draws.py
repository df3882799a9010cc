"""The completions and the rewards of an update: drawn from the row's place, so that every process has the same.
Imports no torch."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from fusepatch.bench.update.cases import Batch

PAD, END = 0, 1
"""Token ids that pad a row and end a completion; the drawn ones are above them."""
SPREAD = 0.75
"""Standard deviation of the logarithm of a completion's length."""


class Row(NamedTuple):
    """The token ids of one prompt and completion."""

    prompt: list[int]
    completion: list[int]


def row(index: int, place: int, batch: Batch, vocabulary: int) -> Row:
    """The row at `place` of the generations of prompt number `index`; one row of each update has the longest
    completion.

    A completion that is shorter than the longest ends with the token that ends; rows of a group share their prompt.
    """
    own = random.Random(f"{index}, {place}")
    shared = random.Random(f"{index}")
    first = index % batch.groups == 0
    prompt = batch.prompt if first else shared.randint(max(batch.prompt // 2, 1), batch.prompt)
    length = min(max(round(batch.median * math.exp(own.gauss(0.0, SPREAD))), 2), batch.longest)
    if first and place == 0:
        length = batch.longest
    tokens = [own.randrange(END + 1, vocabulary) for _ in range(length)]
    if length < batch.longest:
        tokens[-1] = END
    return Row([shared.randrange(END + 1, vocabulary) for _ in range(prompt)], tokens)


def is_dead(index: int, batch: Batch) -> bool:
    """Whether all rows of this prompt have one reward. Which groups of an update do is drawn for each update."""
    update, group = divmod(index, batch.groups)
    order = list(range(batch.groups))
    random.Random(f"dead, {update}").shuffle(order)
    return group in order[: batch.dead_groups]


def reward(index: int, completion: Sequence[int], batch: Batch) -> float:
    """1.0 in a dead group, else a number between 0 and 1 that differs from row to row."""
    if is_dead(index, batch):
        return 1.0
    return random.Random(f"{index}, {completion[:16]}, {len(completion)}").random()
