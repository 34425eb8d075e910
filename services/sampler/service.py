"""The sampler as a process: follows the scored stream and the trainer, and appends each batch as
soon as it may.

All decisions are `memory`'s and `assembly`'s. This file only reads, asks them, and appends.
Whenever it is in doubt about the log's end (an append that timed out, another sampler's batch) it
forgets everything and reads the logs again, which is also how it starts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.sampler.assembly import Assembly, BatchPlan, Wait, WaitFor
from services.sampler.bandit import Evaluation
from services.sampler.composition import compose, taken_of
from services.sampler.figures import Figures
from services.sampler.fitting import fitted
from services.sampler.knowledge import knowledge_of
from services.sampler.logs import BatchLog, ScoredLog
from services.sampler.memory import SamplerMemory, state_for_new_stream
from services.sampler.pool import PoolEntry
from services.sampler.settings import limits_of, rules_of, steering_rules_of
from services.sampler.steering import after_batch, in_force, reconciled
from shared.config import NodeConfig
from shared.contracts.codec import decode, encode
from shared.contracts.control import EvalReport, SamplerPosition, TrainerPosition
from shared.contracts.messages import Batch, ScoredGroup
from shared.contracts.rollout_id import batch_fields, rollout_id_of
from shared.contracts.sampler_state import SamplerState, SteeringState
from shared.contracts.subjects import EVAL_KEY, SAMPLER_KEY, TRAINER_KEY, node_bucket
from shared.contracts.wire import MessageError
from shared.runtime import FatalError, ServiceContext, run_until_stopped
from shared.transport.base import Conflict, StreamFull, TooLarge, TransportError

IDLE_S = 0.02
"""Pause after finding nothing new while the trainer waits for a batch: a demo's whole step takes
0.3 s.
"""
IDLE_WHILE_TRAINING_S = 0.1
"""Pause while the trainer is busy; its news ends it at once."""
_RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)
_PURGE_EVERY_S = 20.0
_COMPLAIN_AFTER_S = 60.0
_REPLAY_TIMEOUT_S = 60.0

_REMEDIES = {
    WaitFor.LOCAL: "are the generator and verifier of this node alive? see `swarm status`",
    WaitFor.EXTERNAL: "sampler.shortage decides what happens without foreign groups; short or fill_local go on",
    WaitFor.TRAINER: "is the trainer alive? see `swarm status`",
    WaitFor.NOTHING: "",
}


class _BatchTooLarge(Exception):
    """The log did not take a batch; the next attempt knows how much it takes."""


@dataclass
class _Loaded:
    """Everything that reading the logs again replaces."""

    memory: SamplerMemory
    after_seq: int
    published: SamplerState
    steering: SteeringState
    """What decides the next batch's I, J and strategy."""


class SamplerService:
    """See the module. `clock` gives Unix time in seconds; tests hold it still."""

    def __init__(self, config: NodeConfig, clock: Callable[[], float] = time.time) -> None:
        try:
            self._rules = rules_of(config)
            self._steering_rules = steering_rules_of(config)
        except ValueError as error:
            raise FatalError(str(error)) from None
        self._limits = limits_of(config)
        self._node = config.node.id
        self._clock = clock
        self._steers = bool(self._steering_rules.arms) or self._steering_rules.sharing is not None
        self._position: TrainerPosition | None = None
        self._evaluation: Evaluation | None = None
        self._news = asyncio.Event()
        self._room_bytes: int | None = None
        """What the log takes of groups in one batch; None until it refused one."""

    async def run(self, context: ServiceContext) -> None:
        """Build batches until `context.stopping` is set."""
        self._context = context
        self._figures = Figures(context.registry, context.status, self._steering_rules.external)
        self._scored = ScoredLog(context.node, self._node)
        self._batches = BatchLog(context.node, self._node)
        self._reported: SamplerPosition | None = None
        following = [self._follow_trainer(), *([self._follow_evaluations()] if self._steers else [])]
        await run_until_stopped(context.stopping, *following, self._go_on())

    async def _follow_trainer(self) -> None:
        async for entry in self._context.node.kv.watch(node_bucket(self._node), TRAINER_KEY, poll_s=0.5):
            try:
                self._position = decode(entry.value, TrainerPosition)
            except MessageError as error:
                self._context.log.error("trainer_position_unreadable", reason=str(error), remedy="update the older side")
                continue
            self._news.set()

    async def _follow_evaluations(self) -> None:
        async for entry in self._context.node.kv.watch(node_bucket(self._node), EVAL_KEY, poll_s=0.5):
            self._note_evaluation(entry.value)

    def _note_evaluation(self, payload: bytes) -> None:
        try:
            report = decode(payload, EvalReport)
        except MessageError as error:
            self._context.log.error("evaluation_unreadable", reason=str(error), remedy="update the older side")
            return
        self._evaluation = Evaluation.of(report)

    async def _go_on(self) -> None:
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
                f"the newest batch in {self._batches.stream} cannot be read: {error}: run the software version that wrote it"
            ) from None
        if self._steers and (evaluation := await self._context.node.kv.get(node_bucket(self._node), EVAL_KEY)) is not None:
            self._note_evaluation(evaluation.value)
        first_held, last_used = await self._scored.bounds()
        state = newest.batch.state if newest.batch is not None else SamplerState()
        if last_used < state.scored_seq:
            self._context.log.warning(
                "scored_stream_made_anew", stream=self._scored.stream, expected_seq=state.scored_seq, found_seq=last_used
            )
            state = state_for_new_stream(state, self._limits.in_flight_local)
        number = newest.batch.number + 1 if newest.batch is not None else 1
        memory = SamplerMemory(self._limits, self._rules.strategy.keeps, state, number)
        memory.skip_to(first_held)
        while memory.cursor < last_used:
            before = memory.cursor
            await self._read(memory)
            if memory.cursor == before:  # a copy of the stream that lags behind its leader answered
                if time.monotonic() - started > _REPLAY_TIMEOUT_S:
                    raise TransportError(f"{self._scored.stream} gives nothing after {before}, yet its last message is {last_used}")
                await asyncio.sleep(IDLE_S)
        self._context.log.info(
            "logs_read",
            next_batch=number,
            pool_local=len(memory.local),
            pool_external=len(memory.external),
            seconds=round(time.monotonic() - started, 3),
        )
        loaded = _Loaded(memory, newest.seq, state, reconciled(self._steering_rules, state.steering, number))
        self._figures.steered(in_force(self._steering_rules, loaded.steering))
        return loaded

    async def _read(self, memory: SamplerMemory) -> None:
        for problem in await self._scored.read_into(memory):
            self._context.log.error("scored_group_unreadable", reason=problem, consequence="dropped")

    async def _build_batches(self, loaded: _Loaded) -> None:
        memory, assembly = loaded.memory, Assembly(self._rules)
        purged_at = waiting_since = complained_at = time.monotonic()
        while True:
            self._news.clear()
            cursor = memory.cursor
            await self._read(memory)
            decided_at = time.monotonic()
            decision = assembly.decide(
                memory.local,
                memory.external,
                memory.next_number,
                self._position,
                self._clock(),
                memory.heard_of,
                knowledge_of(memory.own),
                in_force(self._steering_rules, loaded.steering),
                memory.replayable,
            )
            if isinstance(decision, BatchPlan):
                if await self._append(decision, loaded):
                    self._figures.built(decision, time.monotonic() - decided_at, self._clock())
                    waiting_since = complained_at = time.monotonic()
                self._figures.refresh(memory, WaitFor.NOTHING)
                await self._report(loaded)
                continue
            self._figures.refresh(memory, decision.reason)
            await self._report(loaded)
            if time.monotonic() - complained_at > _COMPLAIN_AFTER_S:
                complained_at = time.monotonic()
                self._complain(decision, memory, complained_at - waiting_since)
            if time.monotonic() - purged_at > _PURGE_EVERY_S:
                purged_at = time.monotonic()
                await self._scored.purge(memory.purgeable_seq(loaded.published))
            if memory.cursor == cursor:
                await self._pause(decision)
            self._figures.waited(decision.reason, time.monotonic() - decided_at)

    async def _append(self, plan: BatchPlan, loaded: _Loaded) -> bool:
        """Append the planned batch; False when it must be planned anew because a payload is
        gone.
        """
        started = time.monotonic()
        payloads = await self._scored.payloads((*plan.local, *plan.external, *plan.replayed))
        present = {seq: scored for seq, scored in payloads.items() if scored is not None}
        if len(present) < len(payloads):
            for gone in payloads.keys() - present.keys():
                loaded.memory.lose(gone)
            self._tell_of_gone([entry for entry in plan.replayed if entry.seq not in present])
            return False
        smaller = self._fitting(plan, present, loaded)
        if smaller is None:
            return False
        plan = smaller
        now = self._clock()
        state = loaded.memory.take((*plan.local, *plan.external), plan.aged, self._steered(plan, loaded, now))
        batch = compose(plan, present, state, now)
        try:
            seq = await self._batches.append(batch, loaded.after_seq)
        except TooLarge as error:
            self._make_room(batch, error)
            raise _BatchTooLarge from None
        except StreamFull as error:
            raise TransportError(f"{error}: is the trainer alive?") from None
        if seq is None:
            raise Conflict(f"batch {plan.number} was in the log already")
        self._tell_of_moves(loaded.steering, state.steering)
        loaded.after_seq, loaded.published, loaded.steering = seq, state, state.steering
        loaded.memory.advance()
        self._context.log.info(
            "batch",
            **batch_fields(batch),
            policy_version=plan.number - 1,
            local=len(plan.local),
            external=len(plan.external),
            replayed=len(plan.replayed),
            shortage=plan.shortage,
            strategy=batch.strategy,
            stream_seq=seq,
            seconds=round(time.monotonic() - started, 4),
        )
        return True

    def _fitting(self, plan: BatchPlan, present: dict[int, ScoredGroup], loaded: _Loaded) -> BatchPlan | None:
        """The plan as the log takes it; None when a group that fits into no batch was given up, so
        that it is planned anew.
        """
        if self._room_bytes is None:
            return plan
        sizes = {seq: len(encode(scored)) for seq, scored in present.items()}
        fits = fitted(plan, sizes, self._room_bytes)
        for entry in fits.too_large:
            loaded.memory.lose(entry.seq, "too_large")
            self._context.log.error(
                "group_too_large",
                rollout_id=rollout_id_of(entry.group_id),
                node=entry.node,
                size_bytes=sizes[entry.seq],
                room_bytes=self._room_bytes,
                consequence="dropped",
                remedy=f"raise max_msg_size of {self._batches.stream}, or lower generator.completions and generator.max_new_tokens",
            )
        return None if fits.too_large else fits.plan

    def _tell_of_gone(self, replayable: Sequence[PoolEntry]) -> None:
        for entry in replayable:
            self._context.log.info(
                "replayable_group_gone",
                rollout_id=rollout_id_of(entry.group_id),
                stream_seq=entry.seq,
                consequence="not replayed; it was trained on before",
            )

    def _make_room(self, batch: Batch, error: TooLarge) -> None:
        """Note what the log takes: its limit less what a batch has besides groups, or half of what
        it refused.
        """
        size_bytes, groups_bytes = len(encode(batch)), sum(len(encode(item.scored)) for item in batch.items)
        limit_bytes = size_bytes // 2 if error.limit_bytes is None else error.limit_bytes
        self._room_bytes = max(1, min(limit_bytes - (size_bytes - groups_bytes), groups_bytes - 1))
        self._context.log.warning(
            "batch_too_large",
            batch=batch.number,
            size_bytes=size_bytes,
            reason=str(error),
            consequence=f"batches of at most {self._room_bytes} bytes of groups; the largest wait",
            remedy=f"raise max_msg_size of {self._batches.stream} and start the sampler again, or lower sampler.local and "
            "sampler.external",
        )

    def _steered(self, plan: BatchPlan, loaded: _Loaded, now: float) -> SteeringState:
        """What the next batch will be made of, decided with this one."""
        return after_batch(
            self._steering_rules,
            loaded.steering,
            plan.number,
            own=loaded.memory.own,
            batch=taken_of(plan, now),
            evaluation=self._evaluation,
        )

    def _tell_of_moves(self, before: SteeringState, after: SteeringState) -> None:
        was, becomes = in_force(self._steering_rules, before), in_force(self._steering_rules, after)
        if was == becomes:
            return
        self._figures.steered(becomes)
        moved = after.sharing is not None and was.external != becomes.external
        self._context.log.info(
            "steered",
            local=becomes.local,
            external=becomes.external,
            strategy=becomes.explained,
            why=after.sharing.why if moved and after.sharing is not None else "a new held-out result",
        )

    async def _report(self, loaded: _Loaded) -> None:
        """Tell the generator what was consumed and dropped and what the next batch takes: its
        admission may be waiting for it.
        """
        memory, moves = loaded.memory, self._steering_rules.sharing is not None
        position = SamplerPosition(
            batch_number=memory.next_number - 1,
            consumed_local=memory.consumed_local,
            dropped_local=memory.dropped_local,
            local=in_force(self._steering_rules, loaded.steering).local if moves else None,
        )
        if position != self._reported:
            await self._context.node.kv.put(node_bucket(self._node), SAMPLER_KEY, encode(position))
            self._reported = position

    async def _pause(self, waiting: Wait) -> None:
        self._context.status.state(f"waiting for {waiting.reason.name.lower()}")
        pause_s = IDLE_WHILE_TRAINING_S if waiting.reason is WaitFor.TRAINER else IDLE_S
        try:
            async with asyncio.timeout(pause_s):
                await self._news.wait()
        except TimeoutError:
            return

    def _complain(self, waiting: Wait, memory: SamplerMemory, waited_s: float) -> None:
        if self._position is not None and self._position.finished:
            return
        self._context.log.warning(
            "no_batch",
            next_batch=memory.next_number,
            waiting_for=waiting.reason.name.lower(),
            have=waiting.have,
            need=waiting.need,
            seconds=round(waited_s),
            remedy=_REMEDIES[waiting.reason],
        )
