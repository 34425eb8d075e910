"""What a node says of itself to the swarm, signed: its held-out scores and its directory entry."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.contracts.wire import Message, SchemaVersion, SwarmId

_DOMAIN = b"swarm-statement-v1\x00"
MAX_STATEMENT_BYTES = 131_072
"""Above the largest honest directory entry (1,024 dataset names)."""


class SignedStatement(Message, frozen=True, kw_only=True):
    """The exact bytes of an `EvalReport` or a `NodeRecord` and an Ed25519 signature over
    `statement_bytes`.

    The body names node, policy version, held-out set and time, and `swarm` the swarm
    (`nats.swarm_id`) that it was said in, so that an old statement said again, or one carried over
    from another swarm, is seen to be that.
    """

    schema: SchemaVersion = 1
    swarm: SwarmId
    public_key: Annotated[str, Meta(max_length=64)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]
    body: Annotated[bytes, Meta(max_length=MAX_STATEMENT_BYTES)]


def statement_bytes(kind: str, swarm: str, body: bytes) -> bytes:
    """What the signature of a statement covers. `kind` is the message's name: a score can never be
    taken for a directory entry. Neither kind nor swarm contains the zero byte that ends it.
    """
    return _DOMAIN + kind.encode() + b"\x00" + swarm.encode() + b"\x00" + body
