"""GRPO with TRL and Liger's loss; Liger's SwiGLU kernel stays off.

    FUSEPATCH_LIGER_SWIGLU=0 python trl_grpo.py --use_liger_kernel --output_dir out \
        --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/tldr

After two steps (`--max_steps 2`), the last lines are

    liger.instance_flags: APPLIED, calls: 1
        apply_liger_kernel_to_qwen3: swiglu: not passed (Liger's default True) -> False (FUSEPATCH_LIGER_SWIGLU=0)
    optimizer.flags: APPLIED, calls: 1
    liger.grpo_loss: APPLIED, calls: 2
    grpo.live_tokens: APPLIED, calls: 2
        Qwen3ForCausalLM: moved rows were compared with padded ones: ...
        Qwen3ForCausalLM: rows moved to the left, attention_mask -> None

On a CPU, a line below `liger.grpo_loss` adds that Triton kernels run on NVIDIA GPUs.
"""

import fusepatch  # above the other imports

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config


def brevity(completions, **_):
    """A reward: the shorter, the better."""
    return [-len(text) / 100 for text in completions]


if __name__ == "__main__":
    script, training, model = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()
    trainer = GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=brevity,
        args=training,
        train_dataset=load_dataset(script.dataset_name, split=script.dataset_train_split),
        peft_config=get_peft_config(model),
    )
    trainer.train()

    for record in fusepatch.status():
        if record.calls:
            print(f"{record.id}: {record.outcome.value}, calls: {record.calls}")
            for note in (*record.replaced, *record.fallbacks):
                print(f"    {note.text}")
