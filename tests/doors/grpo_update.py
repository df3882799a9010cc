"""Door: updates of TRL's GRPOTrainer and RLOOTrainer on the CPU, with completions of drawn lengths and rewards that are
all equal in some groups: what is logged, and what becomes of the weights.

Generation is replaced on the model, so that no case waits for it; everything else is the trainer's own. Completions,
rewards and random numbers are the same in every process.

    python tests/doors/grpo_update.py --cases '[{"config": {"loss_type": "grpo"}}]'
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

GROUP = 4
LONGEST = 24
VOCABULARY = 64
LOGGED = ("loss", "grad_norm", "entropy", "kl", "clip_ratio", "cispo_clip_ratio", "reward")


def main() -> None:
    import script

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=json.loads, default=[{}])
    script.run(door, parser)


def door(arguments: argparse.Namespace) -> dict[str, Any]:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    return {"door": "grpo_update", "cases": [run(**case) for case in arguments.cases]}


def run(**case: Any) -> dict[str, Any]:
    """One training. What is not in `case` is as `trainer` has it."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        made = trainer(Path(folder), **case)
        seen: list[tuple[int, int, bool]] = []
        watched = made.model.get_base_model() if hasattr(made.model, "get_base_model") else made.model
        backbone = watched.base_model

        def look(module: Any, args: Any, kwargs: Any) -> None:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            seen.append((*ids.shape, kwargs.get("attention_mask") is not None))

        backbone.register_forward_pre_hook(look, with_kwargs=True)
        made.train()
        random_number = float(torch.rand(()))
        return {"logs": logs(made), "weights": weights(made), "forwards": seen, "random": random_number}


def logs(made: Any) -> list[dict[str, float]]:
    """What was logged at each step, of what an update decides."""
    steps = [entry for entry in made.state.log_history if "loss" in entry]
    return [{name: value for name, value in step.items() if name.startswith(LOGGED)} for step in steps]


def weights(made: Any) -> list[float]:
    """The norm of each trained parameter, and its product with numbers that are the same everywhere."""
    import torch

    found = []
    for _, param in sorted(made.accelerator.unwrap_model(made.model).named_parameters()):
        if param.requires_grad:
            flat = param.detach().flatten().double()
            numbers = torch.randn(flat.numel(), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            found += [float(flat.norm()), float(flat @ numbers / numbers.norm())]
    return found


def trainer(
    folder: Path,
    kind: str = "GRPO",
    config: dict[str, Any] | None = None,
    model: Any = None,
    lora: bool = False,
    liger: bool = False,
    tools: bool = False,
    dead: str = "",
    prompts: int = 32,
) -> Any:
    """A real trainer. tools: a tool mask. dead: which groups have equal rewards (`Reward`). prompts: how many an epoch
    has."""
    import torch
    import trl
    from datasets import Dataset

    module = getattr(trl, f"{kind}Trainer")

    class Trainer(module):  # type: ignore[misc, valid-type]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            found = super()._generate_and_score_completions(inputs)
            if tools:
                mask = found["completion_mask"]
                found["tool_mask"] = (torch.arange(mask.shape[1]) % 5 != 3).long().expand_as(mask) | (mask == 0).long()
            return found

    Trainer.__name__ = Trainer.__qualname__ = module.__name__
    model = model or tiny_model()
    model.generate = Generator()
    peft = None
    if lora:
        from peft import LoraConfig

        peft = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    source = folder / "model"
    model.save_pretrained(source)
    model.config._name_or_path = str(source)  # the reference model is loaded from there
    return Trainer(
        model=model,
        reward_funcs=Reward(dead),
        args=arguments(getattr(trl, f"{kind}Config"), folder, liger, **(config or {})),
        processing_class=words(),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS[:prompts]}),
        **({"peft_config": peft} if peft else {}),
    )


def arguments(kind: Any, folder: Path, liger: bool, **changes: Any) -> Any:
    known = inspect.signature(kind).parameters
    values: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "bf16": False,
        "seed": 7,
        "max_steps": 3,
        "optim": "sgd",
        "learning_rate": 0.3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "num_generations": GROUP,
        "max_completion_length": LONGEST,
        "beta": 0.0,
        "epsilon": 0.02,
        "temperature": 0.9,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        **changes,
    }
    if liger and "use_liger_loss" in known:
        values["use_liger_loss"] = True
    elif liger:
        layers = ("rope", "rms_norm", "swiglu", "fused_linear_cross_entropy")
        values |= {"use_liger_kernel": True, "liger_kernel_config": dict.fromkeys(layers, False)}
    if "max_prompt_length" in known:
        values["max_prompt_length"] = None
    return kind(**values)


class Generator:
    """`model.generate`: random tokens that depend on the prompt and on how often it has come, of lengths of which few
    are long."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch

        prompts = kwargs.get("input_ids", args[0] if args else None)
        places = torch.arange(prompts.shape[1], 0, -1)
        keys: list[int] = (prompts.cpu() * places**2).sum(1).tolist()
        completions = [completion(key, keys[:row].count(key)) for row, key in enumerate(keys)]
        longest = max(map(len, completions))
        padded = [tokens + [0] * (longest - len(tokens)) for tokens in completions]
        return torch.cat([prompts, torch.tensor(padded, device=prompts.device)], 1)


def completion(key: int, nth: int) -> list[int]:
    """The nth completion of a prompt; the longest ones are cut off, the others end."""
    numbers = random.Random(1000 * key + nth)
    length = 1 + int(numbers.random() ** 2 * 1.2 * LONGEST)
    tokens = [numbers.randrange(4, VOCABULARY) for _ in range(min(length, LONGEST))]
    return tokens if length > LONGEST else [*tokens[:-1], 2]


PROMPTS = [" ".join(f"w{(3 * row + column) % 50}" for column in range(1 + row * 7 % 9)) for row in range(32)]


class Reward:
    """1 and 0 by turns in a group, but for the groups of which all are 1: every other prompt, or four of each eight."""

    __name__ = "reward"

    def __init__(self, dead: str) -> None:
        self.dead = dead

    def __call__(self, prompts: list[str], **_: Any) -> list[float]:
        rows = [PROMPTS.index(prompt) for prompt in prompts]
        is_dead = [bool(row // 4 % 2 if self.dead == "fours" else row % 2) for row in rows]
        return [1.0 if dead else float(place % 2) for place, dead in enumerate(is_dead)]


def tiny_model(kind: str = "Qwen3", **changes: Any) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**shape))
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.mul_(4.0)  # so that attention and logits are far from uniform
    return model


def words() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ("<pad>", "<bos>", "<eos>", "<unk>", *(f"w{index}" for index in range(VOCABULARY - 4)))
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],  # transformers 4 adds token types
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


if __name__ == "__main__":
    main()
