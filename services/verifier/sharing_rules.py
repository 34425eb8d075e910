"""Which local groups a node shares, and which parts of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

from services.verifier.border import without_tokens
from shared.contracts.codec import encode
from shared.contracts.messages import RolloutGroup, SignedRollouts, signed_bytes
from shared.contracts.wire import DEFAULT_SWARM_ID
from shared.identity.keys import SigningKey
from shared.rewards import is_informative

_MESSAGE_ID_DOMAIN = b"swarm-message-id\x00"


def is_shared(policy: Literal["all", "informative", "none"], rewards: Sequence[float]) -> bool:
    """Whether a scored group is sent to the swarm."""
    return policy == "all" or (policy == "informative" and is_informative(rewards))


def sign(group: RolloutGroup, key: SigningKey, *, share_tokens: bool, swarm_id: str = DEFAULT_SWARM_ID) -> SignedRollouts:
    """The signed group for the swarm plane, without token ids if the node does not share them.
    `swarm_id` is the setting `nats.swarm_id`; the group is valid in that swarm only.
    """
    body = encode(group if share_tokens else without_tokens(group))
    signature = key.sign(signed_bytes(swarm_id, body))
    return SignedRollouts(swarm=swarm_id, node=group.node, public_key=key.public_key, signature=signature, body=body)


def message_id(shared_id: str, key: SigningKey) -> str:
    """The `Nats-Msg-Id` under which a group is published: the same after a restart, and
    unpredictable for everybody else.

    A server stores only one message with a given id, whoever sends it. The chunks of a large group
    can be read before its message is stored. If the id depended only on the bytes (`content_id`), a
    reader could use it first, so that the group would never be stored. Ed25519 signatures are
    deterministic (RFC 8032, section 5.1.6).
    """
    return hashlib.sha256(key.sign(_MESSAGE_ID_DOMAIN + shared_id.encode())).hexdigest()
