"""Keeps the reputation of keys in the node's bucket, so that it survives a restart and all replicas
share it.

Each replica applies its events to the common state by compare-and-set and adopts the result. The
replica that reads the trainer's findings of absurd text first applies them; the state records up to
which batch. A state that cannot be read is discarded with a log line: all senders are newcomers
again, which costs nobody anything while there is room.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.verifier.refusals import Found
from services.verifier.reputation import Event, Reputation
from services.verifier.trust import Trust
from shared.contracts import subjects
from shared.contracts.codec import decode, encode
from shared.contracts.senders import FINDINGS_KEY, REPUTATION_KEY, AbsurdText, ReputationState, TrainerFindings
from shared.contracts.wire import MessageError
from shared.runtime.logs import Log
from shared.transport.base import Conflict, Transport, TransportError


class FindingsReader:
    """Counts the trainer's findings against the keys that they concern, in proportion, and never
    enough for quarantine.
    """

    def __init__(self, reputation: Reputation, trust: Trust) -> None:
        self._reputation = reputation
        self._trust = trust

    def apply(self, found: Iterable[AbsurdText], after_batch: int, now_s: float) -> int:
        """Apply the findings of batches after `after_batch`. Returns the newest of these
        batches.
        """
        newest = after_batch
        for each in found:
            if each.batch <= after_batch:
                continue
            newest = max(newest, each.batch)
            public_key = self._trust.key_of(each.sender)
            if public_key is not None:
                part = min(1.0, each.absurd / each.answers)
                self._reputation.apply(Event(public_key, each.sender, Found.ABSURD, part, now_s))
        return newest


class SharedReputation:
    """One replica's access to the common reputation."""

    def __init__(self, node_id: str, node: Transport, reputation: Reputation, trust: Trust, log: Log) -> None:
        self._node_id = node_id
        self._bucket = subjects.node_bucket(node_id)
        self._node = node
        self._reputation = reputation
        self._reader = FindingsReader(reputation, trust)
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
        newest = self._reader.apply(findings.found if findings is not None else (), state.findings_batch, now_s)
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
