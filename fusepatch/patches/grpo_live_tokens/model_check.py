"""One check for each model, before its first rows are moved: two rows both ways, compared to the rounding of the dtype.

The two rows are made of tokens of the batch. One has no padding, one is padded on both sides: the first shows what the
kernels differ by, since nothing moves in it, the second what moving does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from fusepatch.patches.grpo_live_tokens import rows

if TYPE_CHECKING:
    import torch

LONGEST = 512
"""Columns of the prompts, and of the completions, that the two rows have at most."""

_OF_CLASSIFIERS = ("classifier", "summary")
"""Beginnings of fields of a configuration that language models do not use."""


class Compared(NamedTuple):
    """Root mean squares: of upstream's values, of the difference in the row that does not move, and in the row that
    does."""

    values: float
    still: float
    moved: float
    tolerance: float

    @property
    def is_equal(self) -> bool:
        return self.moved <= self.tolerance

    def __str__(self) -> str:
        return (
            f"the row that moves differs by {self.moved:.2g}, the one that does not by {self.still:.2g}; "
            f"{self.tolerance:.2g} would be rounding (root mean squares; the values are {self.values:.3g})"
        )


def why_not_checked(base: Any) -> str | None:
    """What makes two forwards of one row differ, so that there is nothing to compare."""
    from torch.nn.modules.dropout import _DropoutNd

    if not base.training:
        return None
    if any(isinstance(module, _DropoutNd) and module.training and module.p > 0 for module in base.modules()):
        return "dropout"
    fields: dict[str, Any] = base.config.get_text_config().to_dict()
    for name, value in fields.items():
        random = any(part in name for part in ("dropout", "pdrop", "jitter")) and not name.startswith(_OF_CLASSIFIERS)
        if random and isinstance(value, float) and value > 0:
            return name
    return None


def two_rows(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Tokens `[2, P + T]` and a mask for them, with T. P is 2 at least, which leaves room for padding: where the batch
    has fewer columns, its first or last one comes more than once, so that every rank has rows to compare."""
    import torch

    border = input_ids.shape[1] - width
    prompt, completion = max(min(border, LONGEST), 2), max(min(width, LONGEST), 1)
    columns = torch.arange(border - prompt, border + completion, device=input_ids.device)
    tokens = input_ids[[0, min(1, input_ids.shape[0] - 1)]][:, columns.clamp(0, input_ids.shape[1] - 1)]
    mask = torch.ones_like(tokens, dtype=attention_mask.dtype)
    mask[1, : prompt - prompt // 2] = 0
    mask[1, prompt + (completion + 1) // 2 :] = 0
    return tokens, mask, completion


def compare(
    upstreams: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
    moved: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
    tokens: torch.Tensor,
    mask: torch.Tensor,
    width: int,
    rounding: float,
) -> Compared:
    """Ask the model for the values of two rows in upstream's way and moved. rounding: the dtype's epsilon."""
    import torch

    layout = rows.read_layout(mask, width)
    assert layout is not None  # the rows are made so
    part = rows.move(tokens, mask, layout, None)
    with torch.no_grad():
        wanted = upstreams(tokens, mask, width)
        found = rows.put_back([moved(part.input_ids, part.attention_mask, part.logits_to_keep)], [part], 2)
    numbers = []
    for row, count in enumerate(layout.completions):
        reference, difference = wanted[row, :count].double(), (found[row] - wanted[row])[:count].double()
        numbers.append((reference.square().mean().sqrt(), difference.square().mean().sqrt()))
    (scale, still), (other, displaced) = [tuple(map(float, pair)) for pair in numbers]
    scale = max(1.0, scale, other)
    # Of single precision, sums over many layers; of lower ones, logits that are rounded once more at the end. In tiny
    # models of the types that are known to differ, moving changes log-probabilities by 0.008 and more.
    tolerance = max(4 * still, 256 * 2**-23 * scale, 8 * rounding * scale)
    return Compared(max(scale, other), still, displaced, tolerance)


def rounding_of(base: Any, mixed_precision: str | None) -> float:
    """The epsilon of the coarsest dtype that the model computes in."""
    import torch

    dtypes = {param.dtype for param in base.parameters() if param.is_floating_point() and param.element_size() > 1}
    dtypes |= {dtype for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)) if name == mixed_precision}
    epsilons = [torch.finfo(dtype).eps for dtype in dtypes]
    if _computes_in_tf32() and any(param.is_cuda for param in base.parameters()):
        epsilons.append(2**-10)
    return max(epsilons, default=2**-7)


def _computes_in_tf32() -> bool:
    import torch

    matmul: Any = torch.backends.cuda.matmul
    # torch 2.9 and later refuse to read allow_tf32 where TF32 was switched on by the new name.
    return bool(matmul.fp32_precision == "tf32") if hasattr(matmul, "fp32_precision") else bool(matmul.allow_tf32)
