"""`liger.grpo_loss`: Liger's fused linear GRPO loss computes only what autograd needs, in chunks with float32 logits.

`fused_linear_ppo` has the handlers of Liger's base class and of TRL 1.13's copy, `own_code` how the policy of theirs is
recognised, `sharded` what a DTensor head takes. `model_logits` has the handler of TRL's
`GRPOTrainer.compute_liger_loss`, `model_tail` how a model is asked for its logits, `left_out` what TRL's fused path
drops. The arithmetic is in `fusepatch.loss`.
"""

from __future__ import annotations

from fusepatch.engine.patch import Contract, Patch, Site, Slot
from fusepatch.patches.liger_grpo_loss import fused_linear_ppo, model_logits
from fusepatch.patches.upstreams import LIGER, TRL

_FORWARD = Contract(
    parameters=(
        "cls",
        "ctx",
        "_input",
        "weight",
        "selected_token_ids",
        "attention_mask",
        "advantages",
        "bias",
        "ref_per_token_logps",
        "old_per_token_logps",
        "ref_input",
        "ref_weight",
        "ref_bias",
        "beta",
        "temperature",
        "use_ref_model",
    )
)


def _base_slots(name: str) -> tuple[Slot, ...]:
    return (
        Slot(f"{name}.forward", fused_linear_ppo.forward, _FORWARD),
        Slot(f"{name}.backward", fused_linear_ppo.backward, Contract(parameters=("ctx", "grad_output"))),
    )


PATCH = Patch(
    id=fused_linear_ppo.ID,
    promise="Liger's GRPO loss in one pass over chunks of tokens, with float32 logits and only the gradients that are "
    "needed.",
    why=(
        "Up to 0.8.3 Liger allocates a float32 gradient of the size of the lm_head and runs its matrix product for "
        "every chunk, even when LoRA has frozen the head. Every release processes one sequence at a time, including "
        "masked tokens, computes all gradients even under no_grad, and rounds the logits of bfloat16 models to "
        "bfloat16. No release applies Gemma's soft cap, Cohere's logit_scale or Granite's logits_scaling."
    ),
    upstream=(
        "https://github.com/linkedin/Liger-Kernel/pull/1441",
        "https://github.com/linkedin/Liger-Kernel/issues/1432",
        "https://github.com/huggingface/trl/pull/7076",
        "https://github.com/huggingface/trl/issues/4612",
        "https://github.com/huggingface/trl/issues/7009",
    ),
    fixed_in="Liger 0.8.4 computes no gradient of a frozen head; TRL 1.14 no longer uses Liger's fused loss",
    remove_when="no supported TRL or ms-swift calls Liger's fused linear GRPO loss",
    variables=("FUSEPATCH_HEAD", "FUSEPATCH_HEAD_PREFER", "FUSEPATCH_HEAD_CHUNK_MIB"),
    requested_by="",
    changes=(
        "LigerFusedLinearPPOBase.forward computes log-probabilities and gradients with fusepatch.loss and calls the "
        "installed Liger's own ppo_loss_fn for the loss and the metrics; this includes captured apply functions, "
        "subclasses that inherit the policy, and existing instances",
        "gradients are computed only for the inputs that require one, and not under no_grad or inference_mode; a "
        "frozen head allocates nothing of its size",
        "masked tokens, and sequences whose advantage is 0 where beta is 0, are skipped where they cannot change the "
        "result",
        "LigerFusedLinearPPOBase.backward scales without comparing on the host, and in place where the graph is freed "
        "and no saved-tensor hooks were set when it was built",
        "a head that is a DTensor (FSDP2) is gathered for the forward, its gradient averaged over the ranks and "
        "sharded again",
        "in TRL 0.17 to 1.13, the soft cap or logit scale of the trained model reaches the loss: at the first call for "
        "a model its own logits of eight rows are compared with the lm_head's, and a number of its configuration that "
        "explains the difference is used",
        "there, a float32 lm_head beside half-precision hidden states (cast_lm_head_to_fp32) is multiplied in float32 "
        "where the model itself does so; upstream rounds it to the hidden states' dtype",
        "what TRL's fused path leaves out triggers a warning (an error under FUSEPATCH_STRICT=1): logits that differ "
        "from the lm_head's in another way, an adapter on lm_head, an enabled auxiliary router loss, inputs of the "
        "batch that the native path passes to the model (mm_token_type_ids), a _compute_loss of a subclass",
    ),
    limits=(
        "upstream's own forward runs, with the reason recorded, for: advantages that are not [B], both references "
        "given, arguments that upstream refuses or that are not known here, tensors of another shape or on another "
        "device than the plain one (a ref_bias that is longer than the vocabulary), ROCm, XPU, NPU and MPS; a "
        "ppo_loss_fn, or anything that it or the base class reaches in its library, that is not what the library's own "
        "source defines; a model whose logits are not understood",
        "the model's own logits are not computed, and the names in its configuration decide, where its head is sharded "
        "(ZeRO-3), compiled, carries hooks in a group of processes, or its forward is bound to something else",
        "rows that are skipped (masked tokens, and sequences of advantage 0 where beta is 0) are not checked: NaN or "
        "infinity in their hidden states, log-probabilities or sampling ratios makes upstream's loss NaN and leaves "
        "this one finite; in every other row it gives what upstream gives, a loss and gradients that are not finite, "
        "whether or not the head is frozen (a selected token of probability 0 under vespo with a trainable head: NaN, "
        "where upstream's weight is 0)",
        "dapo, cispo and vespo without num_items_in_batch sum the number of tokens over all ranks once per call, "
        "upstream once per chunk of sequences: all ranks must be patched, or none",
        "with Liger 0.6.4 to 0.8.0 and several ranks, those three loss types need one more matrix product for a "
        "trainable head",
        "a graph over a DTensor head must run its backward while the patch is applied",
        "chunk_size and compiled have no effect; torch.compile of code that contains the loss raises in Liger's class "
        "as it does without this patch",
    ),
    sites=(
        Site(
            upstream=LIGER,
            module="liger_kernel.chunked_loss.fused_linear_ppo",
            supported=">=0.5.6",
            slots=_base_slots("LigerFusedLinearPPOBase"),
        ),
        Site(
            upstream=TRL,
            module="trl.losses.fused_linear_ppo",
            supported=">=0.17",
            slots=_base_slots("FusedLinearPPOBase"),
        ),
        Site(
            upstream=TRL,
            module="trl.trainer.grpo_trainer",
            supported=">=0.17",
            slots=(
                Slot(
                    "GRPOTrainer.compute_liger_loss", model_logits.compute_liger_loss, Contract(parameters=("inputs",))
                ),
            ),
        ),
    ),
)
