"""Scores every candidate for some tasks of a dataset and collects those that got full marks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.contracts.messages import Task, TaskRef
from shared.tasks.audit.candidates import TrialAnswer, candidates, constant_names, is_right_after_all, right_answers
from shared.tasks.evaluation import PASS_REWARD
from shared.tasks.sandbox import JobResult, ScorerPool, ScoringJob


@dataclass(slots=True)
class Finding:
    """Results of a verifier over some tasks of one dataset and configuration. Counts are of
    answers.
    """

    dataset: str
    tasks: int = 0
    unanswered: int = 0
    """Tasks without a known right answer, for which most candidates could not be made."""
    right_paid: int = 0
    wrong: int = 0
    paid: list[tuple[TaskRef, TrialAnswer, float]] = field(default_factory=list)
    """Wrong candidates that earned full marks."""
    constants: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Reward for each constant, by task."""
    timeouts: int = 0
    """Answers at which a worker was lost."""

    def best_constant(self) -> tuple[str, float]:
        """The constant with the highest mean reward, and that mean."""
        means = {name: sum(rewards) / self.tasks for name, rewards in self.constants.items()}
        best = max(means, key=lambda name: round(means[name], 6), default="")
        return best, means.get(best, 0.0)


async def audit(pool: ScorerPool, refs: Sequence[TaskRef], thorough: int | None = None) -> dict[str, Finding]:
    """Derive the tasks, score a right answer and all candidates for each, and collect the results
    by dataset.

    Only the first `thorough` tasks of each dataset get all candidates (None: all tasks); the others
    get only the constants. Tasks that cannot be derived are left out.
    """
    by_dataset: dict[str, list[TaskRef]] = defaultdict(list)
    for ref in refs:
        by_dataset[ref.dataset].append(ref)
    # One dataset after the other, so that workers find each task among the last that they derived.
    found = [await _audit_dataset(pool, name, part, thorough) for name, part in by_dataset.items()]
    return {finding.dataset: finding for finding in found if finding.tasks}


async def _audit_dataset(pool: ScorerPool, dataset: str, refs: Sequence[TaskRef], thorough: int | None) -> Finding:
    # Right answers first, because most candidates are made of one; then all candidates of all tasks
    # at once, so that the workers are busy.
    derived = await pool.run([ScoringJob(ref=ref, want_task=True) for ref in refs])
    tasks = [result.task for result in derived if result.task is not None]
    rights = await _rights(pool, tasks)
    finding = Finding(dataset)
    jobs, lists = [], []
    for task, (right, paid) in zip(tasks, rights, strict=True):
        finding.tasks += 1
        finding.right_paid += paid
        finding.unanswered += right is None
        named = constant_names(right or "")
        is_thorough = thorough is None or finding.tasks <= thorough
        made = candidates(task.text, right or "") if is_thorough else []
        lists.append((named, made))
        jobs.append(ScoringJob(ref=task.ref, texts=[_tagged(c.text) for c in (*named, *made)]))
    for task, result, (named, made) in zip(tasks, await pool.run(jobs), lists, strict=True):
        _gather(finding, task.ref, result, named, made)
    return finding


async def _rights(pool: ScorerPool, tasks: Sequence[Task]) -> list[tuple[str | None, bool]]:
    # For each task: the first answer with full marks, or else the first answer, and whether it had
    # full marks.
    known = [right_answers(task) for task in tasks]
    scored = await pool.run(
        [ScoringJob(ref=task.ref, texts=[_tagged(text) for text in texts]) for task, texts in zip(tasks, known, strict=True)]
    )
    found: list[tuple[str | None, bool]] = []
    for texts, result in zip(known, scored, strict=True):
        paid = [text for text, reward in zip(texts, result.rewards, strict=False) if (reward or 0.0) >= PASS_REWARD]
        found.append((paid[0], True) if paid else (texts[0] if texts else None, False))
    return found


def _tagged(text: str) -> str:
    # In tags, so that a candidate that is empty or contains a tag itself is scored unchanged.
    return f"<answer>{text}</answer>"


def _gather(finding: Finding, ref: TaskRef, result: JobResult, named: list[TrialAnswer], made: list[TrialAnswer]) -> None:
    """`result` has the rewards of `named` followed by those of `made`, in order. If the whole job
    failed, all rewards count as 0, and so does an unknown one: nothing was paid.
    """
    finding.timeouts += result.timeouts
    rewards = [reward or 0.0 for reward in result.rewards] or [0.0] * (len(named) + len(made))
    for constant, reward in zip(named, rewards, strict=False):
        finding.constants[constant.name].append(reward)
    for candidate, reward in zip(made, rewards[len(named) :], strict=True):
        finding.wrong += 1
        if reward >= PASS_REWARD and not is_right_after_all(finding.dataset, candidate):
            finding.paid.append((ref, candidate, reward))
