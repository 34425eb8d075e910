"""The long forms of tests, if `TESTS_FULL=1` asks for them, as `make test-full` does."""

from __future__ import annotations

import os

FULL = os.environ.get("TESTS_FULL") == "1"
