"""`sdpa.masked_width`: the rule, what it leaves alone, and on a Hopper GPU the NaN without the patch and none with
it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fusepatch
from fusepatch.engine import sites
from fusepatch.patches import sdpa_masked_width as patch
from kits.forked import forked
from kits.helpers import fresh
from kits.left_padded import batch, tiny_model, training_step

torch = pytest.importorskip("torch", reason="the attention is torch's")
transformers = pytest.importorskip("transformers", reason="its attention is what is patched")
pytest.importorskip(
    "transformers.models.qwen3.modeling_qwen3", reason="the model that is trained"
)  # once for all children

HIT: dict[str, Any] = {
    "device_type": "cuda",
    "capability": (9, 0),
    "masked": True,
    "width": 1088,
    "half": True,
    "grad": True,
}


@pytest.mark.parametrize("width", [64, 192, 320, 704, 1088, 2112])
@pytest.mark.parametrize("capability", [(9, 0), None])
def test_widths_of_64_modulo_128_are_hit(width: int, capability: tuple[int, int] | None) -> None:
    assert patch.is_hit(**{**HIT, "width": width, "capability": capability})


@pytest.mark.parametrize(
    "change",
    [
        *({"width": width} for width in (1, 63, 65, 128, 512, 1000, 1016, 1024, 1087, 1089, 1152, 2048)),
        *({"device_type": kind} for kind in ("cpu", "xpu", "mps", "meta")),
        *({"capability": capability} for capability in ((8, 0), (8, 9), (10, 0), (12, 0))),
        {"masked": False},
        {"half": False},
        {"grad": False},
    ],
    ids=str,
)
def test_every_other_call_is_not(change: dict[str, Any]) -> None:
    assert patch.is_hit(**HIT)
    assert not patch.is_hit(**{**HIT, **change})


@pytest.mark.parametrize(
    ("versions", "why"),
    [
        (("2.13.0+cpu", None, None), "no Hopper GPU: torch 2.13.0+cpu is built without CUDA"),
        (("2.13.0+rocm7.1", None, 91900), "no Hopper GPU: torch 2.13.0+rocm7.1 is built without CUDA"),
        (("2.10.0+cu130", "13.0", 91900), "torch 2.10.0+cu130 is older than 2.11"),
        (("2.9.1", "12.8", 91002), "older than 2.11"),
        (("a checkout", "13.0", 91900), "cannot be read, so it is not known"),
        (("2.13.0", "13.0", None), "has no cuDNN"),
        (("2.11.0", "12.6", 91002), "cuDNN 91002 is one that torch does not prefer"),
        (("2.11.0", "12.9", 91500), "cuDNN 91500 is one that torch does not prefer"),
        (("2.14.0", "13.2", 92600), "cuDNN 92600 has the fix"),
        (("2.13.0", "13.0", 93000), "cuDNN 93000 has the fix"),
        (("2.11.0+cu130", "13.0", 91501), ""),
        (("2.11.0+cu130", "13.0", 91900), ""),
        (("2.13.0", "13.0", 92000), ""),
        (("2.14.0.dev20260901+cu130", "13.0", 92501), ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_the_versions_that_have_the_fault(versions: tuple[str, str | None, int | None], why: str) -> None:
    found = patch.nothing_to_do(*versions)
    assert why in found
    assert bool(found) == bool(why)


LOOK = """
import sys, torch
{before}
import fusepatch
import transformers.integrations.sdpa_attention as module
(record,) = [record for record in fusepatch.status() if record.id == "sdpa.masked_width"]
print(record.outcome.value, "|", record.reason)
print(hasattr(module.sdpa_attention_forward, "__wrapped__"), torch.cuda.is_initialized())
"""


def look(before: str = "") -> tuple[str, str]:
    outcome, wrapped = fresh(LOOK.format(before=before), check=True).stdout.splitlines()
    return outcome, wrapped


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_without_cuda_nothing_is_wrapped_and_the_record_says_why() -> None:
    outcome, wrapped = look()
    assert outcome.startswith("ABSENT | no Hopper GPU: torch 2.")
    assert "is built without CUDA" in outcome
    assert wrapped == "False False"


def test_a_build_for_cuda_is_wrapped_and_cuda_is_not_initialised() -> None:
    outcome, wrapped = look("torch.version.cuda, torch.backends.cudnn.version = '13.0', lambda: 91900")
    assert outcome.startswith("APPLIED")
    assert wrapped == "True False"


def test_what_cannot_have_the_fault_is_said_from_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for version, why in ((91900, ""), (92600, "cuDNN 92600 has the fix"), (91002, "cuDNN 91002 is one")):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        assert patch.unneeded().startswith(why)
        assert bool(patch.unneeded()) == bool(why)

    def unreadable() -> int:
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(torch.backends.cudnn, "version", unreadable)
    assert patch.unneeded() == "cuDNN's version cannot be read: cuDNN version incompatibility"


def attention() -> Any:
    return importlib.import_module("transformers.integrations.sdpa_attention")


def test_a_question_that_raises_is_a_record_and_wraps_nothing() -> None:
    def raising() -> str:
        raise OSError("no such library")

    before = attention().sdpa_attention_forward
    record = sites._install(patch.ID, patch.SITE._replace(unneeded=raising), 0, attention(), late=False)
    assert record.outcome.value == "FAILED"
    assert "OSError: no such library" in str(record.reason)
    assert attention().sdpa_attention_forward is before


class Layer(torch.nn.Module):
    """What transformers' attention reads of a layer: four heads of queries to two of keys."""

    num_key_value_groups = 2
    is_causal = True


def inputs(width: int, mask: str, more: int = 0, dtype: Any = None) -> tuple[Any, Any, Any, Any]:
    """Queries, keys and values that want gradients, and a causal mask whose first row is padded on the left."""
    generator = torch.Generator().manual_seed(width)
    shapes = ((2, 4, width, 16), (2, 2, width, 16), (2, 2, width, 16))
    query, key, value = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype or torch.float64).requires_grad_()
        for shape in shapes
    )
    seen = torch.ones(width, width + more, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    seen[0, :, :, :5] = False  # the first five queries see nothing
    if mask == "bool":
        return query, key, value, seen
    lowest = float("-inf") if mask == "infinite" else torch.finfo(query.dtype).min
    return query, key, value, torch.zeros(seen.shape, dtype=query.dtype).masked_fill(~seen, lowest)


def gradients(output: Any, *leaves: Any) -> tuple[Any, ...]:
    weight = torch.linspace(0, 1, output.numel(), dtype=output.dtype).view(output.shape)
    return torch.autograd.grad((output * weight).sum(), leaves)


@pytest.mark.parametrize(
    ("width", "mask", "more"),
    [(64, "bool", 0), (64, "finite", 0), (192, "bool", 7), (192, "finite", 3), (64, "infinite", 0)],
)
def test_with_64_masked_keys_more_it_is_the_same_attention(width: int, mask: str, more: int) -> None:
    query, key, value, seen = inputs(width, mask, more)
    forward = getattr(attention().sdpa_attention_forward, "__wrapped__", attention().sdpa_attention_forward)
    # Only the first `width` columns of a wider mask count; the releases differ in who cuts them off.
    plain = forward(Layer(), query, key, value, seen[..., :width])[0]
    wider = forward(Layer(), query, *patch.widened(key, value, seen))[0]
    # A query that sees nothing has no attention to compare where its scores are -inf: NaN or 0, as the backend likes.
    rows = slice(5 if mask == "infinite" else 0, None)
    torch.testing.assert_close(wider[:, rows], plain[:, rows], rtol=1e-12, atol=1e-12)
    if mask != "infinite":
        for mine, theirs in zip(gradients(wider, query, key, value), gradients(plain, query, key, value), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)
    assert patch.widened(key, value, seen)[2].shape[-1] == width + 64
    assert seen.shape[-1] == width + more


def passed_on(query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> tuple[Any, ...]:
    """What arrives behind the handler."""
    arrived: list[tuple[Any, ...]] = []

    def proceed(*args: Any, **given: Any) -> str:
        arrived.append((*args, given))
        return "upstream's"

    assert patch.attend(proceed, "layer", query, key, value, mask, **kwargs) == "upstream's"
    (found,) = arrived
    return found


@pytest.fixture
def every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule without the device and the dtype: it hits on the CPU too."""
    rule = patch.is_hit
    monkeypatch.setattr(
        patch, "is_hit", lambda device, capability, *rest: rule("cuda", None, *rest[:2], True, *rest[3:])
    )


@pytest.mark.usefixtures("every_device")
def test_a_hit_gets_keys_values_and_mask_and_is_counted() -> None:
    query, key, value, mask = inputs(64, "bool")
    before = fusepatch.engine.ledger.calls(patch.ID)
    found = passed_on(query, key, value, mask, dropout=0.1, scaling=0.5, is_causal=None)
    assert found[0] == "layer"
    assert found[1] is query
    assert [part.shape[2 if index < 2 else 3] for index, part in enumerate(found[2:5])] == [128, 128, 128]
    assert found[5] == {"dropout": 0.1, "scaling": 0.5, "is_causal": None}
    assert fusepatch.engine.ledger.calls(patch.ID) == before + 1


def without_grad(call: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return call()


def without_cudnn(call: Callable[[], Any]) -> Any:
    kept = [backend for backend in torch.nn.attention._cur_sdpa_kernel_backends() if "CUDNN" not in str(backend)]
    with torch.nn.attention.sdpa_kernel(kept):
        return call()


def at_once(call: Callable[[], Any]) -> Any:
    return call()


@pytest.mark.usefixtures("every_device")
@pytest.mark.parametrize(
    ("width", "change", "around"),
    [
        (128, {}, at_once),
        (65, {}, at_once),
        (64, {"mask": None}, at_once),
        (64, {"mask": "two dimensions"}, at_once),
        (64, {"position_bias": "one"}, at_once),
        (64, {"query": "frozen"}, at_once),
        (64, {}, without_grad),
        (64, {}, without_cudnn),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_other_calls_pass_with_the_objects_that_came(width: int, change: dict[str, Any], around: Any) -> None:
    query, key, value, mask = inputs(width, "bool")
    if change.get("mask") == "two dimensions":
        mask = mask[0, 0]
    elif "mask" in change:
        mask = None
    query = query.detach() if "query" in change else query
    keywords = {"position_bias": torch.zeros(())} if "position_bias" in change else {}
    before = fusepatch.engine.ledger.calls(patch.ID)
    found = around(lambda: passed_on(query, key, value, mask, **keywords))
    for mine, theirs in zip(found[1:5], (query, key, value, mask), strict=True):
        assert mine is theirs
    assert fusepatch.engine.ledger.calls(patch.ID) == before


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_rule_itself_leaves_the_cpu_alone(dtype: str) -> None:
    query, key, value, mask = inputs(64, "bool", dtype=getattr(torch, dtype))
    assert passed_on(query, key, value, mask)[2] is key


def reached_everywhere() -> None:
    """As if this were a build for CUDA, with a rule that hits on the CPU."""
    importlib.import_module("kits.cuda_build")
    rule = patch.is_hit
    patch.is_hit = lambda device, capability, *rest: rule("cuda", None, *rest[:2], True, *rest[3:])  # type: ignore[assignment]


def trained(width: int) -> tuple[Any, ...]:
    reached_everywhere()
    fusepatch.activate()
    data = batch(width, 5)
    served = training_step(tiny_model(), data)
    calls = fusepatch.engine.ledger.calls(patch.ID)
    torch._dynamo.reset()
    model = tiny_model()
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)
    compiled = training_step(model, data)
    (record,) = [record for record in fusepatch.status() if record.id == patch.ID]
    fusepatch.deactivate()
    plain = training_step(tiny_model(), data)
    assert fusepatch.engine.ledger.calls(patch.ID) == calls, (
        "compiled calls are not counted, and the last are not served"
    )
    pads = sum(len(re.findall(r"\.pad\([^()]*\((?:0, 0, )?0, 64\)", graph)) for graph in graphs)
    return record.outcome.value, record.sites[0].flags, (calls, pads), served, compiled, plain


@pytest.mark.parametrize("width", [64, 72])
def test_a_model_trains_the_same_and_each_layer_is_served(width: int) -> None:
    outcome, flags, calls, *steps, plain = forked(trained, width, env={"FUSEPATCH": "0"})
    assert outcome == "APPLIED"
    assert "late" in flags, "the table of attention functions had taken upstream's before"
    assert calls == ((2, 6) if width == 64 else (0, 0)), "two layers; key, value and mask of each"
    for loss, gradients in steps:
        assert loss == pytest.approx(plain[0], rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, plain[1][name], rtol=1e-4, atol=1e-6, msg=name)


def transformed() -> tuple[Any, ...]:
    reached_everywhere()
    module = attention()
    plain = module.sdpa_attention_forward
    fusepatch.activate()
    patched = module.sdpa_attention_forward
    assert patched.__wrapped__ is plain
    query, key, value, mask = inputs(64, "bool")
    layer = Layer()

    def of(forward: Any, q: Any) -> Any:
        return forward(layer, q, key, value, attention_mask=mask)[0]

    def loss(forward: Any) -> Any:
        return lambda q: of(forward, q).square().sum()

    pairs = [(of(patched, query), of(plain, query))]
    pairs.append((torch.func.grad(loss(patched))(query), torch.func.grad(loss(plain))(query)))
    stack = torch.stack([query, query * 2])
    pairs.append(tuple(torch.func.vmap(lambda q, f=f: of(f, q))(stack) for f in (patched, plain)))  # type: ignore[misc]
    errors = []
    for forward in (patched, plain):
        with pytest.raises(RuntimeError) as raised:
            of(forward, query[..., :3])
        errors.append(str(raised.value))
    return (
        [(mine.detach(), theirs.detach()) for mine, theirs in pairs],
        errors,
        fusepatch.engine.ledger.fallbacks(patch.ID),
    )


def test_functorch_and_errors_are_upstreams() -> None:
    pairs, errors, fallbacks = forked(transformed, env={"FUSEPATCH": "0"})
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert errors[0] == errors[1]
    assert fallbacks == ()


def on_other_gpus(names: tuple[str, ...], major: int) -> tuple[Any, ...]:
    importlib.import_module("kits.cuda_build")
    tiny_model()
    fusepatch.activate()
    module = attention()
    wrapper = module.sdpa_attention_forward
    gpus = [SimpleNamespace(name=name, major=major) for name in names]
    torch.cuda.device_count = lambda: len(gpus)
    torch.cuda.get_device_properties = lambda index: gpus[index]
    patch._look_at_gpus()

    def seen() -> tuple[Any, ...]:
        record = next(record for record in fusepatch.status() if record.id == patch.ID)
        return record.outcome.value, record.reason, module.sdpa_attention_forward is wrapper

    first = seen()
    fusepatch.activate()
    trains = training_step(tiny_model(), batch(64, 5))[0] > 0
    return first, seen(), trains


@pytest.mark.parametrize(("major", "there"), [(8, False), (9, True)])
def test_where_no_gpu_is_a_hopper_the_wrapper_goes_at_the_first_call_on_one(major: int, there: bool) -> None:
    first, again, trains = forked(on_other_gpus, ("NVIDIA A100", "NVIDIA A100"), major, env={"FUSEPATCH": "0"})
    assert trains
    assert first == again
    if there:
        assert first[0] == "APPLIED"
        assert first[2]
    else:
        outcome, reason, wrapped = first
        assert outcome == "ABSENT"
        assert reason.startswith("no Hopper GPU: found NVIDIA A100; ")
        assert not wrapped


# On the GPU. All of it runs in fresh processes: CUDA stays uninitialised in this one, which other tests fork.


STEP = """
{first}
import sys
sys.path.insert(0, {tests!r})
import torch
from kits.left_padded import batch, tiny_model, training_step

def tried(width, pads, checkpointing=False, compiled=False, dtype=torch.bfloat16):
    model = tiny_model().to("cuda", dtype)
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    if compiled:
        torch._dynamo.reset()
        model.forward = torch.compile(model.forward, fullgraph=True)
    _, gradients = training_step(model, batch(width, pads, "cuda"))
    return "finite" if all(torch.isfinite(part).all() for part in gradients.values()) else "NaN"
"""


def on_hopper(code: str, patched: bool = True) -> list[str]:
    first = "import fusepatch" if patched else ""
    step = STEP.format(first=first, tests=str(Path(__file__).parents[1]))
    return fresh(step + code, check=True, timeout=600).stdout.splitlines()


@pytest.fixture(scope="module")
def hopper() -> None:
    """Skips where this machine cannot show the fault."""
    asked = """
    import torch
    from fusepatch.patches.sdpa_masked_width import nothing_to_do
    found = nothing_to_do(torch.__version__, torch.version.cuda, torch.backends.cudnn.version())
    if not found and torch.cuda.get_device_capability() != (9, 0):
        found = f"{torch.cuda.get_device_name()} is no Hopper GPU"
    print(found)
    """
    found = fresh(asked, check=True).stdout.strip()
    if found:
        pytest.skip(f"no fault here: {found}")


WIDTHS = """
for width in (1088, 704, 64):
    for checkpointing in (False, True):
        print(tried(width, 40, checkpointing))
print(tried(1088, 0), tried(1024, 40), tried(1000, 40), tried(512, 40))
"""


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
class TestOnHopper:
    def test_a_padded_batch_is_nan_without_and_finite_with_the_patch(self) -> None:
        plain, patched = on_hopper(WIDTHS, patched=False), on_hopper(WIDTHS)
        assert plain[:2] == ["NaN", "NaN"]
        assert patched == [*["finite"] * 6, "finite finite finite finite"]
        assert plain[6] == patched[6], "without pads, and at other widths, there is no fault"

    def test_compiled(self) -> None:
        assert on_hopper("print(tried(1088, 40, compiled=True))") == ["finite"]

    def test_only_the_calls_that_are_hit_are_counted_and_no_switch_of_a_backend_is_touched(self) -> None:
        code = """
from fusepatch.engine import ledger
def switches():
    return [str(backend) for backend in torch.nn.attention._cur_sdpa_kernel_backends()]
before = switches()
for width in (1024, 1000, 512, 1152):
    tried(width, 40)
print(ledger.calls("sdpa.masked_width"))
tried(1088, 40)
print(ledger.calls("sdpa.masked_width"), switches() == before)
tried(1088, 40, dtype=torch.float32)
print(ledger.calls("sdpa.masked_width"))
"""
        assert on_hopper(code) == ["0", "2 True", "2"]

    def test_the_attention_is_that_of_the_math_backend(self) -> None:
        code = """
import transformers.integrations.sdpa_attention as module
from torch.nn.attention import SDPBackend, sdpa_kernel
from fusepatch.engine import ledger

class Layer:
    num_key_value_groups = 2
    is_causal = True

for width in (64, 704, 1088):
    for kind in ("bool", "finite"):
        torch.manual_seed(0)
        shapes = ((2, 4, width, 64), (2, 2, width, 64), (2, 2, width, 64))
        leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
        mask = torch.ones(width, width, dtype=torch.bool, device="cuda").tril().repeat(2, 1, 1, 1)
        mask[0, :, :, :5] = False
        if kind == "finite":
            lowest = torch.finfo(torch.bfloat16).min
            mask = torch.zeros(mask.shape, device="cuda", dtype=torch.bfloat16).masked_fill(~mask, lowest)
        weight = torch.randn(2, width, 4, 64, device="cuda")
        weight[0, :5] = 0  # what a query that sees nothing attends to is the backend's matter

        def gradients():
            output = module.sdpa_attention_forward(Layer(), *leaves, mask)[0]
            return torch.autograd.grad((output.float() * weight).sum(), leaves)

        found = gradients()
        with sdpa_kernel(SDPBackend.MATH):
            wanted = gradients()
        distances = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, wanted)]
        print("equal" if max(distances) < 2e-2 else distances)
print(ledger.calls("sdpa.masked_width"))
"""
        assert on_hopper(code) == [*["equal"] * 6, "6"]
