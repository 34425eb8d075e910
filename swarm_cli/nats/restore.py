"""`swarm nats restore`: restore the streams of a backup on servers that do not have them."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from shared.config.view_config import ViewConfig
from shared.text import visible
from shared.transport.base import Deadline
from shared.transport.nats import administration
from shared.transport.nats.administration import restore_snapshot
from shared.transport.nats.answers import readable
from shared.transport.nats.connection import Connection
from shared.transport.nats.jetstream_api import call
from swarm_cli.chosen_config import ConfigOption, NodeUrlOption, SwarmUrlOption, for_node, load_chosen
from swarm_cli.console import count, note, say
from swarm_cli.errors import CommandError
from swarm_cli.nats.account_list import Plane
from swarm_cli.nats.backup import (
    LISTING_S,
    KeyOption,
    Manifest,
    PlaneOption,
    State,
    StreamEntry,
    checked_parts,
    chosen,
    read_manifest,
    with_connection,
)
from swarm_cli.target import refuse_unnamed_server

WRITTEN_S = 1800.0
"""What a server may take to write one stream."""
COPIES_S = 60.0
"""How long to wait until the other servers have their copies; after that it is only reported."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A stream to restore, and how."""

    folder: Path
    entries: tuple[StreamEntry, ...]
    replicas: int | None
    lower: bool
    replace_empty: bool
    made_at: float

    def copies(self, entry: StreamEntry) -> int:
        """Count the copies of a stream once it is restored."""
        return self.replicas or entry.replicas


def restore(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder that `swarm nats backup` wrote.")],
    stream: Annotated[
        list[str] | None, typer.Option("--stream", help="Only this stream; may be repeated.  [default: all of the backup]")
    ] = None,
    node: Annotated[str, typer.Option(help="Only this node's streams.")] = "",
    replicas: Annotated[int | None, typer.Option(min=1, max=5, help="Copies of each stream.  [default: as many as it had]")] = None,
    lower: Annotated[bool, typer.Option("--lower", help="Allow --replicas to be fewer than a stream had.")] = False,
    replace_empty: Annotated[
        bool,
        typer.Option("--replace-empty", help="Replace streams that never held a message, such as `swarm nats init` makes."),
    ] = False,
    sha256: Annotated[
        str, typer.Option(help="The manifest's SHA-256, which `swarm nats backup` printed: restore only that backup.")
    ] = "",
    check: Annotated[bool, typer.Option("--check", help="Check everything, restore nothing.")] = False,
    plane: PlaneOption = Plane.NODE,
    key: KeyOption = None,
    node_url: NodeUrlOption = "",
    swarm_url: SwarmUrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Restore the streams of a backup: settings, messages and durable consumers.

    An existing stream is never overwritten. Everything is checked before the first stream is made:
    files and checksums, names, copies, the account's free space. Afterwards the counts are compared
    with the backup's. Stop the services first. Streams cannot be renamed, because their messages'
    subjects contain the name.
    """
    manifest = read_manifest(folder, sha256)
    names = chosen([each.name for each in manifest.streams], stream or [], node)
    # Streams that others refer to come first, so that an interrupted restore leaves no reference to
    # something missing.
    by_name = {each.name: each for each in manifest.streams}
    entries = tuple(by_name[name] for name in reversed(names))
    wanted = _Wanted(folder, entries, replicas, lower, replace_empty, manifest.made_at)
    _refuse_fewer_copies(wanted)
    for entry in entries:
        for _ in checked_parts(folder, entry):
            pass
    node_config = for_node(load_chosen(config, ViewConfig), node)
    refuse_unnamed_server(node_config, node_url, swarm_url)
    with_connection(node_config, plane, key, node_url, swarm_url, lambda connection: _restore(connection, wanted, manifest, check))


async def _restore(connection: Connection, wanted: _Wanted, manifest: Manifest, check: bool) -> None:
    """Check everything, then restore the streams one by one. The first failure ends it, with the
    command that continues.
    """
    if connection.options.domain:
        raise CommandError("streams cannot be restored through a leaf server: give the url of the servers that are to hold them")
    replaced = await _look(connection, wanted)
    made = _told(manifest.made_at)
    if check:
        say(f"{wanted.folder}, made {made}: {count(len(wanted.entries), 'stream')} can be restored; nothing was changed")
        return
    await _remove(connection, replaced)
    done: list[str] = []
    notes: list[str] = []
    for entry in wanted.entries:
        note(f"{entry.name} ...")
        try:
            notes += await _one(connection, wanted, entry)
        except Exception as error:
            if done:
                note(f"restored so far: {', '.join(done)}")
            raise CommandError(_how_to_go_on(wanted, entry.name, done, error)) from error
        done.append(entry.name)
        say(f"{entry.name}: {count(entry.state.messages, 'message')} up to {entry.state.last_seq:,} restored and compared")
    for line in notes:
        say(line)
    say(f"{wanted.folder}, made {made}: {count(len(done), 'stream')} restored")


def _told(made_at: float) -> str:
    """A time as the manifest has it, which may be none."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(made_at))
    except (OverflowError, ValueError, OSError):
        return "at a time that is none"


def _refuse_fewer_copies(wanted: _Wanted) -> None:
    fewer = [entry.name for entry in wanted.entries if wanted.copies(entry) < entry.replicas]
    if fewer and not wanted.lower:
        raise CommandError(
            f"--replicas {wanted.replicas} is fewer copies than these had: {', '.join(fewer)}. To keep as many, omit --replicas; "
            "to have fewer, as on a single server, add --lower"
        )


async def _look(connection: Connection, wanted: _Wanted) -> list[str]:
    """Raises CommandError for anything that would stop the restore half-way; returns the names of
    the existing empty streams to replace.
    """
    deadline = Deadline(LISTING_S)
    listed = await administration.streams(connection, deadline)
    names = [entry.name for entry in wanted.entries]
    with readable("the list of streams"):
        there = {each["config"]["name"]: each for each in listed.entries}
        empty = [name for name in names if name in there and there[name]["state"]["last_seq"] == 0]
    filled = [name for name in names if name in listed.missing or (name in there and name not in empty)]
    if filled:
        raise CommandError(f"these streams exist and are not overwritten: {', '.join(filled)}: choose others with --stream")
    if empty and not wanted.replace_empty:
        raise CommandError(f"these streams exist, but never held a message: {', '.join(empty)}: replace them with --replace-empty")
    account = await administration.account(connection, deadline)
    with readable("the account's figures"):
        _check_room(account, wanted)
    return empty


def _check_room(account: dict[str, Any], wanted: _Wanted) -> None:
    """Raises CommandError if the account's limits are too low. A server checks its free space
    itself before it accepts the first byte of a stream.
    """
    limits = account.get("limits") or {}
    most, used = int(limits.get("max_storage", -1)), max(int(account.get("storage", 0)), int(account.get("reserved_storage", 0)))
    needed = sum(entry.reserved_bytes * wanted.copies(entry) for entry in wanted.entries)
    if 0 <= most < used + needed:
        raise CommandError(
            f"the account may store {most:,} bytes and uses {used:,}, but the streams need {needed:,} with all copies: raise the "
            "limit (`swarm nats config --node-storage-gib`) or restore fewer with --stream"
        )
    streams = int(limits.get("max_streams", -1))
    if 0 <= streams < int(account.get("streams", 0)) + len(wanted.entries):
        raise CommandError(f"the account may have {streams} streams: restore fewer with --stream")


async def _remove(connection: Connection, names: Collection[str]) -> None:
    for name in names:
        await call(connection, f"STREAM.DELETE.{name}", None, Deadline(LISTING_S), f"removal of stream {name}")


async def _one(connection: Connection, wanted: _Wanted, entry: StreamEntry) -> list[str]:
    """Restore one stream and compare it with the backup; returns remarks to print."""
    config = {**entry.config, "num_replicas": wanted.copies(entry)}
    config["metadata"] = {name: text for name, text in (config.get("metadata") or {}).items() if not name.startswith("_nats.")}
    # If a file was changed since it was checked, the last part is not sent, and no stream is made.
    parts = checked_parts(wanted.folder, entry)
    made = await restore_snapshot(connection, config, entry.server_state, parts, timeout_s=WRITTEN_S)
    with readable(f"stream {entry.name}"):
        found = msgspec.convert(made["state"], State)
    try:
        notes = _compare(entry, found)
    except CommandError:
        await _remove(connection, [entry.name])
        raise
    await _consumers_are_there(connection, entry)
    if await _copies_behind(connection, entry.name):
        notes.append(f"{entry.name}: other servers are still receiving their copies; `swarm nats report` shows when they are done")
    return notes


def _compare(entry: StreamEntry, found: State) -> list[str]:
    """Raises CommandError unless the stream holds what was backed up, or less because messages have
    passed its maximum age or were removed while it was backed up.
    """
    was = entry.state
    counts = found.messages, found.bytes, found.last_seq
    # For a stream without messages the first number is arbitrary: the server says 0, 1 or the next
    # one.
    if counts == (was.messages, was.bytes, was.last_seq) and (found.first_seq == was.first_seq or not was.messages):
        return []
    aged = entry.config.get("max_age", 0) and found.last_seq == was.last_seq and found.messages < was.messages
    if aged and found.first_seq >= was.first_seq:
        return [
            f"{entry.name}: {was.messages - found.messages:,} of {was.messages:,} messages had passed the maximum age and are gone"
        ]
    lost = was.messages - found.messages
    if found.last_seq == was.last_seq and found.bytes <= was.bytes and 0 < lost <= entry.removed:
        return [
            f"{entry.name}: {lost:,} of {was.messages:,} messages were removed while the backup was made, by newer values of their "
            "keys, by limits or because they were acknowledged, and are gone"
        ]
    raise CommandError(f"the restored stream holds {found}, but {was} was backed up; it was removed again")


async def _consumers_are_there(connection: Connection, entry: StreamEntry) -> None:
    """A cluster makes them after the stream. Raises CommandError if one is missing, is behind, is
    none of the backup's, or pushes messages to a subject: none of a swarm's does, and it could send
    them anywhere.
    """
    deadline, wanted = Deadline(COPIES_S), {each.name: each.acknowledged_seq for each in entry.consumers}
    while True:
        listed = (await administration.consumers(connection, [entry.name], deadline))[entry.name].entries
        with readable(f"the list of consumers of stream {entry.name}"):
            found = {each["name"]: int(each["ack_floor"]["stream_seq"]) for each in listed if each["config"].get("durable_name")}
            pushing = {each["name"] for each in listed if each["config"].get("deliver_subject")}
        if more := sorted(pushing | (set(found) - set(wanted))):
            await _remove(connection, [entry.name])
            raise CommandError(
                f"the file holds consumers that no backup of ours has ({', '.join(map(visible, more))}): they are not in the "
                "manifest, or push messages elsewhere, so somebody changed it; the stream was removed again"
            )
        short = [name for name, seq in wanted.items() if found.get(name, -1) < seq]
        if not short:
            return
        if deadline.left_s < 1:
            raise CommandError(f"consumers are missing or behind: {', '.join(short)}")
        await asyncio.sleep(0.2)


async def _copies_behind(connection: Connection, stream: str) -> bool:
    """Return whether other servers' copies of the stream are still incomplete after `COPIES_S`."""
    deadline = Deadline(COPIES_S)
    while True:
        info = await call(connection, f"STREAM.INFO.{stream}", None, Deadline(LISTING_S), f"stream {stream}")
        with readable(f"stream {stream}"):
            copies: Sequence[dict[str, Any]] = (info.get("cluster") or {}).get("replicas") or []
            complete = all(each.get("current") and not each.get("offline") for each in copies)
        if complete:
            return False
        if deadline.passed:
            return True
        await asyncio.sleep(0.2)


def _how_to_go_on(wanted: _Wanted, failed: str, done: Collection[str], error: Exception) -> str:
    """Tell what happened, and the command that restores the rest. The server itself undoes an
    interrupted transfer, and a stream that is not what was backed up is removed again.
    """
    left = " ".join(f"--stream {shlex.quote(entry.name)}" for entry in wanted.entries if entry.name not in done)
    return (
        f"{failed}: {error}. Once the cause is gone, go on with: swarm nats restore {shlex.quote(str(wanted.folder))} {left} and "
        f"the same options. Within 10 s the server itself removes what was transferred so far; if {failed} still exists after "
        "that, incomplete, remove it first"
    )
