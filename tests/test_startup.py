"""How processes that nobody wrote an import into are switched on: the `.pth` file and `fusepatch_startup`.

`trl` is the upstream that these tests import: it is one of the triggers, and the quickest.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import fusepatch_startup
import pytest

from fusepatch.patches import PATCHES
from kits.environments import distributions, needs_uv, new_environment, site_packages, uv
from kits.helpers import fresh, run

REPOSITORY = Path(__file__).parents[1]
SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
SCRIPTS = Path(sysconfig.get_path("scripts"))

SEEN = """
import os, sys
started = "fusepatch_startup" in sys.modules
before = "fusepatch" in sys.modules
import trl
package = sys.modules.get("fusepatch")
outcome = package.status()[0].outcome.name if package else None
print("started", started, "before", before, "active", outcome not in (None, "DISABLED"), os.environ.get("FUSEPATCH"))
"""
"""What a child sees of fusepatch before and after its first import of an upstream."""

SWITCHED_ON = "started True before False active True 1"
FORKED = "before True active True 1"


def lines(text: str) -> list[str]:
    return text.strip().splitlines()


# One process


def test_the_start_up_files_lie_in_the_site_packages_that_the_tests_run_in() -> None:
    assert (SITE_PACKAGES / "fusepatch.pth").read_text().count("\n") == 1
    assert Path(fusepatch_startup.__file__).parent == SITE_PACKAGES


def test_the_installed_start_up_files_are_those_of_this_checkout() -> None:
    for name in ("fusepatch.pth", "fusepatch_startup.py"):
        assert (SITE_PACKAGES / name).read_text() == (REPOSITORY / "fusepatch" / "startup" / name).read_text(), (
            f"{name} is a copy, also in an editable install: install the checkout again"
        )


def test_every_upstream_that_is_patched_is_a_trigger() -> None:
    patched = {site.upstream.import_name for patch in PATCHES for site in patch.sites}
    assert patched | {"torch"} <= fusepatch_startup.TRIGGERS


@pytest.mark.parametrize("env", [{}, {"FUSEPATCH": ""}, {"FUSEPATCH": "0"}])
def test_nothing_happens_where_the_switch_is_not_on(env: dict[str, str]) -> None:
    done = fresh(SEEN, env=env, check=True)
    assert done.stdout == f"started False before False active False {env.get('FUSEPATCH')}\n"
    assert done.stderr == ""


def test_start_can_be_called_by_anyone_at_any_time() -> None:
    code = """
        import sys, fusepatch_startup
        fusepatch_startup.start()
        fusepatch_startup.start()
        print(len([finder for finder in sys.meta_path if isinstance(finder, fusepatch_startup._Finder)]))
        import trl
        print("fusepatch" in sys.modules)
        fusepatch_startup.start()
        print("fusepatch" in sys.modules)
    """
    for switch, seen in (("", ["0", "False", "False"]), ("0", ["0", "False", "False"]), ("1", ["1", "True", "True"])):
        assert fresh(code, env={"FUSEPATCH": switch}, check=True).stdout.split() == seen
    late = "import sys, os, trl, fusepatch_startup; os.environ['FUSEPATCH'] = '1'; fusepatch_startup.start()"
    assert fresh(f"{late}; print('fusepatch' in sys.modules)", check=True).stdout == "True\n"


def test_loading_the_module_is_enough_for_an_entry_point() -> None:
    code = """
        import importlib, sys, trl
        sys.modules.pop("fusepatch_startup", None)  # the .pth file found no FUSEPATCH when this process began
        import os
        os.environ["FUSEPATCH"] = SWITCH
        importlib.import_module("fusepatch_startup")
        print("fusepatch" in sys.modules)
    """
    for switch, active in (("", "False"), ("0", "False"), ("1", "True")):
        assert fresh(code.replace("SWITCH", repr(switch)), check=True).stdout.split() == [active]


def test_verls_plugins_are_given_the_start_up_module() -> None:
    found = importlib.metadata.distribution("fusepatch").entry_points.select(group="verl.plugins")
    assert {(entry.name, entry.value) for entry in found} == {("fusepatch", "fusepatch_startup")}


def test_the_package_comes_with_the_first_import_of_an_upstream() -> None:
    code = """
        import sys, fusepatch_startup
        import json, email, sqlite3, numpy
        assert "fusepatch" not in sys.modules and "wrapt" not in sys.modules
        assert any(isinstance(finder, fusepatch_startup._Finder) for finder in sys.meta_path)
    """
    done = fresh(textwrap.dedent(code) + SEEN, env={"FUSEPATCH": "1"}, check=True)
    assert lines(done.stdout) == [SWITCHED_ON]


def test_the_finder_steps_aside_and_the_module_is_the_real_one() -> None:
    code = """
        import sys, fusepatch_startup
        import trl.trainer
        assert trl.__spec__.origin.endswith("trl/__init__.py"), trl.__spec__
        assert not any(isinstance(finder, fusepatch_startup._Finder) for finder in sys.meta_path)
        import transformers
        print(transformers.__spec__.name)
    """
    done = fresh(code, env={"FUSEPATCH": "1"}, check=True)
    assert lines(done.stdout) == ["transformers"]


@pytest.mark.parametrize("trigger", sorted(fusepatch_startup.TRIGGERS))
def test_looking_for_a_trigger_brings_the_package(trigger: str) -> None:
    code = f"""
        import importlib.util, sys
        assert "fusepatch" not in sys.modules
        importlib.util.find_spec({trigger!r})
        print("fusepatch" in sys.modules)
    """
    assert lines(fresh(code, env={"FUSEPATCH": "1"}, check=True).stdout) == ["True"]


def test_an_upstream_that_is_not_installed_stays_an_import_error() -> None:
    code = """
        import sys, fusepatch_startup
        fusepatch_startup.TRIGGERS = frozenset({"not_installed_anywhere"})
        try:
            import not_installed_anywhere
        except ModuleNotFoundError as error:
            print(error, "fusepatch" in sys.modules)
    """
    done = fresh(code, env={"FUSEPATCH": "1"}, check=True)
    assert lines(done.stdout) == ["No module named 'not_installed_anywhere' True"]


def test_hooks_on_a_trigger_itself_see_the_very_import_that_brought_the_package() -> None:
    code = """
        import fusepatch_startup, wrapt
        bring = fusepatch_startup._import_package
        def bring_and_hook():
            bring()
            wrapt.register_post_import_hook(lambda module: print("hook saw", module.__name__), "trl")
        fusepatch_startup._import_package = bring_and_hook
        import trl
    """
    assert lines(fresh(code, env={"FUSEPATCH": "1"}, check=True).stdout) == ["hook saw trl"]


def test_a_second_thread_that_meets_the_finder_on_its_way_out_brings_the_package_too() -> None:
    code = """
        import sys, fusepatch_startup
        (finder,) = [finder for finder in sys.meta_path if isinstance(finder, fusepatch_startup._Finder)]
        sys.meta_path.remove(finder)  # what the first thread does while the second one is already asking it
        print(finder.find_spec("trl").name, "fusepatch" in sys.modules)
    """
    assert lines(fresh(code, env={"FUSEPATCH": "1"}, check=True).stdout) == ["trl True"]


def test_the_start_up_module_imports_nothing_that_a_bare_interpreter_has_not_loaded() -> None:
    look = "import sys; print(*sorted(sys.modules))"
    bare = set(fresh(look, check=True).stdout.split())
    assert set(fresh(look, env={"FUSEPATCH": "1"}, check=True).stdout.split()) - bare <= {
        "fusepatch_startup",
        "__future__",
    }


def test_a_switched_on_process_has_the_real_liger_patched() -> None:
    code = """
        import liger_kernel.transformers.monkey_patch
        import fusepatch
        print(fusepatch.is_applied("liger.instance_flags"))
    """
    assert lines(fresh(code, env={"FUSEPATCH": "1"}, check=True).stdout) == ["True"]


@pytest.mark.parametrize(
    "env",
    [
        {"FUSEPATCH": "yes"},
        {"FUSEPATCH": "1", "FUSEPATCH_STRICT": "maybe"},
        {"FUSEPATCH": "1", "FUSEPATCH_DISABLE": "no.such.patch"},
    ],
)
def test_a_value_that_cannot_be_read_is_one_line_on_stderr_and_the_program_runs_on(env: dict[str, str]) -> None:
    code = """
        import trl, transformers
        print("ran on", transformers.__name__)
        raise SystemExit(5)
    """
    done = fresh(code, env=env)
    assert (done.returncode, done.stdout) == (5, "ran on transformers\n")
    (line,) = lines(done.stderr)
    name, value = list(env.items())[-1]
    assert re.match(r"fusepatch: not active in process \d+: ", line)
    assert name in line
    assert repr(value) in line


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
def test_a_value_that_cannot_be_read_harms_nobody_where_stderr_cannot_be_written_to(redirection: str) -> None:
    code = "import trl; print('ran on', trl.__name__)"
    done = run(
        ["bash", "-c", f'"$0" -c "$1" {redirection}', sys.executable, code],
        {"FUSEPATCH": "1", "FUSEPATCH_STRICT": "maybe"},
    )
    assert (done.returncode, done.stdout) == (0, "ran on trl\n")


def test_a_value_that_cannot_be_read_costs_nothing_where_no_upstream_is_imported() -> None:
    done = fresh("print('fine')", env={"FUSEPATCH": "yes"}, check=True)
    assert (done.stdout, done.stderr) == ("fine\n", "")


# Children


ACTIVE_PARENT = """
import subprocess, sys
import fusepatch
"""


def in_child(how: str, before: str = ACTIVE_PARENT) -> list[str]:
    """The lines that a child prints, which `how` starts from a process that ran `before`."""
    return lines(fresh(before + textwrap.dedent(how), check=True).stdout)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "child_program.py"
    path.write_text(SEEN)
    return path


@pytest.mark.parametrize("flags", [[], ["-I"], ["-E"], ["-s"], ["-X", "dev"], ["-O"]])
def test_a_child_by_subprocess_is_switched_on(flags: list[str], script: Path) -> None:
    assert in_child(f"subprocess.run([sys.executable, *{flags}, {str(script)!r}], check=True)") == [SWITCHED_ON]


def test_a_child_by_c_and_by_m_is_switched_on(script: Path) -> None:
    assert in_child(f"subprocess.run([sys.executable, '-c', {SEEN!r}], check=True)") == [SWITCHED_ON]
    by_module = f"subprocess.run([sys.executable, '-m', {script.stem!r}], check=True, cwd={str(script.parent)!r})"
    assert in_child(by_module) == [SWITCHED_ON]


def test_a_grandchild_is_switched_on_even_through_a_child_that_imports_no_upstream(script: Path) -> None:
    child = f"import subprocess, sys; subprocess.run([sys.executable, {str(script)!r}], check=True)"
    assert in_child(f"subprocess.run([sys.executable, '-c', {child!r}], check=True)") == [SWITCHED_ON]


def test_a_child_without_site_packages_is_not_switched_on() -> None:
    child = "import sys; print('fusepatch_startup' in sys.modules)"
    assert in_child(f"subprocess.run([sys.executable, '-S', '-c', {child!r}], check=True)") == ["False"]


@pytest.mark.parametrize(
    ("method", "seen"),
    [("spawn", SWITCHED_ON), ("forkserver", SWITCHED_ON), ("fork", FORKED)],
)
def test_a_child_by_multiprocessing_is_switched_on(method: str, seen: str, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(f"def work():\n{textwrap.indent(SEEN, '    ')}    sys.stdout.flush()\n")
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import multiprocessing
            from work import work

            if __name__ == "__main__":
                import fusepatch
                process = multiprocessing.get_context({method!r}).Process(target=work)
                process.start()
                process.join()
                raise SystemExit(process.exitcode)
            """
        )
    )
    done = run([sys.executable, program])
    assert done.returncode == 0, done.stderr
    (line,) = lines(done.stdout)
    assert line.endswith(seen)


def test_the_console_script_of_another_package_is_switched_on() -> None:
    how = f"""
        import os
        os.environ["FUSEPATCH_NONSENSE"] = "1"  # the warning about it is what an active process prints
        subprocess.run([{str(SCRIPTS / "torchrun")!r}, "--help"], check=True, stdout=subprocess.DEVNULL)
    """
    done = fresh(ACTIVE_PARENT + textwrap.dedent(how), check=True)
    assert "FUSEPATCH_NONSENSE is set but fusepatch has no such variable" in done.stderr
    assert done.stderr.count("FUSEPATCH_NONSENSE") == 1


# The switch


@pytest.mark.parametrize("before", [None, "1"])
def test_activation_exports_the_switch_and_deactivation_takes_it_back(before: str | None) -> None:
    code = """
        import os, subprocess, sys
        child = [sys.executable, "-c", "import os; print(os.environ.get('FUSEPATCH'))"]
        def both():
            return os.environ.get("FUSEPATCH"), subprocess.run(child, capture_output=True, text=True).stdout.strip()
        import fusepatch
        print(*both())
        fusepatch.activate()
        fusepatch.deactivate("liger.instance_flags")
        print(*both())
        fusepatch.deactivate()
        print(*both())
        fusepatch.activate()
        print(*both())
    """
    done = fresh(code, env={} if before is None else {"FUSEPATCH": before}, check=True)
    assert lines(done.stdout) == ["1 1", "1 1", f"{before} {before}", "1 1"]


def test_a_child_of_a_deactivated_process_is_not_switched_on() -> None:
    how = f"""
        fusepatch.deactivate()
        subprocess.run([sys.executable, "-c", {SEEN!r}], check=True)
    """
    assert in_child(how) == ["started False before False active False None"]


def test_an_inert_import_exports_nothing_and_an_explicit_activation_does() -> None:
    code = """
        import os, fusepatch
        print(fusepatch.status()[0].outcome.name, os.environ["FUSEPATCH"])
        fusepatch.activate()
        print(fusepatch.status()[0].outcome.name != "DISABLED", os.environ["FUSEPATCH"])
        fusepatch.deactivate()
        print(os.environ["FUSEPATCH"])
    """
    assert lines(fresh(code, env={"FUSEPATCH": "0"}, check=True).stdout) == ["DISABLED 0", "True 1", "0"]


# Installing


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    uv("build", "--quiet", "--wheel", "--out-dir", folder, REPOSITORY)
    (built,) = folder.glob("*.whl")
    return built


@needs_uv
@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
def test_an_install_switches_children_on_and_uninstalling_leaves_nothing(
    editable: bool, wheel: Path, tmp_path: Path
) -> None:
    python = new_environment(tmp_path / "environment")
    packages = site_packages(python)
    before = {path.name for path in packages.iterdir()}
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "__init__.py").touch()  # only a trigger here: what is patched in it is another test's matter
    uv("pip", "install", "--quiet", "--python", python, *(["-e", REPOSITORY] if editable else [wheel]))
    assert (packages / "fusepatch.pth").is_file()
    assert (packages / "fusepatch_startup.py").is_file()
    assert (python.parent / "fusepatch").is_file()
    code = f"import subprocess, sys, fusepatch; subprocess.run([sys.executable, '-c', {SEEN!r}], check=True)"
    done = run([python, "-c", code], cwd=tmp_path)
    assert lines(done.stdout) == [SWITCHED_ON], done.stderr
    ran = run([python.parent / "fusepatch", "run", "-c", "import os; print(os.environ['FUSEPATCH'])"], cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "1\n"), ran.stderr

    uv("pip", "uninstall", "--quiet", "--python", python, "fusepatch", "wrapt", "packaging")
    assert {path.name for path in packages.iterdir()} - {"__pycache__"} == before
    after = run(
        [python, "-c", "import importlib.util as u; print(u.find_spec('fusepatch_startup'))"], {"FUSEPATCH": "1"}
    )
    assert (after.stdout, after.stderr) == ("None\n", "")
    assert not (python.parent / "fusepatch").exists()


@needs_uv
def test_installing_beside_the_liger_nightly_changes_no_other_distribution(wheel: Path, tmp_path: Path) -> None:
    python = new_environment(tmp_path / "environment")
    uv("pip", "install", "--quiet", "--python", python, "--prerelease=allow", "--no-deps", "liger-kernel-nightly")
    uv("pip", "install", "--quiet", "--python", python, "packaging==22.0", "wrapt==1.16.0")
    before = distributions(python)
    assert any(name.startswith("liger-kernel-nightly==") for name in before)

    uv("pip", "install", "--quiet", "--python", python, wheel)

    assert {line for line in distributions(python) if not line.startswith("fusepatch")} == before
    done = subprocess.run(
        [python.parent / "fusepatch", "status", "-v"],
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": "200"},
    )
    assert "liger_kernel_nightly" in done.stdout.replace("-", "_")
