"""The rules by which a node accepts foreign groups: tasks, and limits of age, size and length."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from shared.config.verifier_config import VerifierConfig
from shared.contracts.codec import MAX_TOKENS
from shared.contracts.messages import TaskRef
from shared.contracts.wire import DEFAULT_SWARM_ID
from shared.environment_files import EnvironmentSpec
from shared.rewards import LocalOnly
from shared.tasks.verifiers import VerifierChoice

Accept = Literal["same", "dataset", "any"]


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
    local_only: Mapping[str, LocalOnly] = field(default_factory=lambda: VerifierChoice().local_only)
    """Datasets of which no foreign group is taken, and why."""
    turns_for: Callable[[TaskRef], EnvironmentSpec | None] = VerifierChoice().turns_for
    """The tools or environment of a task."""

    @classmethod
    def of(cls, config: VerifierConfig, accept: Accept) -> BorderRules:
        """The rules of a node. accept: `verifier.accepted_tasks`, or the value that replaces `auto`
        if there is no roster but all members are known.
        """
        verifier, choice = config.verifier, VerifierChoice(config.tasks)
        return cls(
            node=config.node.id,
            swarm_id=config.nats.swarm_id,
            accept=accept,
            own_tasks=frozenset((spec.dataset, spec.canonical_config) for spec in config.tasks),
            max_age_s=config.max_foreign_age_s,
            max_clock_skew_s=verifier.max_clock_skew_s,
            max_bytes=verifier.max_foreign_bytes,
            max_completions=config.max_foreign_completions,
            max_answer_chars=config.max_answer_chars,
            max_tokens=config.max_foreign_tokens,
            local_only=choice.local_only,
            turns_for=choice.turns_for,
            established_after=verifier.newcomer_groups,
        )
