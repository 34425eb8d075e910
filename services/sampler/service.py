"""The sampler's process: follows the scored stream and the trainer, and appends each batch as soon
as it may.

`memory` and `assembly` make all decisions; this file reads, calls them, and appends. If it is not
certain of the log's end (an append timed out, or another sampler wrote a batch), it discards its
memory and reads the logs again, as it does at its start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from services.sampler.assembly import Assembly, BatchPlan, LogRoom, Wait, WaitFor, compose, foreign_use, groups_wanted
from services.sampler.composition import after_batch, moves, next_composition, reconciled, scored_by
from services.sampler.logs import BatchAppender, NodeNews, ScoredLog
from services.sampler.memory import SamplerMemory, memory_limits, state_for_new_stream
from services.sampler.pool import knowledge_of
from services.sampler.reports import (
    ConsumedReport,
    DemandReport,
    Figures,
    NodeProcesses,
    WaitingReport,
    log_gone,
    log_move,
    log_unreadable,
)
from services.sampler.strategies import strategy_named
from shared.cancelling import run_until_stopped
from shared.config.sampler_section import SamplerConfig
from shared.config.task_sections import rewards_id, scorers_id
from shared.contracts.limits import NODE_LIMITS
from shared.contracts.messages import batch_fields
from shared.contracts.sampler_state import SamplerState, SharingState
from shared.contracts.wire import MessageError
from shared.runtime import FatalError, ServiceContext
from shared.transport.base import Conflict, StreamFull, TooLarge, TransportError

IDLE_S = 0.02
"""Pause if nothing is new while the trainer waits for a batch; a whole step of the demo takes 0.3
s.
"""
IDLE_WHILE_TRAINING_S = 0.1
"""Pause while the trainer is busy; a new position ends it at once."""
_RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)
_PURGE_EVERY_S = 20.0
_REPLAY_TIMEOUT_S = 60.0


class _BatchTooLarge(Exception):
    """The log refused a batch for its size; the next attempt knows the limit."""


@dataclass
class _Loaded:
    """Everything that is replaced when the logs are read again."""

    memory: SamplerMemory
    after_seq: int
    published: SamplerState
    sharing: SharingState | None
    """What decides the next batch's I and J; None if they do not move."""


class SamplerService:
    """See the module's docstring. `clock` gives Unix time in seconds; tests pass their own."""

    def __init__(self, config: SamplerConfig, clock: Callable[[], float] = time.time) -> None:
        try:
            self._strategy = strategy_named(config.sampler.strategy)
        except ValueError as error:
            raise FatalError(str(error)) from None
        self._limits = memory_limits(config.sampler)
        self._settings, self._node, self._seed = config.sampler, config.node.id, config.node.seed
        self._scorers = {spec.scorer_id for spec in config.tasks}
        self._scorer, self._rewards = scorers_id(config.tasks), rewards_id(config.tasks)
        self._clock = clock
        self._moves = moves(config.sampler)

    async def run(self, context: ServiceContext) -> None:
        self._context = context
        context.status.scorer = self._rewards
        self._figures = Figures(context.registry, context.status)
        self._scored = ScoredLog(context.node, self._node)
        self._batches = BatchAppender(context.node, self._node, NODE_LIMITS.batch_bytes(self._settings.prefetch))
        self._room = LogRoom(self._batches.stream, context.log)
        self._news = NodeNews(self._node, context.node, context.log)
        self._consumed = ConsumedReport(context.node, self._node)
        self._demand = DemandReport(context.node, self._node)
        self._waiting = WaitingReport(context.log, partial(NodeProcesses.read, context.node, self._node))
        following = [self._news.follow_trainer(), *([self._news.follow_evaluations()] if self._moves else [])]
        await run_until_stopped(context.stopping, *following, self._go_on())

    async def _go_on(self) -> None:
        """Every failure except a fatal one leads to reading the logs again, because after an append
        that timed out it is unknown whether the batch is in the log. A batch that was too large is
        planned again at once, because the server's limit is now known.
        """
        failures = 0
        while True:
            try:
                loaded = await self._load()
                self._context.mark_ready()
                failures = 0
                await self._build_batches(loaded)
            except _BatchTooLarge:
                continue
            except Conflict as error:
                self._context.log.warning("log_end_moved", reason=str(error), consequence="reading the newest batch again")
                await asyncio.sleep(IDLE_S)
            except TransportError as error:
                pause_s = _RETRY_S[min(failures, len(_RETRY_S) - 1)]
                failures += 1
                self._context.log.warning("node_plane_away", reason=str(error), retry_in_s=pause_s)
                await asyncio.sleep(pause_s)

    async def _load(self) -> _Loaded:
        """Rebuild the memory from the newest batch and the scored stream."""
        self._context.status.state("reading logs")
        started = time.monotonic()
        try:
            newest = await self._batches.newest()
        except MessageError as error:
            raise FatalError(
                f"the newest batch in {self._batches.stream} cannot be read: {error}: run the software version that wrote it, or "
                "choose another node.id and node.run to start from the base policy"
            ) from None
        if self._moves:
            await self._news.read_evaluation()
        self._scored.begin()
        first_held, last_used = await self._scored.bounds()
        state = newest.batch.state if newest.batch is not None else SamplerState()
        if last_used < state.scored_seq:
            self._context.log.warning(
                "scored_stream_made_anew", stream=self._scored.stream, expected_seq=state.scored_seq, found_seq=last_used
            )
            state = state_for_new_stream(state, self._limits.in_flight_local)
        number = newest.batch.number + 1 if newest.batch is not None else 1
        memory = SamplerMemory(self._limits, self._strategy.keeps, state, number)
        memory.skip_to(first_held)
        log_unreadable(self._context.log, await self._scored.read_to(last_used, memory, _REPLAY_TIMEOUT_S))
        if self._scorers and (others := memory.keep_scored_by(self._scorers)):
            self._context.log.warning(
                "scorer_changed",
                batch=number,
                dropped=others,
                reason="a verifier, its package or pass_at is not that of these waiting groups",
                consequence="they are dropped; batches that are in the log already are trained on",
            )
        self._context.log.info(
            "logs_read",
            next_batch=number,
            pool_local=len(memory.local),
            pool_external=len(memory.external),
            seconds=round(time.monotonic() - started, 3),
        )
        sharing = scored_by(reconciled(state.sharing, self._settings), self._scorer, memory.own)
        loaded = _Loaded(memory, newest.seq, state, sharing)
        self._figures.moved(next_composition(loaded.sharing, self._settings))
        return loaded

    async def _build_batches(self, loaded: _Loaded) -> None:
        """`news` is cleared before anything is read, so that what arrives while a batch is planned
        ends the pause at once instead of being overlooked. Reports and purges have their own
        intervals, because the loop runs many times per second.
        """
        memory, assembly = loaded.memory, Assembly(self._settings, node=self._node, seed=self._seed)
        purged_at = time.monotonic()
        self._waiting.begin(purged_at)
        while True:
            self._news.news.clear()
            cursor = memory.cursor
            log_unreadable(self._context.log, await self._scored.read_into(memory))
            decided_at = time.monotonic()
            decision = assembly.decide(
                memory.local,
                memory.external,
                memory.next_number,
                self._news.position,
                self._clock(),
                memory.heard_of,
                knowledge_of(memory.own),
                next_composition(loaded.sharing, self._settings),
                memory.replayable,
            )
            if isinstance(decision, BatchPlan):
                if await self._append(decision, loaded):
                    self._figures.built(decision, time.monotonic() - decided_at, self._clock())
                    self._waiting.built(time.monotonic())
                self._figures.refresh(memory)
                await self._report(loaded)
                continue
            self._figures.refresh(memory)
            await self._report(loaded)
            if not (self._news.position and self._news.position.finished):
                await self._waiting.waits(decision, memory.next_number, time.monotonic())
            if time.monotonic() - purged_at > _PURGE_EVERY_S:
                purged_at = time.monotonic()
                await self._scored.purge(memory.purgeable_seq(loaded.published))
            if memory.cursor == cursor:
                await self._pause(decision)
            self._figures.waited(decision.reason, time.monotonic() - decided_at)

    async def _append(self, plan: BatchPlan, loaded: _Loaded) -> bool:
        """Append the planned batch; False if a payload is gone and the batch must be planned
        again."""
        started = time.monotonic()
        payloads = await self._scored.payloads((*plan.local, *plan.external, *plan.demonstrations, *plan.replayed))
        present = {seq: scored for seq, scored in payloads.items() if scored is not None}
        if len(present) < len(payloads):
            for gone in payloads.keys() - present.keys():
                loaded.memory.lose(gone)
            log_gone(self._context.log, [entry for entry in plan.replayed if entry.seq not in present])
            return False
        smaller = self._room.fitting(plan, present, loaded.memory)
        if smaller is None:
            return False
        plan = smaller
        now = self._clock()
        sharing = after_batch(loaded.sharing, self._settings, loaded.memory.own, foreign_use(plan, now), self._news.evaluation)
        state = loaded.memory.take((*plan.local, *plan.external, *plan.demonstrations), plan.aged, sharing, plan.mastered)
        batch = compose(plan, present, state, now)
        try:
            seq = await self._batches.append(batch, loaded.after_seq)
        except TooLarge as error:
            self._room.make_room(batch, error)
            raise _BatchTooLarge from None
        except StreamFull as error:
            raise TransportError(f"{error}: the trainer's next steps make room in the batch log") from None
        if seq is None:
            raise Conflict(f"batch {plan.number} is already in the log")
        before, after = next_composition(loaded.sharing, self._settings), next_composition(sharing, self._settings)
        if sharing is not None and before != after:
            self._figures.moved(after)
            log_move(self._context.log, after, sharing)
        loaded.after_seq, loaded.published, loaded.sharing = seq, state, sharing
        loaded.memory.advance()
        self._context.log.info(
            "batch",
            **batch_fields(batch),
            policy_version=plan.number - 1,
            local=len(plan.local),
            external=len(plan.external),
            demonstrations=len(plan.demonstrations),
            replayed=len(plan.replayed),
            shortage=plan.shortage,
            strategy=batch.strategy,
            stream_seq=seq,
            seconds=round(time.monotonic() - started, 4),
        )
        return True

    async def _report(self, loaded: _Loaded) -> None:
        memory, composition = loaded.memory, next_composition(loaded.sharing, self._settings)
        await self._consumed.tell(memory, composition.local if self._moves else None)
        wanted = 0
        if self._news.position is None or not self._news.position.finished:
            knowledge = knowledge_of(memory.own)
            wanted = groups_wanted(memory.external, composition, self._settings, self._clock(), knowledge)
        self._figures.wanted(wanted)
        await self._demand.tell(wanted, memory.cursor, time.monotonic())

    async def _pause(self, waiting: Wait) -> None:
        groups = {WaitFor.LOCAL: "local groups", WaitFor.EXTERNAL: "foreign groups"}
        self._context.status.state(f"waiting for {groups.get(waiting.reason, 'trainer')}")
        pause_s = IDLE_WHILE_TRAINING_S if waiting.reason is WaitFor.TRAINER else IDLE_S
        try:
            async with asyncio.timeout(pause_s):
                await self._news.news.wait()
        except TimeoutError:
            return
