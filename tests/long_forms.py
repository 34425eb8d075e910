"""Whether the long forms of tests were asked for: `TESTS_FULL=1`, as `make test-full` does."""

from __future__ import annotations

import os

FULL = os.environ.get("TESTS_FULL") == "1"
