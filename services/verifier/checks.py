"""The border's checks in order, each with its reason: the one description of what
`services.verifier.border` does.

`python -m monitoring.border_doc` writes them as a table to `docs/trust.md`;
`tests/unit/test_border_order.py` checks that the border agrees.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from services.verifier.refusals import BLAME, Refusal


class Stage(Enum):
    """When a check is made; each stage costs more than the one before."""

    UNREAD = "before the payload is read"
    PAYLOAD = "large payloads, stored in chunks"
    ENVELOPE = "envelope"
    KEY = "key"
    BODY = "body"
    CONTENT = "content"
    SANDBOX = "sandbox"
    ACCEPTANCE = "once more, before it is taken in"


class Check(NamedTuple):
    """A message that fails this check is refused as `refusal`, and no later check runs."""

    stage: Stage
    refusal: Refusal
    fails: str
    blameless: bool = False
    spares: str = ""
    """When the key is not blamed after all."""

    @property
    def blamed(self) -> str:
        """Who is blamed, as text for the documentation."""
        weight = BLAME.get(self.refusal, 0.0) if not self.blameless and self.stage not in _UNSIGNED else 0.0
        blamed = f"the key, {weight:g}" if weight else "nobody"
        return f"{blamed}; nobody {self.spares}" if self.spares else blamed


_A_ROW, _SHORT = "for a row of a file", "if the answers are too short to tell"
_UNSIGNED = (Stage.UNREAD, Stage.PAYLOAD, Stage.ENVELOPE)

CHECKS = (
    Check(Stage.UNREAD, Refusal.BANNED, "the name on the subject is banned here (`swarm ban`)"),
    Check(Stage.UNREAD, Refusal.TOO_LARGE, "it is longer than `verifier.max_foreign_bytes`"),
    Check(
        Stage.UNREAD,
        Refusal.FLOOD,
        "more messages wait than the budget covers (`verifier.intake_groups_per_s`, `max_sender_share`, `newcomer_share`)",
    ),
    Check(
        Stage.UNREAD,
        Refusal.SURPLUS,
        "the same, and its sender has earned a whole share (it makes more than this node looks at), or it was in the stream before "
        "this node looked",
    ),
    Check(Stage.PAYLOAD, Refusal.REFERENCE, "what it refers to is not a payload of its own, or does not have the announced hash"),
    Check(Stage.PAYLOAD, Refusal.BLOB_MISSING, "chunks of its payload are gone"),
    Check(Stage.ENVELOPE, Refusal.SCHEMA_VERSION, "its schema version is another"),
    Check(Stage.ENVELOPE, Refusal.MALFORMED, "it is not an envelope"),
    Check(Stage.ENVELOPE, Refusal.OTHER_SWARM, "it is signed for another swarm (`nats.swarm_id`)"),
    Check(Stage.ENVELOPE, Refusal.SIGNATURE, "the signature is not from the key that it names"),
    Check(Stage.KEY, Refusal.BANNED, "the key is banned here"),
    Check(Stage.KEY, Refusal.QUARANTINED, "the key is in quarantine"),
    Check(Stage.BODY, Refusal.SCHEMA_VERSION, "the body's schema version is not supported"),
    Check(Stage.BODY, Refusal.MALFORMED, "the body is not a rollout group, or its parts contradict each other"),
    Check(Stage.BODY, Refusal.AUTHOR, "subject, envelope and body do not name the same node, or name this one"),
    Check(Stage.BODY, Refusal.UNKNOWN_KEY, "the key may not use that name (`verifier.trust`)"),
    Check(Stage.BODY, Refusal.TOO_OLD, "it is older than `verifier.max_age_s`"),
    Check(Stage.BODY, Refusal.FROM_FUTURE, "its creation time is more than `verifier.max_clock_skew_s` in the future"),
    Check(Stage.BODY, Refusal.REPLAYED, "it was accepted or judged before"),
    Check(Stage.BODY, Refusal.TASK_NOT_ALLOWED, "`verifier.accept` does not allow its task"),
    Check(Stage.BODY, Refusal.NO_PASS, "no pass is defined for its task's source (`pass_at`)"),
    Check(Stage.CONTENT, Refusal.HELD_OUT, "its question is in this node's held-out set"),
    Check(Stage.CONTENT, Refusal.LENGTHS, "a completion is longer than `verifier.max_answer_chars` or `max_foreign_length` allows"),
    Check(Stage.CONTENT, Refusal.MALFORMED, "a completion's tokens or logprobs cannot belong to its text"),
    Check(Stage.CONTENT, Refusal.REPEATED, "the key has sent this task before, with the same answers or twice", spares=_A_ROW),
    Check(Stage.CONTENT, Refusal.COPIED, "it repeats an earlier group of another node", spares=_SHORT),
    Check(Stage.SANDBOX, Refusal.BANNED, "the key was banned while the group waited to be scored"),
    Check(Stage.SANDBOX, Refusal.QUARANTINED, "the key came into quarantine while the group waited to be scored"),
    Check(Stage.SANDBOX, Refusal.SCORING_COST, "the key's groups cost more than they are worth"),
    Check(Stage.SANDBOX, Refusal.TASK_UNDERIVABLE, "its task cannot be derived here"),
    Check(Stage.SANDBOX, Refusal.TASK_NOT_ALLOWED, "this node's verifier cannot judge its task"),
    Check(Stage.SANDBOX, Refusal.TASK_MISMATCH, "the derived task's question or answer differs from the group's"),
    Check(Stage.SANDBOX, Refusal.SCORING_TIMEOUT, "it was not judged within its limits"),
    Check(Stage.SANDBOX, Refusal.UNKNOWN_REWARD, "the reward of one of its answers is unknown"),
    Check(Stage.ACCEPTANCE, Refusal.REPLAYED, "the same message was accepted while it was being scored"),
    Check(Stage.ACCEPTANCE, Refusal.REPEATED, "a group of the key's with this task was accepted meanwhile", spares=_A_ROW),
    Check(Stage.ACCEPTANCE, Refusal.COPIED, "another node's group with these answers was accepted meanwhile", spares=_SHORT),
    Check(Stage.ACCEPTANCE, Refusal.UNKNOWN_KEY, "another key got its name while it was being scored", blameless=True),
)
"""Every check, in order. Rewards, reference answers and metadata from the wire are compared, never
used.
"""
