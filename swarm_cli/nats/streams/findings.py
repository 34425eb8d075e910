"""Finds what is wrong with streams, consumers and servers, from JetStream's own reports. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from swarm_cli.console import count

NEARLY_FULL = 0.9
"""For streams that refuse messages when full. A stream that drops its oldest messages is usually
full.
"""


@dataclass(frozen=True, slots=True)
class Consumer:
    """A consumer's figures. `quiet_s`: seconds since its last delivery or acknowledgement, or since
    it was made.
    """

    name: str
    pending: int
    ack_pending: int
    ack_pending_most: int
    redelivered: int
    quiet_s: float
    durable: bool


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream's figures. Limits are None if there are none; `leader` is empty if there is no
    leader. `behind`: a description of each copy that is offline or behind. `unsettled`: it may mend
    itself in seconds, because it has no leader or because a copy is behind whose server is there,
    as after each restart of a server.
    """

    name: str
    messages: int = 0
    bytes: int = 0
    messages_most: int | None = None
    bytes_most: int | None = None
    refuses: bool = False
    replicas: int = 1
    leader: str = ""
    others: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    unsettled: bool = False
    consumers: tuple[Consumer, ...] = ()

    @property
    def fill(self) -> float:
        """The fill level of the fuller of its limits, from 0 to 1; 0 without limits."""
        shares = [now / most for now, most in ((self.messages, self.messages_most), (self.bytes, self.bytes_most)) if most]
        return max(shares, default=0.0)


def read_stream(entry: dict[str, Any], consumers: Sequence[dict[str, Any]], server: str, now: float) -> Stream:
    """A stream from the server's list. `server`: name of the answering server, which is the leader
    if there is no cluster.

    Raises:
        KeyError, TypeError, ValueError: the entry does not describe a stream.
    """
    config, state, cluster = entry["config"], entry["state"], entry.get("cluster")
    copies = (cluster or {}).get("replicas") or []
    leader = server if cluster is None else str(cluster.get("leader") or "")
    return Stream(
        name=str(config["name"]),
        messages=int(state["messages"]),
        bytes=int(state["bytes"]),
        messages_most=_limit(config.get("max_msgs")),
        bytes_most=_limit(config.get("max_bytes")),
        refuses=config.get("discard") == "new",
        replicas=int(config.get("num_replicas", 1)),
        leader=leader,
        others=tuple(str(each.get("name")) for each in copies),
        behind=tuple(filter(None, map(_behind, copies))),
        unsettled=not leader or any(not each.get("current") and not each.get("offline") for each in copies),
        consumers=tuple(_consumer(each, now) for each in consumers),
    )


def stream_findings(stream: Stream, stalled_s: float) -> Iterator[str]:
    """A sentence for each thing that is wrong with it."""
    if not stream.leader:
        yield f"stream {stream.name} has no leader, so it can be neither written nor read"
        return
    if 1 + len(stream.others) < stream.replicas:
        yield f"stream {stream.name} has {1 + len(stream.others)} of {stream.replicas} copies"
    for copy in stream.behind:
        yield f"stream {stream.name}: copy {copy}"
    if stream.refuses and stream.fill >= NEARLY_FULL:
        yield f"stream {stream.name} is {stream.fill:.0%} full and refuses messages that do not fit"
    for consumer in stream.consumers:
        yield from (f"consumer {consumer.name} of stream {stream.name} {what}" for what in _consumer_findings(consumer, stalled_s))


def _consumer_findings(consumer: Consumer, stalled_s: float) -> Iterator[str]:
    if consumer.quiet_s < stalled_s:
        return
    quiet = f"for {consumer.quiet_s:,.0f} s"
    if 0 < consumer.ack_pending_most <= consumer.ack_pending:
        yield f"has stalled: {consumer.ack_pending:,} messages are unacknowledged, its limit, and nothing moved {quiet}"
    elif consumer.pending or consumer.ack_pending:
        yield f"has stalled: {consumer.pending + consumer.ack_pending:,} messages wait and nothing moved {quiet}"


def _consumer(entry: dict[str, Any], now: float) -> Consumer:
    config = entry["config"]
    times = [entry.get("created"), *((entry.get(part) or {}).get("last_active") for part in ("delivered", "ack_floor"))]
    active = max((datetime.fromisoformat(str(each)).timestamp() for each in times if each), default=now)
    return Consumer(
        name=str(entry["name"]),
        pending=int(entry["num_pending"]),
        ack_pending=int(entry["num_ack_pending"]),
        ack_pending_most=int(config.get("max_ack_pending", 0)) if config.get("ack_policy") != "none" else 0,
        redelivered=int(entry["num_redelivered"]),
        quiet_s=max(0.0, now - active),
        durable=bool(config.get("durable_name")),
    )


def _behind(copy: dict[str, Any]) -> str:
    """What is wrong with a copy; empty if nothing is."""
    name, lag = copy.get("name"), int(copy.get("lag") or 0)
    if copy.get("offline"):
        return f"{name} is offline"
    if copy.get("current"):
        return ""
    return f"{name} is behind by {count(lag, 'operation')}" if lag else f"{name} is behind"


def _limit(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
