"""The configuration and the call that open `ActorRolloutRefWorker.init_model`, in verl and in Trinity-RFT.

Trinity-RFT's worker up to 0.5 (and its legacy worker in 0.6) is a modified copy of verl's, with the same method.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any


class Reached(Exception):  # noqa: N818  (no error)
    """Raised by a door behind the point of interest, where `init_model` would go on to what needs a cluster."""


def build(worker_class: Any, name: str, folder: Path, fused_kernels: bool) -> dict[str, Any]:
    """Construct the worker for the role of an actor, call its `init_model`, and describe model and optimizer."""
    from observe import observe_model, observe_optimizer
    from tiny import save_tiny_model

    complete_torch_cpu()
    save_tiny_model(name, folder)
    config = configuration(name, folder, fused_kernels)
    worker = worker_class(config=config, role="actor")
    with suppress(Reached):
        worker.init_model()
    module, optimizer = worker.actor_module_fsdp, worker.actor_optimizer
    return {**observe_model(module), "optimizer": observe_optimizer(optimizer)}


def complete_torch_cpu() -> None:
    """Give `torch.cpu` the memory functions of other device modules: verl calls them to log, and after init_model."""
    import torch

    torch.cpu.memory_allocated = torch.cpu.memory_reserved = lambda *_: 0
    torch.cpu.mem_get_info = lambda *_: (0, 0)
    torch.cpu.empty_cache = lambda: None


def configuration(name: str, folder: Path, fused_kernels: bool) -> Any:
    """What a user's YAML would come to, for every release at once: each reads the keys that it knows."""
    from omegaconf import OmegaConf
    from tiny import decoder_layer

    return OmegaConf.create(
        {
            "actor": {
                "strategy": "fsdp2",
                "ppo_mini_batch_size": 1,
                "ppo_micro_batch_size": None,
                "ppo_micro_batch_size_per_gpu": 1,
                "use_dynamic_bsz": False,
                "ulysses_sequence_parallel_size": 1,
                "use_torch_compile": False,
                "entropy_from_logits_with_chunking": False,
                "entropy_checkpointing": False,
                "checkpoint": {
                    "_target_": "verl.trainer.config.CheckpointConfig",
                    "save_contents": ["model"],
                    "load_contents": ["model"],
                },
                "_target_": "verl.workers.config.FSDPActorConfig",
                "rollout_n": 1,
                "fsdp_config": {
                    "_target_": "verl.workers.config.FSDPEngineConfig",
                    "fsdp_size": -1,
                    "offload_policy": False,
                    "reshard_after_forward": True,
                    "forward_prefetch": False,
                    "model_dtype": "fp32",
                    "wrap_policy": {"transformer_layer_cls_to_wrap": [decoder_layer(name)]},
                },
                "optim": {
                    "_target_": "verl.workers.config.FSDPOptimizerConfig",
                    "optimizer": "AdamW",
                    "optimizer_impl": "torch.optim",
                    "override_optimizer_config": None,
                    "lr": 1e-5,
                    "betas": [0.9, 0.999],
                    "weight_decay": 0.01,
                    "total_training_steps": 2,
                    "lr_warmup_steps": 0,
                },
            },
            "rollout": {"n": 1, "name": "vllm"},
            "synchronizer": {"ray_namespace": "door", "sync_timeout": 60},
            "ref": {"fsdp_config": {}, "log_prob_use_dynamic_bsz": True},
            "model": {
                "path": str(folder),
                "use_liger": True,
                "use_fused_kernels": fused_kernels,
                "override_config": {"attn_implementation": "eager", "_attn_implementation": "eager"},
                "fused_kernel_options": {"impl_backend": "torch"} if fused_kernels else None,
                "rope_scaling": None,
                "rope_theta": None,
            },
        }
    )
