"""`ray.worker_setup` without a Ray: how a runtime_env is merged, and what the hook does. tests/upstream/test_ray.py has
the rest."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import fusepatch
from fusepatch.patches import ray_worker_setup
from kits.helpers import fresh

ID = "ray.worker_setup"
HOOK = "worker_process_setup_hook"


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fusepatch.activate()
    monkeypatch.setenv("FUSEPATCH", "1")
    monkeypatch.setenv("FUSEPATCH_OPTIMIZER_EPS", "1e-6")
    yield
    fusepatch.deactivate()


def merged(given: Mapping[str, Any], submitted: Mapping[str, Any] = {}, client: bool = False) -> dict[str, Any]:
    before = copy.deepcopy(dict(given))
    result = ray_worker_setup._merged(given, submitted, client)
    assert dict(given) == before, "what the user passed was changed"
    return result


def notes() -> str:
    (record,) = [record for record in fusepatch.status() if record.id == ID]
    return "\n".join(note.text for note in (*record.replaced, *record.fallbacks))


OURS = {"FUSEPATCH": "1", "FUSEPATCH_OPTIMIZER_EPS": "1e-6"}


def theirs() -> None:
    """A user's hook."""


def test_an_empty_runtime_env_gets_both() -> None:
    result = merged({})
    assert result["env_vars"] == OURS
    assert result.keys() == {"env_vars", HOOK}
    assert result[HOOK].__defaults__ == (None,)


def test_other_fields_and_keys_stand() -> None:
    given = {"working_dir": None, "pip": ["x"], "env_vars": {"A": "1", "FUSEPATCH_OPTIMIZER_EPS": "1e-5"}, HOOK: theirs}
    result = merged(given)
    assert result["env_vars"] == {"A": "1", "FUSEPATCH": "1", "FUSEPATCH_OPTIMIZER_EPS": "1e-5"}
    assert (result["working_dir"], result["pip"]) == (None, ["x"])
    assert result[HOOK].__defaults__ == (theirs,)
    assert "fusepatch's own, which runs before theirs" in notes()


def test_switched_off_by_the_user_is_off() -> None:
    given = {"env_vars": {"FUSEPATCH": "0"}, HOOK: theirs}
    assert merged(given) == given
    assert merged({}, {"env_vars": {"FUSEPATCH": "0"}}) == {}


def test_keys_of_a_submitted_job_are_left_out() -> None:
    assert merged({}, {"env_vars": {"FUSEPATCH": "1"}})["env_vars"] == {"FUSEPATCH_OPTIMIZER_EPS": "1e-6"}


@pytest.mark.parametrize(
    ("given", "submitted", "client", "reason"),
    [
        ({}, {}, True, "Ray's client (ray://) runs none"),
        ({"image_uri": "x"}, {}, False, "Ray accepts none together with image_uri"),
        ({}, {"container": {"image": "x"}}, False, "Ray accepts none together with container"),
        ({}, {HOOK: "a.b"}, False, "the submitted job has one (a.b)"),
        ({}, {"env_vars": {ray_worker_setup.PROCESSED_HOOK: "a.b"}}, False, "the submitted job has one (a.b)"),
        (
            {HOOK: "b", "env_vars": {ray_worker_setup.PROCESSED_HOOK: "ray_runtime_env_func::eA=="}},
            {},
            False,
            "processed by an earlier ray.init",
        ),
    ],
)
def test_where_ray_takes_no_hook_the_variables_travel_and_one_warning_says_so(
    given: dict[str, Any], submitted: dict[str, Any], client: bool, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    result = merged(given, submitted, client)
    assert result.get(HOOK) == given.get(HOOK)
    assert result["env_vars"] == {**given.get("env_vars", {}), **OURS}
    merged(given, submitted, client)
    assert caplog.text.count(reason) == 1
    assert reason in notes()


@pytest.mark.parametrize("field", [{HOOK: "a.b"}, {}], ids=["both", "the variable alone"])
def test_a_name_that_ray_has_processed_is_a_hook_again(field: dict[str, str]) -> None:
    given = {**field, "env_vars": {ray_worker_setup.PROCESSED_HOOK: "a.b"}}
    result = merged(given)
    assert result["env_vars"] == OURS
    assert result[HOOK].__defaults__ == ("a.b",)


@pytest.mark.parametrize(
    ("address", "environment", "client"),
    [
        (None, None, False),
        ("auto", "127.0.0.1:6379", False),
        ("local", "ray://host:1", False),
        ("127.0.0.1:6379", "ray://host:1", False),
        ("ray://host:1", None, True),
        (None, "ray://host:1", True),
        ("auto", "ray://host:1", True),
    ],
)
def test_rays_client_is_known_by_its_address(
    address: str | None, environment: str | None, client: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if environment is not None:
        monkeypatch.setenv("RAY_ADDRESS", environment)
    assert ray_worker_setup._is_client(address) is client


RUN_HOOK = """
    import builtins, importlib.util, marshal, sys, types
    # What arrives in a worker: code, defaults, and nothing of the module that it comes from.
    code = marshal.loads(bytes.fromhex({code!r}))
    hook = types.FunctionType(code, {{"__builtins__": builtins}}, "hook", ({theirs!r},))
    {before}
    hook()
    found = sys.modules.get("fusepatch")
    print(found is not None, found and found.is_applied("ray.worker_setup"))
"""


def run_hook(theirs: str | None = None, before: str = "pass", **env: str) -> Any:
    import marshal

    code = marshal.dumps(ray_worker_setup._by_value(ray_worker_setup.fusepatch_worker_setup, None).__code__).hex()
    return fresh(RUN_HOOK.format(code=code, theirs=theirs, before=before), env=env)


def test_the_hook_needs_nothing_of_its_module_and_imports_the_package() -> None:
    hook = ray_worker_setup._by_value(ray_worker_setup.fusepatch_worker_setup, None)
    assert hook.__module__ == "__main__"
    done = run_hook(FUSEPATCH="1")
    assert done.stdout.split()[0] == "True", done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("switch", ["0", " 0 ", ""])
def test_the_hook_leaves_a_worker_alone_that_is_off(switch: str) -> None:
    done = run_hook(FUSEPATCH=switch)
    assert (done.stdout, done.stderr) == ("False None\n", "")


def test_the_hook_says_what_is_wrong_and_goes_on_to_the_users() -> None:
    bad = run_hook(theirs="time.time", FUSEPATCH="1", FUSEPATCH_STRICT="maybe")
    assert bad.returncode == 0
    assert "NOT ACTIVE in the Ray worker" in bad.stderr
    assert "SettingError: FUSEPATCH_STRICT='maybe'" in bad.stderr
    assert "Traceback" not in bad.stderr
    faulty = run_hook(before="sys.modules['fusepatch.activation'] = None", FUSEPATCH="1")
    assert faulty.returncode == 0
    assert "ModuleNotFoundError" in faulty.stderr
    assert "Traceback" in faulty.stderr
    missing = run_hook(before="sys.modules['fusepatch'] = None", FUSEPATCH="1")
    assert missing.returncode == 0
    assert f"it is not installed for {sys.executable}" in missing.stderr


def test_what_the_users_hook_raises_is_not_swallowed() -> None:
    done = run_hook(theirs="time.no_such_function", FUSEPATCH="1")
    assert done.returncode != 0
    assert "no_such_function" in done.stderr


def test_the_hook_is_not_pickled_by_name() -> None:
    hook = ray_worker_setup._by_value(ray_worker_setup.fusepatch_worker_setup, None)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(hook)  # only by name, and there is none in __main__: Ray's cloudpickle sends the code
