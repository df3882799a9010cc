"""Door: the module of every site, imported in the order of the patches, then every library that a door may touch.

What is not installed stays out, and with `--patch` everything but the modules of that patch's sites.

    python tests/doors/sites.py --import-fusepatch
"""

from __future__ import annotations

import argparse
import importlib
import sys
from contextlib import suppress
from typing import Any

import script


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patch", metavar="ID", help="only the modules of this patch's sites")
    script.run(door, parser)


def door(arguments: argparse.Namespace) -> dict[str, Any]:
    if not arguments.import_fusepatch:
        sys.exit("sites.py: without --import-fusepatch there are no sites")
    from observe import DISTRIBUTIONS

    import fusepatch

    for patch in fusepatch.status():
        if arguments.patch not in (None, patch.id):
            continue
        for site in patch.sites:
            with suppress(ModuleNotFoundError):
                importlib.import_module(site.module)
    for import_name in DISTRIBUTIONS.values() if arguments.patch is None else ():
        with suppress(ModuleNotFoundError):
            importlib.import_module(import_name)
    return {"door": "sites", "models": {}}


if __name__ == "__main__":
    main()
