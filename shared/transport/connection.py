"""One connection to a NATS server that survives restarts of that server and never waits without a deadline.

nats-py retries a first connection silently, gives up for ever after an authorization error and buffers what is published
while it reconnects; here each of these ends in an exception, a log line or a counter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import nats
import nats.errors
import structlog

from shared.cancelling import cancel_and_wait, heeded_cancellation
from shared.transport import credentials, headers
from shared.transport.base import AccessDenied, NotConnected
from shared.transport.counters import Counters, ErrorKind

log = structlog.get_logger(__name__)

RECONNECT_WAIT_S = 0.5
PING_INTERVAL_S = 20
_ATTEMPT_S = 1.0
_SLOW_LINE_BYTES_PER_S = 1_000_000
_LOST = (nats.errors.UnexpectedEOF, nats.errors.StaleConnectionError, nats.errors.NoServersError, nats.errors.ConnectionClosedError)


class Deadline:
    """A point in time by which an operation must have ended."""

    def __init__(self, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - self._loop.time())

    @property
    def passed(self) -> bool:
        """Whether it is over."""
        return self.left_s <= 0.0


@dataclass(frozen=True, slots=True)
class Options:
    """How to reach a server. Secrets are files, never values."""

    url: str
    name: str
    key_file: str | None = None
    """An nkey seed (`SU...`) or NATS credentials (`.creds`)."""
    ca_file: str | None = None
    inbox_prefix: str = "_INBOX"
    domain: str = ""
    """JetStream domain behind the server: the hub's, for a client of a leaf server. Empty: the server's own."""

    @property
    def api_prefix(self) -> str:
        """First tokens of JetStream's API subjects."""
        return f"$JS.{self.domain}.API" if self.domain else "$JS.API"

    @property
    def demands_tls(self) -> bool:
        """Whether this connection must be encrypted: it was given an authority or a `tls://` url."""
        return self.ca_file is not None or any(url.startswith(("tls://", "wss://")) for url in self.url.split(","))


class _Client(nats.NATS):  # type: ignore[misc]
    """nats-py, but for four things in 2.16: its read loop ends for good when a foreign message's status line is not UTF-8, it
    parses headers of any size, it goes on in the clear when a server, or somebody between, says that it has no TLS, and closing
    can raise what belongs to a task of its own."""

    def __init__(self, *, demands_tls: bool) -> None:
        super().__init__()
        self._demands_tls = demands_tls

    async def _process_info(self, info: Any, initial_connection: bool = False) -> None:
        if initial_connection and self._demands_tls and not info.get("tls_required"):
            raise nats.errors.Error(credentials.NO_TLS)
        await super()._process_info(info, initial_connection=initial_connection)

    async def end(self, timeout_s: float) -> None:
        """Close, whatever state the connection is in. `close` of 2.16 waits for the same future as the reconnecting task that it
        cancels, and with it the future: where the server went away just before, that raises CancelledError though nobody
        cancelled the caller."""
        with suppress(asyncio.CancelledError):
            try:
                async with asyncio.timeout(timeout_s):
                    await self.close()
            except Exception as error:
                log.debug("nats_close_failed", error=repr(error))

    async def _process_headers(self, block: Any) -> Any:
        if not block or headers.is_oversized(block):
            return headers.of_server(block) if block else None
        try:
            parsed = await super()._process_headers(block)
        except (UnicodeDecodeError, IndexError) as error:
            await self._error_cb(error)
            parsed = None
        if not parsed:
            return headers.of_server(block) if headers.is_stored(block) else None
        parsed.pop(headers.OVERSIZED_HEADER, None)  # a publisher's own is no mark
        return parsed


class Connection:
    """A NATS connection with requests that are tried again until their deadline."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.counters = Counters()
        self._client: Any = None
        self._closing = False
        self._opening = False
        self._last_error = ""
        self._forbidden = ""
        self._refused = False
        self._reopening: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """Whether the server can be reached now."""
        return self._client is not None and bool(self._client.is_connected)

    @property
    def epoch(self) -> int:
        """Grows with each new connection; what the server remembered of an earlier one is gone."""
        return self.counters.connects + self.counters.reconnects

    @property
    def client(self) -> Any:
        """The nats-py client in use now (another one after nats-py has given up on the last)."""
        return self._client

    @property
    def max_payload_bytes(self) -> int:
        """Largest message the server takes, headers included."""
        return int(self._client.max_payload)

    async def open(self, timeout_s: float) -> None:
        """Connect. Raises NotConnected after `timeout_s`, AccessDenied as soon as the server refuses."""
        client = _Client(demands_tls=self.options.demands_tls)
        settings = self._settings()
        self._opening = True
        try:
            await _within(client.connect(**settings), timeout_s)
        except (AccessDenied, asyncio.CancelledError):
            await client.end(1.0)
            raise
        except (TimeoutError, nats.errors.Error, OSError, ValueError) as error:
            reason = str(error) or self._last_error
            await client.end(1.0)
            raise NotConnected(
                f"no NATS server answers at {self.options.url} after {timeout_s:g} s{f' ({reason})' if reason else ''}: "
                "start one with `swarm up` (`make run`), or set nats.node_url"
            ) from None
        finally:
            self._opening = False
        self._client = client
        self.counters.connects += 1

    async def close(self) -> None:
        """Flush, then disconnect, also where the caller is cancelled meanwhile."""
        self._closing = True
        with heeded_cancellation():  # nats-py takes some for its own
            try:
                await cancel_and_wait(self._reopening)  # it closes what it was opening
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
        """Wait for the connection; False when the deadline came first."""
        while not self.connected:
            if deadline.passed or self._closing:
                return False
            await asyncio.sleep(min(0.02, deadline.left_s))
        return True

    async def send(self, subject: str, payload: bytes) -> None:
        """Send without waiting for anything, if there is a connection."""
        if self.connected:
            with suppress(nats.errors.Error):
                await self._client.publish(subject, payload)

    async def request(
        self, subject: str, payload: bytes, deadline: Deadline, *, headers: Mapping[str, str] | None = None, what: str
    ) -> Any:
        """Ask until somebody answers. The request must be idempotent: it may arrive more than once.

        Raises:
            NotConnected: no answer before the deadline; `what` says in the message what was asked.
        """
        attempt_s, reason = _ATTEMPT_S + len(payload) / _SLOW_LINE_BYTES_PER_S, ""
        while not deadline.passed:
            if not await self.until_connected(deadline):
                reason = "not connected"
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
                forbidden = f'"{subject}"'.lower() in self._forbidden
                reason = "the server's permissions forbid this user to ask" if forbidden else "no answer in time"
                attempt_s *= 2
            except nats.errors.Error as error:
                reason = str(error)
                await asyncio.sleep(min(0.05, deadline.left_s))
        self.counters.errors["unanswered"] += 1
        raise NotConnected(f"{what} at {self.options.url}: {reason or 'no time left'}")

    @asynccontextmanager
    async def replies(self, subject: str, payload: bytes) -> AsyncIterator[asyncio.Queue[Any]]:
        """Send one request that many messages answer. They appear in the queue until the block is left."""
        queue: asyncio.Queue[Any] = asyncio.Queue()

        async def receive(message: Any) -> None:
            queue.put_nowait(message)

        client = self._client
        inbox = client.new_inbox()
        # Both limits are off: what a request may bring is bounded by the request itself.
        subscription = await client.subscribe(inbox, cb=receive, pending_msgs_limit=0, pending_bytes_limit=0)
        try:
            await client.publish(subject, payload, reply=inbox)
            yield queue
        finally:
            with suppress(nats.errors.Error):
                await subscription.unsubscribe()

    def _settings(self) -> dict[str, Any]:
        options = self.options
        settings: dict[str, Any] = {
            "servers": options.url.split(","),
            "name": options.name,
            "connect_timeout": 2,
            "reconnect_time_wait": RECONNECT_WAIT_S,
            "max_reconnect_attempts": -1,
            "ping_interval": PING_INTERVAL_S,
            "max_outstanding_pings": 2,
            "pending_size": 64 * 1024 * 1024,
            "inbox_prefix": options.inbox_prefix,
            "error_cb": self._on_error,
            "disconnected_cb": self._on_disconnected,
            "reconnected_cb": self._on_reconnected,
            "closed_cb": self._on_closed,
            "lame_duck_mode_cb": self._on_lame_duck,
        }
        return settings | credentials.settings(options.key_file, options.ca_file)

    async def _on_error(self, error: Exception) -> None:
        denied = credentials.denial(error, self.options.url, self.options.key_file, self.options.ca_file)
        kind = _kind_of(error, denied=denied is not None)
        self.counters.errors[kind] += 1
        if kind == "permissions":
            self._forbidden = str(error).lower()
        described = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if described != self._last_error:
            log.warning("nats_error", url=self.options.url, error=described)
        self._last_error = described
        if denied is not None and self._opening:
            # nats-py would try again for ever; what its error callback raises ends `connect`.
            raise AccessDenied(denied)
        if credentials.is_key_refusal(error) and not self._refused:
            self._refused = True
            log.error(
                "key_refused",
                url=self.options.url,
                key_file=self.options.key_file,
                remedy="the key was replaced or removed at the server while this process ran: restart this service with the new "
                "key, or put the key's public half back into the server's configuration and reload; it is tried again until then",
            )

    async def _on_disconnected(self) -> None:
        if self._client is not None and not self._closing:
            self.counters.disconnects += 1
            log.warning("nats_disconnected", url=self.options.url)

    async def _on_reconnected(self) -> None:
        self.counters.reconnects += 1
        self._last_error, self._refused = "", False
        log.info("nats_reconnected", url=self.options.url)

    async def _on_lame_duck(self) -> None:
        log.info("nats_lame_duck", url=self.options.url)

    async def _on_closed(self) -> None:
        if self._client is None or self._closing:
            return
        log.error("nats_gave_up", url=self.options.url, error=self._last_error, remedy="opening a new connection")
        self._reopening = asyncio.create_task(self._reopen())

    async def _reopen(self) -> None:
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
            self._last_error, self._refused = "", False
            log.info("nats_reopened", url=self.options.url)
            return


async def _within(connecting: Coroutine[Any, Any, None], timeout_s: float) -> None:
    """Await nats-py's `connect`, which tries for ever. In a task, because it may swallow the one cancellation of a deadline."""
    task = asyncio.create_task(connecting)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody asks where the caller was cancelled
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise TimeoutError
        task.result()
    finally:
        await cancel_and_wait(task)


def _kind_of(error: Exception, *, denied: bool) -> ErrorKind:
    if "permissions violation" in str(error).lower():
        return "permissions"
    if denied:
        return "access_denied"
    if isinstance(error, nats.errors.SlowConsumerError):
        return "slow_consumer"
    if isinstance(error, (UnicodeDecodeError, IndexError)):
        return "malformed"
    return "unreachable" if isinstance(error, (OSError, TimeoutError, *_LOST)) else "other"
