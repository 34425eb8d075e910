"""The errors that a connection's client reports. They are counted by kind, and each is logged once
until the next successful connection.
"""

from __future__ import annotations

import nats.errors
import structlog

from shared.os_words import in_words
from shared.transport.base import AccessDenied
from shared.transport.counters import Counters, ErrorKind
from shared.transport.nats import credentials
from shared.transport.nats.answers import said
from shared.transport.nats.options import Options
from shared.transport.nats.parser import ServerMisbehaves

log = structlog.get_logger(__name__)

_LOST = (nats.errors.UnexpectedEOF, nats.errors.StaleConnectionError, nats.errors.NoServersError, nats.errors.ConnectionClosedError)
MOST_TOLD = 32
"""Most different errors logged until the next connection; somebody who makes them up could cause
any number.
"""


class Complaints:
    """The errors of one server's connection."""

    def __init__(self, options: Options, counters: Counters) -> None:
        self._options = options
        self._counters = counters
        self._forbidden = ""
        self._denials: dict[str, str] = {}
        self._refused = False
        self._told: set[str] = set()
        self.newest = ""
        """Description of the latest error; empty if there was none since the last `settle`."""

    @property
    def denials(self) -> str:
        """Why servers did not let this process in while the first connection was being made, a
        sentence each.
        """
        return "\n".join(self._denials.values())

    def begin(self) -> None:
        """The first connection is being made."""
        self._denials.clear()

    def hear(self, error: Exception, *, opening: bool, server: str = "") -> None:
        """Record one error.

        Args:
            error: What nats-py said.
            opening: Whether the first connection is being made.
            server: The address that was tried, where the url has several.

        Raises:
            AccessDenied: while `opening`, and no server of the url will let this process in:
                nothing else would end nats-py's attempts. As long as one has not refused, it is
                tried.
        """
        options = self._options
        denied = credentials.denial(error, server or options.url, options.key_file, options.ca_file)
        kind = _kind_of(error, denied=denied is not None)
        self._counters.errors[kind] += 1
        if kind == "permissions":
            self._forbidden = str(error).lower()
        described = f"{type(error).__name__}: {said(in_words(error))}" if str(error) else type(error).__name__
        self._tell(described)
        self.newest = described
        if denied is not None and opening:
            self._denials[server] = denied
            if len(self._denials) >= len(options.servers):
                raise AccessDenied(self.denials, key_refused=credentials.is_key_refusal(error))
        if credentials.is_key_refusal(error) and not self._refused:
            self._refused = True
            log.error(
                "key_refused",
                url=options.url,
                key_file=options.key_file,
                remedy="the key was replaced or removed at the server while this process ran: restart this service with the new "
                "key, or put the public key back into the server's configuration and reload; the connection is retried until then",
            )

    def _tell(self, described: str) -> None:
        if described in self._told or len(self._told) > MOST_TOLD:
            return
        self._told.add(described)
        if len(self._told) <= MOST_TOLD:
            log.warning("nats_error", url=self._options.url, error=described)
        else:
            log.warning(
                "nats_errors_untold", url=self._options.url, remedy="further ones are only counted (swarm_nats_errors_total)"
            )

    def forbids(self, subject: str) -> bool:
        """Whether the last permissions violation was about `subject`."""
        return f'"{subject}"'.lower() in self._forbidden

    def settle(self) -> None:
        """Record a successful connection; errors after it are logged again."""
        self.newest, self._refused = "", False
        self._told.clear()


def _kind_of(error: Exception, *, denied: bool) -> ErrorKind:
    if "permissions violation" in str(error).lower():
        return "permissions"
    if denied:
        return "access_denied"
    if isinstance(error, nats.errors.SlowConsumerError):
        return "slow_consumer"
    if isinstance(error, (UnicodeDecodeError, IndexError, ServerMisbehaves)):
        return "malformed"
    return "unreachable" if isinstance(error, (OSError, TimeoutError, *_LOST)) else "other"
