"""Verifiers: built-in ones, and installed ones from the entry-point group `swarm.verifiers`.

A verifier is a function from a derived task (`Item`) to the scorer of its answers:
`verifier(item)(answer)` is a finite number, used as it is; or a pair of the number and whether the
answer passes. It may raise `TaskError` for a task that it cannot judge. If the scorer raises, is
late or returns anything else, that answer's reward is unknown. It runs in the sandbox's worker,
which has no environment, network or writable files. Its name comes from this node's `[[tasks]]`
entries, never from the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from shared.environment_files import EnvironmentSpec
from shared.registry import DEFAULT_VERIFIER, SCORED_LOCALLY, VERIFIERS, plugin_errors
from shared.reward_files import is_judged
from shared.rewards import LocalOnly
from shared.tasks.derive import Item, TaskError, from_package

if TYPE_CHECKING:
    from shared.config.task_sections import TaskSpec
    from shared.contracts.messages import TaskRef

AnswerScorer = Callable[[str], Any]
"""Reward for an extracted answer. If it raises, the reward is unknown, and that of a built-in
verifier 0.
"""
Verifier = Callable[[Item], AnswerScorer]


@lru_cache(maxsize=64)
def load_verifier(name: str) -> Verifier:
    """The verifier of this name.

    Raises:
        TaskError: there is none, or it cannot be imported.
    """
    try:
        return cast(Verifier, VERIFIERS.load(name))
    except ValueError as error:
        raise TaskError("task_verifier", str(error)) from error


def scorer_of(verifier: str, item: Item) -> AnswerScorer:
    """The scorer that a verifier makes for a task.

    Raises:
        TaskError: there is no such verifier, or it cannot judge this task: it says so, raises
            anything else, or makes nothing that can be called.
    """
    make = load_verifier(verifier)
    with plugin_errors(lambda why: TaskError("task_verifier", f"verifier {verifier} cannot judge this task: {why}"), TaskError):
        score = make(item)
    if not callable(score):
        made = type(score).__name__
        raise TaskError("task_verifier", f"verifier {verifier} made {made} and no function that scores answers: `return` it")
    return score


def is_built_in(verifier: str, dataset: str) -> bool:
    """Check whether the project's own rule scores this dataset, and not a user's or a package's."""
    if (turns := EnvironmentSpec.of(verifier)) is not None:
        verifier = turns.verifier
    return verifier in VERIFIERS.built_in and not (verifier == DEFAULT_VERIFIER and from_package(dataset))


class VerifierChoice:
    """Selects the verifier of a task from this node's own sources, whoever sent the task."""

    def __init__(self, specs: Sequence[TaskSpec] = ()) -> None:
        """An entry applies to its dataset and config. A dataset's first entry also applies to the
        dataset's other configs.
        """
        self._exact = {(spec.dataset, spec.canonical_config): spec for spec in reversed(specs)}
        self._by_dataset = {spec.dataset: spec for spec in reversed(specs)}
        inside = [spec for spec in specs if spec.sandbox]
        self.names = sorted({DEFAULT_VERIFIER, *(name for spec in inside for name in (spec.verifier, spec.scorer_name))})
        self.names_outside = sorted({spec.verifier for spec in specs if not spec.sandbox})
        """Those that run outside the sandbox."""

    def name_for(self, ref: TaskRef) -> str:
        """The name of the scorer: a verifier, rewards or an environment; reasoning_gym for a
        dataset that is not among the sources.
        """
        spec = self.spec_for(ref)
        return spec.scorer_name if spec else DEFAULT_VERIFIER

    def turns_for(self, ref: TaskRef) -> EnvironmentSpec | None:
        """The tools or environment of a task; None for answers of one turn."""
        spec = self.spec_for(ref)
        return spec.turns if spec else None

    def is_outside(self, ref: TaskRef) -> bool:
        """Check whether the task is scored outside the sandbox."""
        spec = self.spec_for(ref)
        return spec is not None and not spec.sandbox

    @property
    def local_only(self) -> dict[str, LocalOnly]:
        """Datasets whose groups are taken from no other node with the verifier that they have, and
        why. `shared.tasks.reference_checks.try_rewards` finds those whose reward depends on a
        group.
        """
        others = {name for name, spec in self._by_dataset.items() if spec.verifier != DEFAULT_VERIFIER}
        outside = {spec.dataset for spec in self._exact.values() if not spec.sandbox}
        judged = {spec.dataset for spec in self._exact.values() if is_judged(spec.verifier)}
        found = dict.fromkeys(SCORED_LOCALLY - others, LocalOnly.SCORER) | dict.fromkeys(judged, LocalOnly.JUDGED)
        return found | dict.fromkeys(outside, LocalOnly.OUTSIDE_SANDBOX)

    def spec_for(self, ref: TaskRef) -> TaskSpec | None:
        """The source whose verifier scores the task; None if its dataset is not among them."""
        return self._exact.get((ref.dataset, ref.config)) or self._by_dataset.get(ref.dataset)
