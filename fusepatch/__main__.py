"""`python -m fusepatch`."""

from __future__ import annotations

import sys

from fusepatch.cli import main

sys.exit(main())
