"""Limits of streams, messages and queues. These numbers are defined only here: `streams` creates
the streams with them, and the verifier's settings take their defaults from its consumer's limits.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S

VERIFIER_ACK_WAIT_S = 60.0
"""A group that a verifier neither finishes nor reports as in progress for this long is redelivered
to another.
"""
VERIFIER_MAX_DELIVER = 5
"""After this many attempts a group becomes a dead letter."""
VERIFIER_MAX_ACK_PENDING = 256
"""Largest number of groups delivered to a node's verifiers but not yet scored."""


MAX_TEXT_CHARS = 262_144
"""Most characters of a task's prompt, of all its parts together, and of its reference answer."""
MAX_PROMPT_MESSAGES = 64
MAX_REWARD_PARTS = 64
"""Most rewards of one task source, whose own values a scored group tells."""
MAX_PARTS = 16
"""Most parts of one message of a prompt."""
MAX_TURNS = 64
"""Most turns of one completion."""
MAX_REPLY_CHARS = 8192
"""Most characters that an environment says to one turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLimits:
    """Bounds of a node's streams. A server stores at most twice the sum of the byte limits, because
    large payloads have a companion stream.
    """

    duplicate_window_s: float = 600.0
    """A message with the same id that is published again within this time is discarded."""
    rollouts_max_msgs: int = 512
    """Groups waiting for the verifier; a full queue makes the generator wait."""
    rollouts_max_bytes: int = 512 * MIB
    group_max_bytes: int = 128 * MIB
    """Largest group; 64 completions of 32k tokens with ids and logprobs are about 25 MB."""
    scored_max_msgs: int = 20_000
    """Scored groups kept, from which a restarted sampler rebuilds its pools."""
    scored_max_bytes: int = 1024 * MIB
    batches_max_msgs: int = 2_000
    """Batches kept; a trainer can resume from any of them."""
    batches_max_bytes: int = 1024 * MIB
    batch_max_bytes: int = 768 * MIB
    unsaved_max_msgs: int = 1_000
    unsaved_max_bytes: int = 256 * MIB
    """Batches trained on since the last checkpoint; at this many (or this many bytes) the next one
    is written early. The log discards its oldest batches, and it must not discard one that no
    checkpoint contains.
    """
    dead_letters_max_msgs: int = 1_000
    dead_letters_max_bytes: int = 128 * MIB
    dead_letters_max_age_s: float = 7 * DAY_S
    name_max_bytes: int = 4 * 1024
    state_history: int = 8
    """Values kept per key of the node's bucket, for inspection."""
    state_value_max_bytes: int = MIB
    """Largest value in the node's bucket: a policy's pointer with the most deltas takes 577 kB,
    a ledger with 4,096 leases 483 kB, the reputation of 1,000 keys 340 kB, an evaluation of 1,024
    datasets 147 kB and a status with the most figures 4 kB.
    """
    state_max_bytes: int = 128 * MIB
    state_max_values: int = 65_536
    """Of the bucket: room for 2,000 processes with all values kept. Processes that ended are among
    them, as a pod's name does not come again.
    """

    def batch_bytes(self, prefetch: int) -> int:
        """Largest batch, in bytes, of a sampler that builds `prefetch` batches ahead. Those ahead
        and the one in training may take half of the log; batches that are in no checkpoint yet take
        a quarter and one batch.
        """
        return min(self.batch_max_bytes, self.batches_max_bytes // 2 // (prefetch + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmLimits:
    """Bounds of the streams that all nodes share."""

    duplicate_window_s: float = 2.0
    """A message with the same id that is published again within this time is discarded: a
    publisher's first repetition, one second after a message whose acknowledgement was late.

    Short, because a server holds all ids of this time in memory, up to 64 kB each, also of messages
    that the stream has already dropped. What is repeated later is stored twice, at nobody's
    expense: receivers refuse a group that they know without blame, viewers show the same score, and
    a directory entry replaces its equal.
    """
    rollouts_max_age_s: float = HOUR_S
    rollouts_max_bytes: int = 2048 * MIB
    group_max_bytes: int = 64 * MIB
    evals_max_age_s: float = 30 * DAY_S
    evals_max_per_node: int = 1024
    """Held-out reports kept per node: four times what `swarm top` draws, or 30 days at one report
    every 42 minutes.
    """
    eval_max_bytes: int = 32 * 1024
    """Largest report: room for about 300 datasets (reasoning-gym has about 100); a report on ten
    takes 1 kB.
    """
    evals_max_bytes: int = 1024 * MIB
    """Room for 32 nodes with the most and largest reports allowed, so that at least as many must
    join before they can push out other nodes' scores.
    """
    node_entry_max_bytes: int = 160 * 1024
    """Largest entry of the directory, which is more than an entry with the most datasets needs.
    Viewers read the newest 64 MiB; without this limit eight members with entries of 8 MiB could
    hide all others.
    """
    node_ttl_s: float = 900.0
    """A node that has not renewed its entry for this long disappears from the directory."""
    node_renewed_s: float = 10.0
    """Each node writes its entry of the directory this often."""


NODE_LIMITS = NodeLimits()
SWARM_LIMITS = SwarmLimits()
