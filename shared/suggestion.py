"""Which known name was probably meant by an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The question to ask about `name`, or nothing where no known name is close.

    Example: `did_you_mean("m2p0", ["dapo", "m2po"])` is `did you mean m2po?`.
    """
    close = difflib.get_close_matches(name, list(known), n=2)
    return f"did you mean {' or '.join(close)}?" if close else ""
