"""Which of its own groups a node shares, and what of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from services.verifier.border import without_tokens
from shared.keys import SigningKey
from shared.messages import SIGNATURE_DOMAIN, RolloutGroup, SignedRollouts, encode


def is_informative(rewards: Sequence[float]) -> bool:
    """Whether the rewards differ, so that the group's advantages are not all zero."""
    return len(set(rewards)) > 1


def is_shared(policy: Literal["all", "informative", "none"], rewards: Sequence[float]) -> bool:
    """Whether a scored group goes to the swarm."""
    return policy == "all" or (policy == "informative" and is_informative(rewards))


def sign(group: RolloutGroup, key: SigningKey, *, share_tokens: bool) -> SignedRollouts:
    """The group as it crosses the swarm plane, without token ids where the node keeps them to itself."""
    body = encode(group if share_tokens else without_tokens(group))
    return SignedRollouts(node=group.node, public_key=key.public_key, signature=key.sign(SIGNATURE_DOMAIN + body), body=body)
