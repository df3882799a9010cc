"""The matrix as data, which of its environments this is, and how a door is opened in a fresh process."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import fusepatch
from tools.rows import MATRIX, Key, enter, make_overlay, outcomes

CHECKOUT = Path(fusepatch.__file__).parent.parent
OVERLAYS = "UPSTREAM_OVERLAYS"
"""The variable that names the folder in which overlays are installed, and kept for the next run."""

NEEDS = {
    "trainer": ("transformers", ">=4.51"),
    "grpo_trainer": ("trl", ">=0.17"),
    "verl_engine": ("verl", ">=0.6"),
    "verl_worker": ("verl", "<0.8"),
    "trinity_worker": ("trinity-rft", "<0.6"),
    "trinity_engine": ("trinity-rft", ">=0.6"),
    "llama_factory": ("llamafactory", ">=0.9"),
    "axolotl_plugin": ("axolotl", ">=0.19"),
    "openrlhf_actor": ("openrlhf", ">=0.11"),
    "ray_driver": ("ray", ">=2.40"),
    "ray_verl": ("verl", ">=0.7"),
}
"""Which upstream each door needs, beside a Liger."""


@dataclass(frozen=True)
class Seen:
    """What a door printed: the models by name, and fusepatch's own records where it was active."""

    models: Mapping[str, Any]
    records: Mapping[str, Any] | None

    def liger(self, name: str) -> dict[str, bool]:
        """Which kernels sit in the model."""
        kernels: dict[str, bool] = self.models[name]["liger"]
        return kernels

    def notes(self, kind: str) -> str:
        """The texts of `replaced` or `fallbacks` of liger.instance_flags, one per line."""
        assert self.records is not None, "fusepatch was not active in this process"
        return "\n".join(self.records["liger.instance_flags"][kind])


def version(distribution: str) -> str | None:
    """The installed version of a distribution."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def factor() -> str | None:
    """The factor whose pins on upstreams hold in this environment: all of `no_deps`, transformers and TRL."""
    for name, table in MATRIX["factor"].items():
        pins = [
            *table["no_deps"],
            *(text for text in table["requirements"] if text.startswith(("transformers=", "trl="))),
        ]
        if all(_holds(Requirement(pin)) for pin in pins):
            return str(name)
    return None


def overlays() -> list[dict[str, Any]]:
    """The overlays that belong on this environment and that its tests look at."""
    here = [overlay for overlay in MATRIX["overlay"] if overlay["factor"] == factor()]
    return [overlay for overlay in here if overlay.get("runs_in", "tests") == "tests"]


def sites(overlay: str | None = None) -> tuple[dict[Key, str], dict[Key, str]]:
    """What became of each site once its module was imported, and why."""
    seen = open_door("sites", overlay=overlay)
    assert seen.records is not None
    return outcomes(seen.records)


def needs(door: str) -> None:
    """Skip the test where this environment does not have the door's upstream, or no Liger."""
    distribution, specifier = NEEDS[door]
    found = version(distribution)
    if found is None or not SpecifierSet(specifier, prereleases=True).contains(found):
        pytest.skip(f"{door} needs {distribution} {specifier}, here: {found}")
    if version("liger-kernel") is None and version("liger-kernel-nightly") is None:
        pytest.skip(f"{door} needs a Liger-Kernel")


@functools.cache
def open_door(
    door: str, *arguments: str, variables: tuple[str, ...] = (), patched: bool = True, overlay: str | None = None
) -> Seen:
    """Run a door in a fresh process and read its last line; the same call is made once per session.

    `variables` are `NAME=value`; `LIGER_X=0` is short for `FUSEPATCH_LIGER_X=0`.
    """
    paths = [*([overlay] if overlay else []), CHECKOUT]
    settings = dict(_variable(text) for text in variables)
    seen = enter(door, *arguments, python=sys.executable, paths=paths, patched=patched, variables=settings)
    return Seen(seen["models"], seen.get("fusepatch"))


def install_overlay(overlay: Mapping[str, Any]) -> str:
    """The folder of an overlay, installed there if it is not yet; skips where no folder for overlays is named."""
    root = os.environ.get(OVERLAYS)
    if not root:
        pytest.skip(f"{OVERLAYS} names no folder to install {overlay['requirements']} in")
    return str(make_overlay(tuple(overlay["requirements"]), sys.executable, Path(root)))


def _holds(pin: Requirement) -> bool:
    found = version(pin.name)
    return found is not None and pin.specifier.contains(found, prereleases=True)


def _variable(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return (f"FUSEPATCH_{name}" if name.startswith("LIGER_") else name), value
