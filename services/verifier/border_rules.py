"""The border's checks that need no memory: they depend only on the node's configuration and the
group.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from services.verifier.completion_checks import completion_problem, token_ids_problem
from services.verifier.refusals import Refusal
from shared.config import NodeConfig
from shared.contracts.codec import MAX_TOKENS
from shared.contracts.messages import RolloutGroup
from shared.contracts.wire import DEFAULT_SWARM_ID
from shared.tasks.derive import from_package
from shared.tasks.file_rows import held, is_file_name

Accept = Literal["same", "dataset", "any"]
Problem = tuple[Refusal, str]
"""The reason why a message is refused, and what exactly was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BorderRules:
    """The fixed part of a node's acceptance rules; the names are those of `[verifier]`."""

    node: str
    accept: Accept
    own_tasks: Collection[tuple[str, str]]
    """(dataset, canonical config) of the node's own task sources."""
    max_age_s: float
    max_clock_skew_s: float
    max_bytes: int
    max_completions: int
    max_answer_chars: int
    max_tokens: int = MAX_TOKENS
    established_after: int = 32
    swarm_id: str = DEFAULT_SWARM_ID
    """`nats.swarm_id`; groups signed for another swarm are refused."""

    @classmethod
    def of(cls, config: NodeConfig, accept: Accept) -> BorderRules:
        """The rules of a node. accept: `verifier.accepted_tasks`, or the value that replaces `auto`
        if there is no roster but all members are known.
        """
        verifier = config.verifier
        return cls(
            node=config.node.id,
            swarm_id=config.nats.swarm_id,
            accept=accept,
            own_tasks=frozenset((spec.dataset, spec.canonical_config) for spec in config.tasks),
            max_age_s=verifier.max_age_s,
            max_clock_skew_s=verifier.max_clock_skew_s,
            max_bytes=verifier.max_foreign_bytes,
            max_completions=config.max_foreign_completions,
            max_answer_chars=verifier.max_answer_chars,
            max_tokens=config.max_foreign_tokens,
            established_after=verifier.newcomer_groups,
        )

    def age_problem(self, group: RolloutGroup, now_s: float) -> Problem | None:
        """What is wrong with the creation time in the group, if anything."""
        age_s = now_s - group.created_at
        if age_s > self.max_age_s:
            return Refusal.TOO_OLD, f"{age_s:.0f} s old, at most {self.max_age_s:.0f} (verifier.max_age_s)"
        if age_s < -self.max_clock_skew_s:
            return Refusal.FROM_FUTURE, f"made {-age_s:.0f} s in the future; one of the two clocks is wrong"
        return None

    def task_problem(self, group: RolloutGroup) -> Problem | None:
        """What is wrong with the group's task, if anything."""
        ref = group.task.ref
        own_dataset = any(ref.dataset == dataset for dataset, _ in self.own_tasks)
        allowed = (
            (self.accept == "any" and (own_dataset or not _needs_an_entry(ref.dataset)))
            or (self.accept == "dataset" and own_dataset)
            or (ref.dataset, ref.config) in self.own_tasks
        )
        if not allowed:
            why = f"verifier.accept: {self.accept}{', but it needs a [[tasks]] entry' if self.accept == 'any' else ''}"
            return Refusal.TASK_NOT_ALLOWED, f"{ref.dataset} {ref.config[:100]} is not taken in ({why})"
        return None

    def completions_problem(self, group: RolloutGroup) -> Problem | None:
        """What is wrong with its texts and tokens, if anything: of the first completion with a
        problem, else of the prompt.
        """
        for completion in group.completions:
            problem = completion_problem(completion, self.max_answer_chars, self.max_tokens)
            if problem is not None:
                return problem
        return token_ids_problem(group.prompt_ids or b"")


def _needs_an_entry(dataset: str) -> bool:
    """Whether only a node that names this dataset in `[[tasks]]` can judge it, because it then has
    the file, or has imported the package. No sender makes a process import another package.
    """
    return (is_file_name(dataset) and held(dataset) is None) or from_package(dataset)
