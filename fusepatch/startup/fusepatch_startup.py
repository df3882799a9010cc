"""Switches fusepatch on in processes that nobody wrote an import into: children, workers, plugins.

It lies at the root of site-packages, beside the `.pth` file that calls it when `FUSEPATCH` is set, and entry points for
plugins name it (`verl.plugins`). It costs a process that imports none of the upstreams one entry in `sys.meta_path`;
the package itself is imported when the first of them is.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # what is imported here is paid for by every child; `os` and `sys` are loaded before it
    from importlib.machinery import ModuleSpec

TRIGGERS = frozenset({"liger_kernel", "ray", "torch", "transformers", "trl", "verl"})
"""Top-level import names that bring the package in: torch, and every upstream that a patch has a site in."""


class _Finder:
    """Brings the package in at the first import of a trigger, then steps aside."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in TRIGGERS:
            return None
        from contextlib import suppress
        from importlib.util import find_spec

        with suppress(ValueError):  # another thread may have been faster; the import below waits for it
            sys.meta_path.remove(self)
        _import_package()
        # Asked again, so that the hooks which the package has just put in front of the finders see this import too.
        return find_spec(name)


def start() -> None:
    """Switch this process on if `FUSEPATCH` says so; cheap until an upstream is imported. Never raises."""
    if os.environ.get("FUSEPATCH", "") in ("", "0") or "fusepatch" in sys.modules:
        return
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if TRIGGERS.isdisjoint(sys.modules):
        sys.meta_path.insert(0, _Finder())
    else:
        _import_package()


def _import_package() -> None:
    # Nobody wrote an import in this process: what goes wrong is said, and the program goes on.
    try:
        import fusepatch  # noqa: F401
    except Exception as error:
        from contextlib import suppress

        with suppress(Exception):
            _say(f"fusepatch: not active in process {os.getpid()}: {error}\n")


def _say(text: str) -> None:
    # As `fusepatch.engine.notice`, which is a part of what could not be imported.
    stream, own = sys.stderr, sys.__stderr__
    if stream is None:  # print would take stdout
        return
    stream.flush()
    if own is not None and stream is own:
        # Past its buffer, which a full disk would leave for the interpreter's end to fail on.
        os.write(own.fileno(), text.encode(own.encoding, "backslashreplace"))
    else:
        stream.write(text)
        stream.flush()


start()  # whoever loads an entry point imports the module that it names, and calls nothing
