"""Does a target still have the shape that a patch was written for: asked of the loaded object, or of its source."""

from __future__ import annotations

import ast
import fnmatch
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from fusepatch.engine.patch import Contract, Site, Slot

if TYPE_CHECKING:
    from pathlib import Path


def broken_by(function: Callable[..., Any], contract: Contract) -> str | None:
    """How `function` breaks `contract`, as words for a sentence; None where it holds."""
    if not callable(function):
        return f"is a {type(function).__name__}, not a function"
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "has no readable signature"
    by_keyword = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    keywords = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return _broken(by_keyword, keywords, contract)


class InSource(NamedTuple):
    """What the source of a module says of a site.

    `problem` says what would break if the module were imported now; it is None where every contract holds that can be seen, or the
    source cannot be read (a compiled module says nothing). `inherited` are methods that their class leaves to a base class,
    of which only an import can show whether it has them.
    """

    problem: str | None
    inherited: tuple[str, ...] = ()


def in_source(site: Site) -> InSource:
    """Look at the source of the site's module, once, without importing anything."""
    path = _source_path(site.module)
    if path is None:
        return InSource(f"there is no module {site.module}")
    if not path.exists():
        return InSource(None)
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        return InSource(None)  # importing it will say why
    functions = dict(_functions(tree))
    classes = {statement.name for statement in tree.body if isinstance(statement, ast.ClassDef)}
    inherited = []
    for slot in site.slots:
        if slot.path.rpartition(".")[0] in classes and slot.path not in functions:
            inherited.append(slot.path)
            continue
        matches = [name for name in functions if fnmatch.fnmatchcase(name, slot.path)]
        if not matches:
            return InSource(f"{site.module} has no {slot.path}")
        broken = {name: _broken(*functions[name], slot.contract) for name in matches}
        problems = {name: problem for name, problem in broken.items() if problem is not None}
        if len(problems) == len(matches):
            name, problem = next(iter(problems.items()))
            return InSource(f"{name} {problem}")
    return InSource(None, tuple(inherited))


def describe(slot: Slot) -> str:
    """The wanted shape in words."""
    named = ", ".join(slot.contract.parameters)
    takes = [f"the parameter{'s' if len(slot.contract.parameters) > 1 else ''} {named}"] if named else []
    if slot.contract.keywords:
        takes.append("further keywords")
    return f"{slot.path} taking {' and '.join(takes)}" if takes else slot.path


def _broken(by_keyword: set[str], keywords: bool, contract: Contract) -> str | None:
    missing = [name for name in contract.parameters if name not in by_keyword]
    if missing:
        return f"no longer takes {', '.join(missing)}"
    if contract.keywords and not keywords:
        return "no longer takes further keywords"
    return None


def _source_path(module: str) -> Path | None:
    from pathlib import Path  # here, since every training script imports this module, and few ask for a source

    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:
        spec = None
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin else None
    for location in spec.submodule_search_locations or ():
        base = Path(location).joinpath(*rest)
        for candidate in (base.with_suffix(".py"), base / "__init__.py"):
            if candidate.exists():
                return candidate
        if any(base.parent.glob(f"{base.name}.*")):
            return base.with_suffix(".so")
    return None


def _functions(tree: ast.Module) -> Iterator[tuple[str, tuple[set[str], bool]]]:
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name, _shape(statement.args)
        elif isinstance(statement, ast.ClassDef):
            for member in statement.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{statement.name}.{member.name}", _shape(member.args)


def _shape(arguments: ast.arguments) -> tuple[set[str], bool]:
    return {a.arg for a in (*arguments.args, *arguments.kwonlyargs)}, arguments.kwarg is not None
