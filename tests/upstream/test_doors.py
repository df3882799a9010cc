"""Every framework's own way into Liger, in fresh processes, without fusepatch and with it: what changed on the
model."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

import pytest
from packaging.version import Version

from kits.helpers import run
from kits.upstream import CHECKOUT, Seen, factor, needs, open_door, sites, version
from tools.rows import DOORS, MATRIX, expected

pytestmark = pytest.mark.upstream

MODELS = ("llama", "qwen3", "gemma2")
ALL = {"rope": True, "rms_norm": True, "mlp": True, "cross_entropy": False, "fused_linear_cross_entropy": True}
NO_LOSS = {**ALL, "fused_linear_cross_entropy": False}


def test_the_outcome_of_every_site_is_what_the_matrix_says() -> None:
    name = factor()
    if name is None:
        pytest.skip("this environment is none of the matrix's")
    found, reasons = sites()
    assert found == expected(MATRIX, MATRIX["factor"][name]), reasons


def test_status_promises_nothing_that_only_an_import_can_show() -> None:
    if Version(version("trl") or "0") < Version("1.14"):
        pytest.skip("TRL's GRPOTrainer defines compute_liger_loss itself before 1.14")
    done = run([sys.executable, "-m", "fusepatch", "status", "--json"], env={"PYTHONPATH": str(CHECKOUT)})
    (record,) = (record for record in json.loads(done.stdout) if record["id"] == "liger.grpo_loss")
    (site,) = (site for site in record["sites"] if site["module"] == "trl.trainer.grpo_trainer")
    assert site["outcome"] == "PENDING"
    condition = "if GRPOTrainer.compute_liger_loss then has the known shape"  # a base class may have it
    assert site["reason"]["consequence"] == f"it is applied when the module is imported, {condition}"


class TestTrainer:
    """`Trainer(use_liger_kernel=True)`, in `__init__` before transformers 5.3 and in `train()` since."""

    @pytest.fixture(autouse=True)
    def _needs(self) -> None:
        needs("trainer")

    @pytest.mark.parametrize("patched", [False, True])
    def test_nothing_changes_that_nobody_asked_for(self, patched: bool) -> None:
        seen = open_door("trainer", patched=patched)
        assert {name: seen.liger(name) for name in MODELS} == dict.fromkeys(MODELS, ALL)

    @pytest.mark.parametrize(
        ("variable", "kernel", "models"),
        [
            ("LIGER_ROPE=0", "rope", MODELS),
            ("LIGER_RMS_NORM=0", "rms_norm", MODELS),
            ("LIGER_SWIGLU=0", "mlp", ("llama", "qwen3")),
            ("LIGER_GEGLU=0", "mlp", ("gemma2",)),
            ("LIGER_FUSED_LINEAR_CROSS_ENTROPY=0", "fused_linear_cross_entropy", MODELS),
        ],
    )
    def test_a_variable_switches_one_kernel_off(self, variable: str, kernel: str, models: tuple[str, ...]) -> None:
        seen = open_door("trainer", variables=(variable,))
        for name in MODELS:
            assert seen.liger(name) == ({**ALL, kernel: False} if name in models else ALL)
        for name in set(MODELS) - set(models):
            assert f"apply_liger_kernel_to_{name} has no flag" in seen.notes("fallbacks")

    def test_cross_entropy_implies_that_the_fused_one_is_off(self) -> None:
        seen = open_door("trainer", variables=("LIGER_CROSS_ENTROPY=1",))
        for name in MODELS:
            assert seen.liger(name) == {**NO_LOSS, "cross_entropy": True}

    def test_what_the_user_wrote_in_code_beats_the_environment(self) -> None:
        if Version(version("transformers") or "0") < Version("4.53"):
            pytest.skip("liger_kernel_config came with transformers 4.53")
        seen = open_door(
            "trainer",
            "--liger-config",
            '{"rope": true, "fused_linear_cross_entropy": false}',
            variables=("LIGER_ROPE=0", "LIGER_FUSED_LINEAR_CROSS_ENTROPY=1", "LIGER_RMS_NORM=0"),
        )
        for name in MODELS:
            assert seen.liger(name) == {**NO_LOSS, "rms_norm": False}
        assert "rope: True from transformers" in seen.notes("replaced")

    def test_the_switch_from_outside_reaches_a_script_without_the_import(self) -> None:
        if importlib.util.find_spec("fusepatch_startup") is None:
            pytest.skip("the start-up file is not installed in this environment")
        script = DOORS / "trainer.py"
        env = {"FUSEPATCH_LIGER_ROPE": "0"}
        done = run([sys.executable, "-m", "fusepatch", "run", str(script), "--models", "llama"], env=env)
        assert done.returncode == 0, done.stderr
        last: dict[str, Any] = json.loads(done.stdout.rstrip().splitlines()[-1])
        assert last["models"]["llama"]["liger"] == {**ALL, "rope": False}


class TestVerl:
    """verl up to 0.7 calls Liger bare, so that its loss forward hides verl's; 0.8 and later say what they want."""

    @pytest.fixture
    def door(self) -> str:
        """The engine, or the worker where there is no engine yet."""
        found = version("verl")
        door = "verl_worker" if found is not None and Version(found) < Version("0.6") else "verl_engine"
        needs(door)
        return door

    @pytest.fixture
    def bare(self) -> None:
        if Version(version("verl") or "0") >= Version("0.8"):
            pytest.skip("verl 0.8 and later pass fused_linear_cross_entropy=False and swiglu=True")

    @pytest.fixture
    def explicit(self) -> None:
        if Version(version("verl") or "0") < Version("0.8"):
            pytest.skip("verl up to 0.7 passes no flags")

    @pytest.mark.usefixtures("bare")
    @pytest.mark.parametrize("door", ["verl_engine", "verl_worker"])
    def test_the_loss_forward_of_liger_is_not_put_over_the_one_of_verl(self, door: str) -> None:
        needs(door)
        plain = open_door(door, "--fused-kernels", patched=False)
        patched = open_door(door, "--fused-kernels")
        if on_the_instance():
            # The fault: verl's forward is on the class, and the instance's own hides it.
            assert forward(plain) == {"held_by": "instance", "function": LIGER_FORWARD}
        assert forward(patched)["held_by"] == "class"
        assert forward(patched)["function"].startswith("verl.models.transformers.")
        assert patched.liger("qwen3") == NO_LOSS
        assert "fused_linear_cross_entropy: not passed -> False (automatic; called by verl." in patched.notes(
            "replaced"
        )

    @pytest.mark.usefixtures("bare")
    def test_a_bare_call_keeps_the_forward_of_the_model(self, door: str) -> None:
        assert open_door(door, patched=False).liger("qwen3") == ALL
        patched = open_door(door)
        assert patched.liger("qwen3") == NO_LOSS
        assert forward(patched)["function"].startswith("transformers.models.qwen3.")

    @pytest.mark.usefixtures("bare")
    def test_the_environment_beats_the_automatic_rule(self, door: str) -> None:
        variables = ("LIGER_FUSED_LINEAR_CROSS_ENTROPY=1", "LIGER_SWIGLU=0")
        seen = open_door(door, variables=variables)
        assert seen.liger("qwen3") == {**ALL, "mlp": False}

    @pytest.mark.usefixtures("explicit")
    def test_nothing_changes_that_nobody_asked_for(self, door: str) -> None:
        assert open_door(door, patched=False).liger("qwen3") == NO_LOSS
        assert open_door(door).liger("qwen3") == NO_LOSS

    @pytest.mark.usefixtures("explicit")
    def test_a_hard_coded_swiglu_is_beaten_and_a_hard_coded_loss_is_not_raised(self, door: str) -> None:
        check_hard_coded_flags(door, caller="verl.workers.engine")


class TestTrinity:
    """Trinity-RFT passes `fused_linear_cross_entropy` itself: hard-coded False in 0.6, `not use_fused_kernels`
    before."""

    def test_the_engine_keeps_its_loss_and_gives_up_swiglu(self) -> None:
        needs("trinity_engine")
        assert open_door("trinity_engine", patched=False).liger("qwen3") == NO_LOSS
        check_hard_coded_flags("trinity_engine", caller="trinity.trainer.verl.monkey_patch")

    def test_the_worker_says_what_it_wants_and_the_environment_may_lower_it(self) -> None:
        needs("trinity_worker")
        assert open_door("trinity_worker", patched=False).liger("qwen3") == ALL
        variables = ("LIGER_FUSED_LINEAR_CROSS_ENTROPY=0", "LIGER_RMS_NORM=0")
        assert open_door("trinity_worker", variables=variables).liger("qwen3") == {**NO_LOSS, "rms_norm": False}

    def test_the_worker_with_fused_kernels_is_never_raised(self) -> None:
        needs("trinity_worker")
        seen = open_door("trinity_worker", "--fused-kernels", variables=("LIGER_FUSED_LINEAR_CROSS_ENTROPY=1",))
        assert seen.liger("qwen3") == NO_LOSS
        assert "FUSEPATCH_LIGER_FUSED_LINEAR_CROSS_ENTROPY=1 was not followed: trinity." in seen.notes("fallbacks")


LIGER_FORWARD = "liger_kernel.transformers.model.qwen3.lce_forward"


def forward(seen: Seen) -> dict[str, str]:
    """Who holds the model's forward, and which function it is."""
    held: dict[str, str] = seen.models["qwen3"]["forward"]
    return held


def on_the_instance() -> bool:
    """Whether the installed Liger puts its loss forward on the instance (0.6.0 on) or on the class."""
    return Version(version("liger-kernel") or version("liger-kernel-nightly") or "0") >= Version("0.6.0")


def check_hard_coded_flags(door: str, caller: str) -> None:
    """A framework's swiglu=True is beaten by the environment; its fused_linear_cross_entropy=False never is."""
    variables = ("LIGER_SWIGLU=0", "LIGER_FUSED_LINEAR_CROSS_ENTROPY=1")
    seen = open_door(door, variables=variables)
    assert seen.liger("qwen3") == {**NO_LOSS, "mlp": False}
    assert f"swiglu: True from {caller}" in seen.notes("replaced")
    assert f"FUSEPATCH_LIGER_FUSED_LINEAR_CROSS_ENTROPY=1 was not followed: {caller}" in seen.notes("fallbacks")
