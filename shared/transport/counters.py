"""Counters of a connection's events, for metrics and tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from shared.disk import Waits

ErrorKind = Literal["unreachable", "slow_consumer", "permissions", "access_denied", "malformed", "unanswered", "other"]
"""unreachable: the connection broke, or an attempt to connect failed. slow_consumer: this client
dropped messages. permissions: the server forbade a subject. access_denied: it refused this
process's key, or its identity could not be verified. malformed: a message that cannot be parsed, or
invalid data from the server. unanswered: a request without an answer before its deadline. other:
any other error of the server or the client.
"""

ERROR_KINDS: tuple[ErrorKind, ...] = get_args(ErrorKind)


@dataclass(slots=True)
class Counters:
    """Counts since a connection was opened. stores: waits until the server had stored a message,
    which it does before it answers.
    """

    connects: int = 0
    disconnects: int = 0
    reconnects: int = 0
    errors: dict[ErrorKind, int] = field(default_factory=lambda: dict.fromkeys(ERROR_KINDS, 0))
    stores: Waits = field(default_factory=Waits)
