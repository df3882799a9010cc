#!/usr/bin/env bash
# Supervised fine-tuning with verl. verl is started as a module, so there is no script to write `import fusepatch` into:
# `python -m fusepatch run` takes its place.
#
#     MODEL=Qwen/Qwen3-0.6B DATASET=train.parquet bash verl_sft.sh
#
# DATASET has a column `messages`; further arguments go to verl. The optimizer runs inside backward, which needs
# optim.clip_grad=inf and one micro-batch on each GPU. For a model of two layers, `status` ends with
#
#     - optimizer.flags: replaced 1x in 1 process: AdamW in verl.workers.config.optimizer: fused: not passed -> True
#       (automatic)
#     - optimizer.in_backward: replaced 1x in 1 process: verl.workers.engine.fsdp.FSDPEngine: torch.optim.adamw.AdamW
#       updates 25 parameters inside backward
set -euo pipefail
export FUSEPATCH_OPTIMIZER_IN_BACKWARD=1
export FUSEPATCH_REPORT="${FUSEPATCH_REPORT:-$PWD/report}"
GPUS="${GPUS:-1}"

python -m fusepatch run -m torch.distributed.run --standalone --nproc-per-node="$GPUS" \
  -m verl.trainer.sft_trainer \
  model.path="$MODEL" \
  data.train_files="$DATASET" \
  data.use_dynamic_bsz=False \
  data.train_batch_size="$((4 * GPUS))" \
  data.micro_batch_size_per_gpu=4 \
  engine.strategy=fsdp2 \
  optim.lr=1e-5 \
  optim.clip_grad=inf \
  trainer.total_epochs=1 \
  trainer.logger=console \
  "$@"

python -m fusepatch status --report "$FUSEPATCH_REPORT"
