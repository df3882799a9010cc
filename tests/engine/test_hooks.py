from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fusepatch.engine import hooks
from kits.helpers import fresh


def test_the_callback_runs_once_after_the_import(library: Callable[..., str]) -> None:
    library()
    seen = []
    for _ in range(3):
        hooks.watch("toylib.core", lambda module, late: seen.append((module.scale(1), late)), lambda *_: None)
    assert seen == []
    importlib.import_module("toylib.core")
    assert seen == [(2, False)]


def test_a_module_that_is_imported_anew_is_hooked_anew(library: Callable[..., str]) -> None:
    library()
    seen = []
    hooks.watch("toylib.core", lambda module, late: seen.append((module, late)), lambda *_: None)
    modules = []
    for _ in range(3):
        sys.modules.pop("toylib.core", None)
        modules.append(importlib.import_module("toylib.core"))
    assert len(set(map(id, modules))) == 3
    assert seen == [(module, False) for module in modules]


def test_looking_for_a_module_without_importing_it_hooks_it_once(library: Callable[..., str]) -> None:
    library()
    seen = []
    hooks.watch("toylib.core", lambda module, late: seen.append(late), lambda *_: None)
    for _ in range(3):
        assert importlib.util.find_spec("toylib.core") is not None
    hooks.watch("toylib.gone", lambda module, late: seen.append(late), lambda *_: None)
    assert importlib.util.find_spec("toylib.gone") is None
    importlib.import_module("toylib.core")
    assert seen == [False]


def test_wrapt_is_imported_with_the_first_watched_module(library: Callable[..., str], tmp_path: Path) -> None:
    library()
    code = """
    import sys
    from fusepatch.engine import hooks
    hooks.watch("toylib.core", lambda module, late: print(module.scale(1), late), lambda *_: None)
    import toylib, json
    heavy = ("wrapt", "asyncio", "importlib.metadata")
    print([name for name in heavy if name in sys.modules])
    import toylib.core
    print("wrapt" in sys.modules)
    """
    done = fresh(code, env={"PYTHONPATH": str(tmp_path), "FUSEPATCH": "0"}, check=True)
    assert done.stdout.splitlines() == ["[]", "2 False", "True"]


def test_a_wrapt_that_cannot_be_imported_does_not_break_the_users_import(
    library: Callable[..., str], tmp_path: Path
) -> None:
    library()
    (tmp_path / "wrapt.py").write_text("raise ImportError('built for another Python')")
    code = """
    from fusepatch.engine import hooks
    hooks.watch("toylib.core", lambda module, late: print("hooked"), lambda name, trace: print(name, trace[-40:]))
    import toylib.core
    print(toylib.core.scale(1))
    """
    done = fresh(code, env={"PYTHONPATH": str(tmp_path), "FUSEPATCH": "0"}, check=True)
    assert done.stdout.splitlines()[-1] == "2"
    assert "toylib.core" in done.stdout
    assert "built for another Python" in done.stdout


def test_threads_that_import_one_module_at_once(library: Callable[..., str]) -> None:
    library()
    seen = []
    hooks.watch("toylib.core", lambda module, late: seen.append(late), lambda *_: None)
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        importlib.import_module("toylib.core")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [False]


def test_two_may_wait_for_one_module(library: Callable[..., str]) -> None:
    library()
    seen = []
    for who in ("first", "second", "first"):
        hooks.watch("toylib.core", lambda module, late, who=who: seen.append(who), lambda *_: None, who)
    importlib.import_module("toylib.core")
    assert seen == ["first", "second"]


def test_a_loaded_module_is_late(library: Callable[..., str]) -> None:
    importlib.import_module(library())
    seen = []
    hooks.watch("toylib.core", lambda module, late: seen.append(late), lambda *_: None)
    assert seen == [True]


def test_a_callback_that_raises_does_not_break_the_users_import(library: Callable[..., str]) -> None:
    library()
    failures = []

    def broken(module: object, late: bool) -> None:
        raise RuntimeError("a fault of ours")

    hooks.watch("toylib.core", broken, lambda name, trace: failures.append((name, trace)))
    assert importlib.import_module("toylib.core").scale(1) == 2
    ((name, trace),) = failures
    assert name == "toylib.core"
    assert "a fault of ours" in trace
    assert "Traceback" in trace


def test_an_upstream_that_raises_on_import_raises_its_own_error(library: Callable[..., str]) -> None:
    library("raise ImportError('libcuda is missing')")
    seen = []
    hooks.watch("toylib.core", lambda module, late: seen.append(module), lambda *_: None)
    with pytest.raises(ImportError, match="libcuda is missing"):
        importlib.import_module("toylib.core")
    assert seen == []
    assert "toylib.core" not in sys.modules


def test_a_hooked_module_can_be_started_with_dash_m(library: Callable[..., str], tmp_path: Path) -> None:
    library("import sys\nif __name__ == '__main__':\n    print('ran', sys.argv[1:])\n")
    done = fresh(
        """
        import runpy, sys
        from fusepatch.engine import hooks
        hooks.watch("toylib.core", lambda module, late: print("hooked"), lambda *_: None)
        sys.argv = ["x", "argument"]
        runpy.run_module("toylib.core", run_name="__main__", alter_sys=True)
        """,
        env={"PYTHONPATH": str(tmp_path), "FUSEPATCH": "0"},
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "ran ['argument']"
