"""For the pages of the patches: small programs, what they print without fusepatch, and what with it. A test runs
them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Example(NamedTuple):
    """One program for a patch.

    Attributes:
        code: the program, without `import fusepatch`.
        variables: the environment variables with which it is run.
        versions: the distributions that decide what it prints, each with the version that printed it.
        before: what it prints as it is.
        after: what it prints with `import fusepatch` as its first line.
    """

    code: str
    variables: Mapping[str, str]
    versions: Mapping[str, str]
    before: str
    after: str


_TINY = """\
config = Qwen2Config(
    vocab_size=64, hidden_size=32, intermediate_size=64,
    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
)
"""

EXAMPLES: Mapping[str, Example] = {
    "liger.instance_flags": Example(
        code=f"""\
from liger_kernel.transformers import _apply_liger_kernel_to_instance
from transformers import Qwen2Config, Qwen2ForCausalLM

{_TINY}\
model = Qwen2ForCausalLM(config)
_apply_liger_kernel_to_instance(model=model)  # as a framework calls it: all or nothing
layer = model.model.layers[0]
parts = {{"RMSNorm": layer.input_layernorm, "SwiGLU": layer.mlp, "the model": model}}
for name, module in parts.items():
    print(f"{{name}}: {{module.forward.__module__.partition('.')[0]}}")
""",
        variables={"FUSEPATCH_LIGER_SWIGLU": "0", "FUSEPATCH_LIGER_FUSED_LINEAR_CROSS_ENTROPY": "0"},
        versions={"liger-kernel": "0.8.5", "transformers": "5.24.0"},
        before="""\
RMSNorm: liger_kernel
SwiGLU: liger_kernel
the model: liger_kernel
""",
        after="""\
RMSNorm: liger_kernel
SwiGLU: transformers
the model: transformers
""",
    ),
    "optimizer.class": Example(
        code="""\
import torch
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments("out", use_cpu=True, learning_rate=3e-4)
optimizer = Trainer(torch.nn.Linear(4, 4), arguments).create_optimizer()
group = optimizer.param_groups[0]
print(type(optimizer).__name__, group["lr"], group.get("momentum"))
""",
        variables={
            "FUSEPATCH_OPTIMIZER_CLASS": "torch.optim.SGD",
            "FUSEPATCH_OPTIMIZER_KWARGS": '{"momentum": 0.9}',
        },
        versions={"transformers": "5.24.0"},
        before="AdamW 0.0003 None\n",
        after="SGD 0.0003 0.9\n",
    ),
    "optimizer.flags": Example(
        code="""\
import torch
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments("out", optim="adamw_torch", use_cpu=True)
optimizer = Trainer(torch.nn.Linear(4, 4), arguments).create_optimizer()
print("fused:", optimizer.param_groups[0]["fused"])
""",
        variables={},
        versions={"transformers": "5.24.0"},
        before="fused: None\n",
        after="fused: True\n",
    ),
    "optimizer.in_backward": Example(
        code=f"""\
from transformers import PrinterCallback, TrainerCallback
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments


class Held(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        held = [parameter for parameter in model.parameters() if parameter.grad is not None]
        print("gradients held after backward:", len(held))


{_TINY}\
arguments = TrainingArguments(
    "out", use_cpu=True, max_steps=1, max_grad_norm=0, report_to="none", disable_tqdm=True
)
data = [{{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}}] * 8
model = Qwen2ForCausalLM(config)
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Held()])
trainer.remove_callback(PrinterCallback)
trainer.train()
""",
        variables={"FUSEPATCH_OPTIMIZER_IN_BACKWARD": "1"},
        versions={"transformers": "5.24.0"},
        before="gradients held after backward: 15\n",
        after="gradients held after backward: 0\n",
    ),
    "liger.grpo_loss": Example(
        code="""\
import torch
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from torch.utils.flop_counter import FlopCounterMode

hidden = torch.randn(4, 64, 128, requires_grad=True)
lm_head = torch.randn(1024, 128)  # frozen, as with LoRA
tokens = torch.randint(1024, (4, 64))
mask = (torch.arange(64) < torch.tensor([[64], [32], [32], [16]])).long()
advantages = torch.tensor([1.0, -1.0, 0.0, 0.5])
loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False)
with FlopCounterMode(display=False) as counter:
    loss(hidden, lm_head, tokens, mask, advantages)[0].backward()
print(f"{counter.get_total_flops() / 1e6:.0f} million operations in matrix products")
""",
        variables={},
        versions={"liger-kernel": "0.8.5"},
        before="201 million operations in matrix products\n",
        after="59 million operations in matrix products\n",
    ),
    "ray.worker_setup": Example(
        code="""\
import sys

import ray


@ray.remote
def patched():
    return "fusepatch" in sys.modules


print("patches in the worker:", ray.get(patched.remote()))
""",
        variables={},
        versions={"ray": "2.60.0"},
        before="patches in the worker: False\n",
        after="patches in the worker: True\n",
    ),
}
"""A patch's id to its program; a patch may have none."""
