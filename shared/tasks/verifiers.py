"""Verifiers: built-in ones, and installed ones from the entry-point group `swarm.verifiers`.

A verifier is a function from a derived task (`Item`) to the scorer of its answers:
`verifier(item)(answer)` is a finite number, used as it is; or a pair of the number and whether the
answer passes. It may raise `TaskError` for a task that it cannot judge. If the scorer raises, is
late or returns anything else, that answer's reward is unknown. It runs in the sandbox's worker,
which has no environment, network or writable files. Its name comes from this node's `[[tasks]]`
entries, never from the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from shared.registry import DEFAULT_VERIFIER, SCORED_LOCALLY, VERIFIERS
from shared.tasks.derive import Item, TaskError, from_package

if TYPE_CHECKING:
    from shared.config import TaskSpec
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


def preload(names: Iterable[str]) -> None:
    """Import verifiers early. A failure is not reported here; it is raised when the verifier is
    needed.
    """
    for name in names:
        try:
            load_verifier(name)
        except TaskError:
            continue


def is_built_in(verifier: str, dataset: str) -> bool:
    """Whether the project's own rule scores this dataset, and not a user's or a package's."""
    return verifier in VERIFIERS.built_in and not (verifier == DEFAULT_VERIFIER and from_package(dataset))


class VerifierChoice:
    """Selects the verifier of a task from this node's own sources, whoever sent the task."""

    def __init__(self, specs: Sequence[TaskSpec] = ()) -> None:
        """An entry applies to its dataset and config. A dataset's first entry also applies to the
        dataset's other configs.
        """
        self._exact = {(spec.dataset, spec.canonical_config): spec for spec in reversed(specs)}
        self._by_dataset = {spec.dataset: spec for spec in reversed(specs)}
        self.names = sorted({DEFAULT_VERIFIER, *(spec.verifier for spec in specs)})

    def name_for(self, ref: TaskRef) -> str:
        """The verifier's name; reasoning_gym for a dataset that is not among the sources."""
        spec = self.spec_for(ref)
        return spec.verifier if spec else DEFAULT_VERIFIER

    @property
    def scored_locally(self) -> frozenset[str]:
        """Datasets whose groups are taken from no other node, with the verifier that they have."""
        others = (name for name, spec in self._by_dataset.items() if spec.verifier != DEFAULT_VERIFIER)
        return SCORED_LOCALLY.difference(others)

    def spec_for(self, ref: TaskRef) -> TaskSpec | None:
        """The source whose verifier scores the task; None if its dataset is not among them."""
        return self._exact.get((ref.dataset, ref.config)) or self._by_dataset.get(ref.dataset)
