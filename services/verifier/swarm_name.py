"""The node's name in the swarm: whose directory entry it is, and what a new node does if it finds
another key there.

Other nodes refuse a second key's groups under a name that they know (`services.verifier.trust`), so
a node that starts under somebody else's name would share in vain. It is told so and stops while the
other node renews its entry. A node that the swarm has already known under its name continues,
whatever anybody writes there, because the swarm plane is untrusted.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec import structs

from shared.contracts import subjects
from shared.contracts.codec import decode, encode
from shared.contracts.control import NodeRecord
from shared.contracts.lease import NameInSwarm
from shared.contracts.wire import MessageError
from shared.identity.statements import Standing, hear
from shared.lease.rules import Newcomer
from shared.runtime import FatalError
from shared.runtime.logs import Log
from shared.transport.base import KvEntry, Transport

SILENT_S = 30.0
"""An entry that is not renewed for this long belongs to nobody; three periods of `reports`."""
TWIN_LOOKS = 3
"""Looks in a row at an entry of this node's key that none of its verifiers wrote. A single one may
be another verifier of this node that has not recorded it yet.
"""


class SwarmName:
    """Decides whether this node may write its directory entry. Asked before each write."""

    def __init__(
        self, node_id: str, public_key: str, swarm_id: str, node: Transport, log: Log, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._id, self._node, self._log, self._clock = node_id, node, log, clock
        self._mine = NameInSwarm(public_key=public_key, swarm_id=swarm_id)
        self._known: NameInSwarm | None = None
        self._newcomer = Newcomer()
        self._complained = False
        self._twins = 0

    async def may_write(self, swarm: Transport) -> bool:
        """Whether the entry is free, this node's, or abandoned. False: not clear yet, ask again
        soon.

        Raises:
            FatalError: another node has the name.
            TransportError: a server does not answer.
        """
        if self._known is None:
            self._known = await self._remembered()
        entry = await swarm.kv.get(subjects.SWARM_NODES_BUCKET, self._id)
        record = None if entry is None else _signed(entry, self._mine.swarm_id)
        other = None if record is None else record.public_key
        if record is not None and other == self._mine.public_key:
            await self._look_for_twin(record)
        mine = {self._mine.public_key, self._known.public_key if self._known else self._mine.public_key}
        if entry is None or other is None or other in mine:
            return True
        if self._known is not None:
            if not self._complained:
                self._complained = True
                self._log.error(
                    "name_contested",
                    key=other,
                    reason=f"another key writes the directory entry of {self._id}",
                    consequence="this node was known under the name first and goes on; nodes that know both keep to the first",
                    remedy="ban that key (`swarm ban`), or use a roster and a secured server (docs/security.md)",
                )
            return True
        verdict = self._newcomer.look(free=False, revision=entry.revision, now_s=self._clock(), lease_s=SILENT_S)
        if verdict == "held":
            raise FatalError(
                f"the name {self._id} is taken in this swarm: a node with the key {other} renews its directory entry, and others "
                f"would refuse what this node (key {self._mine.public_key}) shares. Choose another name (node.id, or "
                "`swarm up --name`); if that node is yours, end it first or give this one its key (verifier.signing_key_file)"
            )
        return verdict == "take"

    async def wrote(self, at: float) -> None:
        """The entry was written with the time `at`: the swarm knows this node by this key. Raises
        TransportError.
        """
        known = structs.replace(self._mine, written_at=at)
        await self._node.kv.put(subjects.node_bucket(self._id), subjects.SWARM_NAME_KEY, encode(known))
        self._known = known

    async def _look_for_twin(self, record: NodeRecord) -> None:
        """Tell once where another process signs as this node: a folder that was copied to another
        machine, with a server of its own, so that no lease keeps the two apart. An entry that is
        older than this node's own is one that somebody put there again.
        """
        if self._known is None or record.updated_at <= self._known.written_at:
            self._twins = 0
            return
        written = await self._remembered()  # another verifier of this node writes it down there
        if written is None or record.updated_at <= written.written_at:
            self._twins = 0
            return
        self._twins += 1
        if self._twins == TWIN_LOOKS:
            self._log.error(
                "key_used_twice",
                key=record.public_key,
                reason=f"the directory entry of {self._id} is renewed with this node's key by a process that is not this node's",
                consequence="others take both for one node: its groups, scores and reputation are mixed",
                remedy="end one of the two, and give it a key and a name of its own (verifier.signing_key_file, node.id; "
                "`swarm join` in a new folder)",
            )

    async def _remembered(self) -> NameInSwarm | None:
        entry = await self._node.kv.get(subjects.node_bucket(self._id), subjects.SWARM_NAME_KEY)
        try:
            found = decode(entry.value, NameInSwarm) if entry is not None else None
        except MessageError:
            return None
        return found if found is not None and found.swarm_id == self._mine.swarm_id else None


def _signed(entry: KvEntry, swarm_id: str) -> NodeRecord | None:
    """The entry's record, if its key signed it for this swarm. None for an unsigned or badly signed
    entry, which anybody may have written and which therefore does not reserve the name.
    """
    try:
        heard = hear(entry.value, NodeRecord, time.time(), swarm_id)
    except MessageError:
        return None
    return heard.said if heard.standing is Standing.SIGNED else None
