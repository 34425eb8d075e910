"""Reasons for refusing foreign messages, and who may be blamed for each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shared.contracts.messages import RolloutGroup


class Refusal(Enum):
    """Why a foreign message was refused. The values are the only labels of the metric."""

    TOO_LARGE = "too_large"
    BLOB_MISSING = "blob_missing"
    REFERENCE = "reference"
    FLOOD = "flood"
    """More than this node can examine, from a sender that has not earned a whole share here."""
    SURPLUS = "surplus"
    """The same from a sender that has earned one, because a fast honest node makes more than others
    can examine; and from any sender if the message was in the stream before this node started to
    read.
    """
    MALFORMED = "malformed"
    SCHEMA_VERSION = "schema_version"
    OTHER_SWARM = "other_swarm"
    SIGNATURE = "signature"
    BANNED = "banned"
    QUARANTINED = "quarantined"
    AUTHOR = "author"
    UNKNOWN_KEY = "unknown_key"
    TOO_OLD = "too_old"
    FROM_FUTURE = "from_future"
    REPLAYED = "replayed"
    TASK_NOT_ALLOWED = "task_not_allowed"
    NO_PASS = "no_pass"
    """No pass is defined for its source, so a near miss could not be told from a right answer."""
    HELD_OUT = "held_out"
    LENGTHS = "lengths"
    TASK_UNDERIVABLE = "task_underivable"
    TASK_MISMATCH = "task_mismatch"
    SCORING_TIMEOUT = "scoring_timeout"
    SCORING_COST = "scoring_cost"
    UNKNOWN_REWARD = "unknown_reward"
    """An answer's reward is unknown here. The whole group is refused: if such answers left it, as
    they leave a local group, a sender could fill a copy with answers that vanish after the checks.
    """
    REPEATED = "repeated"
    COPIED = "copied"


UNEXAMINED = (Refusal.FLOOD, Refusal.SURPLUS)
"""Refusals of messages that were never looked at, so they say nothing about what is in them."""


class Found(Enum):
    """Offences that are found after a group was accepted. Reports list these values along with
    those of `Refusal`.
    """

    ABSURD = "absurd"


Offence = Refusal | Found

BLAME: dict[Offence, float] = {
    Refusal.MALFORMED: 1.0,
    Refusal.TASK_MISMATCH: 1.0,
    Refusal.SCORING_TIMEOUT: 1.0,
    Refusal.SCORING_COST: 1.0,
    Refusal.TASK_UNDERIVABLE: 0.5,
    Refusal.FROM_FUTURE: 0.25,
    Refusal.UNKNOWN_KEY: 0.25,
    Refusal.REPEATED: 0.25,
    Refusal.COPIED: 0.25,
    Found.ABSURD: 0.5,
}
"""How much a refused body counts against the key that signed it, in [0, 1]. Reasons that are
missing here are blamed on nobody.

Only a body under a valid signature can be blamed on anyone, and only on the key, never on a name:

* Before the signature is checked, anyone could have sent it: too large, chunks missing or belonging
to another message, unreadable envelope, forged signature.
* The envelope's `node` and the subject are not signed. Any node can store another node's message
under a third one's subject (`author`).
* Anyone who reads the swarm can send a signed message again: `replayed`, `too_old`. A bad body
counts once, however often it is sent.
* Anyone who reads another swarm can copy its groups here (`other_swarm`), and an honest node may be
misconfigured.
* `task_not_allowed`, `no_pass`, `held_out`, `lengths`, `schema_version`: an honest node cannot know
this node's choices and version.
* `unknown_reward`: this node's scorer failed; what that cost counts (`scoring_cost`).
* `scoring_timeout` weighs as much as it cost (`services.verifier.border`); `scoring_cost` is a
judgement on many groups (`services.verifier.scoring_cost`) and causes quarantine by itself.
* A copy is blamed only if coincidence is excluded, and only on the later one in the stream
(`services.verifier.copies`).
* Text that is absurd under this node's policy may be something it has yet to learn: it counts by
the fraction of absurd answers.
* Weights up to a half never cause quarantine by themselves (`services.verifier.reputation`): a
wrong clock, two nodes with one name. Messages that no honest node with the same software sends
weigh 1.
"""


def beyond_budget(earned: float, *, backlog: bool = False) -> Refusal:
    """The reason for refusing a message for which this node has no turn, by the share that its
    sender has earned, in [0, 1]. A fast honest node is no attacker and must not look like one.

    backlog: the message was in the stream before this node started to read. A node that joins knows
    nobody yet, and what others made while it was away is not a flood.
    """
    return Refusal.SURPLUS if backlog or earned >= 1.0 else Refusal.FLOOD


@dataclass(frozen=True, slots=True)
class Refused:
    """A refused message.

    `sender` is the node in the subject, or None if there is none; it is a claim, to be used only
    for counting. `blamed` is the key that signed the message, if it can be blamed for the reason;
    `quarantined_s` is how long that key is quarantined because of it. `group_id` is the id of bytes
    under a valid signature, else ""; `group` is what was decoded of them before the check that
    failed.
    """

    reason: Refusal
    sender: str | None
    detail: str
    blamed: str | None = None
    quarantined_s: float = 0.0
    group_id: str = ""
    group: RolloutGroup | None = None
