"""Signed statements of a node to the swarm: its held-out scores and its directory entry."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.contracts.wire import Message, SchemaVersion, SwarmId

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
