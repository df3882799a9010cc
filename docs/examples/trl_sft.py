"""Full fine-tuning with TRL; the optimizer runs inside backward, so that no step holds all gradients at once.

    FUSEPATCH_OPTIMIZER_IN_BACKWARD=1 python trl_sft.py --max_grad_norm 0 --output_dir out \
        --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara

`--max_grad_norm 0` switches gradient clipping off, which needs all gradients at once. For a model of two layers, the
last lines are

    optimizer.flags: APPLIED, calls: 1
    optimizer.in_backward: APPLIED, calls: 1
        trl.trainer.sft_trainer.SFTTrainer: torch.optim.adamw.AdamW updates 25 parameters inside backward
"""

import fusepatch  # above the other imports

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser

if __name__ == "__main__":
    script, training, model = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config()
    trainer = SFTTrainer(
        model=model.model_name_or_path,
        args=training,
        train_dataset=load_dataset(script.dataset_name, split=script.dataset_train_split),
    )
    trainer.train()

    for record in fusepatch.status():
        if record.calls:
            print(f"{record.id}: {record.outcome.value}, calls: {record.calls}")
            for note in (*record.replaced, *record.fallbacks):
                print(f"    {note.text}")
