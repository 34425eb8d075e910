"""Records in the node's bucket that say which processes hold the node's name and roles. Only the
node's own processes write them.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.contracts.wire import Count, Message, SchemaVersion, Seconds, ShortText, UnixTime


class NameOwner(Message, frozen=True, kw_only=True):
    """The run that a node's streams and bucket belong to: the one message of the stream
    `NODE_<ID>_NAME`. The run's first process writes it.
    """

    schema: SchemaVersion = 1
    run: ShortText
    host: ShortText
    taken_at: UnixTime


class LeaseRecord(Message, frozen=True, kw_only=True):
    """Which process is a node's trainer, sampler, or a replica of its generator or verifier, stored
    under `lease.<role>`.

    The holder renews the lease by writing it again. Others judge its age by watching its revision,
    never by comparing clocks; the times are for people.
    """

    schema: SchemaVersion = 1
    holder: ShortText
    """A random number that identifies one life of one process."""
    place: ShortText = ""
    """Random number of the lock file that the process holds; empty: it holds none."""
    run: ShortText
    host: ShortText
    pid: Count
    taken_at: UnixTime
    lease_s: Seconds
    """How long the holder may be silent before another process may take its place."""
    released: bool = False
    """The process ended in order and gave up the lease."""


class NameInSwarm(Message, frozen=True, kw_only=True):
    """The key under which the swarm knows this node, stored under `swarm_name`: its verifiers have
    signed the node's directory entry with this key.
    """

    schema: SchemaVersion = 1
    public_key: Annotated[str, Meta(max_length=64)]
    swarm_id: ShortText
    written_at: UnixTime = 0.0
    """The time in the newest entry that one of the node's own verifiers wrote."""
