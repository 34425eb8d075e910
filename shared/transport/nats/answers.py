"""What a server answers is data. Whoever runs the swarm's server may answer anything, and on one
without accounts so may whoever subscribes to the subjects of requests, faster than the server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shared.transport.base import TransportError


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Read an answer within the block, without waiting for anything. `what`: the request, for the
    message.

    Raises:
        TransportError: the answer is not what a server says.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise TransportError(f"{what}: the server's answer cannot be read ({type(error).__name__})") from None


def answer_object(text: bytes, what: str) -> dict[str, Any]:
    """The JSON object that was answered. Raises TransportError: it is none."""
    with readable(what):
        found = json.loads(text)
        if not isinstance(found, dict):
            raise TypeError(type(found).__name__)
        return found


def count_of(value: Any) -> int:
    """A number of messages, bytes or a place in a stream. Raises ValueError for another value."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**64:
        raise ValueError("no count")
    return value
