"""verl's own application of Liger, from inside its FSDP engine."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping

from demo import tiny
from demo.parts import parts
from demo.scenario import PATCHED, PLAIN, Column, Scenario, Value

SCENARIO = Scenario(
    title="verl 0.7.1 FSDP engine, use_liger and use_fused_kernels",
    told=(
        "verl's forward returns the log-probabilities of the tokens. verl 0.7.1 applies Liger first, and Liger's fused "
        "linear cross-entropy on the model hides that forward, without an error (verl issue 2609). With the import the "
        "model runs verl's forward, the other kernels stay, and the optimizer that verl builds without saying how is "
        "fused."
    ),
    columns=(PLAIN, PATCHED, Column("with a variable", True, {"FUSEPATCH_LIGER_SWIGLU": "0"})),
    applied=("liger.instance_flags", "optimizer.flags"),
    wanted={
        "rotary embedding": ("Liger", "Liger", "Liger"),
        "RMSNorm": ("Liger", "Liger", "Liger"),
        "SwiGLU MLP": ("Liger", "Liger", "transformers"),
        "the model's forward": ("Liger", "verl", "verl"),
        "AdamW's fused": ("None", "True", "True"),
    },
)


def run() -> Mapping[str, Value]:
    """Initialise the engine on one process with a model on disk, and look at the model that it built."""
    # verl 0.7.1 takes a class from TRL, wherever TRL is installed, that TRL 1.x no longer has at that place.
    sys.modules["trl"] = None  # type: ignore[assignment]
    import torch.distributed
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp import FSDPEngineWithLMHead

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as directory:
        tiny.model().save_pretrained(directory)
        engine = FSDPEngineWithLMHead(
            model_config=HFModelConfig(
                path=directory,
                load_tokenizer=False,
                use_liger=True,
                use_fused_kernels=True,
                fused_kernel_options={"impl_backend": "torch"},
                override_config={"attn_implementation": "eager"},
            ),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                use_torch_compile=False,
                wrap_policy={"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]},
            ),
            optimizer_config=FSDPOptimizerConfig(lr=1e-3),
            checkpoint_config=CheckpointConfig(),
        )
        engine.initialize()
    return {**parts(engine.module), "AdamW's fused": str(engine.optimizer.param_groups[0]["fused"])}
