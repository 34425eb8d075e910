"""Who holds a node's name: in the node's bucket, written by the node's own processes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.contracts.wire import Count, Message, SchemaVersion, Seconds, ShortText, UnixTime


class NameOwner(Message, frozen=True, kw_only=True):
    """The run that a node's streams and bucket belong to, under `name`. Written once, by the first
    process of the run.
    """

    schema: SchemaVersion = 1
    run: ShortText
    host: ShortText
    taken_at: UnixTime


class LeaseRecord(Message, frozen=True, kw_only=True):
    """Which process is a node's trainer, sampler, or replica of a generator or verifier, under
    `lease.<role>`.

    A process that renews it writes it again; how old it is, is told by watching its revision, never
    by comparing clocks. The times are for people.
    """

    schema: SchemaVersion = 1
    holder: ShortText
    """One life of one process: a random number."""
    place: ShortText = ""
    """The lock file that the process holds, by its random number; empty: it holds none."""
    run: ShortText
    host: ShortText
    pid: Count
    taken_at: UnixTime
    lease_s: Seconds
    """How long the holder may be silent before another process takes its place."""
    released: bool = False
    """The process ended in order, and left the lease to whoever wants it."""


class NameInSwarm(Message, frozen=True, kw_only=True):
    """The key by which a swarm knows this node, under `swarm_name`: its verifiers have written the
    directory entry with it.
    """

    schema: SchemaVersion = 1
    public_key: Annotated[str, Meta(max_length=64)]
    swarm_id: ShortText
    written_at: UnixTime = 0.0
    """The time in the newest entry that one of the node's own verifiers wrote."""
