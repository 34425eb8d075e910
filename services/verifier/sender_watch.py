"""Keeps the border's lists of senders up to date (bans from the node's bucket, the roster from its
file, the shared reputation) and reports the worst senders.

It polls, because a watch can die silently: a ban takes effect within `PERIOD_S` plus the time of
one request.
"""

from __future__ import annotations

import asyncio
import time

from services.verifier.border import Border
from services.verifier.figures import Figures
from services.verifier.shared_reputation import SharedReputation
from services.verifier.trust import RosterKeys, Trust
from shared.contracts import subjects
from shared.contracts.codec import decode, encode
from shared.contracts.senders import BANS_KEY, MAX_SENDERS, SENDERS_PREFIX, BanList, SendersReport, SenderStanding
from shared.contracts.wire import MessageError
from shared.identity.roster import RosterError
from shared.runtime.logs import Log
from shared.transport.base import Transport, TransportError

PERIOD_S = 1.0
REPORT_PERIOD_S = 5.0
COMPLAIN_EVERY_S = 60.0


class SenderWatch:
    """The watch of one verifier replica."""

    def __init__(
        self,
        node_id: str,
        replica: str,
        node: Transport,
        border: Border,
        trust: Trust,
        figures: Figures,
        log: Log,
    ) -> None:
        self._id = node_id
        self._report_key = SENDERS_PREFIX + replica
        self._node = node
        self._border = border
        self._roster = trust if isinstance(trust, RosterKeys) else None
        self._reputation = SharedReputation(node_id, node, border.reputation, trust, log)
        self._figures = figures
        self._log = log
        self._revision = 0
        self._read_bans = False
        self._complained_at = 0.0
        self._reported: list[SenderStanding] = []

    async def run(self) -> None:
        """Run without end."""
        reported_at = time.monotonic()
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                await self.look()
                if time.monotonic() - reported_at >= REPORT_PERIOD_S:
                    reported_at = time.monotonic()
                    await self.exchange()
                    await self.report(time.time())
            except TransportError as error:
                self._log.debug("bans_not_read", reason=str(error))

    async def look(self) -> None:
        """Read the bans and, if there is one, the roster. If one cannot be read, the previous list
        stays in force; without a previous list of bans, no foreign group is accepted.

        Raises:
            TransportError: the node plane does not answer.
        """
        self._read_roster()
        entry = await self._node.kv.get(subjects.node_bucket(self._id), BANS_KEY)
        if entry is not None and entry.revision != self._revision:
            self._revision = entry.revision
            try:
                listed = decode(entry.value, BanList)
            except MessageError as error:
                if not self._read_bans:
                    self._border.bans.unreadable = f"this node's list of bans cannot be read ({error})"
                self._say_unreadable(str(error))
            else:
                self._read_bans = True
                self._border.bans.replace(listed)
                self._log.info("bans", senders=[ban.sender for ban in listed.bans][:20])
        if self._border.bans.unreadable and time.monotonic() - self._complained_at >= COMPLAIN_EVERY_S:
            self._say_unreadable(self._border.bans.unreadable)
        self._border.bans.refresh()
        now_s = time.time()
        self._figures.border.left_out(self._border.reputation.quarantined(now_s), self._border.bans.count(now_s))

    def _say_unreadable(self, reason: str) -> None:
        self._complained_at = time.monotonic()
        self._log.error(
            "bans_unreadable",
            reason=reason,
            consequence="no foreign group is accepted" if self._border.bans.unreadable else "the earlier bans stay in force",
            remedy="start the version that wrote the list, or start a new one: `swarm ban NAME --anew`",
        )

    async def exchange(self) -> None:
        """Store what this replica knows about keys, and learn what other replicas, the trainer and
        this replica's earlier processes knew.

        Raises:
            TransportError: the node plane does not answer.
        """
        await self._reputation.exchange(time.time())

    async def report(self, now_s: float) -> None:
        """Store the worst senders if they have changed."""
        worst = [
            SenderStanding(
                public_key=each.public_key,
                name=each.name,
                suspicion=round(each.suspicion, 3),
                accepted=each.accepted,
                refused=each.refused,
                quarantined_s=round(each.quarantined_s, 1),
            )
            for each in self._border.reputation.worst(MAX_SENDERS, now_s)
        ]
        if worst != self._reported:
            report = SendersReport(node=self._id, updated_at=now_s, worst=worst)
            await self._node.kv.put(subjects.node_bucket(self._id), self._report_key, encode(report))
            self._reported = worst

    def _read_roster(self) -> None:
        if self._roster is None:
            return
        try:
            if self._roster.reload():
                self._log.info("roster", nodes=len(self._roster))
        except RosterError as error:
            self._log.error("roster_unusable", reason=str(error), consequence="the previous roster stays in force")
