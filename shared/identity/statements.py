"""Signs a node's statements to the swarm, its held-out scores and its directory entry, and checks
those of other nodes before they are shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Generic, TypeVar

from msgspec import Meta

from shared.contracts.codec import decode_foreign, encode
from shared.contracts.control import EvalReport, NodeRecord
from shared.contracts.wire import Message, MessageError, SchemaVersion, SwarmId
from shared.identity.keys import SigningKey, verify

_DOMAIN = b"swarm-statement-v1\x00"
MAX_STATEMENT_BYTES = 131_072
"""More than the largest honest directory entry, one with 1,024 dataset names, needs."""


class SignedStatement(Message, frozen=True, kw_only=True):
    """The exact bytes of an `EvalReport` or a `NodeRecord` and an Ed25519 signature over
    `statement_bytes`.

    The body names the node and the time, a score also the policy version and held-out set; `swarm`
    is `nats.swarm_id` of the swarm it was made for. A repeated old statement, or one copied from
    another swarm, is recognised by these.
    """

    schema: SchemaVersion = 1
    swarm: SwarmId
    public_key: Annotated[str, Meta(max_length=64)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]
    body: Annotated[bytes, Meta(max_length=MAX_STATEMENT_BYTES)]


def statement_bytes(kind: str, swarm: str, body: bytes) -> bytes:
    """The bytes that the signature of a statement covers. `kind` is the message's name, so that a
    score can never pass as a directory entry. A zero byte ends `kind` and `swarm`, neither of which
    can contain one.
    """
    return _DOMAIN + kind.encode() + b"\x00" + swarm.encode() + b"\x00" + body


MAX_CLOCK_SKEW_S = 300.0
"""A statement from further in the future is refused, because it would remain the newest for
ever.
"""

OTHER_SWARM = "it was made for another swarm"

S = TypeVar("S", EvalReport, NodeRecord)


class SignatureStatus(StrEnum):
    """State of a statement's signature: whether it is known to come from its node."""

    SIGNED = "signed"
    UNSIGNED = "unsigned"
    REFUSED = "badly signed"


@dataclass(frozen=True, slots=True)
class CheckedStatement(Generic[S]):
    """A received statement and its sender. `public_key` and `swarm` are None if it is unsigned;
    `problem` says why it is refused.
    """

    said: S
    standing: SignatureStatus
    public_key: str | None = None
    swarm: str | None = None
    problem: str = ""


def sign_statement(said: EvalReport | NodeRecord, key: SigningKey, swarm: str) -> SignedStatement:
    """The statement as it is sent to the swarm `swarm` (`nats.swarm_id`)."""
    body = encode(said)
    signature = key.sign(statement_bytes(type(said).__name__, swarm, body))
    return SignedStatement(swarm=swarm, public_key=key.public_key, signature=signature, body=body)


def check_statement(payload: bytes, kind: type[S], now: float, swarm: str | None = None) -> CheckedStatement[S]:
    """Decode and check a received statement. `swarm`: the only swarm whose statements count; None
    if the reader does not know it.

    Older software sent the bare message without a signature: it is read and marked as unsigned.

    Raises:
        MessageError: it is not a statement of this kind at all.
    """
    try:
        signed = decode_foreign(payload, SignedStatement)
    except MessageError:
        return CheckedStatement(decode_foreign(payload, kind), SignatureStatus.UNSIGNED)
    said = decode_foreign(signed.body, kind)
    problem = _problem(signed, said, now, swarm)
    return CheckedStatement(
        said, SignatureStatus.REFUSED if problem else SignatureStatus.SIGNED, signed.public_key, signed.swarm, problem
    )


def statement_content(payload: bytes, kind: type[S]) -> S:
    """A statement's content, unchecked: for lists too long to check every entry.

    Raises:
        MessageError: it is not a statement of this kind.
    """
    try:
        return decode_foreign(decode_foreign(payload, SignedStatement).body, kind)
    except MessageError:
        return decode_foreign(payload, kind)


def _problem(signed: SignedStatement, said: EvalReport | NodeRecord, now: float, swarm: str | None) -> str:
    if not verify(signed.public_key, statement_bytes(type(said).__name__, signed.swarm, signed.body), signed.signature):
        return "the signature is not by the key that it names"
    if swarm is not None and signed.swarm != swarm:
        return OTHER_SWARM
    if isinstance(said, NodeRecord) and said.public_key != signed.public_key:
        return "the entry names a different key from the one that signed it"
    if statement_time(said) > now + MAX_CLOCK_SKEW_S:
        return "its time is in the future"
    return ""


def statement_time(said: EvalReport | NodeRecord) -> float:
    """When the statement was made, by the node's clock (Unix seconds)."""
    return said.updated_at if isinstance(said, NodeRecord) else said.created_at
