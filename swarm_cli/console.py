"""Where a command's words go: results to standard output, everything else to standard error."""

from __future__ import annotations

import sys


def note(text: str) -> None:
    """A line for the person at the terminal."""
    print(text, file=sys.stderr, flush=True)
