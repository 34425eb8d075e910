"""A server with OpenAI's interface: the requests to it, repeated for a while where that may help,
and its key, which is neither a setting nor in any log. Engines and judges ask through it; nothing
here needs torch.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx2

from shared.runtime.exits import FatalError

_RETRY_STATUS = (408, 425, 429, 500, 502, 503, 504)
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_AWAY_S = 5.0
"""A server that cannot be reached for this long is away, and what else was asked of it is lost."""
_BUSY_S = 120.0
"""The same for one that answers that it is busy: as long as limits on requests per minute last."""
_MISTAKES = (httpx2.InvalidURL, httpx2.UnsupportedProtocol, httpx2.LocalProtocolError)
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""A machine that has lost its power is noticed in a minute, however long an answer may take."""


MOST_BYTES = 2**24
"""Of an answer whose size the request does not determine: a list of all models."""


class ServerError(RuntimeError):
    """A request has no answer. The message names the cause and the remedy."""


class ServerAway(ServerError):
    """There was no answer in time; the same request may succeed later."""


class UnusableAnswer(ServerError):
    """The answer to one request cannot be used; another may be."""


class RefusedRequest(ServerError):
    """The server refused the request; `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class OpenAiRequests:
    """Sends requests to one server.

    Args:
        base_url: Its address with its version, such as `http://localhost:8000/v1`.
        api_key: Sent as a bearer token if given, and never part of an error message.
        timeout_s: Deadline of one request, retries included.
        max_connections: Most concurrent requests.
        setting: Name of the setting with the address, for messages.
        relief: How to ask for less, for messages about a server that is slow.
    """

    def __init__(
        self, base_url: str, api_key: str | None, timeout_s: float, max_connections: int, *, setting: str, relief: str
    ) -> None:
        self._setting, self._relief = setting, relief
        self.base_url = base_url.rstrip("/")
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(max_connections)
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx2.Timeout(timeout_s, connect=10.0),
            transport=httpx2.AsyncHTTPTransport(limits=httpx2.Limits(max_connections=max_connections), socket_options=_KEEPALIVE),
        )

    async def ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        most_bytes: int = MOST_BYTES,
        retry_s: Callable[[float, float], float] = lambda from_s, before_s: from_s,
    ) -> dict[str, Any]:
        """Retry with growing pauses until there is an answer or the deadline has passed. An answer
        of more than `most_bytes` is not read to its end.

        `retry_s`: when to try again, at or after the first of two times (`time.monotonic`);
        infinite if that is not before the second.

        Raises:
            RefusedRequest: the server refused; retrying would not help.
            ServerAway: there was no answer in time.
            UnusableAnswer: the answer is not JSON, or too large.
            ServerError: the request cannot be sent.
        """
        url = self.base_url + path
        began = time.monotonic()
        give_up_at = began + self._timeout_s
        failing_since: float | None = None
        pause_s = _FIRST_PAUSE_S
        for tries in range(1, 1_000_000):
            try:
                async with (
                    self._turns,
                    asyncio.timeout(max(give_up_at - time.monotonic(), 0.001)),
                    self._client.stream(method, url, json=body) as answer,
                ):
                    content = await _start_of(answer, most_bytes)
                if answer.is_success:
                    if len(content) > most_bytes:
                        raise UnusableAnswer(f"{method} {url}: the answer is larger than {most_bytes} bytes: see the server's log")
                    return dict(json.loads(content))
                cause = f"status {answer.status_code}: {self._without_key(content.decode(errors='replace'))[:300]}"
                if answer.status_code not in _RETRY_STATUS:
                    raise RefusedRequest(
                        f"{method} {url}: refused with {cause}: check the server's address, key, model and version",
                        answer.status_code,
                    )
                patience_s = _BUSY_S
            except _MISTAKES as error:
                raise ServerError(
                    f"{method} {url}: this cannot be asked ({type(error).__name__}): correct {self._setting}, which begins "
                    "with http:// or https://, or the key"
                ) from None
            except (httpx2.TransportError, TimeoutError) as error:
                cause, patience_s = f"{type(error).__name__}: {error}", _AWAY_S
            except (ValueError, TypeError, RecursionError) as error:
                raise UnusableAnswer(
                    f"{method} {url}: the answer is not JSON ({error}): is this an OpenAI-compatible server?"
                ) from error
            now = time.monotonic()
            failing_since = now if failing_since is None else failing_since
            before_s = min(give_up_at, failing_since + patience_s)
            again_at = retry_s(now + pause_s, before_s)
            if again_at >= before_s:
                raise ServerAway(
                    f"{method} {url}: no answer after {tries} tries in {now - began:.0f} s ({cause}): "
                    f"start the server, correct its address ({self._setting}) or, if it is only slow, {self._relief}"
                )
            await asyncio.sleep(again_at - now)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise AssertionError("unreachable: the deadline ends the loop")

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def _without_key(self, text: str) -> str:
        """The text without the key, because some servers quote a key that they refuse."""
        return text.replace(self._api_key, "<the key>") if self._api_key else text


async def _start_of(answer: httpx2.Response, most_bytes: int) -> bytes:
    """The whole body, or its start of more than `most_bytes`."""
    content = bytearray()
    async for part in answer.aiter_bytes():
        content += part
        if len(content) > most_bytes:
            break
    return bytes(content)


def server_key(variable: str, setting: str) -> str | None:
    """The key in an environment variable; None: no key is configured. `setting`: names the
    variable. Raises `FatalError` if it is not set.
    """
    if not variable:
        return None
    if not (key := os.environ.get(variable, "").strip()):
        raise FatalError(f"{setting} is {variable}, which is not set: export it")
    return key
