"""`python -m docs.generate [FOLDER]`, in the root of a checkout."""

from __future__ import annotations

import sys

from .pages import main

sys.exit(main())
