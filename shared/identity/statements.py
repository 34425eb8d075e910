"""Signs a node's statements about itself, and checks those of other nodes before they are shown."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from shared.contracts.codec import decode_foreign, encode
from shared.contracts.control import EvalReport, NodeRecord
from shared.contracts.statements import SignedStatement, statement_bytes
from shared.contracts.wire import MessageError
from shared.identity.keys import SigningKey, verify

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
class Heard(Generic[S]):
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


def hear(payload: bytes, kind: type[S], now: float, swarm: str | None = None) -> Heard[S]:
    """Decode and check a received statement. `swarm`: the only swarm whose statements count; None
    if the reader does not know it.

    Older software sent the bare message without a signature: it is read and marked as unsigned.

    Raises:
        MessageError: it is not a statement of this kind at all.
    """
    try:
        signed = decode_foreign(payload, SignedStatement)
    except MessageError:
        return Heard(decode_foreign(payload, kind), SignatureStatus.UNSIGNED)
    said = decode_foreign(signed.body, kind)
    problem = _problem(signed, said, now, swarm)
    return Heard(said, SignatureStatus.REFUSED if problem else SignatureStatus.SIGNED, signed.public_key, signed.swarm, problem)


def said_in(payload: bytes, kind: type[S]) -> S:
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
    if said_at(said) > now + MAX_CLOCK_SKEW_S:
        return "its time is in the future"
    return ""


def said_at(said: EvalReport | NodeRecord) -> float:
    """When the statement was made, by the node's clock (Unix seconds)."""
    return said.updated_at if isinstance(said, NodeRecord) else said.created_at
