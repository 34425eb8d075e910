"""Read scorers' results: which answers leave their group because their reward is unknown, which
pass, and what a foreign answer earns.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from services.verifier.figures import Figures
from shared.atomic_files import replace_text
from shared.config.task_sections import scorers_id
from shared.config.verifier_config import VerifierConfig
from shared.contracts import subjects
from shared.contracts.codec import decode, encode
from shared.contracts.control import EvalReport, RewardValues
from shared.contracts.messages import RolloutGroup, TaskRef
from shared.contracts.wire import MessageError
from shared.reward_files import code_hash, not_given, parts_of, verifier_words
from shared.rewards import SANDBOXED, LocalOnly, Mark, unknown_of
from shared.run_records import read_jsonl, unknown_file
from shared.runtime import FatalError
from shared.runtime.exits import FILE_VARIABLE
from shared.runtime.logs import Log
from shared.tasks.derive import TaskError
from shared.tasks.evaluation import REMEDY_NO_PASS, PassRules
from shared.tasks.reference_checks import try_rewards, worth_trying
from shared.tasks.sandbox import JobResult, ScorerPool
from shared.tasks.verifiers import VerifierChoice
from shared.transport.base import Conflict, Transport, TransportError

PERIOD_S = 2.0
REMEDIES = {
    "raised": "correct the verifier; the detail says what it raised",
    "not_a_number": "have the verifier return a finite number",
    "too_long": "lower generator.max_new_tokens",
    "timeout": f"make the verifier faster, or raise verifier.answer_timeout_s; in the sandbox there is {SANDBOXED}",
    "not_applicable": "nothing, if the reward means it: it returned None; a function without `return` does too",
    "no_verdict": "see that the judge answers, and in the form that the reward reads; the detail says what was wrong last",
    "killed": "see what the verifier loads; verifier.worker_memory_mb limits its memory",
}
"""What to do about unknown rewards, by cause."""
NONE_KNOWN = 64
"""After so many local groups in succession without a known reward, a verifier that has never known
one ends, and another scores slowly, so that the generator waits.
"""
LONGEST_PAUSE_S = 30.0


class RewardKnowledge:
    """The rules of what passes, which all processes of the node share, and the count of unknown
    rewards.
    """

    def __init__(self, config: VerifierConfig, node: Transport, figures: Figures, log: Log) -> None:
        self.rules = PassRules(config.tasks)
        self._config, self._node, self._figures, self._log = config, node, figures, log
        self._scorer = scorers_id(config.tasks)
        self._bucket = subjects.node_bucket(config.node.id)
        self._file = unknown_file(config.node.run_dir, config.node.replica)
        self._unknown: dict[str, Counter[str]] = {}
        self._told: set[tuple[str, str]] = set()
        self._without = 0
        self._knew_one = False
        self._newest_cause = ""
        self._unsaved = self._unwritten = False
        self._news = asyncio.Event()
        self.local_only = VerifierChoice(config.tasks).local_only
        """Datasets of which no foreign group is taken, and why."""

    async def begin(self, pool: ScorerPool) -> None:
        """Read what the node knows already, and try the rewards of the node's own sources.

        Raises:
            SandboxError: as `ScorerPool.run`.
            TaskError: a reward's file cannot be used.
        """
        for part in sorted({part for spec in self._config.tasks for part in parts_of(spec.verifier) if part.file}):
            self._log.info("reward_file", reward=part.title, file=part.file, hash=code_hash(part.file), weight=part.weight)
        for sentence in sorted({each for spec in self._config.tasks for each in not_given(spec.verifier)}):
            self._log.info("reward_without", reason=sentence)
        try:
            for line in read_jsonl(self._file):
                self._unknown.setdefault(str(line["dataset"]), Counter())[str(line["cause"])] = int(line["answers"])
        except (OSError, ValueError, KeyError, TypeError):
            self._unknown.clear()  # a file that cannot be read is written anew
        await self._exchange()
        for trial in await try_rewards(pool, [spec for spec in self._config.tasks if worth_trying(spec)], self.rules):
            if trial.unusable:
                raise TaskError("task_verifier", trial.problem)
            if trial.local_only:
                self.local_only.setdefault(trial.spec.dataset, LocalOnly.GROUP_DEPENDENT)
            if trial.problem:
                # `swarm up` and `swarm join` have said it before they started this process.
                say = self._log.info if FILE_VARIABLE in os.environ else self._log.warning
                say("reward_tried", task=trial.spec.dataset, reason=trial.problem, figures=trial.figures)
        own = {spec.dataset: spec.file_name if spec.source == "file" else spec.dataset for spec in self._config.tasks}
        found = {dataset: why for dataset, why in self.local_only.items() if dataset in own}
        for dataset, why in found.items():
            self._log.warning("source_local_only", task=dataset, source=own[dataset], why=why.value, reason=why.words)
        self._figures.scoring.local_only(found.values())
        self._unsaved = True

    async def run(self) -> None:
        """Share what is known with the node's other processes. Never returns."""
        try:
            while True:
                await self._exchange()
                self._write()
                with suppress(TimeoutError):
                    async with asyncio.timeout(PERIOD_S):
                        await self._news.wait()
                self._news.clear()
        finally:
            self._write()

    def scored(self, group: RolloutGroup, result: JobResult) -> tuple[RolloutGroup, list[float], list[bool] | None]:
        """A local group without the answers whose reward is unknown, the rewards of the others, and
        which of these pass. The whole group if no reward is known.
        """
        ref = group.task.ref
        if self.rules.note(ref, result.rewards, result.marks):
            self._unsaved = True
            self._news.set()  # a restart must not bring a pass back
        self._count_unknown(ref.dataset, result)
        rewards = [reward for reward in result.rewards if reward is not None]
        passed = self.rules.passed(ref, result.rewards, result.marks)
        if len(rewards) < len(result.rewards):
            known = [place for place, reward in enumerate(result.rewards) if reward is not None]
            passed = None if passed is None else [passed[place] for place in known]
            completions = [group.completions[place] for place in known]
            group = msgspec.structs.replace(group, completions=completions) if rewards else group
        return group, rewards, passed

    def note(self, ref: TaskRef, result: JobResult) -> None:
        """Count a local group as one with or without a known reward. What its scorer printed is
        logged once.
        """
        if result.printed and self._is_news(ref.dataset, "printed"):
            remedy = "`swarm task score` shows what it prints at an answer; later text is not logged"
            self._log.info("reward_printed", task=ref.dataset, text=result.printed, remedy=remedy)
        if any(reward is not None for reward in result.rewards):
            self._knew_one, self._without = True, 0
            return
        self._without += 1
        for cause in unknown_of(result.marks):
            detail = detail_of(result, cause)
            self._newest_cause = f"{ref.dataset}: {cause}{f' ({detail})' if detail else ''}: {REMEDIES[cause]}"

    @property
    def pause_s(self) -> float:
        """Seconds to hold the newest group without a known reward, so that fewer are made."""
        return min(2.0 ** min(self._without - NONE_KNOWN, 10), LONGEST_PAUSE_S) if self._without > NONE_KNOWN else 0.0

    def refuse_to_go_on(self) -> None:
        """Raises FatalError: there is nothing to train on, and nothing says that there will be."""
        if not self._knew_one and self._without >= NONE_KNOWN:
            raise FatalError(
                f"none of the first {self._without} local groups has an answer with a known reward: {self._newest_cause}. "
                "`swarm config check` tries the verifier"
            )

    def awaits_pass(self, ref: TaskRef) -> bool:
        """Return whether foreign groups of this task's source wait until a pass is defined; the
        first time it is told. With partial credit for foreign answers none waits.
        """
        if self._config.verifier.foreign_partial_credit or self.rules.is_defined(ref):
            return False
        if self._is_news(ref.dataset, "no_pass"):
            names = [spec.file_name for spec in self._config.tasks if spec.dataset == ref.dataset and spec.source == "file"]
            reason = f"{[*names, ref.dataset][0]}: no pass is defined"
            self._log.warning("foreign_groups_wait", task=ref.dataset, reason=reason, remedy=REMEDY_NO_PASS)
        return True

    def foreign(self, ref: TaskRef, result: JobResult) -> tuple[list[float], list[bool] | None]:
        """The rewards that count of a foreign group, all of which are known, and which pass."""
        rewards = [reward for reward in result.rewards if reward is not None]
        passed = self.rules.passed(ref, rewards, result.marks)
        if self._config.verifier.foreign_partial_credit:
            return rewards, passed
        # The source's pass may have gone while the group was scored.
        return foreign_rewards(rewards, passed or [False] * len(rewards)), passed

    def _count_unknown(self, dataset: str, result: JobResult) -> None:
        for cause, answers in unknown_of(result.marks).items():
            self._unknown.setdefault(dataset, Counter())[cause] += answers
            self._unwritten = True
            if self._is_news(dataset, cause):
                self._log.warning(
                    "reward_unknown",
                    task=dataset,
                    cause=cause,
                    detail=detail_of(result, cause),
                    consequence="the answer leaves its group; a group without any reward is dropped",
                    remedy=REMEDIES[cause],
                )

    def _is_news(self, dataset: str, what: str) -> bool:
        """Return whether this is the first time for the source, so that it is logged."""
        known = (dataset, what) in self._told
        self._told.add((dataset, what))
        return not known

    async def _exchange(self) -> None:
        """Merge with what the node's other verifiers and its evaluations have seen."""
        try:
            entry = await self._node.kv.get(self._bucket, subjects.REWARD_VALUES_KEY)
            if entry is not None and (shared := decode(entry.value, RewardValues)).scorer in (None, self._scorer):
                self.rules.merge(shared.sources)
            elif entry is not None:
                self._unsaved = True
                if self._is_news("", "scorer_changed"):
                    self._log.warning(
                        "scorer_changed",
                        rewards=", ".join(sorted({verifier_words(spec.verifier) for spec in self._config.tasks})),
                        reason="one of these rewards is not that of this node's former groups: its file, its package or pass_at "
                        "was changed, or [[tasks]]",
                        consequence="its rewards are learnt anew; waiting groups with former rewards are dropped",
                        remedy="compare rewards and held-out scores only since now; if the verifier was restarted alone, restart "
                        "the node's generator, sampler and trainer too: until then they hold the former rewards",
                    )
            evaluated = await self._node.kv.get(self._bucket, subjects.EVAL_KEY)
            if evaluated is not None and (report := decode(evaluated.value, EvalReport)).scorer in (None, self._scorer):
                self._unsaved = self.rules.merge(report.reward_values) or self._unsaved
            if self._unsaved:
                mine = encode(RewardValues(sources=self.rules.values, scorer=self._scorer))
                revision = entry.revision if entry else 0
                await self._node.kv.update(self._bucket, subjects.REWARD_VALUES_KEY, mine, last_revision=revision)
            self._unsaved = False
        except Conflict:
            return  # another replica was faster: merged the next time
        except (TransportError, MessageError) as error:
            self._log.debug("reward_values_not_shared", reason=str(error))

    def _write(self) -> None:
        """Write the counts of unknown rewards where `swarm plot` and the end of a run read them."""
        if not self._unwritten:
            return
        counts = sorted((dataset, cause, answers) for dataset, found in self._unknown.items() for cause, answers in found.items())
        lines = [json.dumps({"dataset": dataset, "cause": cause, "answers": answers}) for dataset, cause, answers in counts]
        try:
            replace_text(self._file, "".join(f"{line}\n" for line in lines))
            self._unwritten = False
        except OSError as error:
            remedy = f"free space at {self._file.parent}"
            self._log.error("write_failed", kind="unknown rewards", reason=str(error), remedy=remedy)


def detail_of(result: JobResult, cause: str) -> str:
    """The result's detail if it is of this cause, else empty: it tells of the first answer that
    raised, returned no number, was too long or got no verdict.
    """
    told = (Mark.RAISED, Mark.NOT_A_NUMBER, Mark.TOO_LONG, Mark.NO_VERDICT)
    first = next((mark.cause for mark in result.marks if mark in told), "")
    return result.detail if cause == first else ""


def foreign_rewards(rewards: Sequence[float], passed: Sequence[bool]) -> list[float]:
    """The rewards that count where partial credit of foreign answers does not: a passing answer's
    own, and one and the same for all others: 0, or less if a passing answer earns no more than 0.

    A group's advantages depend on which of its answers earned more, not on whether any is right. If
    scorers give partial credit ("1200" for "120" earns three quarters), a sender can write groups
    in which no answer is right and a nearly right one is best. Training would then make the mistake
    more likely, just as it would a right answer. In honestly sampled groups there are right answers
    among the nearly right ones.
    """
    lowest = min((reward for reward, passes in zip(rewards, passed, strict=True) if passes), default=1.0)
    wrong = 0.0 if lowest > 0.0 else lowest - 1.0
    return [reward if passes else wrong for reward, passes in zip(rewards, passed, strict=True)]
