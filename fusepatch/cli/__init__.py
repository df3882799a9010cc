"""The command line: `python -m fusepatch`, and the `fusepatch` script."""

from fusepatch.cli.main import main

__all__ = ["main"]
