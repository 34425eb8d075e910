"""The verifier's metrics and status figures, in one place, so that both always agree."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Container, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.verifier.border import UNEXAMINED, Refusal, Refused
from shared.contracts.status_figures import FigureFamily, StatusFigure
from shared.contracts.wire import Origin
from shared.rewards import CAUSES, LocalOnly, known_parts, mean_parts, unknown_of
from shared.runtime.metrics import DURATION_BUCKETS_S, LateGauge, PublishMetrics
from shared.runtime.status import StatusBoard
from shared.tasks.sandbox import JobResult, ScorerPool
from shared.tasks.sandbox.confinement import PROTECTIONS

MAX_SENDER_LABELS = 64
OTHER_SENDER = "_other"
OTHER_TASK = "_other"
WATCH_PERIOD_S = 2.0
_REWARDS = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
_RESULTS = ("scored", *CAUSES, "error")


class ScoringFigures:
    """Counts of scored groups, scoring time, and the scorer processes."""

    def __init__(self, registry: CollectorRegistry, status: StatusBoard, datasets: Iterable[str]) -> None:
        self._status = status
        self._tasks = frozenset(datasets)
        self._restarts_seen = 0
        self._beyond_shares: set[str] = set()
        self._jobs = Counter(
            "swarm_verify_jobs_total",
            "Completions given to a scorer, by origin and result: scored; raised, not_a_number, too_long, timeout (the scorer "
            "hung), killed (it died), not_applicable (it returned None), no_verdict (its judge gave none), all of which leave the "
            "reward unknown; error (the whole group could not be scored).",
            ["origin", "result"],
            registry=registry,
        )
        self._seconds = Histogram(
            "swarm_verify_duration_seconds",
            f"Time to score one group, by dataset; {OTHER_TASK} for datasets that are not among this node's tasks.",
            ["task"],
            buckets=DURATION_BUCKETS_S,
            registry=registry,
        )
        self._rewards = Histogram(
            "swarm_reward",
            "Reward that this node gave each completion, by origin; without the datasets that had a reward outside 0 to 1.",
            ["origin"],
            buckets=_REWARDS,
            registry=registry,
        )
        self._parts = Gauge(
            "swarm_reward_part_mean",
            "Mean of each reward's own values in the newest local group of a task with several rewards.",
            ["task", "reward"],
            registry=registry,
        )
        self._scored = Counter("swarm_groups_scored_total", "Groups scored, by origin.", ["origin"], registry=registry)
        self._failed = Counter(
            "swarm_groups_failed_total",
            "Local groups given up because they could not be scored, or because none of their answers has a known reward.",
            registry=registry,
        )
        self._restarts = Counter(
            "swarm_scorer_restarts_total", "Scorer processes that hung or died and were replaced.", registry=registry
        )
        self._timeouts = Counter(
            "swarm_scorer_timeouts_total", "Answers that made a scorer hang or die; their reward is unknown.", registry=registry
        )
        self._judge_calls = Counter(
            "swarm_judge_requests_total", "Requests to judges about local answers: ok, error.", ["result"], registry=registry
        )
        self._judge_tokens = Counter(
            "swarm_judge_tokens_total",
            "Tokens of these requests and of their replies, as the judge counts them.",
            registry=registry,
        )
        self._judged = (0, 0, 0)
        for result in ("ok", "error"):
            self._judge_calls.labels(result)
        all_replicas = "The same in every replica."
        self._queue = LateGauge(
            "swarm_verify_queue_groups", f"Local groups waiting for a verifier or being scored. {all_replicas}", registry=registry
        )
        self._dead = LateGauge(
            "swarm_dead_letters", f"Dead letters (local groups given up) kept for inspection. {all_replicas}", registry=registry
        )
        self._buried = Counter("swarm_dead_letters_buried_total", "Local groups that became dead letters.", registry=registry)
        for task in (*self._tasks, OTHER_TASK):
            self._seconds.labels(task)
        for origin in ("local", "external"):
            self._scored.labels(origin)
            self._rewards.labels(origin)
            self._status.set(FigureFamily.SCORED.of(origin), 0)
            for result in _RESULTS:
                self._jobs.labels(origin, result)
        self._protections = Gauge(
            "swarm_sandbox_protections",
            "1 if the operating system gives the scorers this protection, 0 if not; the verifier's log has cause and remedy.",
            ["protection"],
            registry=registry,
        )
        self._local_only = Gauge(
            "swarm_local_only_sources",
            "Task sources of which no group of another node is taken, by cause: outside_sandbox (sandbox = false), group_dependent "
            "(an answer alone earns otherwise than in its group), judged (a judge scores it), scorer (the dataset's own).",
            ["why"],
            registry=registry,
        )
        self.local_only(())
        for figure in (StatusFigure.SCORE_TIMEOUTS, StatusFigure.FAILED_LOCAL):
            status.set(figure, 0)

    def scored(self, origin: Origin, dataset: str, result: JobResult) -> None:
        """Record the rewards of a group. A local one without any known reward is given up."""
        if origin == "local":
            self._status.worked()
        self._count_answers(origin, result)
        known = [reward for reward in result.rewards if reward is not None]
        self._seconds.labels(dataset if dataset in self._tasks else OTHER_TASK).observe(result.seconds)
        if not known:
            self.failed_local()
            return
        self._scored.labels(origin).inc()
        for name, mean in mean_parts(known_parts(result.parts, result.rewards)).items():
            self._parts.labels(dataset if dataset in self._tasks else OTHER_TASK, name).set(mean)
        self._status.add(FigureFamily.SCORED.of(origin))
        # The sum of a histogram must not fall, and the alerts on its mean are about shares.
        if min(known) < 0.0 or max(known) > 1.0:
            self._beyond_shares.add(dataset)
        if dataset not in self._beyond_shares:
            rewards = self._rewards.labels(origin)
            for reward in known:
                rewards.observe(reward)

    def unscored(self, origin: Origin, completions: int, result: JobResult) -> None:
        """Record that a group could not be scored, or that a foreign one has unknown rewards."""
        if result.marks and not result.timeouts:
            self._count_answers(origin, result)
        else:
            self._jobs.labels(origin, "error").inc(max(0, completions - result.timeouts))
            self._jobs.labels(origin, "timeout").inc(result.timeouts - result.deaths)
            self._jobs.labels(origin, "killed").inc(result.deaths)
            self._count_lost(result)

    def failed_local(self) -> None:
        self._failed.inc()
        self._status.add(StatusFigure.FAILED_LOCAL)

    def buried(self) -> None:
        self._buried.inc()

    def queues(self, groups: int, dead_letters: int) -> None:
        self._queue.set(groups)
        self._dead.set(dead_letters)

    async def watch_workers(self, pool: ScorerPool) -> None:
        """Keep the counts of replaced scorer processes and of judges' work up to date. Never
        returns.
        """
        while True:
            self._count_judged(pool)
            self._restarts.inc(pool.replaced - self._restarts_seen)
            self._status.set(StatusFigure.SCORERS_REPLACED, pool.replaced)
            self._restarts_seen = pool.replaced
            await asyncio.sleep(WATCH_PERIOD_S)

    def _count_judged(self, pool: ScorerPool) -> None:
        found = [(each.answered, each.failed, each.tokens) for each in pool.judges]
        answered, failed, tokens = map(sum, zip(*found, strict=True)) if found else (0, 0, 0)
        self._judge_calls.labels("ok").inc(answered - self._judged[0])
        self._judge_calls.labels("error").inc(failed - self._judged[1])
        self._judge_tokens.inc(tokens - self._judged[2])
        self._judged = answered, failed, tokens

    def protections(self, missing: Container[str]) -> None:
        for protection in PROTECTIONS:
            self._protections.labels(protection).set(protection not in missing)
            self._status.set(FigureFamily.SANDBOX_WITHOUT.of(protection), protection in missing)

    def local_only(self, sources: Iterable[LocalOnly]) -> None:
        """Set the number of sources of which no foreign group is taken, from the cause of each."""
        counts = collections.Counter(sources)
        for why in LocalOnly:
            self._local_only.labels(why.value).set(counts[why])
            self._status.set(FigureFamily.LOCAL_ONLY.of(why.value), counts[why] or None)

    def _count_answers(self, origin: Origin, result: JobResult) -> None:
        unknown = unknown_of(result.marks)
        self._jobs.labels(origin, "scored").inc(len(result.marks) - unknown.total())
        for cause, answers in unknown.items():
            self._jobs.labels(origin, cause).inc(answers)
            if origin == "local":
                self._status.add(FigureFamily.UNKNOWN_REWARDS.of(cause), answers)
        self._count_lost(result)

    def _count_lost(self, result: JobResult) -> None:
        if result.timeouts:
            self._timeouts.inc(result.timeouts)
            self._status.add(StatusFigure.SCORE_TIMEOUTS, result.timeouts)


class BorderFigures:
    """Counts of what crosses the border, in both directions."""

    def __init__(self, registry: CollectorRegistry, status: StatusBoard, scoring: ScoringFigures) -> None:
        self._status = status
        self._scoring = scoring
        results = "ok, dropped (will never reach the swarm), error (will be retried)"
        self.publish = PublishMetrics(registry, "swarm", ("ok", "dropped", "error"), results)
        self._outbox = Gauge(
            "swarm_outbox_groups",
            "Local groups waiting to be published on the swarm plane; they pile up while it cannot be reached.",
            registry=registry,
        )
        self._reads = Counter(
            "swarm_sample_requests_total",
            "Reads of the swarm's stream, by result: ok, timeout (no answer), error.",
            ["result"],
            registry=registry,
        )
        self._messages = Counter(
            "swarm_ingest_read_total", "Messages read from the swarm's stream, with their bodies.", registry=registry
        )
        self._accepted = Counter(
            "swarm_ingest_accepted_total", "Foreign groups that passed all checks and were scored.", registry=registry
        )
        self._refused = Counter(
            "swarm_ingest_rejected_total", "Foreign messages refused at the border, by reason.", ["reason"], registry=registry
        )
        self._by_sender = Counter(
            "swarm_ingest_rejected_by_sender_total",
            f"Foreign messages refused at the border, by claimed sender. {OTHER_SENDER}: no sender was claimed, or "
            f"{MAX_SENDER_LABELS} values were in use already.",
            ["sender"],
            registry=registry,
        )
        self._waiting = Gauge(
            "swarm_ingest_waiting_messages",
            "Foreign messages that were read and are waiting for their sender's turn.",
            registry=registry,
        )
        self._flood = Gauge(
            "swarm_ingest_flood_messages_per_second",
            "Messages a second of new senders that each send more than one sender may; read or not, estimated by those read.",
            registry=registry,
        )
        self._left_out = Gauge(
            "swarm_senders_left_out",
            "Senders from whom nothing is accepted, by cause; other_tasks: they sent only tasks that this node does not accept.",
            ["why"],
            registry=registry,
        )
        self._since_taken: dict[str, int] = {}
        """Messages examined and refused since one was accepted, by reason."""
        self._mostly = ""
        self._senders = {OTHER_SENDER}
        self._by_sender.labels(OTHER_SENDER)
        for result in ("ok", "timeout", "error"):
            self._reads.labels(result)
        for reason in Refusal:
            self._refused.labels(reason.value)
            self._status.set(FigureFamily.REFUSED.of(reason.value), 0)
        for why in ("quarantined", "banned", "other_tasks"):
            self._left_out.labels(why)
        for figure in (
            StatusFigure.SHARED,
            StatusFigure.ACCEPTED,
            StatusFigure.REFUSED,
            StatusFigure.SWARM_CONNECTED,
            StatusFigure.SHARES_DROPPED,
        ):
            status.set(figure, 0)

    def accepted(self, dataset: str, result: JobResult) -> None:
        self._scoring.scored("external", dataset, result)
        self._accepted.inc()
        self._status.add(StatusFigure.ACCEPTED)
        self._status.set(StatusFigure.TAKEN_AT, time.time())
        self._status.set(StatusFigure.REFUSED_SINCE_TAKEN, 0)
        self._since_taken.clear()
        self._say_most_refused()

    def read(self, result: str) -> None:
        """Record a read of the swarm's stream: ok, timeout or error."""
        self._reads.labels(result).inc()

    def messages(self, count: int) -> None:
        self._messages.inc(count)

    def refused(self, refused: Refused) -> None:
        self._refused.labels(refused.reason.value).inc()
        sender = refused.sender or OTHER_SENDER
        if sender not in self._senders:
            if len(self._senders) >= MAX_SENDER_LABELS:
                sender = OTHER_SENDER
            self._senders.add(sender)
        self._by_sender.labels(sender).inc()
        self._status.add(StatusFigure.REFUSED)
        self._status.add(StatusFigure.REFUSED_SINCE_TAKEN)
        self._status.set(StatusFigure.REFUSED_AT, time.time())
        self._status.add(FigureFamily.REFUSED.of(refused.reason.value))
        if refused.reason not in UNEXAMINED:
            self._since_taken[refused.reason.value] = self._since_taken.get(refused.reason.value, 0) + 1
            self._say_most_refused()

    def _say_most_refused(self) -> None:
        """Set the one figure of `MOSTLY_REFUSED`, and remove that of an earlier reason."""
        counts = self._since_taken
        most = max(counts, key=lambda reason: counts[reason], default="")
        if self._mostly and self._mostly != most:
            self._status.set(FigureFamily.MOSTLY_REFUSED.of(self._mostly), None)
        if most:
            self._status.set(FigureFamily.MOSTLY_REFUSED.of(most), counts[most])
        self._mostly = most

    def shared(self, seconds: float, size_bytes: int) -> None:
        self.publish.stored(seconds, size_bytes)
        self._status.add(StatusFigure.SHARED)

    def share_dropped(self) -> None:
        self.publish.failed("dropped")
        self._status.add(StatusFigure.SHARES_DROPPED)

    def outbox(self, groups: int) -> None:
        self._outbox.set(groups)
        self._status.set(StatusFigure.OUTBOX, groups)

    def connected(self, connected: bool) -> None:
        self._status.set(StatusFigure.SWARM_CONNECTED, connected)

    def waiting(self, messages: int) -> None:
        self._waiting.set(messages)

    def flood(self, messages_per_s: float) -> None:
        self._flood.set(messages_per_s)

    def left_out(self, quarantined: int, banned: int) -> None:
        for why, count in (("quarantined", quarantined), ("banned", banned)):
            self._left_out.labels(why).set(count)
            self._status.set(FigureFamily.SENDERS.of(why), count)

    def other_tasks(self, senders: int) -> None:
        self._left_out.labels("other_tasks").set(senders)
        self._status.set(FigureFamily.SENDERS.of("other_tasks"), senders)


class Figures:
    """Counts scored groups and messages that cross the border. `datasets` are those of this node's
    tasks.
    """

    def __init__(self, registry: CollectorRegistry, status: StatusBoard, datasets: Iterable[str] = ()) -> None:
        self.scoring = ScoringFigures(registry, status, datasets)
        self.border = BorderFigures(registry, status, self.scoring)
