"""What the capability rules say, held against what torch really does."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fusepatch.optim import capability  # noqa: E402

CPU = {"cpu"}


def parameter(dtype: Any = torch.float32, device: str = "cpu", size: int = 4) -> Any:
    value = torch.ones(size, device=device).to(dtype)
    return torch.nn.Parameter(value, requires_grad=dtype.is_floating_point or dtype.is_complex)


def judge(
    name: str, parameters: list[Any], differentiable: bool = False, devices: set[str] = CPU
) -> capability.Verdict:
    return capability.fused(getattr(torch.optim, name), name, parameters, differentiable, devices)


def fused_step(name: str, parameters: list[Any]) -> None:
    optimizer = getattr(torch.optim, name)(parameters, lr=0.1, fused=True)
    for param in parameters:
        if param.grad is None:
            param.grad = torch.ones_like(param)
    optimizer.step()


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_floating_parameters_can_be_fused(name: str, dtype: Any) -> None:
    verdict = judge(name, [parameter(dtype)])
    assert (verdict.obstacle, verdict.caution) == (None, None)
    assert (verdict.wrong is None) == (name != "SGD" or dtype.itemsize > 2)
    fused_step(name, [parameter(dtype)])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_dtypes_that_torch_stops_at_are_obstacles(dtype: Any) -> None:
    bad = parameter(dtype)
    assert str(dtype) in (judge("AdamW", [parameter(), bad]).obstacle or "")
    bad.grad = torch.ones(4).to(dtype)
    with pytest.raises((RuntimeError, NotImplementedError)):
        fused_step("AdamW", [parameter(), bad])


def test_integer_parameters_are_obstacles() -> None:
    assert "int64" in (judge("AdamW", [parameter(torch.int64)]).obstacle or "")


def test_differentiable_is_an_obstacle() -> None:
    assert "differentiable" in (judge("AdamW", [parameter()], differentiable=True).obstacle or "")
    with pytest.raises(RuntimeError):
        torch.optim.AdamW([parameter()], fused=True, differentiable=True)


def test_a_device_without_kernels_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "_fused_devices", lambda: ("cuda",))
    assert judge("AdamW", [parameter()]).obstacle == "this torch has no fused AdamW for parameters on cpu"


def test_the_dispatcher_is_asked_for_the_class() -> None:
    assert capability._has_kernel("AdamW", "cpu")
    assert capability._has_kernel("AdamW", "cuda") == (torch.version.cuda is not None)
    assert capability._has_kernel("NoSuchOptimizer", "cpu"), "an unknown kernel is left to the list of devices"


def test_adagrad_on_cuda_is_refused_by_its_own_class_before_2_13(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured on an H200 with torch 2.11: the dispatcher has the kernel, the first step raises."""
    monkeypatch.setattr(capability, "_has_kernel", lambda name, device: True)
    for version, refused in (("2.11.0+cu130", True), ("2.13.0", False)):
        monkeypatch.setattr(torch, "__version__", version)
        capability.in_releases.cache_clear()
        try:
            assert (capability._kernel_obstacle("Adagrad", "cuda", torch.float32) is not None) == refused
            assert capability._kernel_obstacle("AdamW", "cuda", torch.float32) is None
        finally:
            capability.in_releases.cache_clear()


def test_meta_parameters_are_left_to_the_step() -> None:
    assert judge("AdamW", [parameter(device="meta")], devices={"meta"}) == capability.Verdict()


@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_sparse_gradients_are_obstacles_where_seen(name: str) -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    assert judge(name, [embedding.weight]) == capability.Verdict()
    embedding(torch.tensor([1])).sum().backward()
    assert "sparse" in (judge(name, [embedding.weight]).obstacle or "")
    with pytest.raises(RuntimeError):
        fused_step(name, [embedding.weight])
    getattr(torch.optim, name)([embedding.weight], lr=0.1).step()


def test_memory_is_judged_apart() -> None:
    strided = torch.nn.Parameter(torch.ones(4, 4).chunk(2, dim=1)[0])
    verdict = judge("AdamW", [parameter(), strided])
    assert "strides (4, 1)" in (verdict.wrong or "")
    assert verdict._replace(wrong=None) == capability.Verdict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torchs_fused_sgd_leaves_16_bit_parameters_on_the_cpu_as_they_are(dtype: Any) -> None:
    """https://github.com/pytorch/pytorch/issues/191763: a torch in which this fails has it mended."""
    size = 64
    param = parameter(dtype, size=size)
    fused_step("SGD", [param])
    if not torch.equal(param.detach(), torch.ones(size, dtype=dtype)):
        pytest.skip(f"torch {torch.__version__} moves them")
    assert "pytorch#191763" in (judge("SGD", [param]).wrong or "")


def test_a_class_whose_steps_are_not_looked_at_is_a_caution() -> None:
    assert "nothing is known" in (judge("RMSprop", [parameter()]).caution or "")


def test_parameters_offloaded_beside_an_accelerator_are_a_caution() -> None:
    verdict = judge("AdamW", [parameter()], devices={"cpu", "cuda"})
    assert verdict.obstacle is None
    assert "offloaded" in (verdict.caution or "")
    assert judge("AdamW", [parameter()], devices={"cpu", "meta"}).caution is None


def test_a_step_of_its_own_is_a_caution_and_an_inherited_one_is_not() -> None:
    class Inheriting(torch.optim.AdamW):
        pass

    class Stepping(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Gathering(torch.optim.AdamW):
        def _init_group(self, group: Any, *lists: Any) -> Any:
            return super()._init_group(group, *lists)

    Inheriting([parameter()])  # torch puts a profiling wrapper on the class at its first construction
    assert capability.fused(Inheriting, "AdamW", [parameter()], False, CPU).caution is None
    for kind, words in (
        (Stepping, "Stepping has a step of its own"),
        (Gathering, "Gathering has a _init_group of its own"),
    ):
        assert words in (capability.fused(kind, "AdamW", [parameter()], False, CPU).caution or "")


def test_tensor_classes_with_operators_of_their_own_are_a_caution() -> None:
    class Plain(torch.nn.Parameter):
        pass

    class Dispatching(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    assert judge("AdamW", [Plain(torch.ones(2))]).caution is None
    odd = torch.Tensor._make_subclass(Dispatching, torch.ones(2))
    assert "Dispatching" in (judge("AdamW", [odd]).caution or "")


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    import torch.distributed as distributed

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    from torch.distributed.device_mesh import init_device_mesh

    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def sharded(mesh: Any, size: int = 4) -> Any:
    from torch.distributed.tensor import Shard, distribute_tensor

    return torch.nn.Parameter(distribute_tensor(torch.ones(size), mesh, [Shard(0)]))


def test_dtensors_can_be_fused_and_mixed_groups_cannot(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "DTENSOR_FAULTS", ())
    distributed, plain = sharded(mesh), parameter()
    assert judge("AdamW", [distributed, sharded(mesh)]) == capability.Verdict()
    fused_step("AdamW", [distributed, sharded(mesh)])
    assert "mixed" in (judge("AdamW", [distributed, plain]).obstacle or "")
    assert "mixed" in (capability.foreach_obstacle("AdamW", [distributed, plain], (0.1,), False, False) or "")
    with pytest.raises(RuntimeError):
        fused_step("AdamW", [distributed, plain])


@pytest.mark.parametrize(("version", "faulty"), [("2.10.0", True), ("2.11.0+cu128", True), ("2.13.0+cpu", False)])
def test_releases_that_leak_on_dtensors_are_a_caution(
    mesh: Any, monkeypatch: pytest.MonkeyPatch, version: str, faulty: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    capability.in_releases.cache_clear()
    try:
        assert ("188174" in (judge("AdamW", [sharded(mesh)]).caution or "")) == faulty
        assert judge("AdamW", [parameter()]).caution is None, "plain parameters are not concerned"
    finally:
        capability.in_releases.cache_clear()


def test_several_meshes_in_one_group_need_torch_2_9(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    other = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    monkeypatch.setattr(capability, "DTENSOR_FAULTS", capability.DTENSOR_FAULTS[1:])
    two = [sharded(mesh), torch.nn.Parameter(distribute_tensor(torch.ones(4), other, [Replicate(), Shard(0)]))]
    assert judge("AdamW", two) == capability.Verdict()
    fused_step("AdamW", two)
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    capability.in_releases.cache_clear()
    try:
        assert "157682" in (judge("AdamW", two).caution or "")
        assert judge("AdamW", two[:1]).caution is None
    finally:
        capability.in_releases.cache_clear()


def test_this_torch_does_not_leak_on_dtensors(mesh: Any) -> None:
    """The table of faults says so of 2.13; a release that brings the leak back turns this red."""
    parameters = [sharded(mesh) for _ in range(8)]
    optimizer = torch.optim.AdamW(parameters, fused=True)

    def specs() -> int:
        gc.collect()
        return sum(type(thing).__name__ == "DTensorSpec" for thing in gc.get_objects())

    def steps(count: int) -> None:
        for _ in range(count):
            for param in parameters:
                param.grad = torch.ones_like(param)
            optimizer.step()

    steps(3)
    before = specs()
    steps(20)
    grown = specs() - before
    if capability.in_releases(capability.DTENSOR_FAULTS[0].releases):
        pytest.skip(f"torch {torch.__version__} is in the table; {grown} objects more after 20 steps")
    assert grown < 20, f"{grown} DTensorSpec objects more after 20 steps of {len(parameters)} parameters"


def test_a_tensor_learning_rate_excludes_foreach_in_adam() -> None:
    scalars = (torch.tensor(0.1), 0.9, 0.999)
    assert "capturable" in (capability.foreach_obstacle("AdamW", [parameter()], scalars, False, False) or "")
    assert capability.foreach_obstacle("AdamW", [parameter()], scalars, False, True) is None
    assert capability.foreach_obstacle("SGD", [parameter()], scalars, False, False) is None
    with pytest.raises(ValueError):
        torch.optim.AdamW([parameter()], lr=torch.tensor(0.1), foreach=True)
    optimizer = torch.optim.SGD([parameter()], lr=torch.tensor(0.1), foreach=True)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(4)
    optimizer.step()


def test_eps_that_a_dtype_cannot_hold() -> None:
    assert capability.becomes_zero(1e-8, [parameter(torch.float16)]) == "float16"
    assert capability.becomes_zero(1e-8, [parameter(torch.bfloat16), parameter()]) is None


def test_parameters_of_a_constructor() -> None:
    assert {"params", "lr", "eps", "fused", "foreach"} <= set(capability.parameters_of(torch.optim.AdamW.__init__))
    assert "fused" not in capability.parameters_of(torch.optim.RMSprop.__init__)


def test_importing_it_imports_no_torch() -> None:
    from kits.helpers import fresh

    done = fresh(
        "import fusepatch.optim.capability, fusepatch.optim.flags, sys; print('torch' in sys.modules)", check=True
    )
    assert done.stdout.strip() == "False"
