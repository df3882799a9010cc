"""`torch.compile` of code that contains the loss ends as it does without the patch: the same error, or equal
gradients."""

from __future__ import annotations

import pytest

from kits.helpers import fresh

pytest.importorskip("torch")
pytest.importorskip("liger_kernel.chunked_loss.grpo_loss")

CODE = """
    if {patched}:
        import fusepatch
    import torch
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    torch.manual_seed(0)
    loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False)
    hidden, weight = torch.randn(2, 4, 8, requires_grad=True), torch.randn(16, 8)
    targets, mask, advantages = torch.randint(0, 16, (2, 4)), torch.ones(2, 4), torch.tensor([1.0, -0.5])

    def step(hidden):
        return loss(hidden * 1.0, weight, targets, mask, advantages)[0]

    step(hidden).backward()
    eager, hidden.grad = hidden.grad, None
    try:
        torch.compile(step, backend="eager", fullgraph={whole})(hidden).backward()
        print("equal" if torch.allclose(hidden.grad, eager) else "not equal")
    except Exception as error:
        print(type(error).__name__)
    if {patched}:
        record = next(record for record in fusepatch.status() if record.id == "liger.grpo_loss")
        assert record.calls, record
"""


@pytest.mark.parametrize("whole", [False, True])
def test_compiling_ends_as_it_does_without_the_patch(whole: bool) -> None:
    theirs, ours = (fresh(CODE.format(patched=patched, whole=whole), check=True).stdout for patched in (False, True))
    assert ours == theirs
    assert theirs.strip() != "not equal"
