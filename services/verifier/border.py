"""What a foreign group must pass before any other code sees it: ordered checks, each with a typed reason.

    ban of the name -> size -> signature -> ban of the key -> quarantine -> decode -> author -> roster or known key -> age -> replay
    -> task allowed -> held-out -> lengths -> (sandbox) task equal -> score

The cheap checks come first and are all in `Border.examine`: pure but for the memory of names and group ids, time is an argument,
and nothing that a sender can put into a message makes it raise. The task is derived again and scored in the sandbox afterwards
(`Border.conclude`). Rewards, truth and metadata from the wire are compared, never used. Only what a valid signature covers is
blamed on anyone, and only on the key that made it (`services.verifier.refusals`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import msgspec

from services.verifier.bans import Bans
from services.verifier.refusals import BLAME, Refusal, Refused
from services.verifier.replay import ReplayMemory
from services.verifier.reputation import Reputation
from services.verifier.trust import Trust
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

__all__ = ["Border", "BorderRules", "Candidate", "Refusal", "Refused", "without_tokens"]

JUDGED_BODIES = 100_000
"""Refused bodies remembered with their signer, so that one sent again by somebody else is neither scored nor blamed twice."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group that passed all cheap checks; its task is still only a claim."""

    sender: str
    public_key: str
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
    """The checks and their memories: which key a name belongs to, which groups were seen, what each key's groups were worth."""

    def __init__(self, rules: BorderRules, trust: Trust, replay: ReplayMemory, held_out: HeldOut) -> None:
        self._rules = rules
        self._trust = trust
        self._replay = replay
        self._held_out = held_out
        self._judged = ReplayMemory(JUDGED_BODIES)
        self._datasets = frozenset(dataset for dataset, _ in rules.own_tasks)
        self.bans = Bans(trust)
        self.reputation = Reputation()

    def refuse_unread(self, subject: str, size_bytes: int, now_s: float) -> Refused | None:
        """The first checks, possible before the payload is fetched: a ban of the name, and the size."""
        sender = subjects.rollouts_author(subject)
        ban = self.bans.of_name(sender, now_s)
        if ban is not None:
            return Refused(Refusal.BANNED, sender, ban.reason)
        if size_bytes <= self._rules.max_bytes:
            return None
        detail = f"{size_bytes} bytes, at most {self._rules.max_bytes} are looked at (verifier.max_foreign_bytes)"
        return Refused(Refusal.TOO_LARGE, sender, detail)

    def examine(self, subject: str, payload: bytes, now_s: float) -> Candidate | Refused:
        """All checks that need neither reasoning-gym nor a worker. Never raises, whatever the bytes."""
        sender = subjects.rollouts_author(subject)
        refused = self.refuse_unread(subject, len(payload), now_s)
        if refused is not None:
            return refused
        try:
            envelope = decode(payload, SignedRollouts)
        except MessageError as error:
            return Refused(_decode_reason(error), sender, error.detail)
        if not keys.verify(envelope.public_key, SIGNATURE_DOMAIN + envelope.body, envelope.signature):
            return Refused(Refusal.SIGNATURE, sender, "the signature is not by the key that the message names")
        body_id = content_id(envelope.body)
        problem = self._key_problem(envelope.public_key, now_s)
        if problem is None:
            try:
                group = decode(envelope.body, RolloutGroup)
            except MessageError as error:
                problem = _decode_reason(error), error.detail
            else:
                problem = (
                    self._author_problem(sender, envelope, group)
                    or self._age_problem(group, now_s)
                    or self._replay_problem(envelope.public_key, body_id)
                    or self._task_problem(group)
                    or self._length_problem(group)
                )
        if problem is not None:
            return self._refuse(problem[0], sender, envelope.public_key, body_id, problem[1], now_s)
        assert sender is not None
        if not self._trust.bind(sender, envelope.public_key):
            return Refused(Refusal.UNKNOWN_KEY, sender, "too many names are known already")
        return Candidate(sender, envelope.public_key, body_id, group)

    def conclude(self, candidate: Candidate, result: JobResult, now_s: float) -> Refused | None:
        """The verdict once the sandbox has derived the task again and scored the answers. None: accepted and remembered."""
        if result.reason is None and len(result.rewards) == len(candidate.group.completions):
            self._replay.remember(candidate.group_id)
            self.reputation.credit(candidate.public_key, candidate.sender, now_s)
            return None
        try:
            reason = Refusal(result.reason or Refusal.TASK_UNDERIVABLE)
        except ValueError:
            reason = Refusal.TASK_UNDERIVABLE
        detail = result.detail if result.reason is not None else "not every answer has a reward"
        return self._refuse(reason, candidate.sender, candidate.public_key, candidate.group_id, detail, now_s)

    def _refuse(self, reason: Refusal, sender: str | None, key: str, body_id: str, detail: str, now_s: float) -> Refused:
        """Refuse what `key` has signed, and blame it once where the reason is its fault."""
        judged_id = _judged_id(key, body_id)
        if reason not in BLAME or self._judged.contains(judged_id):
            return Refused(reason, sender, detail)
        self._judged.remember(judged_id)
        name = sender if sender is not None and self._trust.key_of(sender) in {key, None} else ""
        quarantined_s = self.reputation.blame(key, name, reason, now_s)
        return Refused(reason, sender, detail, blamed=key, quarantined_s=quarantined_s)

    def _key_problem(self, public_key: str, now_s: float) -> tuple[Refusal, str] | None:
        ban = self.bans.of_key(public_key, now_s)
        if ban is not None:
            return Refusal.BANNED, ban.reason
        remaining_s = self.reputation.remaining_s(public_key, now_s)
        return (Refusal.QUARANTINED, f"for {remaining_s:.0f} s more") if remaining_s > 0 else None

    def _author_problem(self, sender: str | None, envelope: SignedRollouts, group: RolloutGroup) -> tuple[Refusal, str] | None:
        if not sender == envelope.node == group.node or sender == self._rules.node:
            return Refusal.AUTHOR, f"subject says {sender}, envelope {envelope.node}, body {group.node}"
        if not self._trust.may_use(envelope.node, envelope.public_key):
            return Refusal.UNKNOWN_KEY, f"{envelope.node} is not the name of this key (verifier.trust)"
        return None

    def _age_problem(self, group: RolloutGroup, now_s: float) -> tuple[Refusal, str] | None:
        age_s = now_s - group.created_at
        if age_s > self._rules.max_age_s:
            return Refusal.TOO_OLD, f"{age_s:.0f} s old, at most {self._rules.max_age_s:.0f} (verifier.max_age_s)"
        if age_s < -self._rules.max_clock_skew_s:
            return Refusal.FROM_FUTURE, f"made {-age_s:.0f} s in the future; one of the two clocks is wrong"
        return None

    def _replay_problem(self, public_key: str, group_id: str) -> tuple[Refusal, str] | None:
        seen = self._replay.contains(group_id) or self._judged.contains(_judged_id(public_key, group_id))
        return (Refusal.REPLAYED, f"group {group_id} was seen before") if seen else None

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


def _judged_id(public_key: str, body_id: str) -> str:
    # With the signer: else who signs another's body again with a key of his own would have the true one refused.
    return content_id(f"{public_key} {body_id}".encode())


def _decode_reason(error: MessageError) -> Refusal:
    return Refusal.SCHEMA_VERSION if error.reason == "schema_version" else Refusal.MALFORMED


def without_tokens(group: RolloutGroup) -> RolloutGroup:
    """The group with its texts only, as a node with another tokenizer uses it."""
    completions = [msgspec.structs.replace(each, token_ids=None, behaviour_logprobs=None) for each in group.completions]
    return msgspec.structs.replace(group, completions=completions, prompt_ids=None)
