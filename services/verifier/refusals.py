"""Reasons for refusing foreign messages, who may be blamed for each, and the border's checks in
order.

`CHECKS` is the one description of what `services.verifier.border` does. `python -m
monitoring.border_doc` writes it as a table, and `tests/unit/test_border_order.py` checks that
the border agrees.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

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
    OUT_OF_RANGE = "out_of_range"
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
    TURNS = "turns"
    """No policy that met the source's environment can have said these turns."""
    REPEATED = "repeated"
    COPIED = "copied"


Problem = tuple[Refusal, str]
"""The reason why a message is refused, and what exactly was found."""


UNEXAMINED = (Refusal.FLOOD, Refusal.SURPLUS)
"""Refusals of messages that were never looked at, so they say nothing about what is in them."""


class LaterOffence(Enum):
    """Offences that are found after a group was accepted. Reports list these values along with
    those of `Refusal`.
    """

    ABSURD = "absurd"


Offence = Refusal | LaterOffence

BLAME: dict[Offence, float] = {
    Refusal.MALFORMED: 1.0,
    Refusal.SCORING_TIMEOUT: 1.0,
    Refusal.SCORING_COST: 1.0,
    Refusal.TURNS: 1.0,
    Refusal.REPEATED: 0.25,
    Refusal.COPIED: 0.25,
    LaterOffence.ABSURD: 0.5,
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
* What another version, package, configuration or clock explains is blamed on nobody:
`schema_version`, `out_of_range`, `task_mismatch`, `task_underivable`, `task_not_allowed`,
`no_pass`, `held_out`, `lengths`, `from_future`, `unknown_key`. Such a message uses its sender's
turns, and a key whose tasks come out otherwise here is not derived again for a while
(`services.verifier.reputation.TaskDifferences`).
* `unknown_reward`: this node's scorer failed; what that cost counts (`scoring_cost`).
* `scoring_timeout` weighs as much as it cost (`services.verifier.border`); `scoring_cost` is a
judgement on many groups (`services.verifier.reputation`) and causes quarantine by itself.
* A copy is blamed only if coincidence is excluded, and only on the later one in the stream
(`services.verifier.copies`).
* Text that is absurd under this node's policy may be something it has yet to learn: it counts by
the fraction of absurd answers.
* Weights up to a half never cause quarantine by themselves (`services.verifier.reputation`).
Messages that no version of the software sends weigh 1.
"""


def beyond_budget(earned: float, *, exceeds: bool, backlog: bool = False) -> Refusal:
    """The reason for refusing a message for which this node has no turn. It is a flood only if its
    sender, whose earned share is in [0, 1], is new and sends more than one sender may. A fast node
    in good standing is no attacker; nor are many new nodes together, and a node that is short of
    time meets its own limit and not theirs.

    backlog: the message was in the stream before this node started to read. A node that joins knows
    nobody yet, and what others made while it was away is not a flood.
    """
    return Refusal.FLOOD if exceeds and earned < 1.0 and not backlog else Refusal.SURPLUS


@dataclass(frozen=True, slots=True)
class Refused:
    """A refused message.

    `sender` is the node in the subject, or None if there is none; it is a claim, to be used only
    for counting. `blamed` is the key that signed the message, if it can be blamed for the reason;
    `quarantined_s` is how long that key is quarantined because of it. `group_id` is the id of bytes
    under a valid signature, else ""; `group` is what was decoded of them before the check that
    failed. `costly`: the answers were looked at, which takes up to a few milliseconds and is
    charged to whoever sent them; all that comes before takes less than one.
    """

    reason: Refusal
    sender: str | None
    detail: str
    blamed: str | None = None
    quarantined_s: float = 0.0
    costly: bool = False
    group_id: str = ""
    group: RolloutGroup | None = None


# The border's checks in order, each with its reason: the one description of what
# `services.verifier.border` does.
#
# `python -m monitoring.border_doc` writes them to `docs/security.md`;
# `tests/unit/test_border_order.py` checks that the border agrees.


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


_AGAIN = "the key's last three groups of this dataset failed this check below"
_A_ROW, _SHORT = "for a row of a file", "if the answers are too short to tell"
_UNSIGNED = (Stage.UNREAD, Stage.PAYLOAD, Stage.ENVELOPE)

CHECKS = (
    Check(Stage.UNREAD, Refusal.SCHEMA_VERSION, "its subject is of another schema version"),
    Check(Stage.UNREAD, Refusal.BANNED, "the name on the subject is banned here (`swarm ban`)"),
    Check(Stage.UNREAD, Refusal.TOO_LARGE, "it is longer than 8 MiB"),
    Check(
        Stage.UNREAD,
        Refusal.FLOOD,
        "more messages wait than the budget covers, and its new sender sends more than one sender may",
    ),
    Check(
        Stage.UNREAD,
        Refusal.SURPLUS,
        "more messages wait than the budget covers, for any other reason",
    ),
    Check(Stage.PAYLOAD, Refusal.REFERENCE, "the payload is not its own, or has another hash"),
    Check(Stage.PAYLOAD, Refusal.BLOB_MISSING, "chunks of its payload are gone"),
    Check(Stage.ENVELOPE, Refusal.SCHEMA_VERSION, "its schema version is another"),
    Check(Stage.ENVELOPE, Refusal.MALFORMED, "it is not an envelope"),
    Check(Stage.ENVELOPE, Refusal.OUT_OF_RANGE, "a value is outside what this version takes, such as an encoding"),
    Check(Stage.ENVELOPE, Refusal.OTHER_SWARM, "it is signed for another swarm (`nats.swarm_id`)"),
    Check(Stage.ENVELOPE, Refusal.REPLAYED, "its body was accepted or judged before"),
    Check(Stage.ENVELOPE, Refusal.SIGNATURE, "the signature is not from the key that it names"),
    Check(Stage.KEY, Refusal.BANNED, "the key is banned here"),
    Check(Stage.KEY, Refusal.QUARANTINED, "the key is in quarantine"),
    Check(Stage.BODY, Refusal.TOO_LARGE, "it unpacks to more than 8 MiB"),
    Check(Stage.BODY, Refusal.SCHEMA_VERSION, "the body's schema version is not supported"),
    Check(
        Stage.BODY,
        Refusal.MALFORMED,
        "the body is not a rollout group, names a field twice, is nested deeper than 16 levels or has more than 16,384 values",
    ),
    Check(Stage.BODY, Refusal.OUT_OF_RANGE, "a value is outside what this version takes, such as a kind of prompt part"),
    Check(Stage.BODY, Refusal.AUTHOR, "subject, envelope and body name different nodes, or this one"),
    Check(Stage.BODY, Refusal.UNKNOWN_KEY, "the key may not use that name (`verifier.trust`)"),
    Check(Stage.BODY, Refusal.TOO_OLD, "it is older than half an hour, and than `sampler.max_external_age_s`"),
    Check(Stage.BODY, Refusal.FROM_FUTURE, "its creation time is more than 60 s in the future"),
    Check(
        Stage.BODY,
        Refusal.TASK_NOT_ALLOWED,
        "`verifier.accept` does not allow its task, or its package or its environment has another version here",
    ),
    Check(Stage.BODY, Refusal.NO_PASS, "no pass is defined for its task's source (`pass_at`)"),
    Check(Stage.BODY, Refusal.TASK_UNDERIVABLE, _AGAIN),
    Check(Stage.BODY, Refusal.TASK_MISMATCH, _AGAIN),
    Check(Stage.CONTENT, Refusal.HELD_OUT, "its task is in this node's held-out set"),
    Check(
        Stage.CONTENT,
        Refusal.LENGTHS,
        "a completion has more than twice `generator.max_new_tokens`, or more than 16,384 characters and 8 for each of these",
    ),
    Check(Stage.CONTENT, Refusal.OUT_OF_RANGE, "a completion has several turns, and its source no environment"),
    Check(Stage.CONTENT, Refusal.MALFORMED, "a completion's tokens or logprobs cannot belong to its text"),
    Check(Stage.CONTENT, Refusal.REPEATED, "the key has sent this task before, with the same answers or twice", spares=_A_ROW),
    Check(Stage.CONTENT, Refusal.COPIED, "it repeats an earlier group of another node", spares=_SHORT),
    Check(Stage.SANDBOX, Refusal.BANNED, "the key was banned meanwhile"),
    Check(Stage.SANDBOX, Refusal.QUARANTINED, "the key came into quarantine meanwhile"),
    Check(Stage.SANDBOX, Refusal.SCORING_COST, "the key's groups cost more than they are worth"),
    Check(Stage.SANDBOX, Refusal.TASK_UNDERIVABLE, "its task cannot be derived here"),
    Check(Stage.SANDBOX, Refusal.TASK_MISMATCH, "the derived task's prompt, key, answer or metadata differs from the group's"),
    Check(Stage.SANDBOX, Refusal.TASK_NOT_ALLOWED, "this node's verifier cannot judge its task"),
    Check(Stage.SANDBOX, Refusal.SCORING_TIMEOUT, "it was not judged within its limits"),
    Check(Stage.SANDBOX, Refusal.UNKNOWN_REWARD, "the reward of one of its answers is unknown"),
    Check(
        Stage.SANDBOX,
        Refusal.TURNS,
        "an answer goes on after its episode has ended, stops before, or has more turns than `max_turns`",
    ),
    Check(Stage.ACCEPTANCE, Refusal.REPLAYED, "the same message was accepted meanwhile"),
    Check(Stage.ACCEPTANCE, Refusal.REPEATED, "a group of the key's with this task was accepted meanwhile", spares=_A_ROW),
    Check(Stage.ACCEPTANCE, Refusal.COPIED, "another node's group with these answers was accepted meanwhile", spares=_SHORT),
    Check(Stage.ACCEPTANCE, Refusal.UNKNOWN_KEY, "another key got its name meanwhile", blameless=True),
)
"""Every check, in order. Rewards, reference answers and metadata from the wire are compared, never
used.
"""
