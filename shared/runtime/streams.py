"""Keeps watch over the streams that a node's processes use: a server that comes back with an empty
store answers and looks healthy, and going on there would number batches from 1 again.

A process remembers which streams it found and when each was created. The run's folder remembers
their names for the processes that start later.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import cycle
from pathlib import Path

from shared.contracts import subjects
from shared.contracts.streams import STREAMS_FILE, MissingStreams, missing, names_of, noted_names
from shared.roles import Role
from shared.runtime.logs import Log
from shared.transport.base import StreamMissing, Transport, TransportError

LOOK_S = 5.0
LOOKS_BETWEEN = 6
"""Without a reason to look, one stream is asked about every sixth time: the server answers such
requests one after the other.
"""


class StreamsReplaced(Exception):
    """Streams of the same names but other contents have taken the place of those that this process
    knows. A restart goes on from what they hold.
    """


async def refuse_empty_store(transport: Transport, run_dir: Path, url: str) -> None:
    """Refuse to start where streams are gone that an earlier process of this run used: they would
    be created again, empty. Raises MissingStreams.
    """
    gone = await missing(transport, noted_names(run_dir))
    if gone:
        raise MissingStreams(lost_sentence(gone, url))


def lost_sentence(gone: Sequence[str], url: str) -> str:
    """Say what is wrong, why, and what to do."""
    return (
        f"the NATS server at {url} no longer has {', '.join(gone)}: it came back with an empty store, or somebody deleted them. "
        "Stop the node and restore them from a backup (`swarm nats restore`, docs/runbooks/SwarmStreamsLost.md); to go on without "
        "what they held, create them empty with `swarm nats init --plane node`"
    )


class KnownStreams:
    """The node's streams as this process found them.

    missing: those that are gone now; not empty means that the process is not ready and writes
        nothing.
    """

    def __init__(self, transport: Transport, node: str, url: str, log: Log) -> None:
        self._transport, self._node, self._url, self._log = transport, node, url, log
        self._created: dict[str, str] = {}
        self.missing: tuple[str, ...] = ()

    async def remember(self, role: Role, run_dir: Path) -> None:
        """Note which streams there are. Raises TransportError."""
        names = names_of(self._node)
        if role in ("generator", "trainer"):  # the roles that may ask about it
            names.append(subjects.node_policies_stream(self._node))
        for name in names:
            with suppress(StreamMissing):
                self._created[name] = (await self._transport.stream_state(name)).created
        with suppress(OSError):  # a folder that cannot be written: this process knows them anyway
            (run_dir / STREAMS_FILE).write_text(json.dumps(names_of(self._node)))

    async def watch(self, hold_back: Callable[[str], None]) -> None:
        """Look for ever: at all streams after a reconnection, else at one after the other. While
        some are missing, `hold_back` is given the reason why nothing may be written, else "".

        Raises:
            StreamsReplaced: others have taken their place.
        """
        seen_reconnects, turns = -1, cycle(tuple(self._created))
        looks = 0
        while True:
            await asyncio.sleep(LOOK_S)
            looks += 1
            reconnects = self._transport.counters.reconnects
            with suppress(TransportError):  # the server does not say; the last answer stays
                if reconnects != seen_reconnects or self.missing:
                    await self._look(tuple(self._created), hold_back)
                    seen_reconnects = reconnects
                elif looks % LOOKS_BETWEEN == 0:
                    await self._look((next(turns),), hold_back)

    async def _look(self, names: Sequence[str], hold_back: Callable[[str], None]) -> None:
        # One that is missing may be the first sign of an empty store, so all are looked at then.
        gone: list[str] = []
        other: list[str] = []
        for name in names:
            try:
                created = (await self._transport.stream_state(name)).created
            except StreamMissing:
                gone.append(name)
            else:
                if created != self._created[name]:
                    other.append(name)
        if gone and len(names) < len(self._created):
            await self._look(tuple(self._created), hold_back)
            return
        if other and not gone:
            self._log.error(
                "streams_replaced", streams=other, consequence="this process starts again from what they hold", url=self._url
            )
            raise StreamsReplaced(", ".join(other))
        if gone and not self.missing:
            self._log.error("streams_lost", reason=lost_sentence(gone, self._url), consequence="not ready, writes nothing")
        if self.missing and not gone:
            self._log.info("streams_back", streams=list(self.missing))
        self.missing = tuple(gone)
        hold_back(lost_sentence(gone, self._url) if gone else "")
