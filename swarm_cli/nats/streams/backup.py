"""`swarm nats backup`: saves streams with settings, messages and durable consumers to a folder that
appears complete or not at all.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import typer

from shared.contracts.subjects import node_bucket
from shared.new_folder import appearing_whole, refuse_filled
from shared.text import visible
from shared.transport.base import Deadline, NotConnected
from shared.transport.keys import bucket_stream
from shared.transport.nats import administration
from shared.transport.nats.administration import TransferLost, take_snapshot
from shared.transport.nats.answers import count_of, readable
from shared.transport.nats.connection import Connection
from shared.transport.nats.jetstream_api import call
from shared.unwinding import unwinding_on_signals
from shared.version import VERSION
from swarm_cli.chosen_config import ConfigOption, NodeUrlOption, SwarmUrlOption, for_node, load_chosen
from swarm_cli.console import count, note, say
from swarm_cli.errors import CommandError
from swarm_cli.nats.account_list import Plane
from swarm_cli.nats.streams.manifest import (
    FORMAT,
    ConsumerEntry,
    Manifest,
    State,
    StreamEntry,
    backup_order,
    file_of,
    write_manifest,
)
from swarm_cli.nats.streams.operating import KeyOption, PlaneOption, with_connection

ATTEMPTS = 3
"""Attempts per stream: a server restart or a change of leader breaks a transfer off."""
AGAIN_S = 1.0
QUIET_ATTEMPTS, QUIET_BYTES = 10, 64 * 2**20
"""A stream of up to so many bytes is backed up again if messages were removed from it meanwhile."""
LISTING_S = 30.0

StreamsOption = Annotated[
    list[str] | None, typer.Option("--stream", help="Only this stream; may be repeated.  [default: all that the key can see]")
]


def backup(
    out: Annotated[Path, typer.Option(help="Folder to make: it must be missing or empty.")],
    stream: StreamsOption = None,
    node: Annotated[str, typer.Option(help="Only this node's streams, if the server has several nodes'.")] = "",
    plane: PlaneOption = Plane.NODE,
    key: KeyOption = None,
    node_url: NodeUrlOption = "",
    swarm_url: SwarmUrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Back up streams into a folder: settings, messages and durable consumers, with checksums.

    The folder appears once all of it is on disk; an interrupted backup leaves no folder and can be
    run again. It works on a running server; docs/kubernetes-trouble.md explains what such a backup
    holds. `swarm nats restore` restores it.
    """
    try:
        refuse_filled(out, "the backup")
        with unwinding_on_signals(), appearing_whole(out, private=True) as staging:  # it holds what the streams hold
            manifest = with_connection(
                for_node(load_chosen(config), node),
                plane,
                key,
                node_url,
                swarm_url,
                lambda connection: _back_up(connection, staging, stream or [], node),
            )
            sha256 = write_manifest(staging, manifest)
    except FileExistsError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"{out} cannot be written ({error.strerror or error}): no backup was made") from None
    for entry in manifest.streams:
        state = entry.state
        say(f"{visible(entry.name)}: {count(state.messages, 'message')}, {entry.size_bytes:,} bytes")
    say(f"{out}: {count(len(manifest.streams), 'stream')} backed up; SHA-256 of its manifest {sha256}")


def belongs_to(stream: str, node: str) -> bool:
    """Whether a stream belongs to the node, by its name."""
    return stream.startswith(f"NODE_{node.upper()}_") or stream == bucket_stream(node_bucket(node))


def chosen(found: Sequence[str], wanted: Collection[str], node: str) -> list[str]:
    """The streams to back up, in their order.

    Raises:
        CommandError: one of `wanted` does not exist, or nothing is left.
    """
    if missing := sorted(set(wanted) - set(found)):
        known = ", ".join(map(visible, found[:20])) or "none"
        raise CommandError(f"no stream {', '.join(missing)} is visible to this key on this server: choose among {known}")
    names = [name for name in found if (not wanted or name in wanted) and (not node or belongs_to(name, node))]
    if not names:
        raise CommandError(f"this key sees no stream{f' of node {node}' if node else ''}: check the server, the plane and the key")
    return sorted(names, key=backup_order)


async def _back_up(connection: Connection, folder: Path, wanted: Sequence[str], node: str) -> Manifest:
    """Back up the streams. Everything is checked before the first byte is written."""
    if connection.options.domain:
        raise CommandError("streams cannot be backed up through a leaf server: give the url of the servers that hold them")
    listed = await administration.streams(connection, Deadline(LISTING_S))
    if listed.left_out:
        raise CommandError(f"{listed.left_out} streams too many for one backup: choose some with --stream")
    with readable("the list of streams"):
        found = {each["config"]["name"]: each for each in listed.entries}
        in_memory = {name for name, each in found.items() if each["config"].get("storage") == "memory"}
        sizes = {name: count_of(each["state"]["bytes"]) for name, each in found.items()}
    names = chosen(sorted([*found, *listed.missing]), wanted, node)
    if leaderless := [name for name in names if name in listed.missing]:
        raise CommandError(
            f"these streams have no leader and cannot be read: {', '.join(map(visible, leaderless))}: see `swarm nats report`"
        )
    if unsaved := [name for name in names if name in in_memory]:
        raise CommandError(f"JetStream cannot back up streams in memory: {', '.join(map(visible, unsaved))}: leave them out")
    size_bytes = sum(sizes[name] for name in names)
    free_bytes = shutil.disk_usage(folder).free
    if size_bytes > free_bytes:
        raise CommandError(
            f"the streams hold {size_bytes:,} bytes and {folder.parent} has {free_bytes:,} free: choose another --out"
        )
    entries = []
    for name in names:
        note(f"{name} ...")
        entries.append(await _one(connection, folder, name))
    _, version = connection.client.server
    return Manifest(FORMAT, time.time(), version, VERSION, entries)


class _Summed:
    """Writes to a file, and computes the size and checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.sha256, self.size_bytes = file, hashlib.sha256(), 0

    def write(self, part: bytes) -> None:
        """Append a part."""
        self._file.write(part)
        self.sha256.update(part)
        self.size_bytes += len(part)


async def _one(connection: Connection, folder: Path, name: str) -> StreamEntry:
    """Back up one stream into its file; starts over if the transfer breaks off."""
    for attempt in range(1, ATTEMPTS + 1):
        await connection.until_connected(Deadline(LISTING_S))
        try:
            for _ in range(QUIET_ATTEMPTS):
                entry = await _taken(connection, folder, name)
                if not entry.removed or entry.size_bytes > QUIET_BYTES:
                    break
            return entry
        except (TransferLost, NotConnected) as error:
            if attempt == ATTEMPTS:
                raise CommandError(f"{error}: no backup was made: run it again once `swarm nats report` has no findings") from None
            note(f"{error}: trying again")
            await asyncio.sleep(AGAIN_S)  # time to elect a leader
    raise AssertionError("the last attempt returns or raises")


async def _taken(connection: Connection, folder: Path, name: str) -> StreamEntry:
    """The stream as it is now, in its file."""
    consumers = (await administration.consumers(connection, [name], Deadline(LISTING_S)))[name]
    with file_of(folder, name).open("wb") as file:
        written = _Summed(file)
        taken = await take_snapshot(connection, name, written.write)
        file.flush()
        os.fsync(file.fileno())
    after = await call(connection, f"STREAM.INFO.{name}", None, Deadline(LISTING_S), f"stream {name}")
    with readable(f"stream {name}"):
        was, now = (msgspec.convert(state, State) for state in (taken.state, after["state"]))
        durable = _durable(consumers.entries)
    removed = max(0, (now.last_seq - now.messages) - (was.last_seq - was.messages))
    digest = written.sha256.hexdigest()
    return StreamEntry(name, digest, written.size_bytes, taken.config, taken.state, durable, removed)


def _durable(consumers: Sequence[dict[str, Any]]) -> list[ConsumerEntry]:
    """The durable consumers. Ephemeral ones are left out, because their programs make
    them again.
    """
    return [
        ConsumerEntry(each["name"], int(each["ack_floor"]["stream_seq"]))
        for each in consumers
        if each["config"].get("durable_name")
    ]
