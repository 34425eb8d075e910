"""The verifier's metrics and status figures, in one place, so that both always agree."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.verifier.refusals import Refusal, Refused
from shared.runtime.status import StatusBoard
from shared.tasks.sandbox import ScorerPool

MAX_SENDER_LABELS = 64
OTHER_SENDER = "_other"
WATCH_PERIOD_S = 2.0


class Figures:
    """Counts what crosses the border. Every refusal reason is exported from the start, as zero."""

    def __init__(self, registry: CollectorRegistry, status: StatusBoard) -> None:
        self._status = status
        self._scored = Counter("swarm_groups_scored", "Groups scored, by origin.", ["origin"], registry=registry)
        self._failed = Counter("swarm_groups_failed", "Own groups that could not be scored.", registry=registry)
        self._shared = Counter("swarm_groups_shared", "Own groups stored on the swarm plane.", registry=registry)
        self._shares_dropped = Counter("swarm_shares_dropped", "Own groups that never reached the swarm.", registry=registry)
        self._refused = Counter("swarm_intake_refused", "Foreign messages refused, by reason.", ["reason"], registry=registry)
        self._by_sender = Counter("swarm_intake_refused_by_sender", "The same, by claimed sender.", ["sender"], registry=registry)
        self._timeouts = Counter("swarm_score_timeouts", "Answers that made a scorer hang.", registry=registry)
        self._workers = Counter("swarm_scorers_replaced", "Scorer processes killed or lost, and replaced.", registry=registry)
        self._seconds = Histogram(
            "swarm_score_seconds", "From taking a group up to its rewards.", registry=registry, buckets=_SECONDS
        )
        self._outbox = Gauge("swarm_outbox_groups", "Own groups waiting for the swarm plane.", registry=registry)
        self._connected = Gauge("swarm_plane_connected", "1 while the swarm plane can be reached.", registry=registry)
        self._backlog = Gauge("swarm_intake_backlog", "Foreign messages not looked at yet.", registry=registry)
        self._waiting = Gauge("swarm_intake_waiting", "Foreign messages waiting for their sender's turn.", registry=registry)
        self._left_out = Gauge("swarm_senders_left_out", "Senders not listened to, by why.", ["why"], registry=registry)
        self._senders: set[str] = set()
        self._workers_seen = 0
        for origin in ("local", "external"):
            self._scored.labels(origin)
            status.set(f"scored_{origin}", 0)
        for reason in Refusal:
            self._refused.labels(reason.value)
            status.set(f"refused_{reason.value}", 0)
        for name in ("shared", "accepted", "refused", "score_timeouts", "swarm_connected", "shares_dropped", "failed_local"):
            status.set(name, 0)

    def scored_local(self, seconds: float, timeouts: int) -> None:
        """An own group has its rewards."""
        self._count_scored("local", seconds, timeouts)

    def accepted(self, seconds: float, timeouts: int) -> None:
        """A foreign group has this node's rewards and is in the pool's stream."""
        self._count_scored("external", seconds, timeouts)
        self._status.add("accepted")

    def failed_local(self) -> None:
        """An own group was given up on."""
        self._failed.inc()
        self._status.add("failed_local")

    def refused(self, refused: Refused) -> None:
        """A foreign message stays outside."""
        self._refused.labels(refused.reason.value).inc()
        sender = refused.sender or OTHER_SENDER
        if sender not in self._senders:
            if len(self._senders) >= MAX_SENDER_LABELS:
                sender = OTHER_SENDER
            self._senders.add(sender)
        self._by_sender.labels(sender).inc()
        self._status.add("refused")
        self._status.add(f"refused_{refused.reason.value}")

    def timeouts(self, count: int) -> None:
        """Answers that made a scorer hang."""
        self._timeouts.inc(count)
        self._status.add("score_timeouts", count)

    def shared(self) -> None:
        """An own group is stored on the swarm plane."""
        self._shared.inc()
        self._status.add("shared")

    def share_dropped(self) -> None:
        """An own group will not reach the swarm."""
        self._shares_dropped.inc()
        self._status.add("shares_dropped")

    def outbox(self, groups: int) -> None:
        """Own groups waiting for the swarm plane."""
        self._outbox.set(groups)
        self._status.set("outbox", groups)

    def connected(self, connected: bool) -> None:
        """Whether the swarm plane can be reached."""
        self._connected.set(connected)
        self._status.set("swarm_connected", connected)

    def backlog(self, messages: int) -> None:
        """Foreign messages not looked at yet."""
        self._backlog.set(messages)
        self._status.set("intake_backlog", messages)

    def waiting(self, messages: int) -> None:
        """Foreign messages waiting for their sender's turn."""
        self._waiting.set(messages)
        self._status.set("intake_waiting", messages)

    def left_out(self, quarantined: int, banned: int) -> None:
        """Senders that are not listened to."""
        for why, count in (("quarantined", quarantined), ("banned", banned)):
            self._left_out.labels(why).set(count)
            self._status.set(f"senders_{why}", count)

    async def watch_workers(self, pool: ScorerPool) -> None:
        """Keep count of replaced scorer processes, for ever."""
        while True:
            self._workers.inc(pool.replaced - self._workers_seen)
            self._status.set("scorers_replaced", pool.replaced)
            self._workers_seen = pool.replaced
            await asyncio.sleep(WATCH_PERIOD_S)

    def _count_scored(self, origin: str, seconds: float, timeouts: int) -> None:
        self._scored.labels(origin).inc()
        self._seconds.observe(seconds)
        self._status.add(f"scored_{origin}")
        if timeouts:
            self.timeouts(timeouts)


_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
