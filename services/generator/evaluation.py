"""Held-out evaluation: one answer for each task of a fixed set that never enters training, as the policy changes.

Results go to `eval.jsonl` in the run's folder and, under the key `eval`, to the node's bucket, from where the verifier hands them
to the swarm. Of several replicas, the one that wins the compare-and-set on `eval_turn` evaluates.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

from services.generator.engines.base import Engine, SamplingParams
from services.generator.policy_follower import PolicyFollower
from services.generator.tasks import PromptedTask
from shared.evaluation import summarise
from shared.messages import EvalReport, MessageError, TrainerPosition, decode, encode
from shared.runtime import ServiceContext
from shared.subjects import EVAL_KEY, EVAL_TURN_KEY, TRAINER_KEY, node_bucket
from shared.tasks.sandbox import ScorerPool
from shared.transport.base import Conflict, TransportError

_POLL_S = 0.1


def evaluation_due(version: int, last: int | None, every: int, *, finished: bool) -> bool:
    """Whether version `version` is to be evaluated, the last one evaluated being `last`. Pure.

    The base policy (version 0) and the policy of a finished trainer always are.
    """
    if last is None:
        return True
    return version > last and (finished or version - last >= every)


class Evaluator:
    """Evaluates one node's policy on its held-out tasks."""

    def __init__(self, context: ServiceContext, engine: Engine, tasks: Sequence[PromptedTask], follower: PolicyFollower) -> None:
        self._context = context
        self._engine = engine
        self._tasks = tasks
        self._follower = follower
        self._bucket = node_bucket(context.config.node.id)
        generator = context.config.generator
        self._params = SamplingParams(temperature=context.config.eval.temperature, max_new_tokens=generator.max_new_tokens)
        self._file = context.config.node.run_dir / "eval.jsonl"
        self.first_look = asyncio.Event()
        """Set once the policy that a start found is being evaluated or need not be. Groups are generated after that: without them
        there is no version 1, so that the base policy is always evaluated."""

    async def run(self) -> None:
        """Loop for ever, evaluating when it is due."""
        if not self._tasks:
            self.first_look.set()
            return
        # Before the first published policy has been looked for, version 0 might be a restarted node's stale base policy.
        await self._follower.wait_for_first(timeout_s=2.0)
        config = self._context.config
        scorers = ScorerPool.from_config(config.verifier, workers=1)
        scorers_start = asyncio.create_task(scorers.start())
        try:
            while True:
                try:
                    await self._evaluate_if_due(scorers, scorers_start)
                    self.first_look.set()
                except TransportError as error:
                    self._context.log.warning("evaluation_postponed", reason=str(error))
                    await asyncio.sleep(1.0)
                await asyncio.sleep(_POLL_S)
        finally:
            scorers_start.cancel()
            await scorers.close()

    async def _evaluate_if_due(self, scorers: ScorerPool, scorers_start: asyncio.Task[None]) -> None:
        version = self._engine.policy_version
        turn = await self._context.node.kv_get(self._bucket, EVAL_TURN_KEY)
        last = int(turn.value) if turn else None
        position = await self._trainer_position()
        finished = position is not None and position.finished and position.policy_version == version
        if not evaluation_due(version, last, self._context.config.eval.every_versions, finished=finished):
            return
        try:
            await self._context.node.kv_update(
                self._bucket, EVAL_TURN_KEY, str(version).encode(), last_revision=turn.revision if turn else 0
            )
        except Conflict:
            return  # another replica's turn
        report = await self._evaluate(scorers, scorers_start)
        self._write(report)
        await self._context.node.kv_put(self._bucket, EVAL_KEY, encode(report))
        self._context.status.set("eval_pass_rate", report.pass_rate)
        self._context.status.set("eval_version", report.policy_version)
        self._context.log.info(
            "evaluated",
            policy_version=report.policy_version,
            pass_rate=round(report.pass_rate, 4),
            n=report.n,
            seconds=report.seconds,
        )

    async def _trainer_position(self) -> TrainerPosition | None:
        entry = await self._context.node.kv_get(self._bucket, TRAINER_KEY)
        if entry is None:
            return None
        try:
            return decode(entry.value, TrainerPosition)
        except MessageError as error:
            self._context.log.error("trainer_position_unreadable", reason=str(error))
            return None

    async def _evaluate(self, scorers: ScorerPool, scorers_start: asyncio.Task[None]) -> EvalReport:
        started = time.monotonic()
        # One call, so that one policy version answers everything; generation and weight swaps wait for it.
        self.first_look.set()
        samples = await self._engine.generate([each.prompt_ids for each in self._tasks], 1, self._params, seed=0)
        await scorers_start
        answers = [only for (only,) in samples]
        rewards = await scorers.score([(each.task, [answer.text]) for each, answer in zip(self._tasks, answers, strict=True)])
        results = [(each.task.ref.dataset, reward) for each, (reward,) in zip(self._tasks, rewards, strict=True)]
        return summarise(
            results,
            node=self._context.config.node.id,
            policy_version=answers[0].policy_version,
            created_at=time.time(),
            seconds=round(time.monotonic() - started, 3),
        )

    def _write(self, report: EvalReport) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a") as file:
            file.write(json.dumps(eval_line(report)) + "\n")


def eval_line(report: EvalReport) -> dict[str, Any]:
    """One line of `eval.jsonl`."""
    return {
        "policy_version": report.policy_version,
        "pass_rate": report.pass_rate,
        "mean_reward": report.mean_reward,
        "n": report.n,
        "per_task": {
            name: {"n": t.n, "pass_rate": t.pass_rate, "mean_reward": t.mean_reward} for name, t in report.per_task.items()
        },
        "seconds": report.seconds,
        "time": report.created_at,
    }
