"""Which distribution ships an import name, in which version, and what a version gate says about it."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING, NamedTuple

from fusepatch.engine.patch import Site, Upstream

if TYPE_CHECKING:
    import importlib.metadata


class Found(NamedTuple):
    """An upstream as it is installed. `version` is None for a copy without metadata (a checkout on the path)."""

    distribution: str | None
    version: str | None

    def __str__(self) -> str:
        name = self.distribution or "a copy without metadata"
        return f"{name} {self.version}" if self.version else f"{name} of unknown version"


def find(upstream: Upstream) -> Found | None:
    """The installed upstream, without importing it; None where it is not there.

    Where several distributions that ship the same import name are installed, the one installed last owns its files.
    """
    import importlib.metadata

    distributions = []
    for name in upstream.distributions:
        try:
            distributions.append(importlib.metadata.distribution(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    if distributions:
        owner = max(distributions, key=_installed_at)
        try:
            metadata = owner.metadata  # parsed anew at every access
        except (OSError, ValueError):  # unreadable, or not UTF-8: a copy of which nothing is known
            return Found(upstream.distributions[0], None)
        return Found(metadata["Name"], metadata["Version"])
    if not _importable(upstream.import_name):
        return None
    module = sys.modules.get(upstream.import_name)
    version = getattr(module, "__version__", None)
    return Found(None, version if isinstance(version, str) else None)


def _installed_at(distribution: importlib.metadata.Distribution) -> float:
    metadata = getattr(distribution, "_path", None)
    return os.stat(metadata).st_mtime if metadata is not None and os.path.exists(metadata) else 0.0


def _importable(import_name: str) -> bool:
    if import_name in sys.modules:
        return sys.modules[import_name] is not None
    return importlib.util.find_spec(import_name) is not None


class Gate(NamedTuple):
    """What the version ranges of a site and its upstream say. An unknown version is inside `supported` and outside
    `tested`."""

    supported: bool
    tested: bool


def gate(site: Site, version: str | None) -> Gate:
    """Compare a version with a site's ranges."""
    supported = is_within(version, site.supported)
    if supported is None:
        return Gate(supported=True, tested=False)
    return Gate(supported=supported, tested=supported and is_within(version, site.upstream.tested) is True)


def is_within(version: str | None, specifier: str) -> bool | None:
    """Whether a version is one of a range; None where it is unknown or cannot be read. Pre-releases and local tags
    count as the releases that they are.

    `prereleases=True` is passed always: the default for nightlies differs between releases of packaging
    (pypa/packaging PR #897).
    """
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return None if version is None else SpecifierSet(specifier).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return None


def in_release(site: Site, version: str | None) -> Site:
    """The site with the slots that are looked for in this version: all of them where the version is unknown."""
    wanted = (slot for slot in site.slots if not slot.releases or is_within(version, slot.releases) is not False)
    return site._replace(slots=tuple(wanted))
