"""Records about senders in its key-value bucket: bans, standings, reputations, and the trainer's
findings.

`swarm ban` writes the bans by compare-and-set, and verifiers read them every second. Verifiers
write standings, for people, and the reputation that they need after a restart (one entry for all
replicas). The trainer writes findings, which verifiers read.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.contracts.wire import Count, Message, NodeId, Number, SchemaVersion, Seconds, Share, ShortText, UnixTime

MAX_BANS = 4096
MAX_SENDERS = 16
MAX_REPUTATIONS = 1000
MAX_FINDINGS = 256


class Ban(Message, frozen=True, kw_only=True):
    """`sender` is a node's name or a public key (`U...`). `until` None: the ban does not expire."""

    sender: Annotated[str, Meta(pattern=r"^([a-z0-9][a-z0-9-]{0,31}|U[A-Z2-7]{55})\Z")]
    until: UnixTime | None = None
    reason: ShortText = ""
    made_at: UnixTime = 0.0


class BanList(Message, frozen=True, kw_only=True):
    """All bans of a node."""

    schema: SchemaVersion = 1
    bans: Annotated[list[Ban], Meta(max_length=MAX_BANS)] = []

    def with_ban(self, ban: Ban) -> BanList:
        """A copy with this ban, which replaces any earlier one of the same sender."""
        return BanList(bans=[*(each for each in self.bans if each.sender != ban.sender), ban])

    def without(self, sender: str) -> BanList:
        """A copy without bans of this sender."""
        return BanList(bans=[each for each in self.bans if each.sender != sender])

    def in_force(self, now_s: float) -> BanList:
        """A copy without the bans that have expired at `now_s` (Unix time)."""
        return BanList(bans=[each for each in self.bans if each.until is None or each.until > now_s])


class SenderStanding(Message, frozen=True, kw_only=True):
    """A verifier's record of one key. `refused` counts refusals by reason, only those that are the
    key's fault.
    """

    public_key: Annotated[str, Meta(max_length=64)]
    name: ShortText
    suspicion: Number
    accepted: Count
    refused: dict[ShortText, Count]
    quarantined_s: Number


class SendersReport(Message, frozen=True, kw_only=True):
    """The worst senders as one verifier replica sees them, stored under `SENDERS_PREFIX` and the
    replica's name.
    """

    schema: SchemaVersion = 1
    node: NodeId
    updated_at: UnixTime
    worst: Annotated[list[SenderStanding], Meta(max_length=MAX_SENDERS)]


class KeyReputation(Message, frozen=True, kw_only=True):
    """Reputation of one key. `suspicion` is in [0, 1], as of `updated_at`. The newest quarantine
    lasts `quarantine_s`, until `quarantined_until`.
    """

    public_key: Annotated[str, Meta(max_length=64)]
    name: ShortText
    suspicion: Share
    updated_at: UnixTime
    accepted: Count
    refused: Annotated[dict[ShortText, Count], Meta(max_length=64)] = {}
    quarantined_until: UnixTime = 0.0
    quarantine_s: Seconds = 0.0


class ReputationState(Message, frozen=True, kw_only=True):
    """The reputation of all keys, shared by a node's verifier replicas. `findings_batch`: the
    trainer's findings up to this batch have been counted.
    """

    schema: SchemaVersion = 1
    findings_batch: Count = 0
    keys: Annotated[list[KeyReputation], Meta(max_length=MAX_REPUTATIONS)] = []


class AbsurdText(Message, frozen=True, kw_only=True):
    """The trainer's finding about one sender in one batch: `absurd` of its `answers` were too
    unlikely under this node's policy to be trained on.
    """

    batch: Count
    sender: NodeId
    absurd: Count
    answers: Annotated[int, Meta(ge=1, le=2**31)]


class TrainerFindings(Message, frozen=True, kw_only=True):
    """The newest findings of a node's trainer, oldest first."""

    schema: SchemaVersion = 1
    node: NodeId
    updated_at: UnixTime
    found: Annotated[list[AbsurdText], Meta(max_length=MAX_FINDINGS)]
