"""`optimizer.in_backward`: the step runs inside backward in SFT trainers, and gradients are freed as they are used.

`transformers_trainer` has the handler of the Trainer's loop, `verl_sft` those of verl. The mechanism is
`fusepatch.optim.in_backward`.
"""

from __future__ import annotations

from fusepatch.engine.patch import Contract, Patch, Site, Slot
from fusepatch.patches.optimizer_in_backward import checkpointing, transformers_trainer, verl_sft
from fusepatch.patches.optimizer_in_backward.attachment import CHECKPOINTING, ID
from fusepatch.patches.upstreams import TORCH, TRANSFORMERS, VERL

PATCH = Patch(
    id=ID,
    promise="On request, the optimizer's step runs inside backward, and each gradient is freed as soon as it is used.",
    why=(
        "Between backward and the step every gradient is held at once: as much memory again as the trainable "
        "parameters. torch's recipe makes one optimizer per parameter, which no framework's checkpoints and schedulers "
        "support, and silently computes something else under gradient accumulation, clipping and DDP."
    ),
    upstream=(
        "https://github.com/volcengine/verl/issues/2558",
        "https://github.com/pytorch/pytorch/issues/124523",
        "https://github.com/pytorch/torchtune/issues/1934",
    ),
    fixed_in="nowhere; the Trainer has layer-wise forms of a few optimizers (GaLore, LOMO, Apollo)",
    remove_when="the frameworks offer it themselves",
    variables=("FUSEPATCH_OPTIMIZER_IN_BACKWARD",),
    requested_by="FUSEPATCH_OPTIMIZER_IN_BACKWARD",
    changes=(
        "with FUSEPATCH_OPTIMIZER_IN_BACKWARD=1, each parameter of the transformers Trainer and of the trainers "
        "derived from it (TRL's SFTTrainer; any with one backward per optimizer step) is updated in backward by the "
        "one real optimizer, and its gradient is freed; state, checkpoints and schedules are the ordinary ones, so a "
        "run can resume with it or without it",
        "the same in verl's fsdp_sft_trainer and FSDP engine (sft_trainer) with optim.clip_grad=inf; its guard against "
        "a norm that is not finite is kept for each gradient",
        "the framework's own step() and zero_grad() still run and find nothing to do; they update only parameters that "
        "were added or unfrozen later, and tied weights under re-entrant checkpointing",
        "gradient accumulation, gradient clipping (max_grad_norm and optim.clip_grad are 1.0 by default), fp16, DDP, "
        "DataParallel, FSDP1, DeepSpeed, offload, compiled autograd, auto_find_batch_size and optimizers whose step is "
        "not known to be per parameter raise an error before training starts, which names the setting to change",
        "a second backward before the step raises an error with the parameter's name; backward passes outside the "
        "training step do not update parameters",
        "a weight that backward needs after its update (because it is also used detached) is an error: every update "
        "raises the version that autograd compares, and under gradient checkpointing every recomputed region, and what "
        "it saved, is checked",
        "settings that change during a run, step pre-hooks, a replaced or wrapped step, and an optimizer that is "
        "replaced during the forward are errors before that step changes a parameter; a Trainer whose callback "
        "replaces the optimizer between two steps continues",
    ),
    limits=(
        "grad_norm is logged as 0 (transformers 5, verl) or not at all (transformers 4)",
        "step post-hooks run once per step, in the framework's own step(), and callbacks before the step see no "
        "gradients, because the parameters are already updated",
        "a weight that is read after its update is not detected where it is used through weight.data outside a "
        "checkpointed region, where other code than torch.utils.checkpoint recomputes a region, or where a region "
        "reaches the weight through other objects than modules, arguments, closures, globals that it names, partials, "
        "lists, tuples, sets, dictionaries and the object of a bound method",
        "a backward that raises midway leaves some parameters updated and others not",
        "in verl, a gradient that is not finite skips only its own parameter, where verl alone would skip the whole "
        "step; under FSDP2 each rank checks its own part of the gradient",
        "in verl, a batch of several dynamic micro-batches takes the ordinary step and saves no memory",
        "not supported: loops that do not run through Trainer._inner_training_loop, verl's PPO workers from before the "
        "engine, verl's Megatron, VeOmni, Automodel and torchtitan engines",
    ),
    sites=(
        Site(
            upstream=TRANSFORMERS,
            module="transformers.trainer",
            supported=">=4.51",
            slots=(
                Slot("Trainer._inner_training_loop", transformers_trainer.inner_training_loop, Contract(("args",))),
            ),
        ),
        Site(
            upstream=VERL,
            module="verl.workers.engine.utils",
            supported=">=0.4.1",
            slots=(Slot("prepare_micro_batches", verl_sft.prepare_micro_batches, Contract(("data",))),),
        ),
        Site(
            upstream=VERL,
            module="verl.workers.engine.fsdp.transformer_impl",
            supported=">=0.4.1",
            slots=(
                Slot("FSDPEngine.initialize", verl_sft.initialize),
                Slot(
                    "FSDPEngine.forward_backward_batch",
                    verl_sft.forward_backward_batch,
                    Contract(("data", "loss_function", "forward_only")),
                ),
            ),
        ),
        Site(
            upstream=TORCH,
            module=CHECKPOINTING,
            supported=">=2.4",
            slots=(
                Slot("_checkpoint_without_reentrant_generator", checkpointing.without_reentrant, Contract(("fn",))),
                Slot("CheckpointFunction.forward", checkpointing.reentrant, Contract(("run_function",))),
                Slot("_checkpoint_hook.__init__", checkpointing.saving, Contract(("frame",))),
            ),
        ),
        Site(
            upstream=TORCH,
            module="torch.optim.optimizer",
            supported=">=2.4",
            slots=(Slot("Optimizer.__init__", verl_sft.construct, Contract(("params", "defaults"))),),
        ),
    ),
)
