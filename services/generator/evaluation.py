"""Evaluation: as the policy changes, samples one answer to each task of a fixed held-out set, and
more seldom several to each question of every `[[eval.sets]]`. None of them enters training.

Results go to `eval.jsonl` in the run's folder, and a few of the answers to `samples.jsonl` beside
it. Results are also written to the node's bucket under the key `eval`, from where the verifier
sends them to the swarm. Of several replicas, the one that wins the compare-and-set on `eval_turn`
evaluates. Results of sets go to `eval_sets.jsonl` and stay on the node.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count as count_up
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from services.generator.engine_calls import ServerWait, sampled
from services.generator.engines.base import Engine, Sample, SamplingParams
from services.generator.figures import Figures
from services.generator.tasks import PromptedTask
from shared.config import NodeConfig, scorers_id
from shared.config.task_sections import EvalSet
from shared.contracts.codec import decode, encode
from shared.contracts.control import EvalReport, EvalTurn, RewardValues, SetTurn, TrainerPosition, incomparable
from shared.contracts.messages import Task
from shared.contracts.subjects import EVAL_KEY, EVAL_TURN_KEY, REWARD_VALUES_KEY, TRAINER_KEY, node_bucket
from shared.contracts.wire import MessageError
from shared.rewards import unknown_of
from shared.run_records import (
    EVAL_FILE,
    EVAL_SETS_FILE,
    SAMPLES_FILE,
    SAMPLES_MAX_BYTES,
    BoundedLines,
    eval_lines,
    eval_report,
    open_lines,
    write_whole,
)
from shared.runtime import ServiceContext
from shared.tasks.evaluation import PassRules, Score, judged_answers, pass_at_k, standard_error, summarise
from shared.tasks.held_out import held_out_id
from shared.tasks.reference_checks import try_rewards, worth_trying
from shared.tasks.sandbox import SandboxError, ScorerPool
from shared.transport.base import Conflict, KvEntry, TransportError

_POLL_S = 0.1
_FOLLOW_S = 2.0
_NOT_ANSWERED = Sample((), "", "stop", None)


def evaluation_due(version: int, last: int | None, every: int, *, finished: bool) -> bool:
    """Decide whether to evaluate version `version` if `last` was evaluated last. Pure.

    The base policy (version 0) and the policy of a finished trainer are always evaluated.
    """
    if last is None:
        return True
    return version > last and (finished or version - last >= every)


async def is_last(context: ServiceContext, version: int, steps: int) -> bool:
    """Check whether the trainer has finished with the policy `version`, or will have: it is that of
    its last step, of `steps` (`trainer.max_steps`; 0: no limit).
    """
    if steps and version >= steps:
        return True
    position = await _trainer_position(context)
    return position.finished and position.policy_version == version


async def _trainer_position(context: ServiceContext) -> TrainerPosition:
    """Where the trainer is; at the beginning if nobody can tell."""
    entry = await context.node.kv.get(node_bucket(context.config.node.id), TRAINER_KEY)
    try:
        if entry is not None:
            return decode(entry.value, TrainerPosition)
    except MessageError as error:
        context.log.error("trainer_position_unreadable", reason=str(error))
    return TrainerPosition(policy_version=0, consumed_local=0)


class _EvaluationLines:
    """A file of evaluations, to which lines that could not be written before are written with the
    next one.
    """

    def __init__(self, context: ServiceContext, file: Path) -> None:
        self._context, self._file = context, file
        self._unwritten: list[dict[str, Any]] = []

    def append(self, line: dict[str, Any]) -> None:
        self._unwritten.append(line)
        remedy = f"free space at {self._file.parent}; the lines are kept and written with the next one"
        with self._context.writes.trying("evaluation", remedy):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            written = {_line_identity(each) for each in eval_lines(self._file)}
            with open_lines(self._file) as file:
                while self._unwritten:
                    # A restart may have come between writing a line and announcing it. Where the
                    # rewards were unknown, the policy is evaluated again and may get its score.
                    if _line_identity(oldest := self._unwritten[0]) not in written:
                        write_whole(file, json.dumps(oldest).encode() + b"\n")
                    self._unwritten.pop(0)


@dataclass(frozen=True, slots=True)
class _Answers:
    """One answer for each held-out task, and the engine's time for all of them."""

    samples: Sequence[Sample]
    seconds: float


class Evaluator:
    """Evaluates one node's policy on its held-out tasks."""

    def __init__(
        self,
        context: ServiceContext,
        config: NodeConfig,
        engine: Engine,
        tasks: Sequence[PromptedTask],
        figures: Figures,
        sets: SetEvaluator | None = None,
    ) -> None:
        """`config`: with the files of its task sources already read. `sets`: measures the last
        policy first, because a run may end with its held-out evaluation.
        """
        self._context = context
        self._sets = sets
        self._server = ServerWait(context)
        self._config = config
        self._rules = PassRules(config.tasks)
        self._engine = engine
        self._tasks = tasks
        self._held_out = held_out_id([each.task for each in tasks])
        self._scorer = scorers_id(config.tasks)
        self._figures = figures
        figures.held_out_tasks(len(tasks))
        self._bucket = node_bucket(config.node.id)
        generator = config.generator
        self._params = SamplingParams(temperature=config.eval.temperature, max_new_tokens=generator.max_new_tokens)
        self._file = config.node.run_dir / EVAL_FILE
        self._samples = BoundedLines(config.node.run_dir / SAMPLES_FILE, SAMPLES_MAX_BYTES)
        self._lines = _EvaluationLines(context, self._file)
        self._base_answers: _Answers | None = None
        self._resuming = True
        self._shown: EvalReport | None = None

    async def begin(self) -> None:
        """Evaluate the base policy if this node has never evaluated anything, because every gain is
        measured against it.

        Call this before following a published policy.
        """
        if self._tasks and await self._last_report() is None and await self._take_turn(self._engine.policy_version):
            self._base_answers = await self._answers()

    async def run(self) -> None:
        """Loop for ever and evaluate when due. Answers that could not be reported are kept."""
        if not self._tasks:
            return
        async with ScorerPool.from_config(self._config.verifier, tasks=self._config.tasks, workers=1) as scorers:
            await try_rewards(scorers, [spec for spec in self._config.tasks if worth_trying(spec)], self._rules)
            unreported = self._base_answers
            while True:
                try:
                    if unreported is None and await self._due() and await self._take_turn(self._engine.policy_version):
                        unreported = await self._answers()
                    if unreported is not None:
                        await self._report(unreported, scorers)
                        unreported = None
                except TransportError as error:
                    self._context.log.warning("evaluation_postponed", reason=str(error))
                    await asyncio.sleep(1.0)
                await asyncio.sleep(_POLL_S)

    async def follow(self) -> None:
        """Loop for ever and show the node's newest result, whichever replica produced it."""
        while self._tasks:
            try:
                entry = await self._context.node.kv.get(self._bucket, EVAL_KEY)
                if entry is not None:
                    self._show(decode(entry.value, EvalReport))
            except (TransportError, MessageError) as error:
                self._context.log.debug("evaluation_unreadable", reason=str(error))
            await asyncio.sleep(_FOLLOW_S)

    async def _due(self) -> bool:
        version = self._engine.policy_version
        finished = await is_last(self._context, version, self._config.trainer.max_steps)
        last = await self._last_turn()
        if finished and self._sets is not None and await self._sets.left(version):
            return False
        return evaluation_due(version, last, self._config.eval.every_versions, finished=finished)

    async def _last_turn(self) -> int | None:
        """The version that was evaluated last, or that another replica is evaluating."""
        entry = await self._context.node.kv.get(self._bucket, EVAL_TURN_KEY)
        if entry is None:
            return None
        try:
            turn = decode(entry.value, EvalTurn)
        except MessageError as error:
            self._context.log.warning("evaluation_turn_unreadable", reason=str(error), consequence="it is taken anew")
            return await self._last_report()
        if self._resuming and turn.replica == self._context.replica:
            # This replica's own turn from before a restart may have ended without a result.
            return await self._last_report()
        return turn.policy_version

    async def _take_turn(self, version: int) -> bool:
        """Claim the version by compare-and-set; False if another replica was faster."""
        entry = await self._context.node.kv.get(self._bucket, EVAL_TURN_KEY)
        mine = encode(EvalTurn(policy_version=version, replica=self._context.replica, sets=_turns_of_sets(entry)))
        try:
            await self._context.node.kv.update(self._bucket, EVAL_TURN_KEY, mine, last_revision=entry.revision if entry else 0)
        except Conflict:
            return False
        self._resuming = False
        return True

    async def _last_report(self) -> int | None:
        entry = await self._context.node.kv.get(self._bucket, EVAL_KEY)
        try:
            return None if entry is None else decode(entry.value, EvalReport).policy_version
        except MessageError as error:
            self._context.log.warning("evaluation_unreadable", reason=str(error), consequence="the policy is evaluated again")
            return None

    async def _answers(self) -> _Answers | None:
        """None if the engine's server answers none of the tasks; one that it refuses to answer is
        not solved.
        """
        given, seconds = await self._server.answer(self._asked)
        if not any(given):
            self._context.log.warning(
                "evaluation_left_out", reason="no held-out task was answered", consequence="tried at the next start"
            )
            return None
        return _Answers([samples[0] if samples else _NOT_ANSWERED for samples in given], seconds)

    async def _asked(self) -> tuple[list[list[Sample]], float]:
        # One call, so that one policy version gives all answers; weight swaps wait for it.
        async with self._engine.turn():
            started = time.monotonic()
            samples = await sampled(self._engine, [each.prompt_ids for each in self._tasks], 1, self._params, seed=0)
        return samples, time.monotonic() - started

    async def _report(self, answered: _Answers, scorers: ScorerPool) -> None:
        """Score and report. The file is written before the bucket: a report that is lost with this
        process is made again, but not one that is already in the bucket.
        """
        await self._learn_passes()  # first, since it fails while the server is away, and scoring takes long
        started, answers = time.monotonic(), answered.samples
        results = await scorers.score([(each.task, [answer.text]) for each, answer in zip(self._tasks, answers, strict=True)])
        scored = judged_answers(self._rules, [each.task.ref for each in self._tasks], results)
        version, unknown = answers[0].policy_version, [each for each in results if each.rewards == [None]]
        if unknown:
            causes = dict(unknown_of(mark for each in unknown for mark in each.marks))
            consequence = "these answers are left out of the means" if len(unknown) < len(results) else "no score is reported"
            detail, remedy = unknown[0].detail, "`swarm config check` tries the verifier"
            self._context.log.warning(
                "rewards_unknown", policy_version=version, causes=causes, detail=detail, consequence=consequence, remedy=remedy
            )
        self._figures.unknown_rewards(len(unknown))
        if len(unknown) == len(results):
            self._lines.append(unscored_line(version, len(unknown), self._held_out, self._scorer, time.time()))
            return
        report = summarise(
            [(each.task.ref.dataset, *score) for each, score in zip(self._tasks, scored, strict=True)],
            node=self._config.node.id,
            policy_version=version,
            created_at=time.time(),
            seconds=round(answered.seconds + time.monotonic() - started, 3),
            held_out=self._held_out,
            scorer=self._scorer,
            pass_rule=self._rules.rule([each.task.ref for each in self._tasks]),
            values=self._rules.values,
        )
        self._lines.append(eval_line(report))
        await self._context.node.kv.put(self._bucket, EVAL_KEY, encode(report))
        self._write_samples(answers, scored, [{name: values[0] for name, values in each.parts.items()} for each in results], report)
        self._show(report)
        pass_rate = None if report.pass_rate is None else round(report.pass_rate, 4)
        mean_reward, n = round(report.mean_reward, 4), report.n
        self._context.log.info("evaluated", policy_version=version, pass_rate=pass_rate, mean_reward=mean_reward, n=n)

    async def _learn_passes(self) -> None:
        """Take over the rewards that the verifiers, and earlier evaluations, have seen."""
        try:
            known = await self._context.node.kv.get(self._bucket, REWARD_VALUES_KEY)
            if known is not None and (values := decode(known.value, RewardValues)).scorer in (None, self._scorer):
                self._rules.merge(values.sources)
            earlier = await self._context.node.kv.get(self._bucket, EVAL_KEY)
            if earlier is not None and (report := decode(earlier.value, EvalReport)).scorer in (None, self._scorer):
                self._rules.merge(report.reward_values)
        except MessageError as error:
            self._context.log.warning("reward_values_unreadable", reason=str(error), consequence="they are learnt anew")

    def _show(self, report: EvalReport) -> None:
        self._figures.evaluated(report)
        if report != self._shown:
            self._figures.base_pass_ratio(self._pass_ratio_of_base(report))
            self._shown = report

    def _pass_ratio_of_base(self, newest: EvalReport) -> float | None:
        """The base policy's pass rate by the measure of the newest report. None: there is none, or
        another replica's disk has it.
        """
        try:
            reports = [report for line in eval_lines(self._file) if (report := eval_report(newest.node, line)) is not None]
        except (OSError, ValueError):
            return None
        base = [
            report for report in [*reports, newest] if report.policy_version == 0 and report.n and not incomparable(report, newest)
        ]
        return base[-1].pass_rate if base else None

    def _write_samples(
        self, answers: Sequence[Sample], scored: Sequence[Score], parts: Sequence[Parts], report: EvalReport
    ) -> None:
        """Nothing depends on the samples; those that cannot be written are dropped."""
        version, time_s = report.policy_version, report.created_at
        remedy = f"free space at {self._file.parent}; the scores are complete, the answers of these versions are not on record"
        with self._context.writes.trying("samples", remedy):
            line = samples_line(self._tasks, answers, scored, parts, policy_version=version, time_s=time_s, scorer=self._scorer)
            self._samples.append(line)


def _turns_of_sets(entry: KvEntry | None) -> dict[str, SetTurn]:
    """The turns of evaluation sets; none if nobody can read them, so that they are measured
    again.
    """
    try:
        return {} if entry is None else decode(entry.value, EvalTurn).sets
    except MessageError:
        return {}


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
        self._lines = _EvaluationLines(context, self._file)
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
        if entry is not None and not self._names.issuperset(turns := _turns_of_sets(entry)):
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
                    elif await self._due(each, version, last=await is_last(self._context, version, self._config.trainer.max_steps)):
                        await self._measure(each)
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
        turn = _turns_of_sets(await self._context.node.kv.get(self._bucket, EVAL_TURN_KEY)).get(each.spec.name)
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
        trained = (await _trainer_position(self._context)).policy_version

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
            sets = _turns_of_sets(entry)
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

    async def _measure(self, each: AskedSet) -> None:
        async with self._swaps:
            if not await self._take_turn(each, self._engine.policy_version):
                return
            answers = await self._ask(each)
        if answers:
            await self._report(each, answers)
        self._free_at[each.spec.name] = time.monotonic() + _IDLE_PARTS * (answers.seconds if answers else 60.0)

    async def _ask(self, each: AskedSet) -> _SetAnswers | None:
        """None if the engine's server answers none of the questions."""
        params = SamplingParams(temperature=each.spec.temperature, max_new_tokens=self._config.generator.max_new_tokens)
        samples: list[list[Sample]] = []
        seconds, size = 0.0, self._questions_a_call[each.spec.name]
        for first in range(0, len(each.tasks), size):
            prompts = [task.prompt_ids for task in each.tasks[first : first + size]]

            async def asked(prompts: Sequence[list[int]] = prompts, seed: int = first) -> tuple[list[list[Sample]], float]:
                async with self._engine.turn():
                    started = time.monotonic()
                    found = await sampled(self._engine, prompts, each.spec.k, params, seed=seed)
                return found, time.monotonic() - started

            found, took_s = await self._server.answer(asked)
            samples += found
            seconds += took_s
            await asyncio.sleep(0)  # a training call that waits comes first
        if not any(samples):
            self._context.log.warning("evaluation_left_out", set=each.spec.name, reason="no question was answered")
            return None
        return _SetAnswers([of_task or [_NOT_ANSWERED] * each.spec.k for of_task in samples], seconds, self._engine.policy_version)

    async def _report(self, each: AskedSet, answered: _SetAnswers) -> None:
        """Score the answers, write the line, and then note that the version is measured."""
        started, spec = time.monotonic(), each.spec
        rules = PassRules([spec])
        for line in eval_lines(self._file):
            if line.get("set") == spec.name and (earlier := eval_report("node", line)) and earlier.scorer == scorers_id([spec]):
                rules.merge(earlier.reward_values)
        async with ScorerPool.from_config(self._config.verifier, tasks=[spec], workers=1) as scorers:
            await try_rewards(scorers, [spec] if worth_trying(spec) else [], rules)
            texts = [[answer.text for answer in of_task] for of_task in answered.samples]
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


def _line_identity(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """The evaluation that a line is of, by which a second line of it is known."""
    return (line.get("set"), line.get("policy_version"), bool(line.get("n")), line.get("held_out"), line.get("scorer"))


def unscored_line(version: int, unknown: int, held_out: str | None, scorer: str | None, time_s: float) -> dict[str, Any]:
    """The line of `eval.jsonl` for a policy of whose answers no reward is known."""
    counts = {"policy_version": version, "pass_rate": None, "mean_reward": None, "n": 0, "unknown": unknown}
    return {**counts, "time": time_s, "held_out": held_out, "scorer": scorer}


def eval_line(report: EvalReport) -> dict[str, Any]:
    """One line of `eval.jsonl`."""
    return {
        "policy_version": report.policy_version,
        "pass_rate": report.pass_rate,
        "mean_reward": report.mean_reward,
        "n": report.n,
        "unknown": report.unknown,
        "per_task": {
            name: {"n": t.n, "pass_rate": t.pass_rate, "mean_reward": t.mean_reward} for name, t in report.per_task.items()
        },
        "seconds": report.seconds,
        "time": report.created_at,
        "held_out": report.held_out,
        "scorer": report.scorer,
        "pass_rule": report.pass_rule,
        "reward_values": report.reward_values,
    }


Parts = Mapping[str, float | None]
"""Of an answer that several rewards score, the value of each; None where it does not apply."""
SAMPLES_IN_ALL = 32
TEXT_CHARACTERS = 2000
"""With 32 samples a line is smaller than 1.6 MB, whatever the characters; 20 KB is usual."""


def sampled_places(datasets: Sequence[str]) -> list[int]:
    """Indexes of the held-out tasks, given by their datasets, that are written: the first of each
    dataset, then the second of each, and so on. The same for the same tasks.
    """
    seen: dict[str, int] = {}
    rounds = []
    for place, dataset in enumerate(datasets):
        nth = seen[dataset] = seen.get(dataset, -1) + 1
        rounds.append((nth, place))
    return sorted(place for _, place in sorted(rounds)[:SAMPLES_IN_ALL])


def samples_line(
    tasks: Sequence[PromptedTask],
    answers: Sequence[Sample],
    scores: Sequence[Score],
    parts: Sequence[Parts],
    *,
    policy_version: int,
    time_s: float,
    scorer: str,
) -> str:
    """One line of the file. `answers`, `scores` and `parts` (of several rewards, the value of each)
    belong to `tasks`, which are all held-out tasks.
    """
    places = sampled_places([each.task.ref.dataset for each in tasks])
    samples = [_sample(tasks[place].task, answers[place], scores[place], parts[place]) for place in places]
    line = {"policy_version": policy_version, "time": round(time_s, 3), "scorer": scorer, "samples": samples}
    return json.dumps(line, separators=(",", ":"))


def _sample(task: Task, answer: Sample, score: Score, parts: Parts) -> dict[str, Any]:
    """A task, its answer and its score, with texts cut, so that a line's size is bounded."""
    ref = task.ref
    return {
        "dataset": ref.dataset,
        "seed": ref.seed,
        "index": ref.index,
        "question": task.text[:TEXT_CHARACTERS],
        "reference": None if task.answer is None else task.answer[:TEXT_CHARACTERS],
        "text": answer.text[:TEXT_CHARACTERS],
        "characters": len(answer.text),
        "reward": score[0],
        "passed": score[1],
        **({"parts": dict(parts)} if parts else {}),
        "tokens": len(answer.token_ids),
        "finish_reason": answer.finish_reason,
    }
