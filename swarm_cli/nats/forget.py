"""`swarm nats forget`: end the streams of a node that is to be no more."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from shared.config.verifier_section import ViewConfig
from shared.contracts.streams import names_of
from shared.contracts.subjects import node_bucket, node_policies_stream
from shared.contracts.wire import is_node_name
from shared.transport.base import Deadline, bucket_stream
from shared.transport.blobs import companion_name
from shared.transport.nats import administration
from shared.transport.nats.connection import Connection
from shared.transport.nats.jetstream_api import call
from shared.transport.nats.transport import NatsTransport
from swarm_cli.chosen_config import ConfigOption, NodeUrlOption, for_node, load_chosen
from swarm_cli.console import count, note, say
from swarm_cli.errors import CommandError
from swarm_cli.nats.backup import KeyOption, with_connection
from swarm_cli.observe.snapshot import node_state, read_bucket

ANSWER_S = 30.0


def forget(
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node. Its services must have ended.")],
    key: KeyOption = None,
    node_url: NodeUrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Delete a node's streams with all that is in them: groups, batches, policies and its state.
    Their reservation ends with them.

    Refuses while a process of the node holds its name. Back up first what you may want again
    (`swarm nats backup`).
    """
    if not is_node_name(node):
        raise CommandError(f"{node!r} is no node's name: give one such as alpha")
    chosen = for_node(load_chosen(config, ViewConfig), node)
    deleted = with_connection(chosen, "node", key, node_url, "", lambda connection: _forget(connection, node))
    note(
        f"{node}: {count(len(deleted), 'stream')} deleted" if deleted else f"{node}: this key sees no stream of it: none to delete"
    )


async def _forget(connection: Connection, node: str) -> list[str]:
    """Delete the streams and return their names. The bucket goes last, so that a command that was
    cut off can be repeated.
    """
    listing = await administration.streams(connection, Deadline(ANSWER_S))
    there = {str(entry["config"]["name"]) for entry in listing.entries} | set(listing.missing)
    bucket = bucket_stream(node_bucket(node))
    streams = {*names_of(node), node_policies_stream(node)}
    found = sorted((streams | {companion_name(name) for name in streams}) & there, key=lambda name: (name == bucket, name))
    if bucket in found:
        entries, _ = await read_bucket(NatsTransport(connection), node)
        now_s = time.time()
        for lease, renewed_at in node_state(node, entries).leases:
            until_s = renewed_at + 2 * lease.lease_s
            if not lease.released and until_s > now_s:
                where = f"process {lease.pid} on {lease.host} (run {lease.run})"
                ends = f"its lease ends in {until_s - now_s:.0f} s unless it is renewed"
                raise CommandError(f"{node} is held by {where}: stop the node and run this again; {ends}")
    for name in found:
        await call(connection, f"STREAM.DELETE.{name}", None, Deadline(ANSWER_S), f"removal of stream {name}")
        say(f"deleted {name}")
    return found
