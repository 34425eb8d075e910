"""Which streams, consumers and buckets a node and a swarm have. Every process makes sure of them as it starts.

All streams are windows: what falls out of a node's own was trained on or given up on long before. Each stream that may carry
large payloads has a companion for their chunks with the same byte limit (`shared.transport.blobs`), and a server reserves both.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.contracts import subjects
from shared.transport.base import ConsumerSpec, NotConnected, Retention, StreamSpec, Transport, TransportError
from shared.transport.keys import bucket_stream

MIB = 1024 * 1024
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S

NODE_DUPLICATE_WINDOW_S = 600.0
SWARM_DUPLICATE_WINDOW_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLimits:
    """Bounds of a node's streams. A server holds at most twice the sum of the byte limits, for blobs."""

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
    dead_letters_max_msgs: int = 1_000
    dead_letters_max_bytes: int = 128 * MIB
    dead_letters_max_age_s: float = 7 * DAY_S
    notices_max_bytes: int = 4 * MIB
    notice_max_bytes: int = 16 * 1024
    state_history: int = 8
    """Values kept per key of the node's bucket, for inspection."""
    verifier_ack_wait_s: float = 60.0
    """A group that a verifier neither finished nor said to be working on is handed to another after this."""
    verifier_max_deliver: int = 5
    """After this many tries a group goes to the dead letters."""
    verifier_max_ack_pending: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmLimits:
    """Bounds of the streams that all nodes share."""

    rollouts_max_age_s: float = HOUR_S
    rollouts_max_bytes: int = 2048 * MIB
    group_max_bytes: int = 64 * MIB
    evals_max_age_s: float = 30 * DAY_S
    evals_max_per_node: int = 1024
    """Held-out reports kept of one node: four times what `swarm top` draws, 30 days at one in 42 minutes."""
    eval_max_bytes: int = 32 * 1024
    """Largest report: some 300 datasets, of which reasoning-gym has about 100; ten are 1 kB."""
    evals_max_bytes: int = 1024 * MIB
    """32 nodes with as many and as large reports as they may have: so many must join to push out others' scores."""
    node_ttl_s: float = 900.0
    """A node that has not renewed its entry for this long is gone from the directory."""


def node_streams(node: str, limits: NodeLimits, *, replicas: int = 1) -> tuple[StreamSpec, ...]:
    """Streams of one node."""
    return (
        StreamSpec(
            name=subjects.node_rollouts_stream(node),
            subjects=(subjects.node_rollouts(node),),
            retention=Retention.WORK_QUEUE,
            discard_new=True,
            max_msgs=limits.rollouts_max_msgs,
            max_bytes=limits.rollouts_max_bytes,
            max_msg_bytes=limits.group_max_bytes,
            duplicate_window_s=NODE_DUPLICATE_WINDOW_S,
            replicas=replicas,
            description="Unscored groups, generator to verifier",
        ),
        StreamSpec(
            name=subjects.node_scored_stream(node),
            subjects=(subjects.node_scored(node),),
            max_msgs=limits.scored_max_msgs,
            max_bytes=limits.scored_max_bytes,
            max_msg_bytes=limits.group_max_bytes + MIB,
            duplicate_window_s=NODE_DUPLICATE_WINDOW_S,
            replicas=replicas,
            description="Scored groups, verifier to sampler",
        ),
        StreamSpec(
            name=subjects.node_batches_stream(node),
            subjects=(subjects.node_batches(node),),
            max_msgs=limits.batches_max_msgs,
            max_bytes=limits.batches_max_bytes,
            max_msg_bytes=limits.batch_max_bytes,
            duplicate_window_s=NODE_DUPLICATE_WINDOW_S,
            replicas=replicas,
            description="Batches, sampler to trainer",
        ),
        StreamSpec(
            name=subjects.node_dead_letters_stream(node),
            subjects=(subjects.node_dead_letters(node),),
            max_msgs=limits.dead_letters_max_msgs,
            max_bytes=limits.dead_letters_max_bytes,
            max_age_s=limits.dead_letters_max_age_s,
            max_msg_bytes=limits.group_max_bytes + MIB,
            duplicate_window_s=NODE_DUPLICATE_WINDOW_S,
            replicas=replicas,
            description="What was given up on, for inspection",
        ),
        StreamSpec(
            name=subjects.node_spent_stream(node),
            subjects=(subjects.node_spent(node),),
            max_msgs=limits.dead_letters_max_msgs,
            max_bytes=limits.notices_max_bytes,
            max_age_s=limits.dead_letters_max_age_s,
            max_msg_bytes=limits.notice_max_bytes,
            replicas=replicas,
            description="Server's notices of groups whose deliveries are used up",
        ),
    )


def verifier_consumer(limits: NodeLimits) -> ConsumerSpec:
    """The consumer that all verifier replicas of a node share."""
    return ConsumerSpec(
        name=subjects.VERIFIER_CONSUMER,
        ack_wait_s=limits.verifier_ack_wait_s,
        max_deliver=limits.verifier_max_deliver,
        max_ack_pending=limits.verifier_max_ack_pending,
    )


def swarm_streams(limits: SwarmLimits, *, replicas: int = 1) -> tuple[StreamSpec, ...]:
    """Streams that all nodes share."""
    return (
        StreamSpec(
            name=subjects.SWARM_ROLLOUTS,
            subjects=(subjects.ALL_ROLLOUTS,),
            max_age_s=limits.rollouts_max_age_s,
            max_bytes=limits.rollouts_max_bytes,
            max_msg_bytes=limits.group_max_bytes,
            duplicate_window_s=SWARM_DUPLICATE_WINDOW_S,
            deny_delete=True,
            deny_purge=True,
            replicas=replicas,
            description="Signed groups of all nodes: a window over the recent past",
        ),
        StreamSpec(
            name=subjects.SWARM_EVALS,
            subjects=(subjects.ALL_EVALS,),
            max_age_s=limits.evals_max_age_s,
            max_msgs_per_subject=limits.evals_max_per_node,
            max_bytes=limits.evals_max_bytes,
            max_msg_bytes=limits.eval_max_bytes,
            duplicate_window_s=SWARM_DUPLICATE_WINDOW_S,
            deny_delete=True,
            deny_purge=True,
            replicas=replicas,
            description="Held-out scores of all nodes",
        ),
    )


class MissingStreams(TransportError):
    """Streams that somebody else had to make are not there."""


async def prepare_node_streams(transport: Transport, node: str, *, create: bool, replicas: int = 1) -> None:
    """Make the node's streams, or only look whether they are there. Raises MissingStreams."""
    if create:
        await ensure_node_streams(transport, node, replicas=replicas)
        return
    names = [spec.name for spec in node_streams(node, NodeLimits())]
    await look_for_streams(transport, [*names, bucket_stream(subjects.node_bucket(node))], "swarm nats init --plane node")
    try:
        await transport.consumer_state(subjects.node_rollouts_stream(node), subjects.VERIFIER_CONSUMER)
    except NotConnected:
        raise
    except TransportError as error:
        raise _missing(error, "swarm nats init --plane node") from None


async def prepare_swarm_streams(transport: Transport, *, create: bool, replicas: int = 1) -> None:
    """Make the swarm's streams where they are missing, or only look whether they are there. Raises MissingStreams."""
    if create:
        await ensure_swarm_streams(transport, replicas=replicas)
        return
    names = [spec.name for spec in swarm_streams(SwarmLimits())]
    await look_for_streams(transport, [*names, bucket_stream(subjects.SWARM_NODES_BUCKET)], "swarm nats init --plane swarm")


async def look_for_streams(transport: Transport, streams: list[str], command: str) -> None:
    """Raises MissingStreams, naming the operator's `command`, if one of `streams` is not there."""
    for name in streams:
        try:
            await transport.stream_state(name)
        except NotConnected:
            raise
        except TransportError as error:
            raise _missing(error, command) from None


def _missing(error: TransportError, command: str) -> MissingStreams:
    return MissingStreams(f"{error}: nats.create_streams is false, so the server's operator makes them once: `{command}`")


async def ensure_node_streams(transport: Transport, node: str, limits: NodeLimits | None = None, *, replicas: int = 1) -> None:
    """Make the node's streams and bucket as `limits` says, also where they exist with other settings. The verifier's consumer is
    made only if it is missing: its settings are the verifier's own, and other services' defaults must not set them back."""
    bounds = limits or NodeLimits()
    for spec in node_streams(node, bounds, replicas=replicas):
        await transport.ensure_stream(spec)
    rollouts = subjects.node_rollouts_stream(node)
    try:
        await transport.consumer_state(rollouts, subjects.VERIFIER_CONSUMER)
    except TransportError:
        await transport.ensure_consumer(rollouts, verifier_consumer(bounds))
    await transport.kv.ensure(subjects.node_bucket(node), history=bounds.state_history, replicas=replicas)


async def update_swarm_streams(transport: Transport, limits: SwarmLimits | None = None, *, replicas: int = 1) -> None:
    """Make the swarm's streams and bucket as `limits` says, also where they exist with other settings: for their operator alone.
    Messages stay, but for those beyond a bound that is new."""
    bounds = limits or SwarmLimits()
    for spec in swarm_streams(bounds, replicas=replicas):
        await transport.ensure_stream(spec)
    await transport.kv.ensure(subjects.SWARM_NODES_BUCKET, ttl_s=bounds.node_ttl_s, replicas=replicas)


async def ensure_swarm_streams(transport: Transport, limits: SwarmLimits | None = None, *, replicas: int = 1) -> None:
    """Make the swarm's streams where they are missing. Existing ones belong to everybody and stay as they are: nodes of other
    versions, or an operator, would otherwise set them back and forth."""
    bounds = limits or SwarmLimits()
    for spec in swarm_streams(bounds, replicas=replicas):
        try:
            await transport.stream_state(spec.name)
        except TransportError:
            await transport.ensure_stream(spec)
    try:
        await transport.stream_state(bucket_stream(subjects.SWARM_NODES_BUCKET))
    except TransportError:
        await transport.kv.ensure(subjects.SWARM_NODES_BUCKET, ttl_s=bounds.node_ttl_s, replicas=replicas)
