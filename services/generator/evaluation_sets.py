"""Evaluation sets (`[[eval.sets]]`): more seldom than to held-out tasks, samples several answers to
each question of every set. None of them enters training. Results go to `eval_sets.jsonl` in the
run's folder and stay on the node.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count as count_up
from itertools import takewhile
from typing import Any

import msgspec

from services.generator.engine_calls import ServerWait, evaluation_progress
from services.generator.engines.base import Engine, Sample, SamplingParams
from services.generator.episodes import Episodes
from services.generator.evaluation import (
    NOT_ANSWERED,
    EvaluationLines,
    eval_line,
    evaluation_due,
    is_last,
    said_by,
    trainer_position,
    turns_of_sets,
    unscored_line,
)
from services.generator.tasks import PromptedTask
from shared.config import NodeConfig, scorers_id
from shared.config.task_sections import EvalSet
from shared.contracts.codec import decode, encode
from shared.contracts.control import EvalTurn, SetTurn
from shared.contracts.status_figures import GENERATING
from shared.contracts.subjects import EVAL_TURN_KEY, node_bucket
from shared.contracts.wire import MessageError
from shared.run_records import EVAL_SETS_FILE, eval_lines, eval_report
from shared.runtime import ServiceContext
from shared.tasks.evaluation import PassRules, Score, judged_answers, pass_at_k, standard_error, summarise
from shared.tasks.held_out import held_out_id
from shared.tasks.reference_checks import try_rewards, worth_trying
from shared.tasks.sandbox import SandboxError, ScorerPool
from shared.transport.base import Conflict, KvEntry, TransportError


@dataclass(frozen=True)
class AskedSet:
    """An evaluation set with its file read, and its questions that fit the model."""

    spec: EvalSet
    tasks: Sequence[PromptedTask]

    @cached_property
    def questions(self) -> str:
        """Identify its questions."""
        return held_out_id([each.task for each in self.tasks])

    @property
    def asked(self) -> str:
        """Identify what is asked, and how."""
        return hashlib.sha256(json.dumps([self.questions, self.spec.k, self.spec.temperature]).encode()).hexdigest()

    @property
    def measure(self) -> str:
        """Identify what a result depends on besides the policy: with another reward everything is
        measured again.
        """
        return hashlib.sha256(f"{self.asked} {scorers_id([self.spec])}".encode()).hexdigest()


_COMPLETIONS_A_CALL = 32
"""The fewest of one call: with fewer an engine works much slower."""
_SETS_POLL_S = 0.5
_IDLE_PARTS = 4
"""After a measurement no other one of that set begins for this many times as long as it took."""


class SetEvaluator:
    """Measures the policy on evaluation sets.

    Of a set a few questions are asked at a time, so that training groups are made between these
    calls. Meanwhile the weights are not swapped, because all of a result's answers come from one
    policy.
    """

    def __init__(
        self, context: ServiceContext, config: NodeConfig, engine: Engine, sets: Sequence[AskedSet], swaps: asyncio.Lock
    ) -> None:
        """`swaps`: held by whoever replaces the engine's weights."""
        self._context = context
        self._config = config
        self._server = ServerWait(context)
        self._engine = engine
        self._names = {each.spec.name for each in sets}
        self._sets = [each for each in sets if each.tasks]
        self._swaps = swaps
        self._bucket = node_bucket(config.node.id)
        completions = max(_COMPLETIONS_A_CALL, config.generator.groups_per_call * config.generator.completions)
        self._questions_a_call = {each.spec.name: max(1, completions // each.spec.k) for each in sets}
        self._file = config.node.run_dir / EVAL_SETS_FILE
        self._lines = EvaluationLines(context, self._file)
        self._of_base: dict[str, _SetAnswers] = {}
        self._free_at: dict[str, float] = {}
        self._failed: set[tuple[str, int]] = set()
        self._resuming = {each.spec.name for each in self._sets}

    async def begin(self) -> None:
        """Ask the base policy the questions of each set on which it was never measured. Call this
        before following a published policy. Turns of sets that are configured no more go: what
        they asked may be trained on from now on.
        """
        entry = await self._context.node.kv.get(self._bucket, EVAL_TURN_KEY)
        if entry is not None and not self._names.issuperset(turns := turns_of_sets(entry)):
            await self._turn_over(entry, {name: turn for name, turn in turns.items() if name in self._names})
        for each in self._sets:
            turn = await self._turn(each)
            again = turn is not None and not turn.base and turn.policy_version == 0 and turn.replica == self._context.replica
            if (turn is None or again) and await self._take_turn(each, self._engine.policy_version):
                self._context.log.info("measuring_base_policy", set=each.spec.name, answers=each.spec.k * len(each.tasks))
                if answers := await self._ask(each):
                    self._of_base[each.spec.name] = answers

    async def run(self) -> None:
        """Loop for ever and measure when due, one set after another."""
        while self._sets:
            for each in self._sets:
                version = self._engine.policy_version
                try:
                    if answers := self._of_base.get(each.spec.name):
                        await self._report(each, answers)
                        del self._of_base[each.spec.name]
                    else:
                        last = await is_last(self._context, version, self._config.trainer.max_steps)
                        if await self._due(each, version, last=last):
                            await self._measure(each, last=last)
                except TransportError as error:
                    self._context.log.warning("evaluation_postponed", set=each.spec.name, reason=str(error))
                    await asyncio.sleep(1.0)
                except SandboxError as error:
                    self._of_base.pop(each.spec.name, None)
                    self._failed.add((each.spec.name, version))
                    self._context.log.error(
                        "set_not_measured", set=each.spec.name, policy_version=version, reason=str(error), consequence="left out"
                    )
            await asyncio.sleep(_SETS_POLL_S)

    async def left(self, version: int) -> bool:
        """Check whether the last policy, `version`, has still to be measured on one of the sets, as
        far as this replica can tell.
        """
        if self._of_base:
            return True
        for each in self._sets:
            turn = await self._turn(each)
            measured = turn is not None and turn.policy_version >= version
            if turn is not None and turn.replica == self._context.replica and not turn.done:
                measured = False
            if not measured and (each.spec.name, version) not in self._failed:
                return True
        return False

    async def _turn(self, each: AskedSet) -> SetTurn | None:
        """The newest turn of a set; None if it was never measured like this."""
        turn = turns_of_sets(await self._context.node.kv.get(self._bucket, EVAL_TURN_KEY)).get(each.spec.name)
        return turn if turn is not None and turn.measure == each.measure else None

    async def _due(self, each: AskedSet, version: int, *, last: bool) -> bool:
        if (each.spec.name, version) in self._failed:
            return False
        if (turn := await self._turn(each)) is None:
            return True
        if each.spec.name in self._resuming and turn.replica == self._context.replica and not turn.done:
            return version >= turn.policy_version  # its own turn from before a restart, once the weights are there
        if not last and time.monotonic() < self._free_at.get(each.spec.name, 0.0):
            return False
        return evaluation_due(version, turn.policy_version, each.spec.every_versions, finished=last)

    async def _take_turn(self, each: AskedSet, version: int) -> bool:
        """Claim the version for a set by compare-and-set; False if another replica was faster."""
        trained = (await trainer_position(self._context)).policy_version

        def claimed(turn: SetTurn | None) -> SetTurn | None:
            known = turn if turn is not None and turn.measure == each.measure else None
            if known is not None and known.policy_version >= version + (known.replica == self._context.replica):
                return None
            added_at = turn.added_at if turn is not None and turn.questions == each.questions else trained
            return SetTurn(
                measure=each.measure,
                policy_version=version,
                replica=self._context.replica,
                base=known is not None and known.base,
                questions=each.questions,
                added_at=added_at,
            )

        taken = await self._turned(each.spec.name, claimed)
        if taken:
            self._resuming.discard(each.spec.name)
        return taken

    async def _turned(self, name: str, change: Callable[[SetTurn | None], SetTurn | None]) -> bool:
        """Change a set's turn, again and again where other turns were changed meanwhile. False if
        `change` returns None.
        """
        while True:
            entry = await self._context.node.kv.get(self._bucket, EVAL_TURN_KEY)
            sets = turns_of_sets(entry)
            turn = change(sets.get(name))
            if turn is None:
                return False
            if await self._turn_over(entry, {**sets, name: turn}):
                return True

    async def _turn_over(self, entry: KvEntry | None, sets: dict[str, SetTurn]) -> bool:
        """Store the turns of sets beside that of the held-out questions, unless another replica has
        changed them since `entry` was read.
        """
        try:
            held_out = None if entry is None else decode(entry.value, EvalTurn)
        except MessageError:
            held_out = None
        mine = EvalTurn(
            policy_version=held_out.policy_version if held_out else 0,
            replica=held_out.replica if held_out else self._context.replica,
            sets=sets,
        )
        try:
            revision = entry.revision if entry else 0
            await self._context.node.kv.update(self._bucket, EVAL_TURN_KEY, encode(mine), last_revision=revision)
        except Conflict:
            return False
        return True

    async def _measure(self, each: AskedSet, *, last: bool) -> None:
        async with self._swaps:
            if not await self._take_turn(each, self._engine.policy_version):
                return
            answers = await self._ask(each, last=last)
        if answers:
            await self._report(each, answers)
        if last:
            self._context.status.state(GENERATING)
        self._free_at[each.spec.name] = time.monotonic() + _IDLE_PARTS * (answers.seconds if answers else 60.0)

    async def _ask(self, each: AskedSet, *, last: bool = False) -> _SetAnswers | None:
        """None if the engine's server answers none of the questions."""
        params = SamplingParams(temperature=each.spec.temperature, max_new_tokens=self._config.generator.max_new_tokens)
        samples: list[list[Sample]] = []
        seconds, size = 0.0, self._questions_a_call[each.spec.name]
        episodes = Episodes(self._engine, self._config, [each.spec])
        for first in range(0, len(each.tasks), size):
            tasks = each.tasks[first : first + size]

            async def asked(
                tasks: Sequence[PromptedTask] = tasks, seed: int = first, given: Sequence[Sequence[Sample]] = tuple(samples)
            ) -> tuple[list[list[Sample]], float]:
                async with self._engine.turn():
                    started = time.monotonic()
                    asks, turns = each.spec.k * len(each.tasks), episodes.several_turns
                    async with evaluation_progress(self._context, self._engine, asks, last=last, given=given, turns=turns):
                        found = await episodes.sampled(tasks, each.spec.k, params, seed=seed)
                return found, time.monotonic() - started

            try:
                found, took_s = await self._server.answer(asked)
            finally:
                await episodes.close()
            samples += found
            seconds += took_s
            await asyncio.sleep(0)  # a training call that waits comes first
        if not any(samples):
            self._context.log.warning("evaluation_left_out", set=each.spec.name, reason="no question was answered")
            return None
        return _SetAnswers([of_task or [NOT_ANSWERED] * each.spec.k for of_task in samples], seconds, self._engine.policy_version)

    async def _report(self, each: AskedSet, answered: _SetAnswers) -> None:
        """Score the answers, write the line, and then note that the version is measured."""
        started, spec = time.monotonic(), each.spec
        rules = PassRules([spec])
        for line in eval_lines(self._file):
            if line.get("set") == spec.name and (earlier := eval_report("node", line)) and earlier.scorer == scorers_id([spec]):
                rules.merge(earlier.reward_values)
        async with ScorerPool.from_config(self._config.verifier, tasks=[spec], workers=1) as scorers:
            await try_rewards(scorers, [spec] if worth_trying(spec) else [], rules)
            texts = [[said_by(answer) for answer in of_task] for of_task in answered.samples]
            results = await scorers.score([(task.task, said) for task, said in zip(each.tasks, texts, strict=True)])
        scores = judged_answers(rules, [task.task.ref for task in each.tasks], results)
        turn = await self._turn(each)
        line = set_line(
            each,
            [scores[first : first + spec.k] for first in range(0, len(scores), spec.k)],
            rules,
            node=self._config.node.id,
            policy_version=answered.policy_version,
            seconds=round(answered.seconds + time.monotonic() - started, 3),
            added_at=turn.added_at if turn is not None else 0,
        )
        self._lines.append(line)

        def reported(turn: SetTurn | None) -> SetTurn | None:
            if turn is None or turn.measure != each.measure:
                return None
            done = turn.done or turn.policy_version == answered.policy_version
            return msgspec.structs.replace(turn, done=done, base=turn.base or answered.policy_version == 0)

        await self._turned(spec.name, reported)
        shown = ("n", "unknown", "pass_rate", "pass_at", "mean_reward", "seconds")
        self._context.log.info(
            "set_measured", set=spec.name, policy_version=answered.policy_version, **{key: line[key] for key in shown}
        )


@dataclass(frozen=True, slots=True)
class _SetAnswers:
    """The answers to each question of a set, the engine's time for them, and their policy."""

    samples: Sequence[Sequence[Sample]]
    seconds: float
    policy_version: int


def set_line(
    each: AskedSet,
    scores: Sequence[Sequence[Score]],
    rules: PassRules,
    *,
    node: str,
    policy_version: int,
    seconds: float,
    added_at: int = 0,
) -> dict[str, Any]:
    """One line of `eval_sets.jsonl`, from the scores of the answers to each question: that of a
    held-out evaluation with answers for tasks (`pass_rate` is avg@k), and pass@k for 1, 2, 4 and so
    on up to k. `error`: standard error of the mean over questions. `added_at`: as in `SetTurn`.
    """
    spec, refs = each.spec, [task.task.ref for task in each.tasks]
    known = [(spec.dataset, *score) for of_question in scores for score in of_question]
    scorer = scorers_id([spec])
    about = {"set": spec.name, "k": spec.k, "temperature": spec.temperature, "questions": len(scores), "added_at": added_at}
    if all(reward is None for _, reward, _ in known):
        unscored = unscored_line(policy_version, len(known), each.asked, scorer, time.time())
        return {**about, **unscored, "pass_at": {}, "error": 0.0, "seconds": seconds}
    report = summarise(
        known,
        k=spec.k,
        node=node,
        policy_version=policy_version,
        created_at=time.time(),
        seconds=seconds,
        held_out=each.asked,
        scorer=scorer,
        pass_rule=rules.rule(refs),
        values=rules.values,
    )
    sizes = [*takewhile(lambda size: size < spec.k, (2**power for power in count_up())), spec.k]
    pass_at = {str(size): rate for size in sizes if (rate := pass_at_k(scores, size)) is not None}
    error = standard_error(scores, passes=report.pass_rate is not None)
    return {**about, **eval_line(report), "pass_at": pass_at, "error": error}
