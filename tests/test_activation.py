"""The public functions and the failure rule, in fresh processes that import no upstream."""

from __future__ import annotations

import importlib.util

import pytest

import fusepatch
from fusepatch.patches import PATCHES
from kits.helpers import fresh

IDS = [patch.id for patch in PATCHES]


def lines(code: str, **env: str) -> list[str]:
    done = fresh(code, env=env, check=True)
    return done.stdout.splitlines()


def test_the_import_brings_in_no_torch_and_no_upstream() -> None:
    code = """
    import sys
    import fusepatch
    heavy = ("torch", "transformers", "liger_kernel", "triton", "trl", "verl", "trinity", "ray", "accelerate", "numpy")
    print([name for name in sys.modules if name.split(".")[0] in heavy])
    """
    assert lines(code) == ["[]"]


def test_the_import_initialises_no_cuda_context() -> None:
    pytest.importorskip("torch", reason="CUDA is torch's")
    assert lines("import fusepatch, torch; print(torch.cuda.is_initialized())") == ["False"]


def test_activating_again_changes_nothing() -> None:
    code = """
    import os, sys, fusepatch, wrapt
    finders, before = list(sys.meta_path), fusepatch.status()
    for _ in range(3):
        fusepatch.activate()
    print(sys.meta_path == finders, fusepatch.status() == before, os.environ["FUSEPATCH"])
    """
    assert lines(code) == ["True True 1"]


@pytest.mark.parametrize(("before", "during", "after"), [("", "1", "None"), ("1", "1", "1")])
def test_the_switch_is_exported_and_taken_back(before: str, during: str, after: str) -> None:
    code = """
    import os, fusepatch
    print(os.environ["FUSEPATCH"])
    fusepatch.deactivate()
    print(os.environ.get("FUSEPATCH"))
    """
    assert lines(code, **({"FUSEPATCH": before} if before else {})) == [during, after]


def test_zero_makes_the_import_inert_and_activate_still_works() -> None:
    code = """
    import os, fusepatch
    print(os.environ["FUSEPATCH"], {record.outcome.value for record in fusepatch.status()})
    fusepatch.activate()
    print(os.environ["FUSEPATCH"], "DISABLED" in {record.outcome.value for record in fusepatch.status()})
    fusepatch.deactivate()
    print(os.environ["FUSEPATCH"])
    """
    assert lines(code, FUSEPATCH="0") == ["0 {'DISABLED'}", "1 False", "0"]


UNREADABLE = [
    ("FUSEPATCH", "yes", "0, 1"),
    ("FUSEPATCH_STRICT", "2", "0, 1"),
    ("FUSEPATCH_LIGER_ROPE", "true", "0, 1"),
    ("FUSEPATCH_DISABLE", "liger.flags", "liger.instance_flags"),
]


@pytest.mark.parametrize(("name", "value", "accepted"), UNREADABLE)
def test_an_unreadable_value_raises_at_the_users_import(name: str, value: str, accepted: str) -> None:
    done = fresh("import fusepatch", env={name: value})
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith("fusepatch.errors.SettingError: ")
    for part in (name, repr(value), accepted, "Nothing was patched"):
        assert part in error


def test_after_an_unreadable_value_nothing_is_half_applied() -> None:
    code = """
    import os, sys
    before = list(sys.meta_path)
    try:
        import fusepatch
    except ValueError as error:
        print(type(error).__name__)
    print(sys.meta_path == before, os.environ.get("FUSEPATCH"))
    del os.environ["FUSEPATCH_STRICT"]
    import fusepatch
    print(os.environ["FUSEPATCH"])
    """
    assert lines(code, FUSEPATCH_STRICT="maybe") == ["SettingError", "True None", "1"]


def test_two_losses_at_once_contradict_each_other() -> None:
    done = fresh(
        "import fusepatch",
        env={"FUSEPATCH_LIGER_CROSS_ENTROPY": "1", "FUSEPATCH_LIGER_FUSED_LINEAR_CROSS_ENTROPY": "1"},
    )
    error = done.stderr.splitlines()[-1]
    assert "FUSEPATCH_LIGER_CROSS_ENTROPY=1 and FUSEPATCH_LIGER_FUSED_LINEAR_CROSS_ENTROPY=1 contradict" in error


def test_an_unknown_variable_is_one_warning_with_the_nearest_name() -> None:
    done = fresh("import fusepatch; fusepatch.activate()", env={"FUSEPATCH_STRIKT": "1"}, check=True)
    (line,) = done.stderr.splitlines()
    assert line.startswith("fusepatch: the variable FUSEPATCH_STRIKT is set but fusepatch has no such variable")
    assert line.endswith("the nearest known one is FUSEPATCH_STRICT")


def test_an_empty_value_counts_as_unset() -> None:
    assert fresh("import fusepatch", env={"FUSEPATCH_STRICT": "", "FUSEPATCH_LIGER_ROPE": " "}, check=True).stderr == ""


@pytest.mark.parametrize("value", [IDS[0], "all", f" {IDS[0]} ,{IDS[-1]}"])
def test_patches_can_be_disabled_by_id(value: str) -> None:
    code = "import fusepatch\nprint([r.id for r in fusepatch.status() if r.outcome.value == 'DISABLED'])"
    wanted = IDS if value == "all" else [patch for patch in IDS if patch in value]
    assert lines(code, FUSEPATCH_DISABLE=value) == [str(wanted)]


def test_one_patch_is_taken_out_and_comes_back_with_activate() -> None:
    code = f"""
    import fusepatch
    def disabled(): return [r.id for r in fusepatch.status() if r.outcome.value == "DISABLED"]
    fusepatch.deactivate({IDS[0]!r})
    print(disabled())
    fusepatch.activate()
    print(disabled())
    """
    assert lines(code) == [f"[{IDS[0]!r}]", "[]"]


@pytest.mark.parametrize("function", ["deactivate", "explain", "is_applied"])
def test_an_unknown_id_names_the_known_ones(function: str) -> None:
    with pytest.raises(fusepatch.UnknownPatchError) as raised:
        getattr(fusepatch, function)("liger.flags")
    assert "'liger.flags'" in str(raised.value)
    assert all(patch in str(raised.value) for patch in IDS)


def test_the_one_line_tells_what_waits_from_what_is_not_applied() -> None:
    code = """
    import fusepatch
    from fusepatch import settings
    from fusepatch.explain import summary
    print(summary(fusepatch.status(), settings.current()))
    """
    (line,) = lines(code, FUSEPATCH_DISABLE=IDS[0])
    assert line.startswith("nothing applied yet; ")
    assert f"not applied: {IDS[0]} DISABLED" in line
    assert line.endswith("`python -m fusepatch status` and `fusepatch.status()` say why.")
    waiting = line.partition("waiting for their modules to be imported: ")[2].partition(";")[0]
    assert IDS[0] not in waiting
    if importlib.util.find_spec("torch") is not None:
        assert "optimizer.flags" in waiting
    if importlib.util.find_spec("ray") is None:
        assert "ray.worker_setup" not in line


def test_the_one_line_names_a_patch_on_request_where_it_was_asked_for() -> None:
    code = """
    import fusepatch
    from fusepatch import settings
    from fusepatch.explain import summary
    print(summary(fusepatch.status(), settings.current()))
    """
    (line,) = lines(code, FUSEPATCH_OPTIMIZER_IN_BACKWARD="0")
    assert "optimizer.class" not in line
    assert "optimizer.in_backward" not in line
    (line,) = lines(code, FUSEPATCH_OPTIMIZER_CLASS="torch.optim.SGD", FUSEPATCH_OPTIMIZER_IN_BACKWARD="1")
    if importlib.util.find_spec("torch") is not None:
        assert "optimizer.class, optimizer.flags, optimizer.in_backward" in line


def test_many_threads_activating_at_once_are_one_activation() -> None:
    code = """
    import os, threading
    os.environ["FUSEPATCH"] = "0"
    import fusepatch, json.tool
    barrier = threading.Barrier(8)
    def work():
        barrier.wait()
        for _ in range(20):
            fusepatch.activate()
            fusepatch.status()
            fusepatch.deactivate()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(os.environ["FUSEPATCH"], {record.outcome.value for record in fusepatch.status()})
    """
    assert lines(code) == ["0 {'DISABLED'}"]


def test_the_trigger_list_of_the_startup_file_names_every_upstream_and_torch() -> None:
    import fusepatch_startup

    assert {site.upstream.import_name for patch in PATCHES for site in patch.sites} <= fusepatch_startup.TRIGGERS
    assert "torch" in fusepatch_startup.TRIGGERS


def test_every_variable_of_a_patch_is_in_the_table() -> None:
    from fusepatch import settings

    declared = {name for patch in PATCHES for name in patch.variables}
    assert all(settings.find(name) is not None for name in declared)


def test_a_report_that_cannot_be_placed_is_said_and_the_import_goes_on() -> None:
    code = """
    import os, tempfile
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
    import fusepatch
    print("goes on")
    """
    done = fresh(code, env={"FUSEPATCH_REPORT": "reports"}, check=True)
    assert done.stdout == "goes on\n"
    (line,) = done.stderr.splitlines()
    assert "could not be written (FileNotFoundError" in line


def test_a_subinterpreter_can_import_it() -> None:
    interpreters = pytest.importorskip("_xxsubinterpreters", reason="the module has another name from Python 3.13 on")
    assert interpreters
    code = """
    import _xxsubinterpreters as interpreters
    import fusepatch
    other = interpreters.create()
    activate = "import fusepatch; fusepatch.activate(); print(fusepatch.status()[0].id, flush=True)"
    interpreters.run_string(other, activate)
    interpreters.destroy(other)
    fusepatch.activate()
    print(fusepatch.status()[0].id)
    """
    assert lines(code) == [IDS[0], IDS[0]]
