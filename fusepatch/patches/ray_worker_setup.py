"""`ray.worker_setup`: what the driver has switched on also holds in its Ray workers.

`ray.init` gets two things into the job's `runtime_env`: the `FUSEPATCH*` variables, which exist before a worker's
interpreter starts, and a `worker_process_setup_hook`, which runs in every worker before any task or actor. The hook
travels by value: a name, or a function of this package, would kill every worker of a cluster in which fusepatch is not
installed.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

from fusepatch import settings
from fusepatch.engine import ledger
from fusepatch.engine.patch import Contract, Patch, Proceed, Site, Slot
from fusepatch.patches.upstreams import RAY

ID = "ray.worker_setup"

SUBMITTED_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""The variable in which `ray job submit` hands its runtime_env to the driver, as JSON. Ray refuses a key on both
sides."""

PROCESSED_HOOK = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
"""What Ray makes of a hook, in the env_vars of the very dict that it was given: its dotted name, or a key."""
PROCESSED_CALLABLE = "ray_runtime_env_func::"
"""How that key begins; it means something in the cluster that it was made in only."""

NO_HOOK_BESIDE = ("container", "image_uri")
"""Fields of a runtime_env beside which Ray takes env_vars but no hook."""


def init(proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
    """Handler of `ray.init`. Nothing that the caller passed is changed; merged copies go on."""
    import copy
    import json

    ledger.count_call(ID)
    job_config = kwargs.get("job_config")
    if sys.modules["ray"].is_initialized():
        ledger.fallback(ID, "ray.init: Ray is already initialised, and ignores the runtime_env of a second call")
        return proceed(*args, **kwargs)
    if kwargs.get("_skip_env_hook") or getattr(job_config, "_client_job", False):
        ledger.fallback(ID, "ray.init: called by Ray's own services, or for a client that has prepared its environment")
        return proceed(*args, **kwargs)
    submitted = json.loads(os.environ.get(SUBMITTED_JOB) or "{}").get("runtime_env") or {}
    given = kwargs.get("runtime_env")
    if not given and not submitted and job_config is not None:
        given = job_config.runtime_env  # Ray would replace it by what is passed
    address = args[0] if args else kwargs.get("address")
    kwargs["runtime_env"] = _merged(given or {}, submitted, _is_client(address))
    if job_config is not None:
        kwargs["job_config"] = copy.copy(job_config)  # Ray keeps what it makes of the runtime_env in it
    return proceed(*args, **kwargs)


def warn_of_running_job(module: ModuleType) -> None:
    """Say that the workers of a Ray that this process had initialised before are out of reach."""
    ray = sys.modules["ray"]
    if not ray.is_initialized() or module.global_worker.mode == module.WORKER_MODE:
        return
    text = (
        "Ray was initialised before fusepatch was activated, so the runtime_env of its job can no longer be changed: "
        "its workers run unpatched; import fusepatch before ray.init, or give the actors that train a "
        'runtime_env={"env_vars": {"FUSEPATCH": "1"}} of their own'
    )
    ledger.fallback(ID, text)
    ledger.warn_once(f"{ID}: {text}")


def _is_client(address: str | None) -> bool:
    """Whether `ray.init` connects through Ray's client (`ray://`), which has no setup hooks."""
    if address in (None, "auto"):
        address = os.environ.get("RAY_ADDRESS", "")
    return "://" in str(address)


def _merged(given: Mapping[str, Any], submitted: Mapping[str, Any], client: bool) -> dict[str, Any]:
    """A copy of the runtime_env with our variables and our hook, as far as the user's own leave room for them."""
    merged = dict(given)
    theirs = dict(given.get("env_vars") or {})
    stated = {**(submitted.get("env_vars") or {}), **theirs}
    if stated.get("FUSEPATCH", "1").strip() == "0":
        ledger.fallback(ID, "ray.init: FUSEPATCH=0 in env_vars keeps the workers of this job unpatched")
        return merged
    ours = {name: value for name, value in _variables().items() if name not in stated}
    merged["env_vars"] = {**theirs, **ours}
    processed = theirs.get(PROCESSED_HOOK, "")
    hook = processed or given.get("worker_process_setup_hook")
    obstacle = _obstacle(given, submitted, client, processed)
    if obstacle is None:
        merged["env_vars"].pop(PROCESSED_HOOK, None)
        merged["worker_process_setup_hook"] = _by_value(fusepatch_worker_setup, hook)
        before = f", which runs before {getattr(hook, '__name__', hook)}" if hook else ""
        ledger.replaced(ID, f"ray.init: worker_process_setup_hook: fusepatch's own{before}")
    else:
        text = (
            f"ray.init: no setup hook: {obstacle}; the variables are passed all the same, and the start-up file "
            "activates the workers that have fusepatch installed; the others run unpatched without a message "
            "(FUSEPATCH_REPORT shows which processes are patched)"
        )
        ledger.fallback(ID, text)
        ledger.warn_once(f"{ID}: {text}")
    shown = ", ".join(f"{name}={value}" for name, value in sorted(ours.items()))
    ledger.replaced(ID, f"ray.init: env_vars of the job: {shown or 'all of ours were there'}")
    return merged


def _obstacle(given: Mapping[str, Any], submitted: Mapping[str, Any], client: bool, processed: str) -> str | None:
    """What stands against a hook of ours in this runtime_env; None where nothing does."""
    if client:
        return "Ray's client (ray://) runs none"
    beside = [name for name in NO_HOOK_BESIDE if given.get(name) or submitted.get(name)]
    if beside:
        return f"Ray accepts none together with {beside[0]}"
    if processed.startswith(PROCESSED_CALLABLE):
        return "the runtime_env was processed by an earlier ray.init, and its hook cannot be read back"
    in_job = submitted.get("worker_process_setup_hook") or (submitted.get("env_vars") or {}).get(PROCESSED_HOOK)
    if in_job and not given.get("worker_process_setup_hook"):
        return f"the submitted job has one ({in_job}), and Ray accepts only one"
    return None


def _variables() -> dict[str, str]:
    """Ours as any child of this process would inherit them, `FUSEPATCH=1` among them."""
    return {name: value for name, value in os.environ.items() if settings.is_own(name)}


def fusepatch_worker_setup(theirs: Callable[[], object] | str | None = None) -> None:
    """The hook, then the user's own (a function, or a dotted name as Ray takes it).

    It is sent as code: it may use nothing of this module. What goes wrong on our side is said in the worker's log,
    which Ray shows in the driver's, and the worker lives; what the user's own hook raises is Ray's to handle.
    """
    import importlib
    import os
    import sys
    import traceback

    if os.environ.get("FUSEPATCH", "").strip() not in ("", "0"):
        try:
            importlib.import_module("fusepatch")
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            if not type(error).__module__.startswith("fusepatch."):  # a fault, of which the text alone says too little
                found += "\n" + traceback.format_exc()
            if isinstance(error, ModuleNotFoundError) and error.name == "fusepatch":
                found = f"it is not installed for {sys.executable}: install it on every node, as on the driver's"
            print(
                f"fusepatch: NOT ACTIVE in the Ray worker with pid {os.getpid()}, which trains unpatched; {found}",
                file=sys.stderr,
                flush=True,
            )
    if isinstance(theirs, str):
        module, _, name = theirs.rpartition(".")
        getattr(importlib.import_module(module), name)()
    elif theirs is not None:
        theirs()


def _by_value(function: Any, theirs: Callable[[], object] | str | None) -> Callable[[], None]:
    """A copy that cloudpickle sends as code, as it does with every function of `__main__`; `theirs` is its default."""
    namespace = {"__name__": "__main__", "__builtins__": builtins}
    return FunctionType(function.__code__, namespace, function.__name__, (theirs,))


PATCH = Patch(
    id=ID,
    promise="What is switched on in the driver is also on in its Ray workers.",
    why=(
        "verl, Trinity-RFT, OpenRLHF and Ray Train build their models and optimizers in Ray actors. An import in the "
        "driver does not reach them, and workers of a cluster that was started elsewhere do not even inherit the "
        "driver's environment: the patches would silently do nothing."
    ),
    upstream=(
        "https://github.com/ray-project/ray/issues/12627",
        "https://github.com/ray-project/ray/issues/38891",
        "https://github.com/ray-project/ray/pull/37463",
        "https://github.com/ray-project/ray/issues/61350",
    ),
    fixed_in="no release: by design",
    remove_when="the frameworks load plugins in every process that trains",
    variables=(),
    requested_by="",
    changes=(
        "ray.init, called or automatic, gets FUSEPATCH=1 and the current variables in runtime_env['env_vars'], and a "
        "worker_process_setup_hook that imports fusepatch in every worker of the job before any task or actor; nested "
        "and restarted actors are included",
        "what you pass is kept: env_vars by key (FUSEPATCH=0 keeps the workers unpatched), a hook by name or function "
        "(it runs after fusepatch's), working_dir and all other fields, a job_config. None of these objects is "
        "changed, so the same dict can be used again",
        "under `ray job submit`, keys and a hook that the job already has are left out, because Ray would refuse to "
        "merge them",
        "a worker that cannot import fusepatch, or cannot read a variable, says so in its log and keeps running",
    ),
    limits=(
        "if Ray was initialised before fusepatch was activated, its workers are not patched; a warning says so",
        "through ray://, with a container or image_uri, and where a submitted job has its own hook, only the variables "
        "are passed. The start-up file then activates the workers; a worker without it runs unpatched and does not say "
        "so",
        "ray.client(...).connect() to a remote cluster does not pass ray.init",
        "with the patch disabled or deactivated, workers of a cluster that this process starts still inherit "
        "FUSEPATCH=1 from it, as every child does",
        "deactivate(id) in the driver does not affect the workers; FUSEPATCH_DISABLE does",
    ),
    sites=(
        Site(
            upstream=RAY,
            module="ray._private.worker",
            supported=">=2.7",
            slots=(Slot("init", init, Contract(parameters=("address", "job_config", "runtime_env"), keywords=True)),),
            when_late=warn_of_running_job,
        ),
    ),
)
