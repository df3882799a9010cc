"""Does a target still have the shape that a patch was written for: asked of the loaded object, or of its source."""

from __future__ import annotations

import ast
import fnmatch
import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping
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
    by_keyword = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return _broken(Contract(by_keyword, any(p.kind is p.VAR_KEYWORD for p in parameters)), contract)


class Seen(NamedTuple):
    """What a slot's path leads to: the functions by their paths, each with how it breaks the contract (None where it
    holds).

    `unclear` says that the source does not show it: the name is inherited, imported, assigned, or defined in a branch.
    """

    slot: Slot
    functions: Mapping[str, str | None]
    unclear: bool = False


def in_source(site: Site) -> tuple[Seen, ...] | None:
    """What the source of the site's module shows of each slot, without importing anything; None where there is no such
    module."""
    path = source_path(site.module)
    if path is None:
        return None
    scope = _read(path, path.stat().st_mtime_ns) if path.exists() else None
    if scope is None:
        return tuple(Seen(slot, {}, unclear=True) for slot in site.slots)
    return tuple(_seen(slot, scope) for slot in site.slots)


class _Scope(NamedTuple):
    """What a module or a class binds its names to: the contract that a function keeps, a class, or None for what only
    an import shows. Where it is `open` there may be more names, from a base class or a star import."""

    names: Mapping[str, Contract | _Scope | None]
    open: bool


@functools.cache  # `status` asks again and again, and parsing what is still to be imported takes up to a second
def _read(path: Path, changed: int) -> _Scope | None:
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        return None  # importing it will say why
    return _scope(body)


def _scope(body: list[ast.stmt], derived: bool = False) -> _Scope:
    names: dict[str, Contract | _Scope | None] = {}
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = statement.args
            by_keyword = tuple(argument.arg for argument in (*arguments.args, *arguments.kwonlyargs))
            names[statement.name] = Contract(by_keyword, arguments.kwarg is not None)
        elif isinstance(statement, ast.ClassDef):
            more = bool(statement.bases or statement.keywords or statement.decorator_list)
            names[statement.name] = _scope(statement.body, more)
        else:
            names.update(dict.fromkeys(_bound(statement)))
    return _Scope(names, derived or "*" in names)


def _bound(statement: ast.stmt) -> set[str]:
    names = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


def _seen(slot: Slot, scope: _Scope) -> Seen:
    *classes, name = slot.path.split(".")
    for part in classes:
        inner = scope.names.get(part)
        if not isinstance(inner, _Scope):
            return Seen(slot, {}, unclear=inner is None and (part in scope.names or scope.open))
        scope = inner
    found = {other: bound for other, bound in scope.names.items() if fnmatch.fnmatchcase(other, name)}
    if "*" not in name and (scope.open or (classes and hasattr(object, name))):
        found.setdefault(name, None)
    inside = slot.path.removesuffix(name)
    kept = {inside + other: bound for other, bound in found.items() if isinstance(bound, Contract)}
    functions = {path: _broken(contract, slot.contract) for path, contract in kept.items()}
    return Seen(slot, functions, unclear=len(functions) < len(found))


def describe(slot: Slot) -> str:
    """The wanted shape in words."""
    named = ", ".join(slot.contract.parameters)
    takes = [f"the parameter{'s' if len(slot.contract.parameters) > 1 else ''} {named}"] if named else []
    if slot.contract.keywords:
        takes.append("further keywords")
    return f"{slot.path} taking {' and '.join(takes)}" if takes else slot.path


def _broken(kept: Contract, contract: Contract) -> str | None:
    missing = [name for name in contract.parameters if name not in kept.parameters]
    if missing:
        return f"no longer takes {', '.join(missing)}"
    if contract.keywords and not kept.keywords:
        return "no longer takes further keywords"
    return None


def source_path(module: str) -> Path | None:
    """The file that an import of the module would run, found without importing anything; None where there is no such
    module."""
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
