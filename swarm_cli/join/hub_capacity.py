"""Free JetStream storage on an open hub for the swarm's streams that it lacks. The first node there
makes them, and a server reserves each stream's limit when it is made. A hub with keys is not asked:
there its operator makes the streams, and members make nothing.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shared.contracts.streams import swarm_streams
from shared.transport.base import Deadline, StreamMissing, Transport, TransportError
from shared.transport.blobs import companion
from shared.transport.nats.administration import account
from shared.transport.nats.answers import count_of, readable
from shared.transport.nats.connection import Connection
from shared.transport.nats.jetstream_api import ApiError, call
from shared.transport.nats.transport import connection_of


@dataclass(frozen=True, slots=True)
class HubCapacity:
    """Bytes that the missing streams reserve, with all copies, and that the hub lets them.

    `there_bytes`: what it could still reserve; None if that is enough or not known.
    `account_bytes`: the account's limit if that is too small. `off`: why it keeps no streams.
    """

    missing: tuple[str, ...]
    needed_bytes: int
    there_bytes: int | None = None
    account_bytes: int | None = None
    off: str = ""
    all_missing: bool = False
    """Whether the hub has none of the swarm's streams yet."""


PROBE = "SWARM_JOIN_CHECK"
"""An empty stream, removed at once. A server does not tell a client how much it may still reserve,
so it is asked to reserve as much as the missing streams will.
"""
_ASK_S = 5.0
_NO_ROOM = frozenset({10002, 10023, 10047})
"""JetStream's errors for an account's or a server's exhausted storage (its `errors.json`)."""
_PARTS = 32


async def capacity_for_streams(hub: Transport, replicas: int) -> HubCapacity | None:
    """The hub's room for the swarm's streams that it lacks; None if it has them all, or does not
    let this be asked.
    """
    specs = [each for spec in swarm_streams(replicas=replicas) for each in (spec, companion(spec)) if each is not None]
    connection = connection_of(hub)
    try:
        figures = await account(connection, Deadline(_ASK_S))
        missing = [spec for spec in specs if await _is_missing(hub, spec.name)]
    except ApiError as error:
        return HubCapacity(tuple(spec.name for spec in specs), 0, off=error.description, all_missing=True)
    except TransportError:
        return None
    if not missing:
        return None
    names, needed = tuple(spec.name for spec in missing), sum(spec.max_bytes * spec.replicas for spec in missing)
    try:
        most, used = _storage_of(figures)
    except TransportError:
        return None
    if most is not None and most < used + needed:
        return HubCapacity(names, needed, max(0, most - used), most, all_missing=len(missing) == len(specs))
    return HubCapacity(names, needed, await _too_little(connection, needed, replicas), all_missing=len(missing) == len(specs))


def _storage_of(figures: dict[str, Any]) -> tuple[int | None, int]:
    """The account's limit (None: it has none) and what it uses or reserves, in bytes. Raises
    TransportError.
    """
    with readable("the account's figures"):
        most = (figures.get("limits") or {}).get("max_storage", -1)
        used = max(count_of(figures.get("storage", 0)), count_of(figures.get("reserved_storage", 0)))
        return None if most == -1 else count_of(most, 2**64), used


async def _is_missing(hub: Transport, stream: str) -> bool:
    try:
        await hub.stream_state(stream)
    except StreamMissing:
        return True
    return False


async def _too_little(connection: Connection, needed: int, replicas: int) -> int | None:
    """Measure what the server can still reserve, to a 32nd of what is needed; None if that is
    enough, or if it does not say.
    """
    if await _reserves(connection, needed, replicas) is not False:
        return None
    possible, refused = 0, _PARTS
    while refused - possible > 1:
        tried = (possible + refused) // 2
        if await _reserves(connection, needed * tried // _PARTS, replicas):
            possible = tried
        else:
            refused = tried
    return needed * possible // _PARTS


async def _reserves(connection: Connection, size_bytes: int, replicas: int) -> bool | None:
    """Return whether the server makes a stream of this size, all copies counted; None if something
    else prevents that.
    """
    config = {
        "name": PROBE,
        "subjects": [f"_{PROBE}"],
        "retention": "limits",
        "storage": "file",
        "max_bytes": size_bytes // replicas,
        "num_replicas": replicas,
        "description": "swarm join asks whether there is room; it may be removed",
    }
    await _remove(connection)  # of a check that was killed
    try:
        await call(connection, f"STREAM.CREATE.{PROBE}", config, Deadline(_ASK_S), f"stream {PROBE}")
    except ApiError as error:
        return False if error.err_code in _NO_ROOM else None
    except TransportError:
        return None
    finally:
        await _remove(connection)
    return True


async def _remove(connection: Connection) -> None:
    with suppress(TransportError):
        await call(connection, f"STREAM.DELETE.{PROBE}", None, Deadline(_ASK_S), f"removal of stream {PROBE}")
