"""Reads the swarm's directory, `swarm_nodes`. Strangers write there, so only a bounded part is
read, and entries are checked.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.contracts import subjects
from shared.contracts.control import NodeRecord
from shared.contracts.wire import MessageError, is_node_name
from shared.identity.statements import Heard, Standing, hear, said_at, said_in
from shared.transport.base import KvEntry, Transport, TransportError

ENTRIES_READ = 4096
"""The most entries that are read, the newest first. An honest node renews its entry every 10 s;
after 15 minutes of silence an entry is removed.
"""


@dataclass(frozen=True, slots=True)
class Directory:
    """Names of nodes, newest entry first, and their entries. `unreadable`: number of invalid
    entries; `left_out`: number of entries that were not read.
    """

    names: tuple[str, ...] = ()
    unreadable: int = 0
    left_out: int = 0
    payloads: Mapping[str, bytes] = field(default_factory=dict)

    def entry(self, name: str) -> Heard[NodeRecord] | None:
        """A node's entry with its signature checked; None if it has none."""
        payload = self.payloads.get(name)
        return None if payload is None else hear(payload, NodeRecord, time.time())

    def entries(self, swarm: str | None = None) -> list[Heard[NodeRecord]]:
        """All entries, each with its signature checked; entries for another swarm than `swarm` are
        refused.
        """
        now = time.time()
        return [hear(payload, NodeRecord, now, swarm) for payload in self.payloads.values()]


def usual_swarm(entries: Iterable[Heard[NodeRecord]], now: float) -> str | None:
    """The swarm that most nodes' signed entries name; None if no entry is signed.

    If several swarms have equally many nodes, the newest entry decides. An entry from the future
    counts as a node but never as the newest, because its sender could then choose the swarm.
    """
    names, newest = Counter[str](), dict[str, float]()
    for entry in entries:
        if entry.standing is Standing.SIGNED and entry.swarm is not None:
            names[entry.swarm] += 1
            at = said_at(entry.said)
            newest[entry.swarm] = max(newest.get(entry.swarm, 0.0), at if at <= now else 0.0)
    return max(names, key=lambda swarm: (names[swarm], newest[swarm], swarm), default=None)


def directory(entries: Iterable[KvEntry], left_out: int = 0) -> Directory:
    """The directory made of `entries`. A valid entry has the node's name both as its key and in its
    record, and its record decodes.
    """
    payloads, unreadable = {}, 0
    for entry in entries:
        try:
            listed = is_node_name(entry.key) and said_in(entry.value, NodeRecord).node == entry.key
        except MessageError:
            listed = False
        if listed:
            payloads[entry.key] = entry.value
        else:
            unreadable += 1
    return Directory(tuple(payloads), unreadable, left_out, payloads)


async def read_directory(swarm_plane: Transport, wanted: Sequence[str] = ()) -> Directory:
    """The newest entries, and those of the nodes in `wanted`. Empty if there is no directory yet or
    it cannot be read.
    """
    bucket = subjects.SWARM_NODES_BUCKET
    try:
        entries, left_out = await swarm_plane.kv.newest(bucket, ENTRIES_READ)
        known = {entry.key for entry in entries}
        missing = [name for name in wanted if name not in known] if left_out else []
        found = [await swarm_plane.kv.get(bucket, name) for name in missing]
    except TransportError:
        return Directory()
    asked = [entry for entry in found if entry is not None]
    return directory([*entries, *asked], left_out - len(asked))
