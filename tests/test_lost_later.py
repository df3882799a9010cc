"""What was asked for, was in place, and is lost later: another library replaces a target, or a module runs anew."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest

import fusepatch
from kits.forked import forked

torch = pytest.importorskip("torch", reason="the targets are torch's and the Trainer's")

MODULE = "torch.optim.adamw"


def adamw() -> Any:
    return sys.modules[MODULE].AdamW


def built_by_a_framework(kind: Any) -> Any:
    space = {"__name__": "verl.workers.of_a_test"}
    exec("def build(kind, parameters): return kind(parameters, lr=1e-3)", space)
    return space["build"](kind, [torch.nn.Parameter(torch.ones(3))])


def outcome(patch: str, module: str) -> str:
    (record,) = [record for record in fusepatch.status() if record.id == patch]
    (site,) = [site for site in record.sites if site.module == module]
    return site.outcome.value


def told(function: Callable[[], Any]) -> list[str]:
    """The warnings that `function` gives, and the StrictError that ends it."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fusepatch")
    logger.addHandler(handler)
    try:
        function()
    except fusepatch.StrictError as error:
        records.append(f"StrictError: {error}")
    finally:
        logger.removeHandler(handler)
    return records


def replace_and_build(passing: bool) -> tuple[list[str], str]:
    kind = adamw()
    before = kind.__init__

    def theirs(self, params, lr=1e-3, **kwargs):
        torch.optim.Optimizer.__init__(self, params, {"lr": lr, **kwargs})

    def theirs_around(self, *args, **kwargs):
        before(self, *args, **kwargs)

    built_by_a_framework(kind)
    kind.__init__ = theirs_around if passing else theirs
    lines = [line for _ in range(3) for line in told(lambda: built_by_a_framework(kind))]
    return lines, outcome("optimizer.flags", MODULE)


def test_a_constructor_that_another_library_replaced_is_one_warning() -> None:
    (line,), outcome = forked(replace_and_build, False, env={"FUSEPATCH_OPTIMIZER_FUSED": "1"})
    assert line.startswith(
        "optimizer.flags: FUSEPATCH_OPTIMIZER_FUSED=1 was set, and is lost: other code replaced AdamW.__init__"
    )
    assert "import fusepatch after whatever replaced it" in line
    assert outcome == "SHADOWED"


def test_it_is_an_error_at_each_use_under_strict() -> None:
    env = {"FUSEPATCH_OPTIMIZER_FUSED": "1", "FUSEPATCH_STRICT": "1"}
    lines, _ = forked(replace_and_build, False, env=env)
    assert len(lines) == 3
    assert all(line.startswith("StrictError: optimizer.flags: FUSEPATCH_OPTIMIZER_FUSED=1 was set") for line in lines)


@pytest.mark.parametrize(
    ("passing", "asked"),
    [(True, {"FUSEPATCH_OPTIMIZER_FUSED": "1"}), (False, {}), (False, {"FUSEPATCH_OPTIMIZER_FUSED": "keep"})],
    ids=["the replacement passes", "nobody asked", "keep asks for nothing"],
)
def test_where_nothing_is_lost_nothing_is_said(passing: bool, asked: dict[str, str]) -> None:
    lines, outcome = forked(replace_and_build, passing, env={**asked, "FUSEPATCH_STRICT": "1"})
    assert (lines, outcome) == ([], "SHADOWED")


def run_anew(how: str) -> list[Any]:
    built_by_a_framework(adamw())
    if how == "reload":
        importlib.reload(sys.modules[MODULE])
    else:
        del sys.modules[MODULE]
        missing = outcome("optimizer.flags", MODULE)
        importlib.import_module(MODULE)
        assert missing == "PENDING", missing
    seen: list[Any] = [outcome("optimizer.flags", MODULE), fusepatch.is_applied("optimizer.flags")]
    seen.append(told(lambda: built_by_a_framework(adamw())))
    fusepatch.activate()
    seen.append(built_by_a_framework(adamw()).param_groups[0]["fused"])
    seen.append(outcome("optimizer.flags", MODULE))
    fusepatch.deactivate()
    seen.append(built_by_a_framework(adamw()).param_groups[0]["fused"])
    return seen


@pytest.mark.parametrize("asked", [{}, {"FUSEPATCH_OPTIMIZER_FUSED": "1"}], ids=["nobody asked", "asked"])
def test_a_module_that_was_reloaded_is_seen_said_and_mended(asked: dict[str, str]) -> None:
    found, applied, lines, fused, mended, after = forked(run_anew, "reload", env=asked)
    assert (found, applied) == ("SHADOWED", False)
    assert (fused, mended, after) == (True, "APPLIED", None)
    assert len(lines) == len(asked)
    if asked:
        assert "AdamW.__init__ of torch.optim.adamw is upstream's original again" in lines[0]
        assert lines[0].endswith("call fusepatch.activate()")


def test_a_module_that_was_imported_anew_is_wrapped_anew() -> None:
    assert forked(run_anew, "import", env={"FUSEPATCH_OPTIMIZER_FUSED": "1"}) == [
        "APPLIED",
        True,
        [],
        True,
        "APPLIED",
        None,
    ]


def remove_unload_and_activate() -> list[Any]:
    seen = [fusepatch.is_applied("optimizer.flags")]
    fusepatch.deactivate("optimizer.flags")
    seen.append(outcome("optimizer.flags", MODULE))
    del sys.modules[MODULE]
    fusepatch.activate()
    return [*seen, outcome("optimizer.flags", MODULE), fusepatch.is_applied("optimizer.flags")]


def test_a_removed_place_that_is_unloaded_waits_again_after_activation() -> None:
    assert forked(remove_unload_and_activate) == [True, "REMOVED", "PENDING", True]


def train_with_a_loop_of_their_own(folder: str) -> tuple[list[str], int | None, str]:
    """Unsloth's way: the Trainer's loop made anew from its source when a model is loaded."""
    import inspect
    import textwrap

    import transformers.trainer as module

    space = dict(vars(module))
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(module.Trainer._inner_training_loop)))
    exec(source.replace("_inner_training_loop", "_remade", 1), space)
    module.Trainer._inner_training_loop = space["_remade"]
    held: list[int] = []

    class Model(torch.nn.Linear):
        def forward(self, x, labels=None):
            return {"loss": super().forward(x).square().mean()}

    class Held(module.TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
            held.append(sum(parameter.grad is not None for parameter in model.parameters()))

    arguments = module.TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        remove_unused_columns=False,
    )
    rows = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 8
    trainer = module.Trainer(Model(2, 1), arguments, train_dataset=rows, callbacks=[Held()])
    return told(trainer.train), sum(held), outcome("optimizer.in_backward", "transformers.trainer")


@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_training_loop_that_another_library_made_anew(strict: str, tmp_path: Any) -> None:
    pytest.importorskip("transformers.trainer", reason="the loop is the Trainer's")
    env = {"FUSEPATCH_OPTIMIZER_IN_BACKWARD": "1", "FUSEPATCH_STRICT": strict, "FUSEPATCH_DISABLE": "optimizer.flags"}
    (line,), held, outcome = forked(train_with_a_loop_of_their_own, str(tmp_path), env=env)
    text = (
        "optimizer.in_backward: FUSEPATCH_OPTIMIZER_IN_BACKWARD=1 was set, and is lost: other code replaced "
        "Trainer._inner_training_loop"
    )
    assert line.startswith(text if strict == "0" else f"StrictError: {text}")
    assert held == (2 if strict == "0" else 0), "under STRICT no step is taken"
    assert outcome == "SHADOWED"
