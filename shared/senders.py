"""What an operator tells a node's verifiers about senders (bans), and what they tell about them (standings).

Both lie in the node's key-value bucket. `swarm ban` writes the first by compare-and-set; verifiers read it every second.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.wire import Count, Message, NodeId, Number, SchemaVersion, ShortText, UnixTime

BANS_KEY = "bans"
SENDERS_PREFIX = "senders."
MAX_BANS = 4096
MAX_SENDERS = 16


class Ban(Message, frozen=True, kw_only=True):
    """`sender` is a node's name or a public key (`U...`). `until` None: for good."""

    sender: Annotated[str, Meta(pattern=r"^([a-z0-9][a-z0-9-]{0,31}|U[A-Z2-7]{55})$")]
    until: UnixTime | None = None
    reason: ShortText = ""
    made_at: UnixTime = 0.0


class BanList(Message, frozen=True, kw_only=True):
    """All bans of a node."""

    schema: SchemaVersion = 1
    bans: Annotated[list[Ban], Meta(max_length=MAX_BANS)] = []

    def with_ban(self, ban: Ban) -> BanList:
        """With this ban instead of any earlier one of the same sender."""
        return BanList(bans=[*(each for each in self.bans if each.sender != ban.sender), ban])

    def without(self, sender: str) -> BanList:
        """Without bans of this sender."""
        return BanList(bans=[each for each in self.bans if each.sender != sender])

    def in_force(self, now_s: float) -> BanList:
        """Without those that have run out."""
        return BanList(bans=[each for each in self.bans if each.until is None or each.until > now_s])


class SenderStanding(Message, frozen=True, kw_only=True):
    """What a verifier holds against one key. `refused` counts by reason only what the key can be blamed for."""

    public_key: Annotated[str, Meta(max_length=64)]
    name: ShortText
    suspicion: Number
    accepted: Count
    refused: dict[ShortText, Count]
    quarantined_s: Number


class SendersReport(Message, frozen=True, kw_only=True):
    """The worst senders as one verifier replica sees them, in the bucket under `SENDERS_PREFIX` and the replica's name."""

    schema: SchemaVersion = 1
    node: NodeId
    updated_at: UnixTime
    worst: Annotated[list[SenderStanding], Meta(max_length=MAX_SENDERS)]
