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

    import_as_if_it_were_needed()
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


def import_as_if_it_were_needed() -> None:
    """The module whose site depends on torch's build and cuDNN: rows have what machines without a GPU can install."""
    with suppress(ModuleNotFoundError):
        import torch

        cuda, cudnn = torch.version.cuda, torch.backends.cudnn.version
        torch.version.cuda, torch.backends.cudnn.version = "13.0", lambda: 91900
        try:
            importlib.import_module("transformers.integrations.sdpa_attention")
        finally:
            torch.version.cuda, torch.backends.cudnn.version = cuda, cudnn


if __name__ == "__main__":
    main()
