"""`python -m demo.child SCENARIO PATCHED FILE`: run one scenario in this process and write what it brings back as JSON.

The scenario is code as a user has it. Where PATCHED is 1, `import fusepatch` stands above it, and nothing else differs.
"""

from __future__ import annotations

import enum
import importlib
import json
import sys
from pathlib import Path
from typing import Any


def as_data(value: Any) -> Any:
    """Records as dictionaries and outcomes as words, all the way down."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        parts = [as_data(part) for part in value]
        return parts if names is None else dict(zip(names, parts, strict=True))
    return value


def main(name: str, patched: str, path: str) -> None:
    """Run the scenario, then ask fusepatch, where it is here, what became of its patches."""
    if patched == "1":
        import fusepatch  # noqa: F401
    rows = importlib.import_module(f"demo.scenarios.{name}").run()
    loaded = sys.modules.get("fusepatch")
    patches = as_data(loaded.status()) if loaded else None
    Path(path).write_text(json.dumps({"rows": rows, "patches": patches}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
