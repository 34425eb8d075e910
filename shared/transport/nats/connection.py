"""A connection to a NATS server: its address, its errors, each logged once, and a client that
survives restarts of that server and never waits without a deadline.

nats-py silently retries a first connection, gives up for ever after an authorization error, and
buffers what is published while it reconnects. Here each of these ends in an exception, a log line
or a counter.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import nats.errors
import structlog

from shared.cancelling import cancel_and_wait, heeded_cancellation
from shared.text import error_text
from shared.transport.base import AccessDenied, Counters, Deadline, ErrorKind, NotConnected
from shared.transport.nats.answers import quote_server
from shared.transport.nats.claims import key_of, user_claims
from shared.transport.nats.client import Client, ServerMisbehaves
from shared.transport.nats.credentials import credential_settings, denial, is_key_refusal

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
        self.full = False
        """Whether a server said, since `begin`, that this key has no connection left."""
        self.newest = ""
        """Description of the latest error; empty if there was none since the last `settle`."""

    @property
    def denials(self) -> str:
        """Why servers did not let this process in while the first connection was being made, a
        sentence each.
        """
        return "\n".join(self._denials.values())

    def begin(self) -> None:
        self._denials.clear()
        self.full = False

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
        denied = denial(error, server or options.url, options.key_file, options.ca_file)
        self.full = self.full or _FULL in str(error).lower()
        kind = _kind_of(error, denied=denied is not None)
        self._counters.errors[kind] += 1
        if kind == "permissions":
            self._forbidden = str(error).lower()
        described = f"{type(error).__name__}: {quote_server(error_text(error))}" if str(error) else type(error).__name__
        self._tell(described)
        self.newest = described
        if denied is not None and opening:
            self._denials[server] = denied
            if len(self._denials) >= len(options.servers):
                raise AccessDenied(self.denials, key_refused=is_key_refusal(error))
        if is_key_refusal(error) and not self._refused:
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
        """Check whether the last permissions violation was about `subject`."""
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


_FULL = "maximum account active connections"
_SHUT_OUT = "other processes with this key hold all its connections, or the server's operator has shut it out: ask them"
_HUB = "check the network on the way and the hub's server"


@dataclass(frozen=True, slots=True)
class Options:
    """Ways to reach a server. Secrets are given as files, never as values."""

    url: str
    name: str
    key_file: str | None = None
    """An nkey seed (`SU...`) or NATS credentials (`.creds`)."""
    ca_file: str | None = None
    inbox_prefix: str = "_INBOX"
    domain: str = ""
    """JetStream domain behind the server; for a client of a leaf server, the hub's. Empty: the
    server's own.
    """

    may_ask: bool = True
    """Whether this user may ask the server about streams (`STREAM.INFO`)."""
    accounts: tuple[str, ...] = ()
    """Names of the accounts that this key may be of, the likeliest first, for a server whose
    accounts are claims; others ignore them.
    """
    hub: bool = False
    """Whether the server is a swarm's hub, which nobody here can start."""

    @property
    def servers(self) -> list[str]:
        return list(dict.fromkeys(self.url.split(",")))

    @property
    def if_absent(self) -> str:
        """Say what to do if the server does not answer a first connection."""
        return f"{_HUB}, or set nats.swarm_url" if self.hub else "start one with `swarm up` (`make run`), or set nats.node_url"

    @property
    def if_lost(self) -> str:
        """Say what to do if the server does not come back."""
        again = "start it again (`swarm restart nats` in a running swarm, `swarm up` otherwise)"
        return f"if it stays away, {_HUB if self.hub else again}"

    @property
    def api_prefix(self) -> str:
        return f"$JS.{self.domain}.API" if self.domain else "$JS.API"

    @property
    def demands_tls(self) -> bool:
        """Check whether this connection must be encrypted: it has an authority file or a `tls://`
        url.
        """
        return self.ca_file is not None or any(url.startswith("tls://") for url in self.servers)


RECONNECT_WAIT_S = 0.5
PING_INTERVAL_S = 20
CONNECT_TIMEOUT_S = 2
"""Limit of each step of connecting to one server: address, greeting, TLS handshake, answer."""
_ATTEMPT_S = 1.0
_REFUSED_WAIT_S = 1.0
"""Between two attempts with a key that was refused."""
_HEADERS_BYTES = 16 * 1024
"""Room kept below the server's `max_payload` for headers."""
_SLOW_LINE_BYTES_PER_S = 1_000_000


class Connection:
    """A NATS connection whose requests are retried until their deadline."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.counters = Counters()
        self._complaints = Complaints(options, self.counters)
        self._client: Any = None
        self._closing = False
        self._opening: Client | None = None
        self._reopening: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self._client is not None and bool(self._client.is_connected)

    @property
    def epoch(self) -> int:
        """Increases with each new connection; the server's state for an earlier one is gone."""
        return self.counters.connects + self.counters.reconnects

    @property
    def client(self) -> Any:
        """The nats-py client in use now; replaced when nats-py has given up on it."""
        return self._client

    @property
    def max_payload_bytes(self) -> int:
        return int(self._client.max_payload)

    @property
    def inline_limit_bytes(self) -> int:
        """Largest payload of one message, with room left for its headers."""
        return self.max_payload_bytes - _HEADERS_BYTES

    async def open(self, timeout_s: float, refused_s: float = 0.0) -> None:
        """Connect. A key that every server refuses is tried again for `refused_s`: its line may
        still be on the way, or the server's accounts may have been lost and come back.

        Raises:
            NotConnected: no server answered within `timeout_s`.
            AccessDenied: every server refuses, and what it refuses is not the key, or it still did
                after `refused_s`.
        """
        until, told, accounts = Deadline(refused_s), False, self.options.accounts or ("",)
        for number in itertools.count(1):
            try:
                await self._open(timeout_s, accounts[(number - 1) % len(accounts)])
                return
            except AccessDenied as error:
                if error.key_refused and number < len(accounts):
                    continue
                if not (refused_s and error.key_refused and self.options.key_file):
                    raise
                if until.passed:
                    raise AccessDenied(f"{error} (tried for {refused_s:g} s)", key_refused=True) from None
                if not told:
                    log.warning("key_refused_at_start", reason=str(error), retried_for_s=refused_s)
                told = True
            await asyncio.sleep(min(_REFUSED_WAIT_S, until.left_s))

    async def _open(self, timeout_s: float, account: str) -> None:
        if any(url.startswith(("ws://", "wss://")) for url in self.options.servers):
            # Over a websocket nats-py accepts frames of any size, before its parser can check them.
            raise AccessDenied(f"{self.options.url}: websockets are not supported: use a nats:// or tls:// address")
        settings = _settings(self.options) | self._callbacks()
        seed = settings.get("nkeys_seed_str")
        key = key_of(seed) if seed and account else None
        client = Client(demands_tls=self.options.demands_tls, claims=partial(user_claims, key, account) if key else None)
        self._opening = client
        self._complaints.begin()
        try:
            await _within(client.connect(**settings), timeout_s)
        except (AccessDenied, asyncio.CancelledError):
            await client.end(1.0)
            raise
        except (TimeoutError, nats.errors.Error, OSError, ValueError) as error:
            reason = (quote_server(error_text(error)) if str(error) else "") or self._complaints.denials or self._complaints.newest
            await client.end(1.0)
            raise NotConnected(
                f"no NATS server answers at {self.options.url} after {timeout_s:g} s{f' ({reason})' if reason else ''}",
                _SHUT_OUT if self._complaints.full else self.options.if_absent,
            ) from None
        finally:
            self._opening = None
        self._client = client
        self.counters.connects += 1

    async def close(self) -> None:
        """Flush, then disconnect, even if the caller is cancelled meanwhile."""
        self._closing = True
        with heeded_cancellation():  # nats-py may take the cancellation for its own
            try:
                await cancel_and_wait(self._reopening)  # wait until it has closed what it was opening
            finally:
                await self._disconnect()

    async def _disconnect(self) -> None:
        if self._client is None or self._client.is_closed:
            return
        try:
            with suppress(Exception):
                if self.connected:
                    await self._client.flush(timeout=2)
        finally:
            await self._client.end(2.0)

    async def until_connected(self, deadline: Deadline) -> bool:
        """Wait for the connection. False if the deadline passed first."""
        while not self.connected:
            if deadline.passed or self._closing:
                return False
            await asyncio.sleep(min(0.02, deadline.left_s))
        return True

    async def send(self, subject: str, payload: bytes) -> None:
        """Send without waiting for a reply, if there is a connection."""
        if self.connected:
            with suppress(nats.errors.Error):
                await self._client.publish(subject, payload)

    async def request(
        self, subject: str, payload: bytes, deadline: Deadline, *, headers: Mapping[str, str] | None = None, what: str
    ) -> Any:
        """Send a request until somebody answers. It must be idempotent, because it may arrive more
        than once.

        Raises:
            NotConnected: no answer before the deadline; `what` names the request in the message.
        """
        attempt_s, reason = _ATTEMPT_S + len(payload) / _SLOW_LINE_BYTES_PER_S, ""
        while not deadline.passed:
            if not await self.until_connected(deadline):
                break
            try:
                with heeded_cancellation():
                    return await self._client.request(
                        subject, payload, timeout=min(attempt_s, deadline.left_s), headers=dict(headers) if headers else None
                    )
            except nats.errors.NoRespondersError:
                reason = "nobody answers: the stream or consumer does not exist there, or JetStream is still starting"
                await asyncio.sleep(min(0.1, deadline.left_s))
            except (TimeoutError, nats.errors.TimeoutError):
                forbidden = self._complaints.forbids(subject)
                reason = "the server's permissions forbid this user to ask" if forbidden else "no answer in time"
                attempt_s *= 2
            except nats.errors.Error as error:
                reason = quote_server(error)
                await asyncio.sleep(min(0.05, deadline.left_s))
        self.counters.errors["unanswered"] += 1
        what = f"{what} at {self.options.url}"
        raise NotConnected(f"{what}: {reason or 'no time left'}") if self.connected else lost(what, self.options)

    @asynccontextmanager
    async def replies(self, subject: str, payload: bytes) -> AsyncIterator[asyncio.Queue[Any]]:
        """Send one request with many replies, which arrive in the queue inside the block."""
        queue: asyncio.Queue[Any] = asyncio.Queue()

        async def receive(message: Any) -> None:
            queue.put_nowait(message)

        client = self._client
        inbox = client.new_inbox()
        # Both limits are off because the request itself limits the replies.
        subscription = await client.subscribe(inbox, cb=receive, pending_msgs_limit=0, pending_bytes_limit=0)
        try:
            await client.publish(subject, payload, reply=inbox)
            yield queue
        finally:
            with suppress(nats.errors.Error):
                await subscription.unsubscribe()

    def _callbacks(self) -> dict[str, Any]:
        return {
            "error_cb": self._on_error,
            "disconnected_cb": self._on_disconnected,
            "reconnected_cb": self._on_reconnected,
            "closed_cb": self._on_closed,
            "lame_duck_mode_cb": self._on_lame_duck,
        }

    async def _on_error(self, error: Exception) -> None:
        # nats-py would retry a first connection for ever; raising here ends `connect`.
        tried = self._opening.tried if self._opening is not None else ""
        self._complaints.hear(error, opening=self._opening is not None, server=tried)

    async def _on_disconnected(self) -> None:
        if self._client is not None and not self._closing:
            log.warning("nats_disconnected", url=self.options.url)

    async def _on_reconnected(self) -> None:
        self.counters.reconnects += 1
        self._complaints.settle()
        log.info("nats_reconnected", url=self.options.url)

    async def _on_lame_duck(self) -> None:
        log.info("nats_lame_duck", url=self.options.url)

    async def _on_closed(self) -> None:
        if self._client is None or self._closing:
            return
        log.error("nats_gave_up", url=self.options.url, error=self._complaints.newest, remedy="opening a new connection")
        self._reopening = asyncio.create_task(self._reopen())

    async def _reopen(self) -> None:
        """nats-py gives up a connection for good if the server refuses its credentials, as happens
        while keys are rotated. This opens a new one, waiting twice as long each time, at most half
        a minute.
        """
        wait_s = RECONNECT_WAIT_S
        while not self._closing:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 30.0)
            try:
                await self.open(10.0)
            except AccessDenied as error:
                log.error("nats_access_denied", reason=str(error), retry_s=wait_s)
                continue
            except NotConnected:
                continue
            self._complaints.settle()
            log.info("nats_reopened", url=self.options.url)
            return


def lost(what: str, options: Options) -> NotConnected:
    """Why `what` failed on a broken connection, and what to do."""
    cause = "not connected: the server has not answered since the connection broke"
    return NotConnected(f"{what}: {cause}", options.if_lost)


def _settings(options: Options) -> dict[str, Any]:
    """Arguments for nats-py's `connect`. Reconnecting never ends, because a service outlives its
    server's restarts. No call waits for it for ever, because each has its own deadline.
    `pending_size` limits, in bytes, what may wait to be sent meanwhile. Raises AccessDenied for
    files that cannot be used.
    """
    return {
        "servers": options.servers,
        "name": options.name,
        "connect_timeout": CONNECT_TIMEOUT_S,
        "reconnect_time_wait": RECONNECT_WAIT_S,
        "max_reconnect_attempts": -1,
        "ping_interval": PING_INTERVAL_S,
        "max_outstanding_pings": 2,
        "pending_size": 64 * 1024 * 1024,
        "inbox_prefix": options.inbox_prefix,
        **credential_settings(options.key_file, options.ca_file),
    }


async def _within(connecting: Coroutine[Any, Any, None], timeout_s: float) -> None:
    """Await nats-py's `connect`, which retries for ever. It runs in a task because it may swallow
    the only cancellation of a deadline.
    """
    task = asyncio.create_task(connecting)
    # A cancelled caller does not retrieve the exception, which asyncio would then log.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise TimeoutError
        task.result()
    finally:
        await cancel_and_wait(task)
