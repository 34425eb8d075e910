"""`swarm nats report`: a plane's streams and consumers on one screen, and what is wrong with them,
from JetStream's own reports. A server's own figures are those of its exporter, and its port 8222.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.filesize import decimal
from rich.table import Table

from shared.config.verifier_section import ViewConfig
from shared.contracts.streams import STREAMS_FILE, names_of, swarm_streams
from shared.contracts.subjects import SWARM_NODES_BUCKET
from shared.text import visible, visible_json
from shared.transport.base import Deadline, bucket_stream
from shared.transport.nats import administration
from shared.transport.nats.answers import readable
from shared.transport.nats.connection import Connection
from swarm_cli.chosen_config import ConfigOption, NodeUrlOption, SwarmUrlOption, for_node, load_chosen
from swarm_cli.console import cell, count, say, show_table
from swarm_cli.errors import CommandError
from swarm_cli.nats.backup import KeyOption, PlaneOption, belongs_to, with_connection
from swarm_cli.target import run_at

NEARLY_FULL = 0.9
"""For streams that refuse messages when full. A stream that drops its oldest messages is usually
full.
"""
STORAGE_NEARLY_FULL = 0.85
"""The same threshold as the alert NatsJetStreamStorageHigh's."""
STALLED_S = 300.0
"""Without delivery or acknowledgement, a consumer with work has stalled."""


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
        consumers=tuple(_read_consumer(each, now) for each in consumers),
    )


def stream_findings(stream: Stream) -> Iterator[str]:
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
        yield from (f"consumer {consumer.name} of stream {stream.name} {what}" for what in _consumer_findings(consumer))


def _consumer_findings(consumer: Consumer) -> Iterator[str]:
    if consumer.quiet_s < STALLED_S:
        return
    quiet = f"for {consumer.quiet_s:,.0f} s"
    if 0 < consumer.ack_pending_most <= consumer.ack_pending:
        yield f"has stalled: {consumer.ack_pending:,} messages are unacknowledged, its limit, and nothing moved {quiet}"
    elif consumer.pending or consumer.ack_pending:
        yield f"has stalled: {consumer.pending + consumer.ack_pending:,} messages wait and nothing moved {quiet}"


def _read_consumer(entry: dict[str, Any], now: float) -> Consumer:
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
    """Describe what is wrong with a copy, or return ""."""
    name, lag = copy.get("name"), int(copy.get("lag") or 0)
    if copy.get("offline"):
        return f"{name} is offline"
    if copy.get("current"):
        return ""
    return f"{name} is behind by {count(lag, 'operation')}" if lag else f"{name} is behind"


def _limit(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


SHOWN = 60
"""The most lines of streams, of consumers and of findings; --json has all."""
SERVER_CHARACTERS = 24
"""Of a server's name: a server without a configured name is called by its key of 56 characters."""
LISTING_S = 30.0
SETTLING_S = 10.0
"""A stream without a leader, or with a copy that is behind, is looked at for this long: after the
start of a server both are so for a moment and nothing is wrong. Servers elect a leader in 4 to 9 s
(nats-server, `minElectionTimeout` and `maxElectionTimeout`).
"""
LOOK_AGAIN_S = 0.5


@dataclass(frozen=True, slots=True)
class Report:
    """The report at one moment. `account` is JetStream's answer about the account."""

    at: float
    server: str
    version: str
    account: dict[str, Any]
    streams: tuple[Stream, ...]
    left_out: int
    missing: tuple[str, ...] = ()
    """Streams of a node or of the swarm that the plane should have."""

    def findings(self) -> list[str]:
        """A sentence for each problem."""
        most, used = int((self.account.get("limits") or {}).get("max_storage", -1)), int(self.account.get("storage", 0))
        found = [
            f"{name} does not exist: if a node has run here, its store is lost: stop the node, then `swarm nats restore` "
            "(docs/runbooks/SwarmStreamsLost.md)"
            for name in self.missing
        ]
        if most > 0 and used / most >= STORAGE_NEARLY_FULL:
            found.append(f"the account has used {used / most:.0%} of its JetStream storage; at 100 % every stream refuses messages")
        found += [sentence for stream in self.streams for sentence in stream_findings(stream)]
        return list(map(visible, found))


def report(
    node: Annotated[str, typer.Option(help="Only this node's streams, if the server has several nodes'.")] = "",
    plane: PlaneOption = "node",
    key: KeyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with everything.")] = False,
    node_url: NodeUrlOption = "",
    swarm_url: SwarmUrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Show the streams and consumers of a plane, and what is wrong with them.

    Exits with 1 and a sentence for each problem: a stream of a node that is gone, a copy that is
    offline, no leader or a copy behind for 10 seconds, a queue or the store nearly full, a stalled
    consumer. It changes nothing.
    """
    node_config = for_node(load_chosen(config, ViewConfig), node)

    def wanted(listed: Collection[str]) -> set[str]:
        if plane == "swarm":
            return {*(spec.name for spec in swarm_streams()), bucket_stream(SWARM_NODES_BUCKET)}
        return {name for each in _nodes(node_config, node, node_url, listed) for name in names_of(each)}

    def look(connection: Connection) -> Awaitable[Report]:
        return until_settled(lambda: _look(connection, node, wanted))

    found = with_connection(node_config, plane, key, node_url, swarm_url, look)
    with readable("what is there of the account and its streams"):
        findings = found.findings()
        if as_json:
            typer.echo(visible_json({**dataclasses.asdict(found), "findings": findings}, indent=2))
        else:
            show(found)
    if findings:
        shown = findings[:SHOWN]
        more = [f"and {len(findings) - SHOWN} more (--json has all)"] if findings[SHOWN:] else []
        raise CommandError("\n".join([count(len(findings), "finding") + ":", *(f"  {each}" for each in (*shown, *more))]))


async def until_settled(look: Callable[[], Awaitable[Report]], patience_s: float = SETTLING_S) -> Report:
    """Return what `look` sees once every stream is settled, or after `patience_s`."""
    deadline = Deadline(patience_s)
    while True:
        found = await look()
        if deadline.passed or not any(each.unsettled for each in found.streams):
            return found
        await asyncio.sleep(LOOK_AGAIN_S)


def _nodes(config: ViewConfig, node: str, node_url: str, listed: Collection[str]) -> set[str]:
    """The nodes whose streams must be there: the one that was named, else those of the run on this
    machine and those with a stream; where there is neither, the configured one.
    """
    if node:
        return {node}
    run = run_at(config.node.var_dir, node_url or config.nats.node_url)
    here = {file.parent.name for file in (config.node.var_dir / "runs" / run).glob(f"*/{STREAMS_FILE}")} if run else set()
    found = (re.fullmatch(r"KV_node_(.+)|NODE_(.+)_(?:ROLLOUTS|SCORED|BATCHES|DEAD)", name) for name in listed)
    return here | {(each[1] or each[2]).lower() for each in found if each} or {config.node.id}


async def _look(
    connection: Connection,
    node: str,
    wanted: Callable[[Collection[str]], set[str]],
) -> Report:
    # Ask for consumers only if the stream has some; most have none.
    deadline = Deadline(LISTING_S)
    account = await administration.account(connection, deadline)
    listed = await administration.streams(connection, deadline)
    with readable("the list of streams"):
        entries = [each for each in listed.entries if not node or belongs_to(each["config"]["name"], node)]
        with_consumers = [each["config"]["name"] for each in entries if each["state"]["consumer_count"]]
    consumers = await administration.consumers(connection, with_consumers, deadline)
    now = time.time()
    name, version = connection.client.server
    with readable("the list of streams and consumers"):
        streams = [read_stream(each, _of(consumers, each), name, now) for each in entries]
        leaderless = [Stream(each, unsettled=True) for each in listed.missing if not node or belongs_to(each, node)]
        present = {*(each["config"]["name"] for each in listed.entries), *listed.missing}
        gone = () if listed.left_out else tuple(sorted(wanted(present) - present))
    left_out = listed.left_out + sum(each.left_out for each in consumers.values())
    return Report(now, name, version, account, (*leaderless, *streams), left_out, gone)


def _of(consumers: dict[str, Any], entry: dict[str, Any]) -> Sequence[dict[str, Any]]:
    found = consumers.get(entry["config"]["name"])
    return found.entries if found else ()


def show(found: Report) -> None:
    """Print the report, with what is wrong first."""
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(found.at))
    used, most = found.account, int((found.account.get("limits") or {}).get("max_storage", -1))
    say(f"{at}, asked {visible(found.server, SERVER_CHARACTERS)} (nats-server {visible(found.version, 20)})")
    say(
        f"account: {decimal(int(used.get('storage', 0)))} stored{f' of {decimal(most)}' if most >= 0 else ', without a limit'}; "
        f"{used.get('streams', 0)} streams, {used.get('consumers', 0)} consumers"
    )
    wrong_first = sorted(found.streams, key=lambda each: not any(stream_findings(each)))
    streams = Table("stream", "messages", "size", "full", "copies", "leader, and who is behind")
    for each in wrong_first[:SHOWN]:
        full = f"{each.fill:.0%}" if each.messages_most or each.bytes_most else "-"
        copies = f"{1 + len(each.others) - len(each.behind)}/{each.replicas}" if each.leader else "?"
        told = "; ".join([visible(each.leader, SERVER_CHARACTERS) or "NO LEADER", *each.behind])
        streams.add_row(cell(each.name), f"{each.messages:,}", decimal(each.bytes), full, copies, cell(told))
    _print(streams, len(found.streams), "streams")
    consumers = [(stream.name, each) for stream in wrong_first for each in stream.consumers]
    consumers.sort(key=lambda each: (not any(_consumer_findings(each[1])), not each[1].durable))
    table = Table("consumer", "waiting", "out", "again", "quiet")
    for of, consumer in consumers[:SHOWN]:
        figures = (f"{number:,}" for number in (consumer.pending, consumer.ack_pending, consumer.redelivered))
        table.add_row(cell(f"{of} {consumer.name}"), *figures, f"{consumer.quiet_s:,.0f} s")
    _print(table, len(consumers), "consumers")
    if found.left_out:
        say(f"{found.left_out} more were left out")


def _print(table: Table, total: int, what: str) -> None:
    if total:
        show_table(table)
    if total > SHOWN:
        say(f"and {total - SHOWN:,} more {what} (--json has all)")
