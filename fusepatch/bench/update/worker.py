"""One form of `bench update` in a process of its own, or on several ranks.

Started as `python -m fusepatch.bench.update.worker CASE.json RESULT.json`, by itself or by `torch.distributed.run`.
Whether fusepatch is active is the environment's matter: the import of this package activates it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fusepatch import activation
from fusepatch.bench.answering import machine, problem
from fusepatch.bench.report import write
from fusepatch.bench.update import draws
from fusepatch.bench.update.cases import WARM_UP, Batch, Case, Model

RANK = int(os.environ.get("RANK", "0"))


def main() -> None:
    case = Case.from_json(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    try:
        found = measure(case)
    except Exception as error:
        if case.ranks > 1:
            raise  # the other ranks wait for this one: whoever started them ends them all
        found = problem(error)
    if RANK == 0:
        write(sys.argv[2], json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def measure(case: Case) -> dict[str, Any]:
    """Train for the warm-up and the timed updates, and say what each of the latter took.

    Returns a JSON object: `milliseconds`, `tokens` (through the input embedding, all ranks together), `used` (those
    that are no padding), `norms` and `losses` of each timed update; `peak_bytes` of the fullest rank; the machine,
    versions, and what fusepatch did.
    """
    device = _device()
    seen = Watch(case)
    with tempfile.TemporaryDirectory(prefix="fusepatch-bench-") as folder:
        trainer = build(case, device, seen, folder)
        counting = trainer.model.get_input_embeddings().register_forward_hook(seen.count)
        trainer.add_callback(seen.callback())
        trainer.train()
        counting.remove()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry][WARM_UP:]
    tokens, peaks = _of_all_ranks(seen.tokens), _of_all_ranks([seen.peak])
    return {
        "machine": machine(device),
        "versions": {name: importlib.import_module(name).__version__ for name in ("trl", "transformers")},
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "milliseconds": seen.milliseconds,
        "tokens": [sum(each) for each in zip(*tokens, strict=True)],
        "used": [sum(each) for each in zip(*_of_all_ranks(seen.used_in_updates()), strict=True)],
        "norms": [float(entry["grad_norm"]) for entry in logged],
        "losses": [float(entry["loss"]) for entry in logged],
        "peak_bytes": max(peak for (peak,) in peaks),
        "fusepatch": {record.id: [record.outcome.value, record.calls] for record in activation.status()},
    }


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _of_all_ranks(values: list[int]) -> list[list[int]]:
    if not torch.distributed.is_initialized():
        return [values]
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, values)
    return gathered


class Watch:
    """Draws what the trainer would generate, and measures its updates."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.milliseconds: list[float] = []
        self.tokens: list[int] = []
        self.peak = 0
        self._used: list[int] = []
        self._counted = 0
        self._started = 0.0

    def rollout(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`: a prompt is its number as text, and each rank has a part of the update's rows in their
        order."""
        start = RANK * len(prompts)
        rows = [
            draws.row(int(prompt), place % self.case.batch.group, self.case.batch, self.case.model.vocabulary)
            for place, prompt in enumerate(prompts, start)
        ]
        self._used.append(sum(len(row.prompt) + len(row.completion) for row in rows))
        return {
            "prompt_ids": [row.prompt for row in rows],
            "completion_ids": [row.completion for row in rows],
            "logprobs": None,
        }

    def reward(self, index: Sequence[int], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        """TRL's reward function; `index` is the dataset's column."""
        rows = zip(index, completion_ids, strict=True)
        return [draws.reward(number, completion, self.case.batch) for number, completion in rows]

    def count(self, _: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        """Hook on the input embedding."""
        self._counted += output.shape[:-1].numel()

    def used_in_updates(self) -> list[int]:
        return self._used[WARM_UP:]

    def callback(self) -> Any:
        transformers: Any = importlib.import_module("transformers")
        watch = self

        class Callback(transformers.TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                watch.begin()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                watch.end(timed=state.global_step > WARM_UP)

        return Callback()

    def begin(self) -> None:
        self._counted = 0
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._started = time.perf_counter()

    def end(self, timed: bool) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        took = (time.perf_counter() - self._started) * 1000
        if not timed:
            return
        self.milliseconds.append(took)
        self.tokens.append(self._counted)
        if torch.cuda.is_available():
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())


def build(case: Case, device: torch.device, seen: Watch, folder: str) -> Any:
    """TRL's trainer on a model with random weights, with what it would download made here."""
    trl: Any = importlib.import_module("trl")
    datasets: Any = importlib.import_module("datasets")
    batch = case.batch
    numbers = range(batch.groups * (WARM_UP + case.updates))
    return trl.GRPOTrainer(
        model=_model(case.model, case.dtype, device),
        reward_funcs=seen.reward,
        args=trl.GRPOConfig(**_arguments(case, batch, device, folder)),
        processing_class=_tokenizer(),
        train_dataset=datasets.Dataset.from_dict(
            {"prompt": [str(number) for number in numbers], "index": list(numbers)}
        ),
        peft_config=_lora() if case.trained == "lora" else None,
        rollout_func=seen.rollout,
    )


def _arguments(case: Case, batch: Batch, device: torch.device, folder: str) -> dict[str, Any]:
    values: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": device.type == "cpu",
        "bf16": case.dtype == "bfloat16",
        "max_steps": WARM_UP + case.updates,
        "learning_rate": 0.0,  # so that every update of every form has the same weights
        "per_device_train_batch_size": batch.completions // (batch.micro_batches * case.ranks),
        "gradient_accumulation_steps": batch.micro_batches,
        "num_generations": batch.group,
        "max_completion_length": batch.longest,
        "shuffle_dataset": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    if case.liger:
        layers = ("rope", "rms_norm", "swiglu", "fused_linear_cross_entropy")
        values |= {"use_liger_kernel": True, "liger_kernel_config": dict.fromkeys(layers, False)}
    if case.fsdp:
        values |= {
            "fsdp": "full_shard",
            "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]},
        }
    return values


def _model(model: Model, dtype: str, device: torch.device) -> Any:
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.key_value_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocabulary,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        pad_token_id=draws.PAD,
        eos_token_id=draws.END,
        bos_token_id=None,
        attn_implementation="sdpa",
    )
    with device:
        return transformers.Qwen3ForCausalLM(config).to(getattr(torch, dtype))


def _tokenizer() -> Any:
    """The tokens that pad and end; all others decode to nothing, which no reward here reads."""
    transformers: Any = importlib.import_module("transformers")
    tokenizers: Any = importlib.import_module("tokenizers")
    words = {"<pad>": draws.PAD, "<end>": draws.END}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<end>",
        padding_side="left",
    )


def _lora() -> Any:
    peft: Any = importlib.import_module("peft")
    return peft.LoraConfig(r=16, target_modules="all-linear")


if __name__ == "__main__":
    main()
