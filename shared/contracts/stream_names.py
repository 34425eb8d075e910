"""Tells a swarm's own streams by their names."""

from __future__ import annotations

from shared.contracts import subjects
from shared.contracts.wire import is_node_name
from shared.transport.base import bucket_of_stream, bucket_stream
from shared.transport.blobs import companion_name

_OF_A_NODE = (
    subjects.node_rollouts_stream,
    subjects.node_scored_stream,
    subjects.node_batches_stream,
    subjects.node_dead_letters_stream,
    subjects.node_spent_stream,
    subjects.node_name_stream,
    subjects.node_policies_stream,
)


def is_swarm_stream(name: str) -> bool:
    """Check whether a node or a swarm makes a stream of this name: one of messages, of their
    chunks, or a bucket.
    """
    if name.startswith(bucket_stream("")):
        bucket = bucket_of_stream(name)
        return bucket == subjects.SWARM_NODES_BUCKET or subjects.node_of_bucket(bucket) is not None
    base = name.removesuffix(companion_name(""))
    node = base.rpartition("_")[0].partition("_")[2].lower()
    of_node = is_node_name(node) and base in [stream(node) for stream in _OF_A_NODE]
    return of_node or base in (subjects.SWARM_ROLLOUTS, subjects.SWARM_EVALS)
