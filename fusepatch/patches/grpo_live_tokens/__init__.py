"""`grpo.live_tokens`: in a GRPO update of TRL or verl only tokens that can matter enter the model.

`handlers` has the handlers, `obstacles` why they leave something to upstream, `model_check` the comparison at the first
call for a model. `rows` moves rows and puts results back, `without_mask` keeps the mask from the model, `regroup` sorts
a generation batch, `zero_advantage` says which rows of a micro-batch enter. `verl_engine` leaves rows out of an update
of verl's.
"""

from __future__ import annotations

from fusepatch.engine.patch import Contract, Patch, Site, Slot
from fusepatch.patches.grpo_live_tokens import handlers, verl_engine
from fusepatch.patches.upstreams import TRL, VERL

_LOSS = Contract(parameters=("model", "inputs"))

PATCH = Patch(
    id=handlers.ID,
    promise="In a GRPO or RLOO update of TRL no padding column enters the model, and on request no sequence without a "
    "gradient, in verl too.",
    why=(
        "TRL pads every completion to the longest one of the generation batch and cuts micro-batches from that, so "
        "each of them runs as many columns as the longest completion of all. The mask that the padding needs keeps "
        "attention from its causal kernel. Groups whose rewards are all equal have advantage 0 and no gradient, and "
        "pay forward and backward of the whole model."
    ),
    upstream=(
        "https://github.com/huggingface/trl/issues/7179",
        "https://github.com/huggingface/trl/pull/7087",
        "https://github.com/huggingface/trl/issues/3495",
    ),
    fixed_in="no release",
    remove_when="TRL pads each micro-batch by itself and without a mask",
    variables=(handlers.PADDING, handlers.ZERO_ADVANTAGE),
    requested_by="",
    changes=(
        "each row of a forward becomes prompt, completion, padding, in as many columns as the longest row of that "
        "forward needs, and the model gets no attention mask; log-probabilities, entropies and hidden states come back "
        "in upstream's places and shapes, in training, in evaluation, and for the old and the reference policy",
        "what stands at padding is the old log-probability where there is one, else 0",
        "rows of like length share a micro-batch: a generation batch is sorted after upstream's own shuffle, inside "
        "the micro-batches of one optimizer step; the passes without gradients run in batches of like length too",
        "with FUSEPATCH_GRPO_ZERO_ADVANTAGE=drop, sequences whose advantage is exactly 0 do not enter the model in "
        "training; the loss, its denominators, the gradient and the clip ratios are the same, `entropy` is the mean "
        "over the sequences that enter, and vespo/phi_seq_mean counts 1 for the others; at least one row of each "
        "micro-batch runs",
        "with FUSEPATCH_GRPO_ZERO_ADVANTAGE=drop, verl's FSDP engine (0.7.1 and later) forms its micro-batches without "
        "such sequences, after the tokens of the whole batch were counted; each rank runs as many sequences as the one "
        "that has most",
        "before the first rows for a model are moved, two rows run both ways without gradients; where they differ by "
        "more than rounding, that model is left to upstream, with the numbers in the record",
        "where the profiler of TRL is on, the passes without gradients have one entry for each batch",
    ),
    limits=(
        "rows are left where they are, with the reason recorded: a model type that no test has compared, learned "
        "positions, dynamic and long rope, attention scaled by the position, recurrent states that see padding, images "
        "and token types, the auxiliary router loss, prompt learning, compiled models, attention implementations other "
        "than eager, sdpa and flash-attention, masks that are not one run, a prompt of no token, pad_to_multiple_of",
        "rows are not regrouped: loss_type bnpo, the entropy bonus, top_entropy_quantile below 1, the auxiliary router "
        "loss, images, a loss of a subclass, steps_per_generation and gradient_accumulation_steps of which neither "
        "divides the other, TRL 0.17, which does not shuffle",
        "sequences are not dropped, with one warning: beta other than 0, the entropy bonus, top_entropy_quantile below "
        "1, the auxiliary router loss, a loss of a subclass, a loss type that is not known, experts in a ModuleList on "
        "several ranks, a release of TRL that is not a tested one",
        "in verl, sequences are not dropped, with one warning: losses other than ppo_loss with a policy loss that is a "
        "sum over tokens (vanilla, dppo_tv, dppo_kl, gspo, sapo, gpg, cispo), an entropy or KL term, "
        "calculate_entropy, experts in a ModuleList on several ranks, the legacy worker (up to 0.7.1), Trinity-RFT's "
        "losses, which divide by each micro-batch; other engines than FSDP are not reached. pg_clipfrac and ppo_kl are "
        "means over the sequences that ran",
        "a model with dropout is moved without the comparison, and draws other random numbers",
        "where rows are regrouped, metrics that are means over micro-batches (entropy, kl, clip ratios) weigh the "
        "tokens differently; the loss does not",
        "nothing is gained where all completions are of one length, and little where they are short beside the prompts "
        "or where flash-attention takes padding out by itself",
        "the gradient of equal rewards whose mean is rounded (0.1, 0.7) is not exactly 0: such sequences are kept and "
        "counted",
    ),
    sites=(
        Site(
            upstream=TRL,
            module="trl.trainer.grpo_trainer",
            supported=">=0.17",
            slots=(
                Slot(
                    "GRPOTrainer._get_per_token_logps",
                    handlers.log_probabilities,
                    Contract(("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size")),
                    releases="<0.20",
                ),
                Slot(
                    "GRPOTrainer._get_per_token_logps_and_entropies",
                    handlers.log_probabilities,
                    Contract(("model", "batch_size")),
                    releases=">=0.20",
                ),
                Slot(
                    "GRPOTrainer._get_last_hidden_state",
                    handlers.hidden_states,
                    Contract(("input_ids", "attention_mask", "logits_to_keep")),
                    releases="<1.14",
                ),
                Slot("GRPOTrainer.compute_loss", handlers.compute_loss, _LOSS),
                Slot("GRPOTrainer._prepare_inputs", handlers.prepare_inputs),
                Slot("shuffle_tensor_dict", handlers.shuffle, Contract(("tensor_dict",)), releases=">=0.18,<0.20"),
                Slot("shuffle_sequence_dict", handlers.shuffle, Contract(("seq_dict",)), releases=">=0.20,<0.22"),
            ),
        ),
        Site(
            upstream=TRL,
            module="trl.trainer.rloo_trainer",
            supported=">=0.22",
            slots=(
                Slot(
                    "RLOOTrainer._get_per_token_logps_and_entropies",
                    handlers.log_probabilities,
                    Contract(("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size")),
                ),
                Slot("RLOOTrainer.compute_loss", handlers.compute_loss, _LOSS),
                Slot("RLOOTrainer._prepare_inputs", handlers.prepare_inputs),
            ),
        ),
        Site(
            upstream=TRL,
            module="trl.trainer.utils",
            supported=">=0.22",
            slots=(Slot("shuffle_sequence_dict", handlers.shuffle, Contract(("seq_dict",))),),
        ),
        Site(
            upstream=VERL,
            module="verl.workers.engine.utils",
            supported=">=0.4.1",
            slots=(Slot("prepare_micro_batches", verl_engine.prepare_micro_batches, Contract(("data", "dp_group"))),),
        ),
        Site(
            upstream=VERL,
            module="verl.workers.engine.fsdp.transformer_impl",
            supported=">=0.4.1",
            slots=(
                Slot(
                    "FSDPEngine.forward_backward_batch",
                    verl_engine.forward_backward_batch,
                    Contract(("data", "loss_function", "forward_only")),
                ),
            ),
        ),
        Site(
            upstream=VERL,
            module="verl.workers.actor.dp_actor",
            supported=">=0.4.1",
            slots=(Slot("DataParallelPPOActor.update_policy", verl_engine.update_policy),),
        ),
    ),
)
