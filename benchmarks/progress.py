"""Reports a row's progress on standard error."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"    {text}", file=sys.stderr, flush=True)
