"""Why foreign messages stay outside, and who may be blamed for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Refusal(Enum):
    """Why a foreign message was not taken in. The values are metric labels; there are no others."""

    TOO_LARGE = "too_large"
    BLOB_MISSING = "blob_missing"
    FLOOD = "flood"
    MALFORMED = "malformed"
    SCHEMA_VERSION = "schema_version"
    SIGNATURE = "signature"
    BANNED = "banned"
    QUARANTINED = "quarantined"
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


BLAME: dict[Refusal, float] = {
    Refusal.MALFORMED: 1.0,
    Refusal.TASK_MISMATCH: 1.0,
    Refusal.SCORING_TIMEOUT: 1.0,
    Refusal.TASK_UNDERIVABLE: 0.5,
    Refusal.LENGTHS: 0.25,
    Refusal.FROM_FUTURE: 0.25,
    Refusal.UNKNOWN_KEY: 0.25,
}
"""How bad a body is for the standing of the key that signed it, in [0, 1]; what is missing here is nobody's fault.

Only a body under a valid signature can be blamed on anyone, and only on the key, never on a name:

* Before the signature is checked everybody could have sent it: too large, chunks missing, unreadable envelope, forged signature.
* The envelope's `node` and the subject are not signed. A peer can store another's message under a third one's subject (`author`).
* Whoever reads the swarm can send a signed message again: `replayed`, `too_old`. A bad body counts once, however often it comes.
* `task_not_allowed`, `held_out`, `schema_version`: an honest node cannot know this node's choices and version.
* Weights up to a half never lead to quarantine alone (`services.verifier.reputation`): a wrong clock, a narrower limit here,
  two nodes of one name. What no honest node of the same software sends weighs 1.
"""


@dataclass(frozen=True, slots=True)
class Refused:
    """A message that stays outside.

    `sender` is the subject's node, None where the subject names none: a claim, good for counting. `blamed` is the key that signed
    it, where the reason can be blamed on it; `quarantined_s` is how long that key is left out from now on because of it.
    """

    reason: Refusal
    sender: str | None
    detail: str
    blamed: str | None = None
    quarantined_s: float = 0.0
