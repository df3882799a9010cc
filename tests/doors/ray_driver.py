"""Door: a driver that starts a small Ray of its own, and every kind of worker: a task, a pool of actors, an actor made
by an actor, an actor that was killed and restarted. Each builds a model and an optimizer as verl's workers do.

    python tests/doors/ray_driver.py
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
from typing import Any

import script


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    script.run(door, parser)


def door(arguments: argparse.Namespace) -> dict[str, Any]:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else Ray writes a token into the home directory
    if importlib.metadata.version("verl") >= "0.9":  # see verl_engine.py
        os.environ.update({"VERL_USE_EXTERNAL_MODULES": "cpu_platform", "VERL_PLATFORM": "cpu"})
    import ray
    from ray.util import ActorPool

    @ray.remote(num_cpus=0, max_restarts=1, max_task_retries=1)
    class Trainer:
        def train(self) -> Any:
            from ray_worker import train

            return train()

        def train_in_another(self) -> Any:
            another = Inner.remote()
            return ray.get(another.train.remote())

        def die(self) -> None:
            os._exit(1)

    @ray.remote(num_cpus=0)
    class Inner:
        def train(self) -> Any:
            from ray_worker import train

            return train()

    @ray.remote(num_cpus=0)
    def task() -> Any:
        from ray_worker import train

        return train()

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20)
    trainers = [Trainer.remote(), Trainer.remote()]
    seen = {"task": ray.get(task.remote())}
    pool = ActorPool(trainers)
    for index, result in enumerate(pool.map(lambda trainer, _: trainer.train.remote(), range(2))):
        seen[f"pool {index}"] = result
    seen["nested"] = ray.get(trainers[0].train_in_another.remote())
    trainers[1].die.options(max_task_retries=0).remote()
    seen["restarted"] = ray.get(trainers[1].train.remote())
    ray.shutdown()
    return {"door": "ray_driver", "models": seen}


if __name__ == "__main__":
    main()
