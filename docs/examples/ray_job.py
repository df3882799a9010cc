"""Two learning rates in two Ray tasks. `ray.init` carries the patches and the variables to the workers.

    FUSEPATCH_LIGER_SWIGLU=0 python ray_job.py --use_liger_kernel --output_dir out \
        --model Qwen/Qwen3-0.6B --dataset roneneldan/TinyStories --learning_rates 1e-5 3e-5

It prints what each worker says of itself:

    learning rate 1e-05
    liger.instance_flags: APPLIED, calls: 1
        apply_liger_kernel_to_qwen3: swiglu: not passed (Liger's default True) -> False (FUSEPATCH_LIGER_SWIGLU=0)
    optimizer.flags: APPLIED, calls: 1
    learning rate 3e-05
    liger.instance_flags: APPLIED, calls: 1
        apply_liger_kernel_to_qwen3: swiglu: not passed (Liger's default True) -> False (FUSEPATCH_LIGER_SWIGLU=0)
    optimizer.flags: APPLIED, calls: 1
"""

import fusepatch  # above the other imports, and before `ray.init`

import ray
import torch
from transformers import HfArgumentParser, TrainingArguments


@ray.remote(num_gpus=1 if torch.cuda.is_available() else 0)
def train(script, training):
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer

    tokenizer = AutoTokenizer.from_pretrained(script.model)
    dataset = load_dataset(script.dataset, split="train")
    dataset = dataset.map(lambda row: tokenizer(row["text"], truncation=True), remove_columns=dataset.column_names)
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(script.model),
        args=training,
        train_dataset=dataset,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()

    lines = []
    for record in fusepatch.status():
        if record.calls:
            lines.append(f"{record.id}: {record.outcome.value}, calls: {record.calls}")
            lines += [f"    {note.text}" for note in (*record.replaced, *record.fallbacks)]
    return lines


if __name__ == "__main__":
    parser = HfArgumentParser(TrainingArguments)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--learning_rates", type=float, nargs="+", required=True)
    training, script = parser.parse_args_into_dataclasses()

    ray.init()
    folder = training.output_dir
    runs = []
    for rate in script.learning_rates:
        training.learning_rate = rate
        training.output_dir = f"{folder}/{rate}"
        runs.append(train.remote(script, training))
    for rate, lines in zip(script.learning_rates, ray.get(runs), strict=True):
        print(f"learning rate {rate}", *lines, sep="\n")
