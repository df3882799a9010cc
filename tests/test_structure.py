"""What a module may import, read from the sources; that patches declare what they read; that what is public is
exported."""

from __future__ import annotations

import ast
import enum
import graphlib
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

import fusepatch
from fusepatch import errors, settings
from fusepatch.patches import PATCHES
from fusepatch.patches.frameworks import FRAMEWORKS

CHECKOUT = Path(__file__).parent.parent
PACKAGE = CHECKOUT / "fusepatch"
DOCS = CHECKOUT / "docs"

ERRORS = "fusepatch.errors"
FOUNDATION = {ERRORS, "fusepatch._version", "fusepatch.settings"}
BELOW_PATCHES = {*FOUNDATION, "fusepatch.engine", "fusepatch.loss", "fusepatch.optim"}
BELOW_REPORTING = {*BELOW_PATCHES, "fusepatch.patches"}
BELOW_ACTIVATION = {*BELOW_REPORTING, "fusepatch.reporting", "fusepatch.explain"}
EVERYTHING_BUT_TOOLS = {*BELOW_ACTIVATION, "fusepatch.activation", "fusepatch"}
MAY_IMPORT: dict[str, set[str]] = {
    ERRORS: set(),
    "fusepatch._version": set(),
    "fusepatch.settings": {ERRORS},
    "fusepatch.terminal": {ERRORS},
    "fusepatch.engine": {ERRORS},
    "fusepatch.loss": {ERRORS},
    "fusepatch.optim": {ERRORS},
    "fusepatch.patches": BELOW_PATCHES,
    "fusepatch.reporting": BELOW_REPORTING,
    "fusepatch.explain": BELOW_REPORTING,
    "fusepatch.activation": BELOW_ACTIVATION,
    "fusepatch": EVERYTHING_BUT_TOOLS - {"fusepatch"},
    "fusepatch.startup": {"fusepatch"},
    "fusepatch.testing": EVERYTHING_BUT_TOOLS,
    "fusepatch.bench": {*EVERYTHING_BUT_TOOLS, "fusepatch.terminal"},
    "fusepatch.cli": {*EVERYTHING_BUT_TOOLS, "fusepatch.terminal", "fusepatch.bench"},
    "fusepatch.__main__": {"fusepatch.cli"},
}
"""A room, which is a folder or a module at the top level, to the rooms that it may import beside itself."""


def upstreams_but(*names: str) -> set[str]:
    return {site.upstream.import_name for patch in PATCHES for site in patch.sites} - {*names}


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(module: str) -> Iterator[str]:
    """The modules of the package that a module imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(SOURCES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in SOURCES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in SOURCES:
                    yield name
                elif node.module in SOURCES:
                    yield str(node.module)


def room(module: str) -> str:
    return ".".join(module.split(".")[:2])


@pytest.mark.parametrize("module", SOURCES)
def test_imports_point_one_way(module: str) -> None:
    assert {room(name) for name in imports(module)} <= MAY_IMPORT[room(module)] | {room(module)}


def test_no_imports_go_in_a_circle() -> None:
    graph = {module: set(imports(module)) - {module} for module in SOURCES}
    assert len(tuple(graphlib.TopologicalSorter(graph).static_order())) == len(SOURCES)


def test_the_arrows_have_none_that_points_back() -> None:
    order = list(graphlib.TopologicalSorter(MAY_IMPORT).static_order())
    assert {room(module) for module in SOURCES} == set(order)
    for lower in ("engine", "loss", "optim", "settings"):
        assert order.index(f"fusepatch.{lower}") < order.index("fusepatch.patches")
    assert order.index("fusepatch.patches") < order.index("fusepatch.reporting") < order.index("fusepatch.activation")


NAMES_OF_CALLERS = ["fusepatch_", "trainer", "accelerate", "deepspeed", *FRAMEWORKS, *upstreams_but("torch")]
OF_CALLERS = re.compile(rf"(?<![a-z])(?:{'|'.join(NAMES_OF_CALLERS)})", re.IGNORECASE)


@pytest.mark.parametrize("module", [name for name in SOURCES if room(name) == "fusepatch.optim"])
def test_what_an_optimizer_can_do_names_no_variable_and_no_framework(module: str) -> None:
    text = SOURCES[module].read_text(encoding="utf-8")
    assert sorted({found.lower() for found in OF_CALLERS.findall(text)}) == []


def settings_read(module: str, others: set[str]) -> set[str]:
    """The fields of the settings in force that a module of the patches and what it imports there read."""
    tree = ast.parse(SOURCES[module].read_text(encoding="utf-8"))
    current = "settings.current()"
    names = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value) == current
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    own = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in {current, *names}
    }
    inside = [name for name in imports(module) if room(name) == "fusepatch.patches" and name not in others]
    return own.union(*(settings_read(name, others | {module}) for name in inside)) & set(settings.Settings._fields)


def declaring_module(id: str) -> str:
    (found,) = [name for name in SOURCES if name == f"fusepatch.patches.{id.replace('.', '_')}"]
    return found


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_a_patch_declares_the_variables_that_it_reads(patch: fusepatch.engine.patch.Patch) -> None:
    declared = {variable.field for name in patch.variables if (variable := settings.find(name)) is not None}
    assert len(declared) == len(patch.variables), "each is a row of the table"
    others = {declaring_module(other.id) for other in PATCHES if other is not patch} | {"fusepatch.patches"}
    assert settings_read(declaring_module(patch.id), others) == declared


def public_functions() -> list[str]:
    return [name for name in fusepatch.__all__ if inspect.isfunction(getattr(fusepatch, name))]


def types_within(annotation: object) -> Iterator[type]:
    """Our own types in an annotation, and in the fields of those."""
    for argument in typing.get_args(annotation):
        yield from types_within(argument)
    if isinstance(annotation, type) and annotation.__module__.startswith("fusepatch."):
        yield annotation
        if not issubclass(annotation, enum.Enum):
            for inner in typing.get_type_hints(annotation).values():
                yield from types_within(inner)


def test_what_public_functions_return_and_raise_is_exported() -> None:
    returned = {
        kind
        for name in public_functions()
        for kind in types_within(typing.get_type_hints(getattr(fusepatch, name)).get("return"))
    }
    raised = {kind for kind in vars(errors).values() if inspect.isclass(kind)}
    assert {"PatchRecord", "SiteRecord", "Outcome", "Reason", "Note"} == {kind.__name__ for kind in returned}
    for kind in returned | raised:
        exported = kind.__name__ in fusepatch.__all__ and getattr(fusepatch, kind.__name__) is kind
        assert exported, f"import {kind.__name__} in fusepatch/__init__.py, and add it to __all__ there"
        assert kind.__doc__


def test_every_exception_of_the_package_that_training_can_meet_is_among_them() -> None:
    elsewhere = {
        (module, node.name)
        for module in SOURCES
        if module != ERRORS and room(module) not in ("fusepatch.cli", "fusepatch.terminal", "fusepatch.bench")
        for node in ast.walk(ast.parse(SOURCES[module].read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and any("FusepatchError" in ast.unparse(base) for base in node.bases)
    }
    assert elsewhere == set()


def test_the_page_about_the_python_names_has_each() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\.\. auto(?:function|class|exception):: fusepatch\.(\w+)$", page, re.MULTILINE)
    assert sorted([*documented, "__version__"]) == sorted(fusepatch.__all__)
