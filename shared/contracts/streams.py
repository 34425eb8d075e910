"""The streams, consumers and buckets of a node and of a swarm. Every process ensures at its start
that they exist.

All streams are windows. What drops out of a node's streams was trained on or given up long before.
Each stream with possibly large payloads has a companion stream for their chunks, with the same byte
limit (`shared.transport.blobs`); a server reserves space for both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from shared.contracts import subjects
from shared.contracts.limits import (
    MIB,
    NODE_LIMITS,
    SWARM_LIMITS,
    VERIFIER_ACK_WAIT_S,
    VERIFIER_MAX_ACK_PENDING,
)
from shared.transport.base import (
    AccessDenied,
    ConsumerSpec,
    Lowering,
    NoStream,
    NotConnected,
    Retention,
    StreamMissing,
    StreamSpec,
    Transport,
    TransportError,
    bucket_stream,
)
from shared.transport.blobs import companion

STREAMS_FILE = "streams.json"
"""In a node's run folder: the names of the node's streams, once they exist
(`shared.runtime.streams`).
"""
_NAMES_BYTES = 64 * 1024


def node_streams(node: str, *, replicas: int = 1) -> tuple[StreamSpec, ...]:
    """Streams of one node."""
    limits = NODE_LIMITS
    return (
        StreamSpec(
            name=subjects.node_rollouts_stream(node),
            subjects=(subjects.node_rollouts(node),),
            retention=Retention.WORK_QUEUE,
            discard_new=True,
            max_msgs=limits.rollouts_max_msgs,
            max_bytes=limits.rollouts_max_bytes,
            max_msg_bytes=limits.group_max_bytes,
            duplicate_window_s=limits.duplicate_window_s,
            replicas=replicas,
            description="Unscored groups, generator to verifier",
        ),
        StreamSpec(
            name=subjects.node_scored_stream(node),
            subjects=(subjects.node_scored(node),),
            max_msgs=limits.scored_max_msgs,
            max_bytes=limits.scored_max_bytes,
            max_msg_bytes=limits.group_max_bytes + MIB,
            duplicate_window_s=limits.duplicate_window_s,
            replicas=replicas,
            description="Scored groups, verifier to sampler",
        ),
        StreamSpec(
            name=subjects.node_batches_stream(node),
            subjects=(subjects.node_batches(node),),
            max_msgs=limits.batches_max_msgs,
            max_bytes=limits.batches_max_bytes,
            max_msg_bytes=limits.batch_max_bytes,
            duplicate_window_s=limits.duplicate_window_s,
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
            duplicate_window_s=limits.duplicate_window_s,
            replicas=replicas,
            description="What was given up on, for inspection",
        ),
        StreamSpec(
            name=subjects.node_name_stream(node),
            subjects=(subjects.node_name(node),),
            discard_new=True,
            write_once=True,
            max_msg_bytes=limits.name_max_bytes,
            duplicate_window_s=limits.duplicate_window_s,
            replicas=replicas,
            description="Which run the node's streams belong to; written once",
        ),
    )


def names_of(node: str) -> list[str]:
    """The streams, and the bucket as a stream, that every process of a node may ask about."""
    return [*(spec.name for spec in node_streams(node)), bucket_stream(subjects.node_bucket(node))]


async def missing(transport: Transport, names: Iterable[str]) -> list[str]:
    """Those of the streams that the server says it does not have. Raises TransportError if it does
    not say.
    """
    found = []
    for name in names:
        try:
            await transport.stream_state(name)
        except StreamMissing:
            found.append(name)
    return found


def noted_names(run_dir: Path) -> list[str]:
    """The streams that a process of this run's folder has seen; none if there was no such process,
    or the note cannot be read.
    """
    with suppress(OSError, ValueError):
        with (run_dir / STREAMS_FILE).open("rb") as file:
            found = json.loads(file.read(_NAMES_BYTES))
        if isinstance(found, list) and all(isinstance(each, str) for each in found):
            return found
    return []


def verifier_consumer(ack_wait_s: float = VERIFIER_ACK_WAIT_S) -> ConsumerSpec:
    """The consumer that all verifier replicas of a node share. The server delivers without end, and
    the verifier counts (`verifier.max_deliver`): a server that stops keeps the message and gives it
    to nobody.
    """
    return ConsumerSpec(
        name=subjects.VERIFIER_CONSUMER, ack_wait_s=ack_wait_s, max_deliver=-1, max_ack_pending=VERIFIER_MAX_ACK_PENDING
    )


def swarm_streams(*, replicas: int = 1, window_bytes: int = SWARM_LIMITS.rollouts_max_bytes) -> tuple[StreamSpec, ...]:
    """Streams that all nodes share. window_bytes: most of the newest hour of groups."""
    limits = SWARM_LIMITS
    return (
        StreamSpec(
            name=subjects.SWARM_ROLLOUTS,
            subjects=(subjects.ALL_ROLLOUTS,),
            max_age_s=limits.rollouts_max_age_s,
            max_bytes=window_bytes,
            max_msg_bytes=limits.group_max_bytes,
            duplicate_window_s=limits.duplicate_window_s,
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
            duplicate_window_s=limits.duplicate_window_s,
            deny_delete=True,
            deny_purge=True,
            replicas=replicas,
            description="Held-out scores of all nodes",
        ),
    )


_NO_MESSAGES_SEQ = 2**62
"""No stream has a message there, so only whether somebody answers is told."""
_SWARM_COMMAND = "swarm nats init --plane swarm"


class MissingStreams(TransportError):
    """Streams are missing that the server's operator must create."""


async def prepare_node_streams(transport: Transport, node: str, *, create: bool, replicas: int = 1) -> None:
    """Create the node's streams, or with `create=False` only check that they exist. Raises
    MissingStreams.
    """
    if create:
        await ensure_node_streams(transport, node, replicas=replicas)
        return
    names = [spec.name for spec in node_streams(node)]
    await look_for_streams(transport, [*names, bucket_stream(subjects.node_bucket(node))], "swarm nats init --plane node")
    try:
        await transport.consumer_state(subjects.node_rollouts_stream(node), subjects.VERIFIER_CONSUMER)
    except NotConnected:
        raise
    except TransportError as error:
        raise _missing(error, "swarm nats init --plane node") from None


async def prepare_swarm_streams(
    transport: Transport, *, create: bool, replicas: int = 1, window_bytes: int = SWARM_LIMITS.rollouts_max_bytes
) -> None:
    """Create the swarm's streams if they are missing, or with `create=False` only check that they
    exist. Raises MissingStreams if the server says that one does not, and NoStream if nobody
    answers for it, which a member cannot tell from a server that is still starting.
    """
    if create:
        await ensure_swarm_streams(transport, replicas=replicas, window_bytes=window_bytes)
        return
    for name in (*(spec.name for spec in swarm_streams()), bucket_stream(subjects.SWARM_NODES_BUCKET)):
        await _look_for_stream(transport, name, _SWARM_COMMAND)


async def look_for_streams(transport: Transport, streams: list[str], command: str) -> None:
    """Raise MissingStreams, which names the operator's `command`, if one of `streams` does not
    exist.
    """
    for name in streams:
        await _look_for_stream(transport, name, command)


async def _look_for_stream(transport: Transport, name: str, command: str) -> None:
    try:
        await _ask_for_stream(transport, name)
    except NoStream as error:
        raise NoStream(f"{error}. If it does not exist, the server's operator makes it once: `{command}`") from None
    except NotConnected:
        raise
    except TransportError as error:
        raise _missing(error, command) from None


async def _ask_for_stream(transport: Transport, name: str) -> None:
    """Raises TransportError if the stream does not exist or does not answer; NoStream if a direct
    get is all that this user may ask with.
    """
    try:
        await transport.stream_state(name)
    except AccessDenied:
        await transport.ends(name, _NO_MESSAGES_SEQ)


def _missing(error: TransportError, command: str) -> MissingStreams:
    return MissingStreams(f"{error}: nats.create_streams is false, so the server's operator makes them once: `{command}`")


async def ensure_node_streams(transport: Transport, node: str, *, replicas: int = 1, lowering: Lowering = Lowering.KEEP) -> None:
    """Create the node's streams and bucket with the settings in `limits`, and update existing ones
    to them, except limits that `lowering` keeps higher.

    The verifier's consumer is created only if it is missing. The verifier sets its consumer from
    its own settings, which other services' defaults must not overwrite.
    """
    for spec in node_streams(node, replicas=replicas):
        await transport.ensure_stream(spec, lowering)
    rollouts = subjects.node_rollouts_stream(node)
    try:
        await transport.consumer_state(rollouts, subjects.VERIFIER_CONSUMER)
    except TransportError:
        await transport.ensure_consumer(rollouts, verifier_consumer())
    await ensure_node_bucket(transport, node, replicas, lowering)


async def ensure_node_bucket(transport: Transport, node: str, replicas: int, lowering: Lowering) -> None:
    """Create or update the node's bucket."""
    limits = NODE_LIMITS
    await transport.kv.ensure(
        subjects.node_bucket(node),
        history=limits.state_history,
        max_value_bytes=limits.state_value_max_bytes,
        max_bytes=limits.state_max_bytes,
        max_values=limits.state_max_values,
        replicas=replicas,
        lowering=lowering,
    )


async def ensure_swarm_streams(
    transport: Transport, *, replicas: int = 1, window_bytes: int = SWARM_LIMITS.rollouts_max_bytes
) -> None:
    """Create the swarm's streams if they are missing. Existing ones belong to all nodes and stay as
    they are; otherwise nodes of different versions, or a node and the operator, would keep
    overwriting each other's settings.
    """
    for stream in swarm_streams(replicas=replicas, window_bytes=window_bytes):
        # A companion may be missing alone: somebody removed it, or making it failed.
        for spec in (stream, companion(stream)):
            if spec is None:
                continue
            try:
                await _ask_for_stream(transport, spec.name)
            except TransportError:
                await transport.ensure_stream(spec)
    try:
        await _ask_for_stream(transport, bucket_stream(subjects.SWARM_NODES_BUCKET))
    except TransportError:
        await ensure_directory(transport, replicas, Lowering.APPLY)


async def ensure_directory(transport: Transport, replicas: int, lowering: Lowering) -> None:
    """Create or update the bucket of the swarm's directory."""
    limits = SWARM_LIMITS
    await transport.kv.ensure(
        subjects.SWARM_NODES_BUCKET,
        ttl_s=limits.node_ttl_s,
        max_value_bytes=limits.node_entry_max_bytes,
        duplicate_window_s=limits.duplicate_window_s,
        replicas=replicas,
        lowering=lowering,
    )
