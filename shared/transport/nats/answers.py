"""Reads a server's answers as untrusted data. Whoever runs the swarm's server may answer anything,
and so may anyone on a server without accounts who subscribes to the requests' subjects and is
faster.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from shared.text import visible
from shared.transport.base import TransportError

SAID_CHARACTERS = 300
"""More than any of JetStream's own sentences."""
LARGEST_COUNT = 2**62
"""Counts and sequences from here on are no server's; the sum of two smaller ones still fits where
64 bits are kept.
"""


def quote_server(text: object) -> str:
    """Quote what a server said in one line that is not endless and does nothing to a terminal:
    errors quote it, and whoever shows an error keeps its line breaks.
    """
    return visible(str(text), SAID_CHARACTERS)


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


def count_of(value: Any, below: int = LARGEST_COUNT) -> int:
    """A count of messages or bytes, or a sequence number. Raises ValueError for anything else."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < below:
        raise ValueError("no count")
    return value


def count_in(headers: Mapping[str, str], name: str, default: int | None = None) -> int:
    """As `count_of`, of a header. Raises KeyError if there is none and no default."""
    text = headers[name] if default is None else headers.get(name, str(default))
    return count_of(int(text))
