"""Every site survives what upstreams do: targets that are gone or bent, modules that raise, empty shadows."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

import fusepatch
from fusepatch.engine import sites, versions
from fusepatch.engine.patch import Patch, Site
from fusepatch.errors import StrictError
from fusepatch.patches import PATCHES
from kits.forked import forked
from kits.helpers import fresh


def as_installed(site: Site) -> Site:
    found = versions.find(site.upstream)
    return site if found is None else versions.in_release(site, found.version)


SITES = [(patch, as_installed(site)) for patch in PATCHES for site in patch.sites]
IDS = [f"{patch.id}-{site.module}" for patch, site in SITES]
UPSTREAMS = sorted({site.upstream.import_name for _, site in SITES})


def load(site: Site) -> None:
    """Import the site's module into the test process, or skip where this environment does not have it."""
    if importlib.util.find_spec(site.upstream.import_name) is None:
        pytest.skip(f"{site.upstream.import_name} is not installed in this environment")
    if sites.judge(site).kind is not sites.Kind.FITS:
        pytest.skip(f"the installed {site.upstream.import_name} has no such target")
    importlib.import_module(site.module)


def bend(site: Site, how: str) -> list[tuple[object, str]]:
    """Remove or change every target of a site in the loaded upstream; returns what was changed."""
    from fusepatch.engine import install

    module = sys.modules[site.module]
    targets = [(owner, name) for slot in site.slots for owner, name, _ in install._matches(slot, module)]
    for owner, name in targets:
        if how == "removed":
            gone = owner.__name__ if isinstance(owner, type) else name  # a method can be inherited, so its class goes
            vars(module).pop(gone, None)
        else:
            exec(f"def {name}(): return 'bent'", vars(module))
            setattr(owner, name, vars(module)[name])
    return targets


def record_of(patch: Patch, site: Site):
    (record,) = [record for record in fusepatch.status() if record.id == patch.id]
    (found,) = [found for found in record.sites if found.module == site.module]
    return found


def activate_on_bent(patch: Patch, site: Site, how: str):
    if site.unneeded is not None:
        importlib.import_module("kits.cuda_build")
    targets = bend(site, how)
    fusepatch.activate()
    found = record_of(patch, site)
    called = None
    if how == "bent":
        owner, name = targets[0]
        try:
            called = getattr(owner, name)()
        except StrictError as error:
            called = f"StrictError: {error}"
    return found.outcome.value, str(found.reason), called


@pytest.mark.parametrize(("patch", "site"), SITES, ids=IDS)
def test_a_target_that_is_gone_is_absent(patch: Patch, site: Site) -> None:
    load(site)
    outcome, reason, _ = forked(activate_on_bent, patch, site, "removed", env={"FUSEPATCH": "0"})
    assert outcome == "ABSENT"
    assert f"{site.module} has no" in reason


@pytest.mark.parametrize(("patch", "site"), SITES, ids=IDS)
def test_a_target_with_another_shape_has_drifted_and_is_left_alone(patch: Patch, site: Site) -> None:
    load(site)
    outcome, reason, called = forked(activate_on_bent, patch, site, "bent", env={"FUSEPATCH": "0"})
    assert outcome in ("DRIFTED", "ABSENT")
    assert called == "bent"
    if outcome == "DRIFTED":
        for part in ("no longer takes", "wanted", "upstream is left as it is"):
            assert part in reason


@pytest.mark.parametrize(("patch", "site"), SITES, ids=IDS)
def test_strict_raises_at_the_first_use_of_a_drifted_target(patch: Patch, site: Site) -> None:
    load(site)
    outcome, _, called = forked(activate_on_bent, patch, site, "bent", env={"FUSEPATCH": "0", "FUSEPATCH_STRICT": "1"})
    if outcome == "DRIFTED":
        sharing = [other.id for other, there in SITES if there.module == site.module]
        assert called.startswith(tuple(f"StrictError: {name}: DRIFTED" for name in sharing))


def test_a_drifted_site_never_stops_the_others() -> None:
    patch, site = SITES[0]
    load(site)

    def attempt():
        activate_on_bent(patch, site, "bent")
        return [found.outcome.value for record in fusepatch.status() for found in record.sites]

    outcomes = forked(attempt, env={"FUSEPATCH": "0"})
    assert outcomes[0] == "DRIFTED"
    assert {"FAILED", "DRIFTED"}.isdisjoint(outcomes[1:])


def write(root: Path, module: str, source: str) -> None:
    """A module of that dotted name with `source`, below packages that are empty."""
    *packages, name = module.split(".")
    for package in packages:
        root = root / package
        root.mkdir(exist_ok=True)
        (root / "__init__.py").touch()
    (root / f"{name}.py").write_text(source)


LOOK = """
import sys, fusepatch
module = sys.argv[1] if len(sys.argv) > 1 else {module!r}
try:
    __import__(module)
    print("imported")
except ImportError as error:
    print("ImportError", error)
for record in fusepatch.status():
    for site in record.sites:
        if (record.id, site.module) == ({patch!r}, {module!r}):
            print(site.outcome.value, "|", site.reason)
"""


@pytest.mark.parametrize(("patch", "site"), SITES, ids=IDS)
def test_an_empty_shadow_of_the_module_is_absent(patch: Patch, site: Site, tmp_path: Path) -> None:
    write(tmp_path, site.module, "")
    done = fresh(LOOK.format(patch=patch.id, module=site.module), env={"PYTHONPATH": str(tmp_path)}, check=True)
    imported, outcome = done.stdout.splitlines()
    assert imported == "imported"
    assert outcome.startswith(("ABSENT", "GATED"))
    assert done.stderr == ""


@pytest.mark.parametrize("upstream", UPSTREAMS)
def test_an_empty_shadow_of_the_package_leaves_the_script_unharmed(upstream: str, tmp_path: Path) -> None:
    (tmp_path / upstream).mkdir()
    (tmp_path / upstream / "__init__.py").touch()
    patch, site = next((patch, site) for patch, site in SITES if site.upstream.import_name == upstream)
    code = f"import {upstream}\n{LOOK.format(patch=patch.id, module=site.module)}"
    done = fresh(code, env={"PYTHONPATH": str(tmp_path)}, check=True)
    imported, outcome = done.stdout.splitlines()
    assert imported.startswith("ImportError No module named")
    assert outcome.startswith(("ABSENT", "GATED"))
    assert done.stderr == ""


@pytest.mark.parametrize("upstream", UPSTREAMS)
def test_an_upstream_that_raises_on_import_raises_its_own_error(upstream: str, tmp_path: Path) -> None:
    patch, site = next((patch, site) for patch, site in SITES if site.upstream.import_name == upstream)
    write(tmp_path, site.module, "raise ImportError('libcuda.so.1 is missing')")
    done = fresh(LOOK.format(patch=patch.id, module=site.module), env={"PYTHONPATH": str(tmp_path)}, check=True)
    imported, outcome = done.stdout.splitlines()
    assert imported == "ImportError libcuda.so.1 is missing"
    assert outcome.startswith(("PENDING", "ABSENT", "GATED", "DRIFTED"))


def test_a_module_that_is_still_being_imported_is_patched_by_the_next_activation(tmp_path: Path) -> None:
    site = SITES[0][1]
    activating = "import fusepatch\nfor r in fusepatch.status():\n    print(r.sites[0].outcome.value, '|', r.reason)\n"
    write(tmp_path, site.module, activating + "def _apply_liger_kernel_to_instance(model, **kwargs): ...\n")
    code = f"""
    import {site.module}
    import fusepatch
    fusepatch.activate()
    print(fusepatch.status()[0].outcome.value)
    """
    lines = fresh(code, env={"PYTHONPATH": str(tmp_path)}, check=True).stdout.splitlines()
    assert lines[0].startswith(f"PENDING | {site.module} was still being imported when fusepatch was activated")
    assert "call fusepatch.activate() once more" in lines[0]
    assert lines[-1] == "DRIFTED", "the copy has one target of three, and is looked at once it is complete"


def test_an_environment_without_triton(tmp_path: Path) -> None:
    write(tmp_path, "triton", "raise ImportError('no triton here')")
    code = """
    import fusepatch
    try:
        import liger_kernel.transformers.monkey_patch
    except ImportError as error:
        print("ImportError", error)
    print(sorted({record.outcome.value for record in fusepatch.status()}))
    """
    if importlib.util.find_spec("liger_kernel") is None:
        pytest.skip("liger_kernel is not installed in this environment")
    done = fresh(code, env={"PYTHONPATH": str(tmp_path)}, check=True)
    error, outcomes = done.stdout.splitlines()
    assert error == "ImportError no triton here"
    assert "FAILED" not in outcomes
