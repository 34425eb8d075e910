"""Reads a server's answers as untrusted data. Whoever runs the swarm's server may answer anything,
and so may anyone on a server without accounts who subscribes to the requests' subjects and is
faster.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shared.transport.base import TransportError


@contextmanager
def readable(what: str) -> Iterator[None]:
    """For a block that reads an answer and awaits nothing. `what`: the request, for the message.

    Raises:
        TransportError: the answer is not in a server's format.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise TransportError(f"{what}: the server's answer cannot be read ({type(error).__name__})") from None


def answer_object(text: bytes, what: str) -> dict[str, Any]:
    """The answer's JSON object. Raises TransportError if it is not one."""
    with readable(what):
        found = json.loads(text)
        if not isinstance(found, dict):
            raise TypeError(type(found).__name__)
        return found


def count_of(value: Any) -> int:
    """A count of messages or bytes, or a sequence number. Raises ValueError for anything else."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**64:
        raise ValueError("no count")
    return value
