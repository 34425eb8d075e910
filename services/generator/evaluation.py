"""Evaluation: as the policy changes, samples one answer to each task of a fixed held-out set. None
of them enters training.

Results go to `eval.jsonl` in the run's folder, and a few of the answers to `samples.jsonl` beside
it. Results are also written to the node's bucket under the key `eval`, from where the verifier
sends them to the swarm. Of several replicas, the one that wins the compare-and-set on `eval_turn`
evaluates. `evaluation_sets` measures the policy on further sets of questions.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from services.generator.engine_calls import ServerWait, evaluation_progress
from services.generator.engines.base import Engine, Sample, SamplingParams
from services.generator.episodes import Episodes
from services.generator.figures import Figures
from services.generator.tasks import PromptedTask
from shared.config import NodeConfig, scorers_id
from shared.contracts.codec import decode, encode
from shared.contracts.control import EvalReport, EvalTurn, RewardValues, SetTurn, TrainerPosition, incomparable
from shared.contracts.messages import Task, transcript
from shared.contracts.status_figures import GENERATING
from shared.contracts.subjects import EVAL_KEY, EVAL_TURN_KEY, REWARD_VALUES_KEY, TRAINER_KEY, node_bucket
from shared.contracts.wire import MessageError
from shared.paired import ANSWERS_FIELD
from shared.rewards import unknown_of
from shared.run_records import (
    EVAL_FILE,
    SAMPLES_FILE,
    SAMPLES_MAX_BYTES,
    BoundedLines,
    eval_lines,
    eval_report,
    open_lines,
    write_whole,
)
from shared.runtime import ServiceContext
from shared.tasks.evaluation import PassRules, Score, judged_answers, summarise
from shared.tasks.held_out import held_out_id, held_out_order
from shared.tasks.reference_checks import try_rewards, worth_trying
from shared.tasks.sandbox import ScorerPool
from shared.transport.base import Conflict, KvEntry, TransportError

_POLL_S = 0.1
_FOLLOW_S = 2.0
NOT_ANSWERED = Sample((), "", "stop", None)


def said_by(answer: Sample) -> str | list[str]:
    """The answer as scorers take it: its text, or its turns."""
    return answer.turns if answer.turn_chars else answer.text


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
    position = await trainer_position(context)
    return position.finished and position.policy_version == version


async def trainer_position(context: ServiceContext) -> TrainerPosition:
    """Where the trainer is; at the beginning if nobody can tell."""
    entry = await context.node.kv.get(node_bucket(context.config.node.id), TRAINER_KEY)
    try:
        if entry is not None:
            return decode(entry.value, TrainerPosition)
    except MessageError as error:
        context.log.error("trainer_position_unreadable", reason=str(error))
    return TrainerPosition(policy_version=0, consumed_local=0)


class EvaluationLines:
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
        sets_left: Callable[[int], Awaitable[bool]] | None = None,
        swaps: asyncio.Lock | None = None,
        episodes: Episodes | None = None,
    ) -> None:
        """`config`: with the files of its task sources already read. `sets_left`: whether sets are
        still to be measured on the last policy. They come first, because a run may end with its
        held-out evaluation. `swaps`: held while answers of several turns are sampled, so that one
        policy gives all of them. `episodes`: samples them.
        """
        self._context = context
        self._sets_left = sets_left
        self._server = ServerWait(context)
        self._config = config
        self._rules = PassRules(config.tasks)
        self._engine = engine
        self._episodes = episodes or Episodes(engine, config, config.tasks)
        self._swaps = swaps
        self._tasks = tasks
        self._held_out = held_out_id([each.task for each in tasks])
        self._scorer = scorers_id(config.tasks)
        self._figures = figures
        figures.held_out_tasks(len(tasks))
        self._bucket = node_bucket(config.node.id)
        generator = config.generator
        self._params = SamplingParams(temperature=0.0, max_new_tokens=generator.max_new_tokens)
        self._file = config.node.run_dir / EVAL_FILE
        self._samples = BoundedLines(config.node.run_dir / SAMPLES_FILE, SAMPLES_MAX_BYTES)
        self._lines = EvaluationLines(context, self._file)
        self._base_answers: _Answers | None = None
        self._resuming = True
        self._of_last = False
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
                        if self._of_last:
                            self._context.status.state(GENERATING)
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
        if finished and self._sets_left is not None and await self._sets_left(version):
            return False
        self._of_last = finished
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
        mine = encode(EvalTurn(policy_version=version, replica=self._context.replica, sets=turns_of_sets(entry)))
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
        return _Answers([samples[0] if samples else NOT_ANSWERED for samples in given], seconds)

    async def _asked(self) -> tuple[list[list[Sample]], float]:
        # One call, so that one policy version gives all answers; weight swaps wait for it.
        turns = self._episodes.several_turns
        async with self._swaps if self._swaps and turns else nullcontext(), self._engine.turn():
            started = time.monotonic()
            async with evaluation_progress(self._context, self._engine, len(self._tasks), last=self._of_last, turns=turns):
                samples = await self._episodes.sampled(self._tasks, 1, self._params, seed=0)
        return samples, time.monotonic() - started

    async def _report(self, answered: _Answers, scorers: ScorerPool) -> None:
        """Score and report. The file is written before the bucket: a report that is lost with this
        process is made again, but not one that is already in the bucket.
        """
        await self._learn_passes()  # first, since it fails while the server is away, and scoring takes long
        started, answers = time.monotonic(), answered.samples
        results = await scorers.score([(each.task, [said_by(answer)]) for each, answer in zip(self._tasks, answers, strict=True)])
        tasks = [each.task for each in self._tasks]
        scored = judged_answers(self._rules, [task.ref for task in tasks], results)
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
        report = msgspec.structs.replace(report, max_new_tokens=self._params.max_new_tokens)
        self._lines.append({**eval_line(report), ANSWERS_FIELD: [list(scored[place]) for place in held_out_order(tasks)]})
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


def turns_of_sets(entry: KvEntry | None) -> dict[str, SetTurn]:
    """The turns of evaluation sets; none if nobody can read them, so that they are measured
    again.
    """
    try:
        return {} if entry is None else decode(entry.value, EvalTurn).sets
    except MessageError:
        return {}


def _line_identity(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """The evaluation that a line is of, by which a second line of it is known."""
    of_set = line.get("set"), line.get("added_at", 0)
    return (*of_set, line.get("policy_version"), bool(line.get("n")), line.get("held_out"), line.get("scorer"))


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
        "max_new_tokens": report.max_new_tokens,
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
        "text": transcript(answer.turns, answer.replies)[:TEXT_CHARACTERS],
        "characters": len(answer.text),
        "reward": score[0],
        "passed": score[1],
        **({"parts": dict(parts)} if parts else {}),
        "tokens": len(answer.token_ids),
        **({"turns": len(answer.turns)} if answer.turn_chars else {}),
        "finish_reason": answer.finish_reason,
    }
