"""The definition of a pass, and the summary of a held-out evaluation. Pure.

Whether an answer passes is a fact of its own beside its reward: what its scorer says; else whether
the reward reaches `pass_at` of its `[[tasks]]` entry; else, under a built-in verifier, whether it
is full marks. Of a scorer that says so of any answer, those pass of which it says so, and no
others. A reward of one's own that says nothing has a pass while it takes two values: the higher one
passes. Where it takes more, or only one so far, no pass is defined.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from math import comb, sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from shared.contracts.control import EvalReport, TaskScore
from shared.contracts.messages import TaskRef, source_name
from shared.rewards import Mark, differ
from shared.tasks.verifiers import VerifierChoice, is_built_in

if TYPE_CHECKING:
    from shared.config.task_sections import TaskSpec
    from shared.tasks.sandbox import JobResult

PASS_REWARD = 0.99
"""Full marks of a built-in verifier: an answer passes at this reward or above; partial credit is
not a pass.
"""
SAID = frozenset({Mark.PASSED, Mark.FAILED})
"""What a scorer that says itself what passes says of an answer."""
MANY = 3
"""This many distinct rewards of a source say that its reward has no full marks by itself."""
Z_95 = 1.96
"""A normal value is within so many standard errors with 95 %."""
REMEDY_NO_PASS = "set pass_at in its [[tasks]] entry"
NO_PASS = f"no pass is defined: {REMEDY_NO_PASS}"


def pass_words(passed: bool | None) -> str:
    """Say whether an answer passes; None: no pass is defined."""
    return {True: "passes", False: "does not pass", None: NO_PASS}[passed]


class PassRules:
    """Tells which answers of a node's task sources pass."""

    def __init__(self, specs: Sequence[TaskSpec]) -> None:
        self._choice = VerifierChoice(specs)
        self._values: dict[str, list[float]] = {}
        self._told: set[str] = set()
        """Sources whose scorers say themselves what passes."""

    def passed(self, ref: TaskRef, rewards: Sequence[float | None], marks: Sequence[Mark]) -> list[bool] | None:
        """Check whether each answer of a task passes, an unknown reward never does; None if no
        pass is defined for the task's source.
        """
        threshold = self._threshold(ref)
        says = self._source(ref) in self._told or any(mark in SAID for mark in marks)
        found: list[bool] = []
        for reward, mark in zip(rewards, marks, strict=True):
            if mark is not Mark.UNSAID or reward is None:
                found.append(mark is Mark.PASSED)
            elif threshold is not None:
                found.append(reward >= threshold or not differ(reward, threshold))
            elif says:
                found.append(False)
            else:
                return None
        return found

    def scorer(self, ref: TaskRef) -> str | None:
        """Identify the scorer of a task's source; None for a task that no source has."""
        spec = self._choice.spec_for(ref)
        return None if spec is None else spec.scorer_id

    def settled_pass(self, ref: TaskRef, reward: float | None, mark: Mark) -> bool | None:
        """Check whether an answer passes, whatever rewards others will earn: None where only the
        rewards of a run can tell.
        """
        if self._fixed(ref) is None and self._source(ref) not in self._told and mark not in SAID:
            return None
        passed = self.passed(ref, [reward], [mark])
        return None if passed is None else passed[0]

    def is_defined(self, ref: TaskRef) -> bool:
        return self._threshold(ref) is not None or self._source(ref) in self._told

    def note(self, ref: TaskRef, rewards: Sequence[float | None], marks: Sequence[Mark]) -> bool:
        """Remember rewards that this node's own answers earned. True if that changes what `values`
        returns. Other nodes' answers must not be noted: they are chosen.
        """
        if self._fixed(ref) is not None:
            return False
        source, changed = self._source(ref), False
        for reward, mark in zip(rewards, marks, strict=True):
            if mark in SAID:
                self._told.add(source)
            elif reward is not None:
                changed = self._add(source, reward) or changed
        return changed

    @property
    def values(self) -> dict[str, list[float]]:
        """The distinct rewards seen, by source."""
        return {source: list(rewards) for source, rewards in self._values.items()}

    def merge(self, values: Mapping[str, Sequence[float]]) -> bool:
        """Add rewards that other processes of the node have seen. True if there are new ones."""
        found = [self._add(source, reward) for source, rewards in values.items() for reward in rewards]
        return any(found)

    def rule(self, refs: Iterable[TaskRef]) -> str | None:
        """SHA-256 (hex) of the rule by which answers to these tasks pass; None if one of their
        sources has no pass.
        """
        rules = {source: "said" if source in self._told else self._threshold(ref) for ref in refs if (source := self._source(ref))}
        if None in rules.values():
            return None
        return hashlib.sha256(json.dumps(sorted(rules.items())).encode()).hexdigest()

    def _add(self, source: str, reward: float) -> bool:
        known = self._values.setdefault(source, [])
        if len(known) >= MANY or not all(differ(reward, value) for value in known):
            return False
        known.append(reward)
        return True

    def _threshold(self, ref: TaskRef) -> float | None:
        """The lowest reward that passes, where the scorer does not say; None: no pass is
        defined.
        """
        fixed = self._fixed(ref)
        if fixed is not None:
            return fixed
        source = self._source(ref)
        values = self._values.get(source, [])
        return max(values) if len(values) == 2 and source not in self._told else None

    def _fixed(self, ref: TaskRef) -> float | None:
        spec = self._choice.spec_for(ref)
        if spec is not None and spec.pass_at is not None:
            return spec.pass_at
        return PASS_REWARD if is_built_in(self._choice.name_for(ref), ref.dataset) else None

    def _source(self, ref: TaskRef) -> str:
        spec = self._choice.spec_for(ref)
        return source_name(ref.dataset, ref.config if spec is None else spec.canonical_config)


Score = tuple[float | None, bool | None]
"""An answer's reward (None: unknown), and whether it passes (None: no pass is defined)."""


def judged_answers(rules: PassRules, refs: Sequence[TaskRef], results: Sequence[JobResult]) -> list[Score]:
    """The scores of the answers to each task, in order. The rules note all of the rewards first."""
    for ref, result in zip(refs, results, strict=True):
        rules.note(ref, result.rewards, result.marks)
    scores: list[Score] = []
    for ref, result in zip(refs, results, strict=True):
        passed: Sequence[bool | None] | None = rules.passed(ref, result.rewards, result.marks)
        scores += zip(result.rewards, passed or [None] * len(result.rewards), strict=True)
    return scores


def pass_at_k(questions: Iterable[Sequence[Score]], k: int) -> float | None:
    """The mean over questions of the probability that of `k` of its answers, drawn without
    replacement, at least one passes: pass@k by the unbiased estimator (Chen et al. 2021, arXiv
    2107.03374). Where fewer rewards of a question are known, of all of these; a question without
    any is left out, as in `summarise`. None where no question is left, or no pass is defined.
    """
    found: list[float] = []
    for answers in questions:
        passes = [passed for reward, passed in answers if reward is not None]
        if None in passes:
            return None
        if passes:
            drawn, failed = min(k, len(passes)), len(passes) - sum(map(bool, passes))
            found.append(1.0 - comb(failed, drawn) / comb(len(passes), drawn))
    return fmean(found) if found else None


def standard_error(questions: Iterable[Sequence[Score]], *, passes: bool) -> float:
    """Standard error of the mean score of these questions, as a sample of all such questions: from
    the differences between questions, because answers to one question are alike. 0 for fewer than
    two questions.

    passes: of pass rates; else of mean rewards.
    """
    by_question = [
        [float(bool(passed)) if passes else reward for reward, passed in answers if reward is not None] for answers in questions
    ]
    means = [fmean(scores) for scores in by_question if scores]
    return stdev(means) / sqrt(len(means)) if len(means) > 1 else 0.0


def rate_interval(rate: float, questions: float, error: float = 0.0) -> tuple[float, float]:
    """The 95 % interval (Wilson, 1927) of a pass rate between 0 and 1 on so many questions, at
    least one.

    error: the rate's standard error where questions have several answers each. The interval is then
        that of as many independent answers as have this error.
    """
    n = rate * (1.0 - rate) / error**2 if error and 0.0 < rate < 1.0 else questions
    middle = (rate + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
    half = Z_95 / (1 + Z_95**2 / n) * sqrt(rate * (1 - rate) / n + Z_95**2 / (4 * n**2))
    return max(0.0, min(rate, middle - half)), min(1.0, max(rate, middle + half))


def summarise(
    results: Sequence[tuple[str, float | None, bool | None]],
    *,
    k: int = 1,
    node: str,
    policy_version: int,
    created_at: float,
    seconds: float,
    held_out: str | None = None,
    scorer: str | None = None,
    pass_rule: str | None = None,
    values: Mapping[str, list[float]] | None = None,
) -> EvalReport:
    """Sum up `(dataset, reward, passed)` triples, one per answer; the `k` answers to a question are
    next to each other. Each question counts once, with the mean of its answers. An unknown reward
    (None) is left out of its question and counted, and so is a question without another. `passed`
    is None where no pass is defined. `held_out`: the id of the set of tasks; `scorer`: that of its
    scorers; `pass_rule`: `PassRules.rule`; `values`: `PassRules.values`.

    Raises:
        ValueError: no answer has a reward.
    """
    by_dataset: dict[str, list[list[tuple[float, bool | None]]]] = {}
    for first in range(0, len(results), k):
        known = [(reward, passed) for _, reward, passed in results[first : first + k] if reward is not None]
        if known:
            by_dataset.setdefault(results[first][0], []).append(known)
    everything = [answers for found in by_dataset.values() for answers in found]
    if not everything:
        raise ValueError("an evaluation needs at least one answer with a reward")
    overall = _score(everything)
    return EvalReport(
        node=node,
        policy_version=policy_version,
        created_at=created_at,
        n=overall.n,
        pass_rate=overall.pass_rate,
        mean_reward=overall.mean_reward,
        per_task={dataset: _score(found) for dataset, found in sorted(by_dataset.items())},
        seconds=seconds,
        held_out=held_out,
        scorer=scorer,
        pass_rule=pass_rule if overall.pass_rate is not None else None,
        unknown=len(results) - overall.n,
        reward_values=dict(values or {}),
    )


def _score(questions: Sequence[Sequence[tuple[float, bool | None]]]) -> TaskScore:
    has_pass = all(passed is not None for answers in questions for _, passed in answers)
    shares = [sum(bool(passed) for _, passed in answers) / len(answers) for answers in questions]
    means = [sum(reward for reward, _ in answers) / len(answers) for answers in questions]
    return TaskScore(
        n=sum(map(len, questions)),
        pass_rate=sum(shares) / len(questions) if has_pass else None,
        mean_reward=sum(means) / len(questions),
    )
