"""All streams and consumers that a user sees, page by page: JetStream lists 256 at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shared.cancelling import together
from shared.transport.deadline import Deadline
from shared.transport.nats.answers import count_of, readable
from shared.transport.nats.connection import Connection
from shared.transport.nats.jetstream_api import call

MOST_LISTED = 16_384
"""Of one list: more is not listed, and said to be left out."""
_AT_ONCE = 8
"""Lists asked for at once: a server answers its API one request after the other."""


@dataclass(frozen=True, slots=True)
class Listed:
    """Entries of a list in the server's words."""

    entries: list[dict[str, Any]]
    missing: list[str]
    """Names of those that exist and of which no server says more: they have no leader."""
    left_out: int = 0


async def account(connection: Connection, deadline: Deadline) -> dict[str, Any]:
    """What the user's account uses and may use."""
    found: dict[str, Any] = await call(connection, "INFO", None, deadline, "the account's figures")
    return found


async def streams(connection: Connection, deadline: Deadline) -> Listed:
    """All streams of the account, by name."""
    return await _pages(connection, "STREAM.LIST", "streams", "the list of streams", deadline)


async def consumers(connection: Connection, names: Iterable[str], deadline: Deadline) -> dict[str, Listed]:
    """All consumers of each of the streams."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(stream: str) -> Listed:
        async with places:
            what = f"the list of consumers of stream {stream}"
            return await _pages(connection, f"CONSUMER.LIST.{stream}", "consumers", what, deadline)

    chosen = list(names)
    return dict(zip(chosen, await together(*map(one, chosen)), strict=True))


async def _pages(connection: Connection, subject: str, field: str, what: str, deadline: Deadline) -> Listed:
    """Ask until the server has no more. What it says of the total is not trusted to end: a page
    without a new entry does, and so does `MOST_LISTED`.
    """
    found: dict[str, dict[str, Any]] = {}
    missing: dict[str, None] = {}
    offset = total = 0
    while offset < MOST_LISTED:
        page = await call(connection, subject, {"offset": offset}, deadline, what)
        with readable(what):
            total = count_of(page["total"])
            entries = {_name(entry): entry for entry in page.get(field) or []}
            lost = [str(name) for name in page.get("missing") or []]
        known = len(found) + len(missing)
        found |= entries
        missing |= dict.fromkeys(lost)
        offset += len(entries) + len(lost)
        if offset >= total or len(found) + len(missing) == known:
            break
    return Listed([found[name] for name in sorted(found)], sorted(missing), max(0, total - offset))


def _name(entry: dict[str, Any]) -> str:
    return str(entry["name"] if "name" in entry else entry["config"]["name"])
