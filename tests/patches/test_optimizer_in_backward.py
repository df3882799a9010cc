"""`optimizer.in_backward` in the real Trainer of transformers and the real SFT and GRPO trainers of TRL, on a tiny
model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import fusepatch  # noqa: E402
from fusepatch.errors import InBackwardError  # noqa: E402
from kits import trainers as trainers  # noqa: E402
from kits.optimizer_flags import active as activated  # noqa: E402
from kits.optimizer_flags import inactive  # noqa: E402
from kits.trainers import MIDDLE, STEPS, TRAINERS  # noqa: E402

ID = "optimizer.in_backward"
ON: dict[str, object] = {"OPTIMIZER_IN_BACKWARD": 1, "OPTIMIZER_FUSED": "keep"}


def active(**variables: object) -> Any:
    return activated(**{**ON, **variables})


def record() -> Any:
    return next(record for record in fusepatch.status() if record.id == ID)


def trainer(name: str, folder: Path, **changes: Any) -> Any:
    return TRAINERS[name](folder, **{"max_grad_norm": 0.0, **changes})


def short(name: str, folder: Path, **changes: Any) -> Any:
    return trainer(name, folder, **{"max_steps": 3, "save_strategy": "no", "save_steps": None, **changes})


def trained(built: Any, resume: Path | None = None) -> Any:
    transformers.set_seed(1)
    built.train(resume_from_checkpoint=str(resume) if resume else None)
    return trainers.weights(built)


def optimizer_file(folder: Path) -> Any:
    """The keys, shapes and dtypes of a checkpoint's optimizer, and its groups."""
    saved = torch.load(folder / f"checkpoint-{MIDDLE}" / "optimizer.pt", weights_only=True)
    state = {
        index: {key: (tuple(value.shape), value.dtype) for key, value in own.items()}
        for index, own in saved["state"].items()
    }
    return state, saved["param_groups"]


def hooks(model: Any) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


CHECKPOINTING = [
    pytest.param({}, id="plain"),
    pytest.param(
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}, id="ckpt"
    ),
    pytest.param(
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, id="reentrant"
    ),
]


@pytest.mark.parametrize("changes", CHECKPOINTING)
@pytest.mark.parametrize("name", ["Trainer", "SFT"])
def test_twenty_steps_and_a_resume_both_ways(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """A linear learning rate, weight-decay groups; checkpoints of either run are loaded into the other."""
    with inactive():
        start = trainers.weights(trainer(name, tmp_path / "start"))
        ordinary = trained(trainer(name, tmp_path / "ordinary", **changes))
    with active(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        built = trainer(name, tmp_path / "inside", **changes)
        inside = trained(built)
        assert built.state.global_step == STEPS
        assert (record().calls, record().fallbacks) == (1, ())
        assert "updates 21 parameters inside backward" in record().replaced[0].text
    with active():
        resumed_inside = trained(
            trainer(name, tmp_path / "a", **changes), tmp_path / "ordinary" / f"checkpoint-{MIDDLE}"
        )
        assert record().calls == 1
    with inactive():
        resumed_ordinary = trained(
            trainer(name, tmp_path / "b", **changes), tmp_path / "inside" / f"checkpoint-{MIDDLE}"
        )
    assert (ordinary - start).norm() > 0.01 * start.norm(), "it trained"
    for other in (inside, resumed_inside, resumed_ordinary):
        assert (other - ordinary).norm() <= 1e-6 * ordinary.norm()
    assert optimizer_file(tmp_path / "inside") == optimizer_file(tmp_path / "ordinary")


@pytest.mark.parametrize("name", TRAINERS)
def test_with_the_flags_patch_on(name: str, tmp_path: Path) -> None:
    """Fused by the automatic rule, inside backward and not: the same numbers."""
    with activated():
        ordinary = trained(short(name, tmp_path))
    with active(OPTIMIZER_FUSED="auto"):
        built = short(name, tmp_path)
        inside = trained(built)
        assert {group["fused"] for group in built.optimizer.param_groups} == {True}
        assert type(built.optimizer.optimizer) is torch.optim.AdamW
    assert (inside - ordinary).norm() <= 1e-6 * ordinary.norm()


@pytest.mark.parametrize("path", ["torch.optim.NAdam", "torch.optim.RMSprop"])
def test_with_another_class(path: str, tmp_path: Path) -> None:
    with activated(OPTIMIZER_CLASS=path):
        ordinary = trained(short("SFT", tmp_path, max_grad_norm=0.0))
    with active(OPTIMIZER_CLASS=path):
        built = short("SFT", tmp_path)
        inside = trained(built)
        assert record().calls == 1
        assert type(built.optimizer.optimizer).__name__ == path.rpartition(".")[2]
    assert (inside - ordinary).norm() <= 1e-6 * ordinary.norm()


def test_a_class_whose_step_is_not_known_is_refused(tmp_path: Path) -> None:
    with active(OPTIMIZER_CLASS="transformers.optimization.Adafactor", OPTIMIZER_KWARGS='{"relative_step": false}'):
        trained(short("SFT", tmp_path))
        assert record().calls == 1
    with active(OPTIMIZER_CLASS=f"{__name__}.Clipping"):
        built = short("SFT", tmp_path)
        before = trainers.weights(built)
        with pytest.raises(InBackwardError, match="is not known to update each parameter from that parameter alone"):
            built.train()
        assert torch.equal(trainers.weights(built), before)


class Clipping(torch.optim.SGD):
    """Takes all gradients together, as no class of torch does."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


class Watch(transformers.TrainerCallback):
    """What callbacks around each step find."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.gradients: list[int] = []
        self.moved: list[bool] = []
        self.optimizer_steps = 0
        self.before: Any = None

    def flat(self) -> Any:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.before = self.flat()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.gradients.append(sum(p.grad is not None for p in self.model.parameters()))
        now = self.flat()
        self.moved.append(not torch.equal(now, self.before))
        self.before = now

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.optimizer_steps += 1
        assert torch.equal(self.flat(), self.before), "the Trainer's own step changed something"


def test_gradients_are_gone_when_backward_returns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with active():
        built = short("SFT", tmp_path, logging_steps=1)
        watch = Watch(built.model)
        built.add_callback(watch)
        trained(built)
    assert watch.gradients == [0, 0, 0]
    assert watch.moved == [True, True, True]
    assert watch.optimizer_steps == 3
    norms = {entry.get("grad_norm", 0.0) for entry in built.state.log_history}
    assert {float(norm) for norm in norms} == {0.0}
    told = [entry.getMessage() for entry in caplog.records if "grad_norm is logged as 0" in entry.getMessage()]
    assert len(told) == 1
    assert "trl.trainer.sft_trainer.SFTTrainer" in told[0]


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """A second train() trains on; a backward of the user's after training is an ordinary one."""

    def twice() -> Any:
        built = short("Trainer", tmp_path)
        trained(built)
        assert hooks(built.model) == 0
        trained(built)
        ids = torch.tensor([[4, 5, 6]])
        before = trainers.weights(built)
        built.model(input_ids=ids, labels=ids).loss.backward()
        assert all(p.grad is not None for p in built.model.parameters())
        assert torch.equal(trainers.weights(built), before)
        names = [type(callback).__name__ for callback in built.callback_handler.callbacks]
        return before, names

    with inactive():
        ordinary, names = twice()
    with active():
        inside, left = twice()
    assert (inside - ordinary).norm() <= 1e-6 * ordinary.norm()
    assert left == names


def test_backward_passes_between_the_steps_are_ordinary(tmp_path: Path) -> None:
    class Probe(transformers.TrainerCallback):
        """Looks at gradients after each step, as analyses do."""

        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            ids = torch.tensor([[4, 5, 6]])
            before = [p.detach().clone() for p in model.parameters()]
            for _ in range(2):
                model(input_ids=ids, labels=ids).loss.backward()
            assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
            assert all(p.grad is not None for p in model.parameters())
            model.zero_grad()

    def run() -> Any:
        built = short("Trainer", tmp_path)
        built.add_callback(Probe())
        return trained(built)

    with inactive():
        ordinary = run()
    with active():
        inside = run()
    assert (inside - ordinary).norm() <= 1e-6 * ordinary.norm()


def test_evaluation_in_between(tmp_path: Path) -> None:
    class Evaluate(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_evaluate = True

    def run(folder: Path) -> tuple[Any, list[Any]]:
        built = short("Trainer", folder)
        built.eval_dataset = built.train_dataset
        built.add_callback(Evaluate())
        moved = trained(built)
        return moved, [entry["eval_loss"] for entry in built.state.log_history if "eval_loss" in entry]

    with inactive():
        ordinary = run(tmp_path / "a")
    with active():
        inside = run(tmp_path / "b")
    assert len(ordinary[1]) == 3
    assert inside[1] == pytest.approx(ordinary[1])
    assert (inside[0] - ordinary[0]).norm() <= 1e-6 * ordinary[0].norm()


def test_a_failure_in_the_middle_removes_the_hooks(tmp_path: Path) -> None:
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise KeyError("stop")

    with active():
        built = short("Trainer", tmp_path)
        built.add_callback(Stop())
        with pytest.raises(KeyError, match="stop"):
            built.train()
        assert hooks(built.model) == 0


def test_a_second_backward_in_a_training_step_is_an_error(tmp_path: Path) -> None:
    class Twice(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            super().training_step(model, copy.copy(inputs), *rest, **more)
            return super().training_step(model, inputs, *rest, **more)

    with active():
        built = short("Trainer", tmp_path)
        built.__class__ = Twice
        with pytest.raises(InBackwardError, match=r"the gradient of lm_head\.weight arrived a second time"):
            built.train()


def test_adapters_alone_get_hooks(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def run() -> tuple[Any, int]:
        torch.manual_seed(0)
        built = short("Trainer", tmp_path)
        built.model = built.model_wrapped = peft.get_peft_model(
            built.model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        )
        counted: list[int] = []

        class Count(transformers.TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                counted.append(hooks(built.model))

        built.add_callback(Count())
        return trained(built), counted[0]

    with inactive():
        ordinary, _ = run()
    with active():
        inside, number = run()
    assert number == 8
    assert (inside - ordinary).norm() <= 1e-6 * ordinary.norm()


@pytest.mark.parametrize("reentrant", [True, False])
def test_tied_weights(reentrant: bool, tmp_path: Path) -> None:
    def run() -> Any:
        built = short(
            "Trainer", tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant}
        )
        config = copy.deepcopy(built.model.config)
        config.tie_word_embeddings = True
        torch.manual_seed(0)
        built.model = built.model_wrapped = transformers.LlamaForCausalLM(config)
        return trained(built)

    with inactive():
        ordinary = run()
    with active():
        inside = run()
        fallbacks = " ".join(note.text for note in record().fallbacks)
        assert ("model.embed_tokens.weight: tied" in fallbacks) == reentrant
        assert ("20 parameters" if not reentrant else "19 parameters") in record().replaced[0].text
    assert (inside - ordinary).norm() <= 1e-6 * ordinary.norm()


@pytest.mark.parametrize("optim", ["sgd", "rmsprop", "adafactor"])
def test_other_optims(optim: str, tmp_path: Path) -> None:
    with inactive():
        ordinary = trained(short("Trainer", tmp_path, optim=optim))
    with active():
        inside = trained(short("Trainer", tmp_path, optim=optim))
    assert (inside - ordinary).norm() <= 1e-6 * ordinary.norm()


@pytest.fixture
def unchanged_shared_state() -> Iterator[None]:
    from accelerate.state import AcceleratorState, PartialState

    saved = [(kind, dict(kind._shared_state)) for kind in (AcceleratorState, PartialState)]
    yield
    for kind, state in saved:
        kind._shared_state.clear()
        kind._shared_state.update(state)


def refused(built: Any) -> str:
    """The message with which a training was refused, after it was seen that nothing moved."""
    before = [p.detach().clone() for p in built.model.parameters()]
    with pytest.raises(InBackwardError) as raised:
        built.train()
    assert all(torch.equal(p, old) for p, old in zip(built.model.parameters(), before, strict=True))
    assert all(p.grad is None for p in built.model.parameters())
    assert hooks(built.model) == 0
    assert built.state.global_step == 0
    assert "no parameter was changed" in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"max_grad_norm": None}, ["max_grad_norm=1.0 (1.0 is the Trainer's default)", "set max_grad_norm=0"]),
        ({"max_grad_norm": 0.5}, ["max_grad_norm=0.5"]),
        ({"gradient_accumulation_steps": 2}, ["gradient_accumulation_steps=2", "set gradient_accumulation_steps=1"]),
        ({"auto_find_batch_size": True}, ["auto_find_batch_size=True", "set per_device_train_batch_size"]),
        (
            {"max_grad_norm": 1.0, "gradient_accumulation_steps": 4},
            ["gradient_accumulation_steps=4", "max_grad_norm=1.0"],
        ),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], texts: list[str], tmp_path: Path) -> None:
    with active():
        message = refused(short("SFT", tmp_path, **changes))
    assert "trl.trainer.sft_trainer.SFTTrainer" in message
    for text in texts:
        assert text in message


def test_an_infinite_maximum_norm_is_no_clipping(tmp_path: Path) -> None:
    with active():
        trained(short("Trainer", tmp_path, max_grad_norm=float("inf")))
        assert record().calls == 1


def test_fp16_is_refused(tmp_path: Path) -> None:
    """transformers itself takes fp16 on an accelerator only, so the argument is set afterwards."""
    with active():
        built = short("Trainer", tmp_path)
        built.args.fp16 = True
        assert "set bf16=True instead" in refused(built)
    with active():
        built = short("Trainer", tmp_path)
        built.accelerator.scaler = torch.amp.GradScaler("cpu")
        assert "GradScaler" in refused(built)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_engines_with_gradients_of_their_own_are_refused(
    kind: str, tmp_path: Path, unchanged_shared_state: None
) -> None:
    from accelerate.utils import DistributedType

    with active():
        built = short("Trainer", tmp_path)
        built.accelerator.state._shared_state["distributed_type"] = DistributedType(kind)
        message = refused(built)
    assert f"accelerate runs {kind}" in message
    assert "every ZeRO stage" in message


def test_fsdp_with_offload_is_refused(tmp_path: Path, unchanged_shared_state: None) -> None:
    """The plugin alone: accelerate shards on accelerators only."""
    from accelerate import FullyShardedDataParallelPlugin

    with active():
        built = short("Trainer", tmp_path)
        built.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True)
        assert "switch the offload off" in refused(built)
    with active():
        built = short("Trainer", tmp_path)
        built.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=False)
        trained(built)


def test_optimizers_that_are_refused(tmp_path: Path) -> None:
    class Own(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    for kind in (torch.optim.LBFGS, Own):
        with active():
            built = short("Trainer", tmp_path)
            built.optimizer = kind(built.model.parameters(), lr=0.1)
            message = refused(built)
        assert kind.__qualname__ in message
        assert "use one of the classes with a known step" in message
    if transformers.__version__ < "5":
        return  # its schedulers refuse a compiled step themselves
    with active():
        built = short("Trainer", tmp_path)
        built.optimizer = torch.optim.SGD(built.model.parameters(), lr=0.1)
        built.optimizer.step = torch.compile(built.optimizer.step)
        assert "optimizer.step is compiled" in refused(built)


def test_compiled_autograd_is_refused(tmp_path: Path) -> None:
    from torch._dynamo import config

    with config.patch(compiled_autograd=True), active():
        assert "compiled autograd is on" in refused(short("Trainer", tmp_path))


def test_data_parallel_is_refused(tmp_path: Path) -> None:
    with active():
        built = short("Trainer", tmp_path)
        built.model_wrapped = torch.nn.DataParallel(built.model)
        assert "the model is in DataParallel" in refused(built)


@pytest.mark.parametrize("variables", [{}, {"OPTIMIZER_IN_BACKWARD": 0}])
def test_off_means_off(variables: dict[str, object], tmp_path: Path) -> None:
    with activated(OPTIMIZER_FUSED="keep", **variables):
        built = short("Trainer", tmp_path)
        watch = Watch(built.model)
        watch.on_optimizer_step = lambda *_, **__: None  # type: ignore[method-assign]
        built.add_callback(watch)
        trained(built)
        assert watch.gradients == [21, 21, 21]
        assert record().calls == 0


class EarlyExit(transformers.Trainer):
    """An auxiliary loss through the detached head, which trains the lower layers alone."""

    region = False

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        base, head, labels = model.model, model.lm_head.weight, inputs["labels"]
        hidden = base(inputs["input_ids"], output_hidden_states=True, use_cache=False).hidden_states

        def loss(states: Any, weight: Any) -> Any:
            logits = torch.nn.functional.linear(states, weight)
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

        def early(states: Any) -> Any:
            return loss(states, head.detach())

        if self.region:
            first = torch.utils.checkpoint.checkpoint(early, hidden[1], use_reentrant=False)
        else:
            first = early(hidden[1])
        return first + loss(hidden[-1], head)


@pytest.mark.parametrize("region", [False, True], ids=["saved", "computed again"])
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_a_weight_that_is_still_needed_is_an_error_that_says_what_to_do(
    region: bool, optim: str, tmp_path: Path
) -> None:
    with inactive():
        built = short("Trainer", tmp_path, optim=optim)
        built.__class__, built.region = EarlyExit, region
        trained(built)
    with active():
        built = short("Trainer", tmp_path, optim=optim)
        built.__class__, built.region = EarlyExit, region
        with pytest.raises(InBackwardError, match=r"weight\.detach\(\)\.clone\(\)") as raised:
            built.train()
        assert hooks(built.model) == 0
    assert ("lm_head.weight" if region else "modified by an inplace operation") in str(raised.value)


def test_another_error_of_torch_is_left_as_it_is(tmp_path: Path) -> None:
    class Fails(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            scale = torch.ones(2, requires_grad=True)
            changed = scale * 2
            product = (changed * changed).sum()
            with torch.no_grad():
                changed.add_(1)
            return super().compute_loss(model, inputs) + product

    for context in (inactive(), active()):
        with context:
            built = short("Trainer", tmp_path)
            built.__class__ = Fails
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
                built.train()
            assert type(raised.value) is RuntimeError


def test_saved_tensor_hooks_of_a_trainer_are_watched_while_it_trains(tmp_path: Path) -> None:
    """What TRL's activation_offloading is: it keeps weights where they are. The class itself wants an accelerator."""
    from torch.autograd.graph import saved_tensors_hooks

    class Keeping(EarlyExit):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            with self.keep:
                return super().compute_loss(*args, **kwargs)

    def unpack(tensor: Any) -> Any:
        return tensor

    with active():
        built = short("Trainer", tmp_path)
        built.__class__, built.keep = Keeping, saved_tensors_hooks(lambda tensor: tensor, unpack)
        with pytest.raises(InBackwardError, match=r"a saved tensor that lies in lm_head\.weight"):
            built.train()
        assert built.keep.unpack_hook is unpack


class Between(transformers.TrainerCallback):
    """Does something after the second step."""

    def __init__(self, do: Any) -> None:
        self.do = do
        self.before: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 2:
            self.do()
        self.before = [p.detach().clone() for p in model.parameters()]


def test_an_optimizer_that_a_callback_exchanges_is_the_one_that_is_hooked(tmp_path: Path) -> None:
    def run(folder: Path) -> Any:
        built = short("Trainer", folder, max_steps=5)

        def exchange() -> None:
            built.optimizer = built.accelerator.prepare(torch.optim.SGD(built.model.parameters(), lr=0.05))

        built.add_callback(Between(exchange))
        watch = Watch(built.model)
        watch.on_optimizer_step = lambda *_, **__: None  # type: ignore[method-assign]
        built.add_callback(watch)
        return trained(built), watch.gradients, hooks(built.model)

    with inactive():
        ordinary, _, _ = run(tmp_path / "a")
    with active():
        inside, gradients, left = run(tmp_path / "b")
        assert [note.text.split(": ")[1] for note in record().replaced] == [
            "torch.optim.adamw.AdamW updates 21 parameters inside backward",
            "torch.optim.sgd.SGD updates 21 parameters inside backward",
        ]
    assert gradients == [0] * 5
    assert left == 0
    assert (inside - ordinary).norm() <= 1e-6 * ordinary.norm()


def clipped_step(optimizer: Any) -> None:
    step = optimizer.step

    def clip(*args: Any, **kwargs: Any) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)
        return step(*args, **kwargs)

    optimizer.step = clip


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda built: setattr(built.args, "max_grad_norm", 1.0), "max_grad_norm=1.0"),
        (lambda built: setattr(built.args, "gradient_accumulation_steps", 2), "gradient_accumulation_steps=2"),
        (
            lambda built: clipped_step(built.optimizer.optimizer),
            "step was replaced on this AdamW (clip in",
        ),
        (
            lambda built: clipped_step(built.optimizer),
            "step was replaced on this AcceleratedOptimizer (clip in",
        ),
        (
            lambda built: built.optimizer.optimizer.register_step_pre_hook(lambda *_: None),
            "a step pre-hook is registered (<lambda> in",
        ),
        (
            lambda built: setattr(built, "optimizer", torch.optim.LBFGS(built.model.parameters())),
            "torch.optim.lbfgs.LBFGS",
        ),
    ],
)
def test_what_a_callback_changes_is_seen_before_a_weight_moves(change: Any, found: str, tmp_path: Path) -> None:
    with active():
        built = short("Trainer", tmp_path, max_steps=5)
        between = Between(lambda: change(built))
        built.add_callback(between)
        with pytest.raises(InBackwardError) as raised:
            built.train()
    assert found in str(raised.value)
    assert "training stops before this step has changed a parameter" in str(raised.value)
    assert built.state.global_step == 2
    assert all(torch.equal(p, old) for p, old in zip(built.model.parameters(), between.before, strict=True))


def test_an_optimizer_that_is_exchanged_in_the_forward_is_seen_before_a_weight_moves(tmp_path: Path) -> None:
    class Exchanging(transformers.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 2:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
            return super().compute_loss(*args, **kwargs)

    with active():
        built = short("Trainer", tmp_path, max_steps=5)
        built.__class__ = Exchanging
        between = Between(lambda: None)
        built.add_callback(between)
        with pytest.raises(InBackwardError, match=r"steps another optimizer \(torch\.optim\.sgd\.SGD\)"):
            built.train()
    assert all(torch.equal(p, old) for p, old in zip(built.model.parameters(), between.before, strict=True))


def test_checkpointing_that_cannot_be_watched_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusepatch.engine import ledger
    from fusepatch.engine.patch import Outcome
    from fusepatch.patches.optimizer_in_backward import attachment

    with active():
        drifted = ledger.site(ID, attachment.CHECKPOINTING)
        assert drifted is not None
        drifted = drifted._replace(outcome=Outcome.DRIFTED)
        monkeypatch.setattr(attachment.ledger, "site", lambda *_: drifted)
        built = short("Trainer", tmp_path, gradient_checkpointing=True)
        before = trainers.weights(built)
        with pytest.raises(InBackwardError, match=r"gradient checkpointing is on, .*\(DRIFTED; "):
            built.train()
        assert torch.equal(trainers.weights(built), before)
        trained(short("Trainer", tmp_path))


def test_what_only_the_patch_knows_of_is_judged_too() -> None:
    from transformers.optimization import Adafactor

    from fusepatch.optim.in_backward import obstacles
    from fusepatch.patches.optimizer_in_backward.attachment import CALLER

    model = torch.nn.Linear(2, 2)
    optimizer = Adafactor(model.parameters())
    assert obstacles(optimizer, model, CALLER) == []
    assert "Adafactor.step" in str(obstacles(optimizer, model)[0])
    engine = type("DeepSpeedEngine", (torch.nn.Module,), {"__module__": "deepspeed.runtime.engine"})
    assert "every ZeRO stage" in str(obstacles(optimizer, engine(), CALLER)[0])
