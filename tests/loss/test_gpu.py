"""The same maths on a GPU: cuBLAS, compiled kernels, large buffers, and no surprises in memory, syncs or
compilation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusepatch.loss import LogitMap, Wanted, linear_log_probabilities
from kits import kernel_layouts
from kits.loss_cases import ALL, FROZEN, Batch, Setting, error, log_probabilities_like, make_batch, reference, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}


def on_gpu(batch: Batch) -> Batch:
    return Batch(**{name: None if value is None else value.cuda() for name, value in vars(batch).items()})


def setting_on_gpu(batch: Batch, **arguments: object) -> Setting:
    old, other = log_probabilities_like(batch, 1).cuda(), log_probabilities_like(batch, 2).cuda()
    return replace(Setting(beta=0.04, reference=other, old=old), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 257, 128, 1003), (2, 3, 64, 77), (5, 301, 96, 20_011)])
@pytest.mark.parametrize("logit_map", [LogitMap(), LogitMap(0.8, 1.3, 5.0)])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_against_float64(
    dtype: torch.dtype, shape: tuple[int, int, int, int], logit_map: LogitMap, backend: str
) -> None:
    # Sums rather than means, so that float16 gradients are not subnormal.
    batch = make_batch(*shape, spread=0.5).to(dtype)
    setting = setting_on_gpu(batch, loss_type="dapo", num_items=1.0)
    batch = on_gpu(batch)
    exact = reference(batch, setting, logit_map)
    for prefer in ("speed", "memory"):
        for chunk_mib in (256.0, 1.0):
            for wanted in (ALL, FROZEN):
                found = run(
                    batch, setting, wanted, logit_map=logit_map, prefer=prefer, chunk_mib=chunk_mib, backend=backend
                )
                assert found.backend.name == backend
                assert error(found.loss, exact.loss) < 2e-5
                for name in ("hidden", "weight", "bias"):
                    if getattr(wanted, name):
                        assert error(getattr(found.gradients, name), getattr(exact, name)) < TOLERANCE[dtype], name


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_more_than_two_to_the_31_logits_at_once(level: str) -> None:
    rows, vocabulary = 16_500, 131_072
    assert rows * vocabulary > 2**31
    generator = torch.Generator(device="cuda").manual_seed(0)
    hidden = torch.randn(1, rows, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(vocabulary, 64, generator=generator, device="cuda").mul_(0.3).bfloat16()
    targets = torch.randint(0, vocabulary, (1, rows), generator=generator, device="cuda")
    mask = torch.ones(1, rows, device="cuda")
    batch = Batch(hidden, weight, None, targets, mask, torch.ones(1, device="cuda"))
    setting = Setting("bnpo", level)
    small = run(batch, setting, Wanted(True, True, False), backend="triton")
    large = run(batch, setting, Wanted(True, True, False), backend="triton", chunk_mib=16_384)
    torch.testing.assert_close(large.log_probabilities, small.log_probabilities, rtol=0, atol=1e-4)
    assert error(large.gradients.hidden, small.gradients.hidden) < 5e-3
    assert error(large.gradients.weight, small.gradients.weight) < 5e-3


@pytest.mark.parametrize(("spread", "limit"), [(1.0, 5e-5), (4.0, 3e-4), (8.0, 6e-4)])
def test_log_probabilities_are_as_exact_as_float32_logits(spread: float, limit: float) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    hidden = (torch.randn(256, 4096, generator=generator, device="cuda") * spread).bfloat16()
    weight = (torch.randn(50_257, 4096, generator=generator, device="cuda") / 64).bfloat16()
    targets = torch.randint(0, 50_257, (256,), generator=generator, device="cuda")
    exact = torch.log_softmax(hidden.double() @ weight.double().t(), -1).gather(1, targets.unsqueeze(1)).squeeze(1)
    assert (linear_log_probabilities(hidden, weight, targets).double() - exact).abs().max() < limit


def test_autocast() -> None:
    batch = make_batch(width=64, vocabulary=999)
    setting = setting_on_gpu(batch)
    batch = on_gpu(batch)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = run(batch, setting, backend="auto")
    assert found.gradients.weight is not None
    assert found.gradients.weight.dtype == torch.float32
    rounded = replace(batch, hidden=batch.hidden.bfloat16(), weight=batch.weight.bfloat16())
    exact = reference(rounded, setting)
    for name in ("hidden", "weight", "bias"):
        assert error(getattr(found.gradients, name), getattr(exact, name)) < 5e-3


def test_one_sync_for_the_rows_and_none_in_backward() -> None:
    batch = make_batch(width=64, vocabulary=999)
    setting = setting_on_gpu(batch, beta=0.0, reference=None)
    batch = on_gpu(batch).to(torch.bfloat16)
    syncs = 0
    tolist = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> object:
        nonlocal syncs
        syncs += 1
        torch.cuda.set_sync_debug_mode("default")
        try:
            return tolist(tensor)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    for wanted, expected in ((FROZEN, 1), (ALL, 1)):
        run(batch, setting, wanted, backend="auto")
        syncs = 0
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch.Tensor, "tolist", counted)
            torch.cuda.set_sync_debug_mode("error")
            try:
                run(batch, setting, wanted, backend="auto")
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert syncs == expected


def test_varying_lengths_compile_nothing_new() -> None:
    from fusepatch.loss import kernels

    batch = on_gpu(make_batch(3, 400, 64, 1000)).to(torch.bfloat16)

    def variants() -> int:
        found = 0
        for kernel in (kernels.exponentials_kernel, kernels.log_sum_exp_kernel, kernels.gradients_kernel):
            # Triton 3.0 to 3.2 named it `cache`.
            caches = kernel.device_caches if hasattr(kernel, "device_caches") else kernel.cache
            found += sum(len(cache[0] if isinstance(cache, tuple) else cache) for cache in caches.values())
        return found

    def step(length: int) -> None:
        part = replace(
            batch,
            hidden=batch.hidden[:, :length],
            targets=batch.targets[:, :length],
            mask=torch.ones(3, length, device="cuda"),
            advantages=torch.ones(3, device="cuda"),
        )
        for prefer in ("speed", "memory"):
            run(part, Setting(), ALL, prefer=prefer, backend="triton")
            run(part, Setting(), Wanted(False, False, False), backend="triton")

    step(400)
    step(131)
    before = variants()
    assert before > 0
    for length in range(1, 400, 8):
        step(length)
    assert variants() == before


def test_memory_of_a_trainable_head_is_its_gradient_and_a_chunk() -> None:
    mib = 1 << 20
    batch = on_gpu(make_batch(8, 1024, 512, 32_768, bias=False).to(torch.bfloat16))
    wanted = Wanted(True, True, False)
    run(batch, Setting(), wanted, prefer="memory", chunk_mib=64, backend="triton")
    exact = reference(batch, Setting())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = run(batch, Setting(), wanted, prefer="memory", chunk_mib=64, backend="triton")
    # A chunk of logits, grad-weight (32 MiB), grad-hidden (8 MiB) and a group's rows of hidden states.
    assert torch.cuda.max_memory_allocated() - before < (64 + 32 + 8 + 8) * mib
    assert error(found.gradients.weight, exact.weight) < 5e-3


def test_memory_of_a_frozen_head_is_a_chunk_and_the_gradient() -> None:
    hidden = torch.randn(4, 1024, 1024, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(65_536, 1024, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, 65_536, (4, 1024), device="cuda")
    batch = Batch(hidden, weight, None, targets, torch.ones(4, 1024, device="cuda"), torch.ones(4, device="cuda"))
    run(batch, Setting(), FROZEN, chunk_mib=64, backend="auto")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = run(batch, Setting(), FROZEN, chunk_mib=64, backend="auto")
    torch.cuda.synchronize()
    mib = 1 << 20
    assert torch.cuda.max_memory_allocated() - before < (64 + 8 + 2) * mib
    assert found.gradients.hidden is not None
    kept = found.gradients.hidden.numel() * 2
    assert torch.cuda.memory_allocated() - before < kept + mib


@pytest.mark.parametrize("case", kernel_layouts.VECTORS, ids=str)
def test_launchers_take_any_layout(case: kernel_layouts.Vectors) -> None:
    from fusepatch.loss import kernels

    kernel_layouts.check_vectors(kernels, case, "cuda:0")


@pytest.mark.parametrize("said", kernel_layouts.REFUSED)
def test_launchers_refuse_what_a_kernel_would_misread(said: str) -> None:
    from fusepatch.loss import kernels

    kernel_layouts.check_refused(kernels, said, "cuda:0")


@pytest.mark.parametrize("case", kernel_layouts.WHOLE, ids=str)
def test_driver_takes_any_layout(case: kernel_layouts.Whole) -> None:
    kernel_layouts.check_whole(case, "cuda:0")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("wanted", [ALL, FROZEN])
@pytest.mark.parametrize("prefer", ["speed", "memory"])
def test_tensors_on_another_device_than_the_current_one(wanted: Wanted, prefer: str) -> None:
    batch = make_batch(3, 257, 64, 999, spread=0.5)
    second = Batch(**{name: None if value is None else value.to("cuda:1") for name, value in vars(batch).items()})
    old = log_probabilities_like(batch, 1).to("cuda:1")
    setting = Setting(old=old)
    exact = reference(second, setting)
    with torch.cuda.device(0):
        found = run(second, setting, wanted, prefer=prefer, backend="triton", chunk_mib=1.0)
        assert torch.cuda.current_device() == 0
    assert error(found.loss, exact.loss) < 2e-5
    for name in ("hidden", "weight", "bias"):
        if getattr(wanted, name):
            gradient = getattr(found.gradients, name)
            assert gradient.device == torch.device("cuda:1")
            assert error(gradient, getattr(exact, name)) < 2e-5, name
