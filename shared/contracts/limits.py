"""Limits of streams, messages and queues. The one place for these numbers: `streams` uses them to
create streams, and the verifier's settings take their defaults from those of its consumer.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S

VERIFIER_ACK_WAIT_S = 60.0
"""A group that a verifier neither finished nor said to be working on is handed to another after
this. Default of `verifier.ack_wait_s`."""
VERIFIER_MAX_DELIVER = 5
"""After this many tries a group goes to the dead letters. Default of `verifier.max_deliver`."""
VERIFIER_MAX_ACK_PENDING = 256
"""Groups handed out to a node's verifiers and not yet scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLimits:
    """Bounds of a node's streams. A server holds at most twice the sum of the byte limits, for
    blobs.
    """

    duplicate_window_s: float = 600.0
    """A message published again within this is known by its id."""
    rollouts_max_msgs: int = 512
    """Groups waiting for the verifier; a full queue makes the generator wait."""
    rollouts_max_bytes: int = 512 * MIB
    group_max_bytes: int = 128 * MIB
    """Largest group; 64 completions of 32k tokens with ids and logprobs are about 25 MB."""
    scored_max_msgs: int = 20_000
    """Scored groups that a restarted sampler can rebuild its pools from."""
    scored_max_bytes: int = 1024 * MIB
    batches_max_msgs: int = 2_000
    """Batches back to which a trainer can resume."""
    batches_max_bytes: int = 1024 * MIB
    batch_max_bytes: int = 768 * MIB
    unsaved_max_msgs: int = 1_000
    unsaved_max_bytes: int = 256 * MIB
    """Batches trained on since the last checkpoint, which is written early when there are as many:
    the log forgets its oldest, and what no checkpoint holds must not be among them.
    """
    dead_letters_max_msgs: int = 1_000
    dead_letters_max_bytes: int = 128 * MIB
    dead_letters_max_age_s: float = 7 * DAY_S
    notices_max_bytes: int = 4 * MIB
    notice_max_bytes: int = 16 * 1024
    state_history: int = 8
    """Values kept per key of the node's bucket, for inspection."""

    def batch_bytes(self, prefetch: int) -> int:
        """Largest batch of a sampler that builds `prefetch` ahead: those ahead and the one in
        training take half of the log, those that no checkpoint holds yet a quarter and a batch.
        """
        return min(self.batch_max_bytes, self.batches_max_bytes // 2 // (prefetch + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmLimits:
    """Bounds of the streams that all nodes share."""

    duplicate_window_s: float = 120.0
    """A message published again within this is known by its id."""
    rollouts_max_age_s: float = HOUR_S
    rollouts_max_bytes: int = 2048 * MIB
    group_max_bytes: int = 64 * MIB
    evals_max_age_s: float = 30 * DAY_S
    evals_max_per_node: int = 1024
    """Held-out reports kept of one node: four times what `swarm top` draws, 30 days at one in 42
    minutes.
    """
    eval_max_bytes: int = 32 * 1024
    """Largest report: some 300 datasets, of which reasoning-gym has about 100; ten are 1 kB."""
    evals_max_bytes: int = 1024 * MIB
    """32 nodes with as many and as large reports as they may have: so many must join to push out
    others' scores.
    """
    node_entry_max_bytes: int = 160 * 1024
    """Largest entry of the directory, above that with as many datasets as it may name: viewers read
    the newest 64 MiB, and eight members' entries of 8 MiB would hide all others."""
    node_ttl_s: float = 900.0
    """A node that has not renewed its entry for this long is gone from the directory."""


NODE_LIMITS = NodeLimits()
SWARM_LIMITS = SwarmLimits()
