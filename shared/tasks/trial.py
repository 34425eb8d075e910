"""Tries the rewards of task sources in the sandbox that scores a run's answers: what a task's own
reference earns there, and what the references of other tasks earn on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.contracts.messages import TaskRef
from shared.registry import DEFAULT_VERIFIER
from shared.rewards import Mark, differ
from shared.tasks.derive import TaskError, dataset_size, from_package
from shared.tasks.evaluation import SAID, PassRules
from shared.tasks.own_reference import is_left_out
from shared.tasks.verifiers import is_built_in

if TYPE_CHECKING:
    from shared.config import TaskSpec
    from shared.tasks.sandbox import ScorerPool

OTHERS = 4
"""References of other tasks that are tried: one may be the same value in another form."""
LOOKED_AT = 24
"""Tasks, spread over a source, among which such references are looked for."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What one text earned. `detail`: why its reward is unknown."""

    reward: float | None
    passed: bool | None
    mark: Mark
    detail: str
    seconds: float

    def __str__(self) -> str:
        earned = f"unknown ({self.mark.cause})" if self.reward is None else f"{self.reward:g}"
        passes = {True: ", passes", False: ", does not pass", None: ", no pass defined by that alone (set pass_at)"}[self.passed]
        return f"{earned}{'' if self.reward is None else passes}, {self.seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class Trial:
    """What one source's task paid its own reference (`own`), and the references of other tasks."""

    spec: TaskSpec
    own: Tried
    others: Sequence[Tried]

    @property
    def built_in(self) -> bool:
        """Whether the project's own rule was tried, and not a user's or a package's."""
        return is_built_in(self.spec.verifier, self.spec.dataset)

    @property
    def figures(self) -> str:
        """The rewards, passes and seconds in a line."""
        name = self.spec.file_name if self.spec.source == "file" else self.spec.dataset
        others = f"; another task's: {self.others[-1]}" if self.others else ""
        return f"{name}, verifier {self.spec.verifier}: the reference earns {self.own}{others}"

    @property
    def problem(self) -> str:
        """What is wrong with these rewards, and what that means for the run; empty: nothing."""
        for tried in (self.own, *self.others):
            if tried.reward is None:
                why = {Mark.TIMEOUT: "does not return in time", Mark.KILLED: "ends its process"}.get(tried.mark, tried.detail)
                becomes = (
                    "" if self.built_in else ": in a run, the reward of every such answer is unknown and it counts for nothing"
                )
                return f"verifier {self.spec.verifier} {why} for a reference answer, in the sandbox (no network, no files){becomes}"
        if self.others and not any(differ(self.own.reward or 0.0, tried.reward or 0.0) for tried in self.others):
            paid = f"pays a task's reference {self.own.reward:g} and the references of {len(self.others)} other tasks as much"
            return f"verifier {self.spec.verifier} {paid}: a policy cannot learn from it"
        return ""


def worth_trying(spec: TaskSpec) -> bool:
    """Whether a source's reward is the user's choice. Those of reasoning-gym's own datasets are
    tried by this project's tests.
    """
    return spec.source == "file" or spec.verifier != DEFAULT_VERIFIER or from_package(spec.dataset)


async def try_rewards(pool: ScorerPool, specs: Sequence[TaskSpec], rules: PassRules) -> list[Trial]:
    """Try the sources, which must have been found usable (`check_specs`). A source whose tasks have
    no references is left out. `rules` note the rewards.

    Raises:
        SandboxError: as `ScorerPool.run`.
    """
    return [trial for spec in specs if (trial := await _tried(pool, spec, rules)) is not None]


async def _tried(pool: ScorerPool, spec: TaskSpec, rules: PassRules) -> Trial | None:
    from shared.tasks.sandbox.jobs import ScoringJob

    try:
        size = dataset_size(spec.dataset, spec.canonical_config)
    except TaskError:
        return None
    count = min(size, LOOKED_AT)
    places = [number * size // count for number in range(count)]
    refs = [TaskRef(dataset=spec.dataset, config=spec.canonical_config, seed=1, index=place) for place in places]
    derived = [each.task for each in await pool.run([ScoringJob(ref=ref, want_task=True) for ref in refs])]
    known = [task for task in derived if task is not None and task.answer is not None and not is_left_out(spec, task.ref)]
    tasks = [(task.ref, task.answer or "") for task in known]
    if not tasks:
        return None
    (ref, reference), *rest = tasks
    others = list(dict.fromkeys(answer for _, answer in rest if answer.strip().casefold() != reference.strip().casefold()))
    found = [await _scored(pool, rules, ref, reference)]
    for other in others[:OTHERS]:
        if found[-1].reward is None or (len(found) > 1 and differ(found[0].reward or 0.0, found[-1].reward)):
            break
        found.append(await _scored(pool, rules, ref, other))
    # Whether an answer passes may depend on all rewards that were seen.
    says = is_built_in(spec.verifier, spec.dataset) or spec.pass_at is not None or any(each.mark in SAID for each in found)
    own, *tried = (_with_pass(each, rules, ref, says) for each in found)
    return Trial(spec, own, tried)


async def _scored(pool: ScorerPool, rules: PassRules, ref: TaskRef, text: str) -> Tried:
    from shared.tasks.sandbox.jobs import ScoringJob

    (result,) = await pool.run([ScoringJob(ref=ref, texts=[text], urgent=True)])
    if result.reason is not None:
        return Tried(None, None, Mark.TIMEOUT if result.timeouts else Mark.RAISED, result.detail, result.seconds)
    rules.note(ref, result.rewards, result.marks)
    return Tried(result.rewards[0], None, result.marks[0], result.detail, result.seconds)


def _with_pass(tried: Tried, rules: PassRules, ref: TaskRef, says: bool) -> Tried:
    # Of a reward that says nothing, the run decides by all rewards that it will see.
    passed = rules.passed(ref, [tried.reward], [tried.mark]) if says else None
    return Tried(tried.reward, passed[0] if passed else None, tried.mark, tried.detail, tried.seconds)
