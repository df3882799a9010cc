"""The transformers Trainer with another optimizer in the place of its AdamW.

    FUSEPATCH_OPTIMIZER_CLASS=torch.optim.Adafactor python trainer_adamw.py --output_dir out \
        --model Qwen/Qwen3-0.6B --dataset roneneldan/TinyStories

Any class that can be imported will do, `torchao.optim.AdamW8bit` for one. What AdamW was given and the class has no
use for is left out, and said. The last lines are

    optimizer.class: APPLIED, calls: 1
        AdamW in transformers.trainer: class torch.optim.AdamW -> torch.optim.Adafactor (FUSEPATCH_OPTIMIZER_CLASS), ...
        AdamW in transformers.trainer: betas=(0.9, 0.999) from transformers.trainer left out: ...
        AdamW in transformers.trainer: eps=1e-08 from transformers.trainer left out: ...
        AdamW in transformers.trainer: fused=True from transformers.trainer left out: ...
    optimizer.flags: APPLIED, calls: 1
        Adafactor in transformers.trainer: not fused: Adafactor has no fused form in this torch
"""

import fusepatch  # above the other imports

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

if __name__ == "__main__":
    parser = HfArgumentParser(TrainingArguments)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dataset", required=True)
    training, script = parser.parse_args_into_dataclasses()

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

    for record in fusepatch.status():
        if record.calls:
            print(f"{record.id}: {record.outcome.value}, calls: {record.calls}")
            for note in (*record.replaced, *record.fallbacks):
                print(f"    {note.text}")
