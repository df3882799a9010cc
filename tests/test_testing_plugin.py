"""The pytest plugin, in pytest processes of its own: each option fails where it should and passes where it should."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from kits.helpers import Completed, run

PLUGIN = ("-p", "fusepatch.testing")
SCOPE = {"FUSEPATCH_OPTIMIZER_SCOPE": "all"}
"""Makes the test files' own optimizers the patch's concern."""
FAIL = "--fusepatch-fail-on-fallback"

OPTIMIZERS = """
    import pytest
    import torch

    def parameters():
        return [torch.nn.Parameter(torch.zeros(2))]

    def test_fused():
        assert torch.optim.AdamW(parameters()).param_groups[0]["fused"]

    def test_without_a_fused_form():
        torch.optim.Adamax(parameters())
"""
NOT_FUSED = "optimizer.flags: fallback 1x: Adamax in test_it: not fused: Adamax has no fused form in this torch"


def pytest_in(
    folder: Path,
    *arguments: str,
    code: str | None = None,
    env: Mapping[str, str] | None = None,
    conftest: str = "",
    plugin: tuple[str, ...] = PLUGIN,
) -> Completed:
    """Run pytest on one test file, or on what lies in the folder already."""
    if code is not None:
        (folder / "test_it.py").write_text(textwrap.dedent(code))
    if conftest:
        (folder / "conftest.py").write_text(textwrap.dedent(conftest))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", folder, "-c", "/dev/null"]
    return run([*command, *plugin, *arguments], env=env, cwd=folder)


def outcomes(done: Completed) -> dict[str, int]:
    """The counts of pytest's last line."""
    last = done.stdout.rstrip().splitlines()[-1]
    found = re.findall(r"(\d+) (passed|failed|errors?|skipped|xfailed|deselected)", last)
    return {name.removesuffix("s"): int(number) for number, name in found}


def block(done: Completed) -> list[str]:
    """The lines of the plugin's block at the end."""
    lines = done.stdout.splitlines()
    starts = [number for number, line in enumerate(lines) if re.fullmatch(r"=+ fusepatch =+", line)]
    assert len(starts) <= 1, done.stdout
    if not starts:
        return []
    rest = lines[starts[0] + 1 :]
    end = next(number for number, line in enumerate(rest) if line.startswith("==="))
    return [line for line in rest[:end] if line]


# What it shows


def test_the_header_and_the_block_say_what_is_patched_and_what_it_did(tmp_path: Path) -> None:
    done = pytest_in(tmp_path, code=OPTIMIZERS, env=SCOPE)
    assert (done.returncode, outcomes(done)) == (0, {"passed": 2}), done.stdout
    header = done.stdout[: done.stdout.index("collected")]
    assert "waiting for their modules to be imported: " in header
    assert "optimizer.flags" in header
    assert "fusepatch: FUSEPATCH_OPTIMIZER_SCOPE=all" in header
    lines = block(done)
    start = lines.index("optimizer.flags: APPLIED, 2 calls")
    assert lines[start + 1 : start + 3] == [
        "  replaced 1x: AdamW in test_it: fused: not passed -> True (automatic)",
        "  fallback 1x: Adamax in test_it: not fused: Adamax has no fused form in this torch",
    ]
    assert "liger.grpo_loss: not imported by these tests" in lines


def test_a_conftest_that_imports_the_upstream_finds_it_patched(tmp_path: Path) -> None:
    conftest = """
        import sys
        assert "torch" not in sys.modules
        import torch
        import fusepatch

        def pytest_sessionfinish():
            record = next(record for record in fusepatch.status() if record.id == "optimizer.flags")
            assert {site.outcome.value for site in record.sites} == {"APPLIED"}
            assert [site for site in record.sites if "late" in site.flags] == []
            print("NONE IS LATE")
    """
    done = pytest_in(tmp_path, "-s", code="def test_nothing(): pass", conftest=conftest)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NONE IS LATE" in done.stdout


def test_it_does_not_load_by_itself(tmp_path: Path) -> None:
    code = "import sys\ndef test_it(): assert 'fusepatch' not in sys.modules"
    assert pytest_in(tmp_path, code=code, plugin=()).returncode == 0
    assert "unrecognized arguments: --fusepatch-fail-on-fallback" in pytest_in(tmp_path, FAIL, plugin=()).stderr


# --fusepatch-fail-on-fallback


def test_only_the_test_with_the_fallback_fails_and_says_why(tmp_path: Path) -> None:
    done = pytest_in(tmp_path, FAIL, code=OPTIMIZERS, env=SCOPE)
    assert (done.returncode, outcomes(done)) == (1, {"passed": 1, "failed": 1})
    failures = done.stdout[done.stdout.index("= FAILURES =") : done.stdout.index("= fusepatch =")]
    assert "test_without_a_fused_form" in failures
    assert "test_fused" not in failures.replace("test_without_a_fused_form", "")
    assert NOT_FUSED in failures
    assert re.search(r"FAILED test_it.py::test_without_a_fused_form - optimizer\.flags: fallback 1x", done.stdout)


def test_a_fallback_of_ligers_loss_fails_the_test_that_called_it(tmp_path: Path) -> None:
    pytest.importorskip("liger_kernel")
    code = """
        import torch
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        def loss(**changes):
            torch.manual_seed(0)
            arguments = {
                "_input": torch.randn(2, 5, 8, requires_grad=True),
                "lin_weight": torch.randn(11, 8),
                "selected_token_ids": torch.randint(0, 11, (2, 5)),
                "attention_mask": torch.ones(2, 5),
                "advantages": torch.tensor([1.0, -1.0]),
                **changes,
            }
            return LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, compiled=False)(**arguments)[0].backward()

        def test_taken():
            loss()

        def test_refused():
            loss(advantages=torch.ones(2, 5))
    """
    env = {"FUSEPATCH_HEAD": "torch"}  # the automatic rule wants Triton, and records that there is no GPU
    done = pytest_in(tmp_path, FAIL, "--fusepatch-require", "liger.grpo_loss", code=code, env=env)
    assert (done.returncode, outcomes(done)) == (1, {"passed": 1, "failed": 1}), done.stdout
    assert "liger.grpo_loss: fallback 1x: upstream's own forward: advantages have 2 dimensions" in done.stdout
    assert "liger.grpo_loss: APPLIED, 2 calls" in block(done)
    assert not [line for line in block(done) if line.startswith("ERROR")]


def test_a_fallback_counts_in_every_phase_and_whatever_the_test_came_to(tmp_path: Path) -> None:
    code = (
        OPTIMIZERS
        + """
    @pytest.fixture
    def before():
        torch.optim.Adamax(parameters())

    @pytest.fixture
    def after():
        yield
        torch.optim.Adamax(parameters())

    def test_setup(before):
        raise AssertionError("the test itself is not run")

    def test_teardown(after):
        pass

    def test_skipped():
        torch.optim.Adamax(parameters())
        pytest.skip("after the fallback")

    @pytest.mark.xfail
    def test_expected_to_fail():
        torch.optim.Adamax(parameters())
        raise AssertionError("as expected")

    def test_failed():
        torch.optim.Adamax(parameters())
        raise AssertionError("its own reason")

    def test_skipped_before():
        pytest.skip("without a fallback")
    """
    )
    done = pytest_in(tmp_path, FAIL, "-rA", code=code, env=SCOPE)
    ends = dict(re.findall(r"^(?:[A-Z]+) test_it.py::(\w+)()", done.stdout, re.M))
    results = re.findall(
        r"^(PASSED|FAILED|ERROR|XFAIL|SKIPPED) (?:\[1\] )?test_it.py(?:::(\w+)|:\d+: (.+))", done.stdout, re.M
    )
    by_name = {
        (name or why): {result for result, *rest in results if (name or why) in rest} for _, name, why in results
    }
    assert by_name == {
        "test_fused": {"PASSED"},
        "test_without_a_fused_form": {"FAILED"},
        "test_setup": {"ERROR"},
        "test_teardown": {"PASSED", "ERROR"},
        "test_skipped": {"FAILED"},
        "test_expected_to_fail": {"FAILED"},
        "test_failed": {"FAILED"},
        "without a fallback": {"SKIPPED"},
    }, (done.stdout, ends)
    own = done.stdout[done.stdout.index("_ test_failed _") :]
    assert 'AssertionError("its own reason")' in own
    assert NOT_FUSED in own[: own.index("= fusepatch =")]


@pytest.mark.parametrize("option", [(), (FAIL,)])
def test_a_fallback_outside_of_any_test_fails_the_session(tmp_path: Path, option: tuple[str, ...]) -> None:
    code = """
        import torch
        torch.optim.Adamax([torch.nn.Parameter(torch.zeros(2))])

        def test_nothing():
            pass
    """
    done = pytest_in(tmp_path, *option, code=code, env=SCOPE)
    assert outcomes(done) == {"passed": 1}
    problems = [line for line in block(done) if line.startswith("ERROR")]
    if option:
        assert (done.returncode, problems) == (1, [f"ERROR: {FAIL}: outside of any test, {NOT_FUSED}"])
    else:
        assert (done.returncode, problems) == (0, [])


def test_a_test_that_activates_anew_keeps_to_itself(tmp_path: Path) -> None:
    code = (
        OPTIMIZERS
        + """
    def test_activates_anew():
        import fusepatch
        fusepatch.deactivate()
        fusepatch.activate()

    def test_after_it():
        torch.optim.Adamax(parameters())
    """
    )
    done = pytest_in(tmp_path, FAIL, code=code, env=SCOPE)
    assert re.findall(r"^FAILED test_it.py::(\w+)", done.stdout, re.M) == ["test_without_a_fused_form", "test_after_it"]


# --fusepatch-require


@pytest.mark.parametrize(
    ("required", "env", "problem"),
    [
        ("optimizer.flags", SCOPE, None),
        ("optimizer.flags", {}, "no call went through optimizer.flags, so the tests prove nothing about it"),
        ("optimizer.flags, liger.grpo_loss", SCOPE, "liger.grpo_loss is not applied anywhere: of 1 process"),
        ("optimizer.flags", {"FUSEPATCH_DISABLE": "optimizer.flags"}, "optimizer.flags is DISABLED in "),
    ],
)
def test_require(tmp_path: Path, required: str, env: Mapping[str, str], problem: str | None) -> None:
    code = "import torch\ndef test_it(): torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])"
    done = pytest_in(tmp_path, "--fusepatch-require", required, code=code, env=env)
    assert outcomes(done) == {"passed": 1}
    problems = [line for line in block(done) if line.startswith("ERROR")]
    if problem is None:
        assert (done.returncode, problems) == (0, [])
    else:
        assert done.returncode == 1
        assert problems[0].startswith(f"ERROR: --fusepatch-require: {problem}"), problems


def test_require_asks_nothing_of_a_session_that_only_collects(tmp_path: Path) -> None:
    done = pytest_in(tmp_path, "--collect-only", "--fusepatch-require", "optimizer.flags", code="def test_it(): pass")
    assert done.returncode == 0, done.stdout


# What stops pytest before any test


@pytest.mark.parametrize(
    ("arguments", "env", "text"),
    [
        (
            ("--fusepatch-require", "optimizer.flag"),
            {},
            "there is no patch 'optimizer.flag'; the nearest is optimizer.flags",
        ),
        (("--fusepatch-require", "optimizer.flags"), {"FUSEPATCH": "0"}, "FUSEPATCH=0 leaves every patch out"),
        (("--fusepatch-deselect", "missing.toml"), {}, "it cannot be read"),
    ],
)
def test_usage_errors(tmp_path: Path, arguments: tuple[str, ...], env: Mapping[str, str], text: str) -> None:
    done = pytest_in(tmp_path, *arguments, code="def test_it(): pass", env=env)
    assert done.returncode == 4
    assert text in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "passed" not in done.stdout


def test_a_value_that_cannot_be_read_stops_pytest(tmp_path: Path) -> None:
    done = pytest_in(tmp_path, code="def test_it(): pass", env={"FUSEPATCH_STRICT": "yes"})
    assert done.returncode != 0
    assert "SettingError: FUSEPATCH_STRICT='yes' cannot be read: wanted 0, 1." in done.stderr
    assert "passed" not in done.stdout


def test_the_switch_makes_the_plugin_inert(tmp_path: Path) -> None:
    code = """
        import torch

        def test_it():
            assert not torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))]).param_groups[0]["fused"]
    """
    done = pytest_in(tmp_path, FAIL, code=code, env={**SCOPE, "FUSEPATCH": "0"})
    assert (done.returncode, outcomes(done), block(done)) == (0, {"passed": 1}, [])
    assert "FUSEPATCH=0, so nothing is patched" in done.stdout


# --fusepatch-deselect

CASES = """
    import pytest

    @pytest.mark.parametrize("x", ["a", "b"])
    def test_case(x):
        pass

    class TestGroup:
        def test_one(self):
            pass

        def test_two(self):
            pass
"""


@pytest.mark.parametrize(
    ("test", "when", "gone"),
    [
        ("test_it.py::test_case[a]", "'pytest>=8'", ["test_case[a]"]),
        ("test_it.py::test_case[[ab]]", "'pytest>=8'", []),
        ("test_it.py::test_case*", "'pytest>=8'", ["test_case[a]", "test_case[b]"]),
        ("*::TestGroup::*", "'pytest>=8'", ["TestGroup::test_one", "TestGroup::test_two"]),
        ("*test_tw?", "'pytest'", ["TestGroup::test_two"]),
        ("test_it.py", "'pytest>=8'", []),
        ("*test_two", "'pytest<8'", None),
        ("*test_two", "'no-such-distribution'", None),
        ("*test_two", "\"python_version >= '3.10'\"", ["TestGroup::test_two"]),
        ("*test_two", "\"pytest>=8; python_version < '3.10'\"", None),
        ("*test_two", "['pytest>=8', 'packaging>=22']", ["TestGroup::test_two"]),
        ("*test_two", "['pytest>=8', 'packaging<22']", None),
    ],
)
def test_deselections(tmp_path: Path, test: str, when: str, gone: list[str] | None) -> None:
    (tmp_path / "skip.toml").write_text(f"[[deselect]]\ntest = '{test}'\nwhen = {when}\nreason = 'known'\n")
    done = pytest_in(tmp_path, "-v", "--fusepatch-deselect", "skip.toml", code=CASES, env={"FUSEPATCH": "0"})
    every = ["test_case[a]", "test_case[b]", "TestGroup::test_one", "TestGroup::test_two"]
    assert done.returncode == 0
    assert re.findall(r"^test_it\.py::(\S+) PASSED", done.stdout, re.M) == [
        name for name in every if name not in (gone or [])
    ]
    if gone:
        assert block(done) == [f"deselected {len(gone)}: {test}: known"]
        assert outcomes(done)["deselected"] == len(gone)
    elif gone is None:  # the condition does not hold: there is nothing to say
        assert block(done) == []
    else:
        assert len(block(done)) == 1
        assert block(done)[0].startswith(f"deselection without a test: {test} (")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "[[deselect]]\ntest = 'x'\nwhen = 'pytest'\n",
            "entry 1: wanted the texts test, when and reason, found test, when",
        ),
        ("[[deselect]]\ntest = 'x'\nwhen = 'pytest'\nreason = ''\n", "entry 1: wanted the texts"),
        ("[[deselect]]\ntest = 'x'\nwhen = 'pytest'\nreason = 'r'\nwho = 'me'\n", "found reason, test, when, who"),
        (
            "[[deselect]]\ntest = 'x'\nwhen = 'pytest>='\nreason = 'r'\n",
            "'pytest>=' is not a condition; wanted a requirement",
        ),
        ("[[deselect]]\ntest = 'x'\nwhen = []\nreason = 'r'\n", "when must be a condition or a list of conditions"),
        ("[skip]\ntest = 'x'\n", "wanted [[deselect]] tables only, found skip"),
        ("[[deselect]\n", "it cannot be read"),
    ],
)
def test_a_wrong_deselection_file_stops_pytest(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "skip.toml").write_text(text)
    done = pytest_in(tmp_path, "--fusepatch-deselect", "skip.toml", code=CASES, env={"FUSEPATCH": "0"})
    assert done.returncode == 4
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


# pytest-xdist


def test_the_workers_of_xdist_are_patched_and_their_records_are_merged(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "skip.toml").write_text("[[deselect]]\ntest = '*fused_form'\nwhen = 'torch'\nreason = 'known'\n")
    arguments = ("-n", "2", FAIL, "--fusepatch-require", "optimizer.flags")
    done = pytest_in(tmp_path, *arguments, code=OPTIMIZERS, env=SCOPE)
    assert (done.returncode, outcomes(done)) == (1, {"passed": 1, "failed": 1})
    assert NOT_FUSED in done.stdout
    assert "optimizer.flags: APPLIED, 2 calls" in block(done)
    done = pytest_in(tmp_path, *arguments, "--fusepatch-deselect", "skip.toml", env=SCOPE)
    assert (done.returncode, outcomes(done)) == (0, {"passed": 1})
    assert "deselected 1: *fused_form: known" in block(done)
    done = pytest_in(tmp_path, "-n", "2", "--fusepatch-require", "optimizer.flags")
    assert done.returncode == 1
