"""Rows of a batch moved to the left, and what a model gave for them put back: functions on tensors alone.

A batch has prompts that are padded on the left and completions that are padded on the right: `[B, P + T]`. Moved, each
row is prompt, completion, padding. Under causal attention no token sees what stands to its right, so no mask is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

MULTIPLE = 8
"""Widths are rounded up to a multiple of this, which matrix products on GPUs like, but never beyond upstream's."""


class Layout(NamedTuple):
    """How many tokens each row has: int64 `[B]` on the device, and the same numbers on the host. `width` is T."""

    prompt: torch.Tensor
    completion: torch.Tensor
    prompts: tuple[int, ...]
    completions: tuple[int, ...]
    width: int

    def length(self, row: int) -> int:
        return self.prompts[row] + self.completions[row]


class Part(NamedTuple):
    """The rows of one forward of the model.

    input_ids, attention_mask: `[R, W]`; moved rows have a mask that is 1 at the tokens of the completion only, which
    are those that a head may be asked for. logits_to_keep: k. rows: the rows' numbers in the batch, `[R]`; None for all
    of them in order. column: where among the last k columns each completion token's value is, `[R, T]`, and real:
    whether there is such a token; None for rows that stay where they are.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    logits_to_keep: int
    rows: torch.Tensor | None
    column: torch.Tensor | None = None
    real: torch.Tensor | None = None


def read_layout(attention_mask: torch.Tensor, width: int) -> Layout | None:
    """The layout of a batch, `[B, P + T]`; None where the tokens of a row are not one run from its prompt into its
    completion, or a row has no prompt. Waits for the device once."""
    import torch

    mask = attention_mask != 0
    border = mask.shape[1] - width
    prompt, completion = mask[:, :border].sum(1), mask[:, border:].sum(1)
    columns = torch.arange(mask.shape[1], device=mask.device)
    run = (columns >= (border - prompt)[:, None]) & (columns < (border + completion)[:, None])
    is_run = (run == mask).all(1) & (prompt > 0)
    prompts, completions, runs = torch.stack([prompt, completion, is_run.long()]).tolist()
    return Layout(prompt, completion, tuple(prompts), tuple(completions), width) if all(runs) else None


def move(input_ids: torch.Tensor, attention_mask: torch.Tensor, layout: Layout, rows: Sequence[int] | None) -> Part:
    """Some rows (all: None), each moved to the left, in as many columns as the longest of them needs."""
    import torch

    total = input_ids.shape[1]
    chosen = range(len(layout.prompts)) if rows is None else rows
    shortest = min(layout.prompts[row] for row in chosen)
    # One column more than the shortest prompt, where nothing has a completion: upstream keeps at least one.
    needed = max(shortest + 1, *(layout.length(row) for row in chosen))
    wide = max(needed, min(-(-needed // MULTIPLE) * MULTIPLE, total))
    index = None if rows is None else torch.tensor(list(rows), device=input_ids.device)
    prompt, completion = layout.prompt, layout.completion
    if index is not None:
        input_ids, attention_mask = input_ids[index], attention_mask[index]
        prompt, completion = prompt[index], completion[index]
    columns = torch.arange(wide, device=input_ids.device)
    source = ((total - layout.width) - prompt)[:, None] + columns
    in_completion = (columns >= prompt[:, None]) & (columns < (prompt + completion)[:, None])
    token = torch.arange(layout.width, device=input_ids.device)
    kept = wide - shortest
    return Part(
        input_ids=input_ids.gather(1, source.clamp(max=total - 1)),
        attention_mask=in_completion.to(attention_mask.dtype),
        logits_to_keep=kept,
        rows=index,
        column=((prompt - shortest)[:, None] + token).clamp(max=kept - 1),
        real=token < completion[:, None],
    )


def select(input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int, rows: Sequence[int]) -> Part:
    """Some rows, where they are."""
    import torch

    index = torch.tensor(list(rows), device=input_ids.device)
    return Part(input_ids[index], attention_mask[index], width, index)


def put_back(
    values: Sequence[torch.Tensor], parts: Sequence[Part], size: int, fill: torch.Tensor | None = None
) -> torch.Tensor:
    """What the forwards gave, `[R, k, ...]` each, in upstream's places: `[size, T, ...]`.

    fill: `[size, T]`, what stands where nothing was computed (padding, rows of no part); 0 without it.
    """
    import torch

    fill = None if fill is None else fill.to(values[0].dtype)
    back = [_restored(value, part, fill) for value, part in zip(values, parts, strict=True)]
    if len(parts) == 1 and parts[0].rows is None:
        return back[0]
    whole = back[0].new_zeros(size, *back[0].shape[1:]) if fill is None else fill
    index = torch.cat([part.rows for part in parts if part.rows is not None])
    return whole.index_copy(0, index, torch.cat(back))


def _restored(values: torch.Tensor, part: Part, fill: torch.Tensor | None) -> torch.Tensor:
    import torch

    if part.column is None or part.real is None:
        return values
    further = (1,) * (values.dim() - 2)
    column = part.column.view(*part.column.shape, *further).expand(*part.column.shape, *values.shape[2:])
    real = part.real.view(*part.real.shape, *further)
    if fill is None:
        return torch.where(real, values.gather(1, column), values.new_zeros(()))
    return torch.where(real, values.gather(1, column), fill if part.rows is None else fill[part.rows])


def by_length(layout: Layout, rows: Sequence[int] | None) -> list[int]:
    """The rows, longest first; rows of one length in the order in which they come."""
    chosen = range(len(layout.prompts)) if rows is None else rows
    return sorted(chosen, key=layout.length, reverse=True)
