"""The shared reputation of keys, and the lists of senders that the border goes by, kept up to date
from the node's bucket and the roster.
"""

from __future__ import annotations

import asyncio
import time

from services.verifier.figures import Figures
from services.verifier.reputation import Reputation, apply_findings
from services.verifier.trust import Bans, RosterKeys, Trust
from shared.contracts import subjects
from shared.contracts.codec import decode, encode
from shared.contracts.senders import MAX_SENDERS, BanList, ReputationState, SendersReport, SenderStanding, TrainerFindings
from shared.contracts.subjects import BANS_KEY, FINDINGS_KEY, REPUTATION_KEY, SENDERS_PREFIX
from shared.contracts.wire import MessageError
from shared.identity.roster import RosterError
from shared.runtime.logs import Log
from shared.transport.base import Conflict, Transport, TransportError


class SharedReputation:
    """The reputation of keys in the node's bucket, so that it survives a restart and all replicas
    share it.

    Each replica applies its events to the common state by compare-and-set and adopts the result.
    The replica that reads the trainer's findings of absurd text first applies them; the state
    records up to which batch. A state that cannot be read is discarded: all senders are newcomers
    again, which costs nobody anything while there is room.
    """

    def __init__(self, node_id: str, node: Transport, reputation: Reputation, trust: Trust, log: Log) -> None:
        self._bucket = subjects.node_bucket(node_id)
        self._node = node
        self._reputation = reputation
        self._trust = trust
        self._log = log
        self._unreadable_revision = 0

    async def exchange(self, now_s: float) -> None:
        """Apply this replica's events and the trainer's findings, and adopt what happened at other
        replicas.

        Raises:
            TransportError: the node plane does not answer. Nothing is lost; the next exchange
                includes it.
        """
        state, revision = await self._read()
        findings = await self._findings()
        events = self._reputation.take_events()
        self._reputation.adopt(state.keys, events)
        found = findings.found if findings is not None else ()
        newest = apply_findings(self._reputation, self._trust, found, state.findings_batch, now_s)
        after = ReputationState(findings_batch=newest, keys=self._reputation.records(now_s))
        if after == state:
            return
        try:
            await self._node.kv.update(self._bucket, REPUTATION_KEY, encode(after), last_revision=revision)
        except Conflict:
            self._reputation.keep_events(events)
        except TransportError:
            self._reputation.keep_events(events)
            raise

    async def _read(self) -> tuple[ReputationState, int]:
        entry = await self._node.kv.get(self._bucket, REPUTATION_KEY)
        if entry is None:
            return ReputationState(), 0
        try:
            return decode(entry.value, ReputationState), entry.revision
        except MessageError as error:
            self._log.error(
                "reputation_unreadable", reason=str(error), consequence="it is created anew from what this replica knows"
            )
            return ReputationState(), entry.revision

    async def _findings(self) -> TrainerFindings | None:
        entry = await self._node.kv.get(self._bucket, FINDINGS_KEY)
        if entry is None or entry.revision == self._unreadable_revision:
            return None
        try:
            return decode(entry.value, TrainerFindings)
        except MessageError as error:
            self._unreadable_revision = entry.revision
            self._log.error("findings_unreadable", reason=str(error), remedy="run the same version of all of a node's services")
            return None


WATCH_PERIOD_S = 1.0
REPORT_PERIOD_S = 5.0
COMPLAIN_EVERY_S = 60.0


class SenderWatch:
    """Keeps the border's lists of senders up to date (bans from the node's bucket, the roster from
    its file, the shared reputation) and reports the worst senders.

    It polls, because a watch can die silently: a ban takes effect within `WATCH_PERIOD_S` plus the
    time of one request.
    """

    def __init__(
        self,
        node_id: str,
        replica: str,
        node: Transport,
        bans: Bans,
        reputation: Reputation,
        trust: Trust,
        figures: Figures,
        log: Log,
    ) -> None:
        self._id = node_id
        self._report_key = SENDERS_PREFIX + replica
        self._node = node
        self._bans, self._known = bans, reputation
        self._roster = trust if isinstance(trust, RosterKeys) else None
        self._reputation = SharedReputation(node_id, node, reputation, trust, log)
        self._figures = figures
        self._log = log
        self._revision = 0
        self._read_bans = False
        self._complained_at = 0.0
        self._reported: list[SenderStanding] = []

    async def run(self) -> None:
        reported_at = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            try:
                await self.look()
                if time.monotonic() - reported_at >= REPORT_PERIOD_S:
                    reported_at = time.monotonic()
                    await self._reputation.exchange(time.time())
                    await self.report(time.time())
            except TransportError as error:
                self._log.debug("bans_not_read", reason=str(error))

    async def begin(self) -> None:
        """Learn what is known of senders already. Raises TransportError."""
        await self._reputation.exchange(time.time())
        await self.look()

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
                    self._bans.unreadable = f"this node's list of bans cannot be read ({error})"
                self._say_unreadable(str(error))
            else:
                self._read_bans = True
                self._bans.replace(listed)
                self._log.info("bans", senders=[ban.sender for ban in listed.bans][:20])
        if self._bans.unreadable and time.monotonic() - self._complained_at >= COMPLAIN_EVERY_S:
            self._say_unreadable(self._bans.unreadable)
        self._bans.refresh()
        now_s = time.time()
        self._figures.border.left_out(self._known.quarantined(now_s), self._bans.count(now_s))

    def _say_unreadable(self, reason: str) -> None:
        self._complained_at = time.monotonic()
        self._log.error(
            "bans_unreadable",
            reason=reason,
            consequence="no foreign group is accepted" if self._bans.unreadable else "the earlier bans stay in force",
            remedy="start the version that wrote the list, or start a new one: `swarm ban NAME --anew`",
        )

    async def report(self, now_s: float) -> None:
        worst = self._known.worst(MAX_SENDERS, now_s)
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
