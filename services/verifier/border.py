"""What a foreign group must pass before any other code sees it: ordered checks, each with a typed reason.

    size -> signature -> decode -> author -> age -> replay -> task allowed -> held-out -> lengths -> (sandbox) task equal -> score

The cheap checks come first and are all in `Border.examine`: pure but for the memory of names and group ids, time is an argument,
and nothing that a sender can put into a message makes it raise. The task is derived again and scored in the sandbox afterwards
(`Border.conclude`). Rewards, truth and metadata from the wire are compared, never used.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import msgspec

from services.verifier.quarantine import Quarantine
from services.verifier.replay import ReplayMemory
from services.verifier.trust import KnownKeys
from shared import keys, subjects
from shared.messages import (
    SIGNATURE_DOMAIN,
    MessageError,
    RolloutGroup,
    SignedRollouts,
    content_id,
    decode,
    unpack_ids,
    unpack_logprobs,
)
from shared.tasks.held_out import HeldOut
from shared.tasks.sandbox import JobResult


class Refusal(Enum):
    """Why a foreign message was not taken in. The values are metric labels; there are no others."""

    TOO_LARGE = "too_large"
    BLOB_MISSING = "blob_missing"
    MALFORMED = "malformed"
    SCHEMA_VERSION = "schema_version"
    SIGNATURE = "signature"
    AUTHOR = "author"
    UNKNOWN_KEY = "unknown_key"
    TOO_OLD = "too_old"
    FROM_FUTURE = "from_future"
    REPLAYED = "replayed"
    TASK_NOT_ALLOWED = "task_not_allowed"
    HELD_OUT = "held_out"
    LENGTHS = "lengths"
    TASK_UNDERIVABLE = "task_underivable"
    TASK_MISMATCH = "task_mismatch"
    SCORING_TIMEOUT = "scoring_timeout"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class Refused:
    """A message that stays outside. `sender` is the subject's node, None where the subject names none."""

    reason: Refusal
    sender: str | None
    detail: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group that passed all cheap checks; its task is still only a claim."""

    sender: str
    group_id: str
    group: RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class BorderRules:
    """What this node takes in; the fields are those of the configuration's `verifier` section."""

    node: str
    accept: Literal["same", "dataset", "any"]
    own_tasks: Collection[tuple[str, str]]
    """(dataset, canonical config) of the node's own sources."""
    max_age_s: float
    max_clock_skew_s: float
    max_bytes: int
    max_completions: int
    max_answer_chars: int


class Border:
    """The checks and their memories: which key a name belongs to, which groups were seen, who made a worker hang."""

    def __init__(self, rules: BorderRules, known_keys: KnownKeys, replay: ReplayMemory, held_out: HeldOut) -> None:
        self._rules = rules
        self._known_keys = known_keys
        self._replay = replay
        self._held_out = held_out
        self._quarantine = Quarantine()
        self._datasets = frozenset(dataset for dataset, _ in rules.own_tasks)

    def refuse_size(self, subject: str, size_bytes: int) -> Refused | None:
        """The first check, possible before the payload is fetched."""
        if size_bytes <= self._rules.max_bytes:
            return None
        detail = f"{size_bytes} bytes, at most {self._rules.max_bytes} are looked at (verifier.max_foreign_bytes)"
        return Refused(Refusal.TOO_LARGE, subjects.rollouts_author(subject), detail)

    def examine(self, subject: str, payload: bytes, now_s: float) -> Candidate | Refused:
        """All checks that need neither reasoning-gym nor a worker. Never raises, whatever the bytes."""
        sender = subjects.rollouts_author(subject)
        refused = self.refuse_size(subject, len(payload))
        if refused is not None:
            return refused
        try:
            envelope = decode(payload, SignedRollouts)
            if not keys.verify(envelope.public_key, SIGNATURE_DOMAIN + envelope.body, envelope.signature):
                return Refused(Refusal.SIGNATURE, sender, "the signature is not by the key that the message names")
            group = decode(envelope.body, RolloutGroup)
        except MessageError as error:
            reason = Refusal.SCHEMA_VERSION if error.reason == "schema_version" else Refusal.MALFORMED
            return Refused(reason, sender, error.detail)
        problem = (
            self._author_problem(sender, envelope, group)
            or self._quarantine_problem(envelope.node, now_s)
            or self._age_problem(group, now_s)
            or self._replay_problem(content_id(envelope.body))
            or self._task_problem(group)
            or self._length_problem(group)
        )
        if problem is not None:
            return Refused(problem[0], sender, problem[1])
        assert sender is not None
        if not self._known_keys.bind(sender, envelope.public_key):
            return Refused(Refusal.UNKNOWN_KEY, sender, "too many names are known already")
        return Candidate(sender, content_id(envelope.body), group)

    def conclude(self, candidate: Candidate, result: JobResult, now_s: float) -> Refused | None:
        """The verdict once the sandbox has derived the task again and scored the answers. None: accepted and remembered."""
        if result.reason is None:
            if len(result.rewards) != len(candidate.group.completions):
                return Refused(Refusal.TASK_UNDERIVABLE, candidate.sender, "not every answer has a reward")
            self._replay.remember(candidate.group_id)
            return None
        try:
            reason = Refusal(result.reason)
        except ValueError:
            reason = Refusal.TASK_UNDERIVABLE
        if reason is Refusal.SCORING_TIMEOUT:
            self._quarantine.strike(candidate.sender, now_s)
        return Refused(reason, candidate.sender, result.detail)

    def _author_problem(self, sender: str | None, envelope: SignedRollouts, group: RolloutGroup) -> tuple[Refusal, str] | None:
        if not sender == envelope.node == group.node or sender == self._rules.node:
            return Refusal.AUTHOR, f"subject says {sender}, envelope {envelope.node}, body {group.node}"
        if not self._known_keys.may_use(envelope.node, envelope.public_key):
            return Refusal.UNKNOWN_KEY, f"{envelope.node} is bound to another key"
        return None

    def _quarantine_problem(self, sender: str, now_s: float) -> tuple[Refusal, str] | None:
        remaining_s = self._quarantine.remaining_s(sender, now_s)
        return (Refusal.QUARANTINED, f"made a scorer hang; for {remaining_s:.0f} s more") if remaining_s > 0 else None

    def _age_problem(self, group: RolloutGroup, now_s: float) -> tuple[Refusal, str] | None:
        age_s = now_s - group.created_at
        if age_s > self._rules.max_age_s:
            return Refusal.TOO_OLD, f"{age_s:.0f} s old, at most {self._rules.max_age_s:.0f} (verifier.max_age_s)"
        if age_s < -self._rules.max_clock_skew_s:
            return Refusal.FROM_FUTURE, f"made {-age_s:.0f} s in the future; one of the two clocks is wrong"
        return None

    def _replay_problem(self, group_id: str) -> tuple[Refusal, str] | None:
        return (Refusal.REPLAYED, f"group {group_id} was seen before") if self._replay.contains(group_id) else None

    def _task_problem(self, group: RolloutGroup) -> tuple[Refusal, str] | None:
        ref = group.task.ref
        allowed = (
            self._rules.accept == "any"
            or (self._rules.accept == "dataset" and ref.dataset in self._datasets)
            or (ref.dataset, ref.config) in self._rules.own_tasks
        )
        if not allowed:
            return Refusal.TASK_NOT_ALLOWED, f"{ref.dataset} {ref.config[:100]} is not taken in (verifier.accept)"
        if self._held_out.contains(group.task.question):
            return Refusal.HELD_OUT, "the question is in this node's held-out set"
        return None

    def _length_problem(self, group: RolloutGroup) -> tuple[Refusal, str] | None:
        if len(group.completions) > self._rules.max_completions:
            return Refusal.LENGTHS, f"{len(group.completions)} completions (verifier.max_foreign_completions)"
        for completion in group.completions:
            if len(completion.text) > self._rules.max_answer_chars:
                return Refusal.LENGTHS, f"a text of {len(completion.text)} characters (verifier.max_answer_chars)"
            for packed in (completion.token_ids, completion.behaviour_logprobs):
                if packed is not None and len(packed) != 4 * completion.token_count:
                    return Refusal.LENGTHS, "token_ids, behaviour_logprobs and token_count disagree"
        try:
            unpack_ids(group.prompt_ids or b"")
            for completion in group.completions:
                unpack_ids(completion.token_ids or b"")
                unpack_logprobs(completion.behaviour_logprobs or b"")
        except MessageError as error:
            return Refusal.MALFORMED, error.detail
        return None


def without_tokens(group: RolloutGroup) -> RolloutGroup:
    """The group with its texts only, as a node with another tokenizer uses it."""
    completions = [msgspec.structs.replace(each, token_ids=None, behaviour_logprobs=None) for each in group.completions]
    return msgspec.structs.replace(group, completions=completions, prompt_ids=None)
