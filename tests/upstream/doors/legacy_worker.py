"""The configuration and the call that open `ActorRolloutRefWorker._build_model_optimizer`, in verl and in Trinity-RFT.

Trinity-RFT's worker up to 0.5 (and its legacy worker in 0.6) is a modified copy of verl's, with the same method.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def build(worker_class: Any, name: str, folder: Path, fused_kernels: bool) -> dict[str, Any]:
    """Construct the worker for the role of an actor, build model and optimizer, and describe both."""
    from observe import observe_model, observe_optimizer
    from tiny import save_tiny_model

    give_the_cpu_memory_statistics()
    save_tiny_model(name, folder)
    config = configuration(name, folder, fused_kernels)
    worker = worker_class(config=config, role="actor")
    worker._qat_enabled = False  # verl 0.7.1 sets it in init_model, from actor.fsdp_config.qat
    module, optimizer, *_ = worker._build_model_optimizer(
        model_path=str(folder),
        fsdp_config=engine_configuration(config),
        optim_config=config.actor.optim,
        override_model_config=dict(config.model.override_config),
        use_fused_kernels=fused_kernels,
        use_liger=True,
        role="actor",
    )
    return {**observe_model(module), "optimizer": observe_optimizer(optimizer)}


def give_the_cpu_memory_statistics() -> None:
    """verl 0.4 and 0.5 log `torch.cpu.memory_allocated()` and its like, which torch does not have."""
    import torch

    torch.cpu.memory_allocated = torch.cpu.memory_reserved = lambda *_: 0
    torch.cpu.mem_get_info = lambda *_: (0, 0)


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
                "fsdp_config": {
                    "fsdp_size": -1,
                    "offload_policy": False,
                    "reshard_after_forward": True,
                    "forward_prefetch": False,
                    "model_dtype": "fp32",
                    "wrap_policy": {"transformer_layer_cls_to_wrap": [decoder_layer(name)]},
                },
                "optim": {
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
            "ref": {"fsdp_config": {}, "log_prob_use_dynamic_bsz": True},
            "model": {
                "path": str(folder),
                "override_config": {"attn_implementation": "eager", "_attn_implementation": "eager"},
                "fused_kernel_options": {"impl_backend": "torch"} if fused_kernels else None,
                "rope_scaling": None,
                "rope_theta": None,
            },
        }
    )


def engine_configuration(config: Any) -> Any:
    """`fsdp_config` as the release wants it: a dataclass where verl has one (0.6.0 on), a mapping before."""
    try:
        from verl.workers.config import FSDPEngineConfig
    except ImportError:
        return config.actor.fsdp_config
    from omegaconf import OmegaConf

    return FSDPEngineConfig(strategy="fsdp2", **OmegaConf.to_container(config.actor.fsdp_config))
