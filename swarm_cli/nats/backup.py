"""`swarm nats backup` and `swarm nats restore`: streams with settings, messages and durable
consumers as a folder, and back.

The folder appears complete or not at all. It holds a file for each stream, and a manifest with
settings, counts and checksums. They are not trusted when they are read: no path is taken from them,
every size is bounded, and settings that affect more than the stream itself are refused."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shlex
import shutil
import stat
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

import msgspec
import typer

from shared.atomic_folder import atomic_folder, refuse_filled, unwinding_on_signals
from shared.config.verifier_section import ViewConfig
from shared.contracts.subjects import node_bucket
from shared.roles import OPERATOR
from shared.runtime.planes import connect_node_plane, connect_swarm_plane
from shared.text import visible
from shared.transport.base import Deadline, NotConnected, bucket_stream
from shared.transport.blobs import companion_name
from shared.transport.nats import administration
from shared.transport.nats.administration import TransferLost, restore_snapshot, take_snapshot
from shared.transport.nats.answers import count_of, readable
from shared.transport.nats.connection import Connection
from shared.transport.nats.jetstream_api import call
from shared.transport.nats.transport import connection_of
from shared.version import VERSION
from swarm_cli.chosen_config import ConfigOption, NodeUrlOption, SwarmUrlOption, for_node, load_chosen
from swarm_cli.console import count, note, say
from swarm_cli.errors import CommandError
from swarm_cli.target import default_target, is_named, refuse_unnamed_server, unnamed_server

CONNECT_TIMEOUT_S = 10.0
T = TypeVar("T")

OnePlane = Literal["node", "swarm"]
PlaneOption = Annotated[
    OnePlane, typer.Option(help="Whose server and key to use: the node's or the swarm's. Without keys both may be on one server.")
]
KeyOption = Annotated[
    Path | None, typer.Option(help="Operator's key file.  [default: nats.node_key_file or swarm_key_file, as operator]")
]


def with_connection(
    config: ViewConfig, plane: OnePlane, key: Path | None, node_url: str, swarm_url: str, work: Callable[[Connection], Awaitable[T]]
) -> T:
    """Run `work` with an operator's connection to the plane's servers.

    Raises:
        CommandError: there is no such plane.
        TransportError: no server answers, or the key is refused.
    """
    target = default_target(config, node_url, swarm_url)
    named = is_named(config, target, swarm_url)
    return asyncio.run(_with_connection(config, plane, key, (target.node_url, target.swarm_url), work, named=named))


async def _with_connection(
    config: ViewConfig,
    plane: OnePlane,
    key: Path | None,
    urls: tuple[str, str | None],
    work: Callable[[Connection], Awaitable[T]],
    *,
    named: bool,
) -> T:
    # A key from the command line replaces the configured one of the chosen plane only.
    node_url, swarm_url = urls
    config = with_key(config, "node_key_file" if plane == "node" else "swarm_key_file", key)
    if plane == "swarm" and swarm_url is None:
        raise CommandError("nats.swarm_url is none, so this node has no swarm plane: set nats.swarm_url, or use --plane node")
    if plane == "node":
        transport = await connect_node_plane(config, OPERATOR, timeout_s=CONNECT_TIMEOUT_S, url=node_url)
    else:
        transport = await connect_swarm_plane(config, OPERATOR, timeout_s=CONNECT_TIMEOUT_S, url=swarm_url or "")
    try:
        if not named:
            note(f"{unnamed_server(config.node.var_dir, node_url)}: it is used here. --node-url names another")
        return await work(connection_of(transport))
    finally:
        await transport.close()


def with_key(config: ViewConfig, field: str, key: Path | None) -> ViewConfig:
    """The configuration with the key file of a command line, if there is one, in `nats.<field>`."""
    return config if key is None else config.model_copy(update={"nats": config.nats.model_copy(update={field: str(key)})})


FORMAT = 1
MANIFEST = "backup.json"
PART_BYTES = 128 * 1024
_MANIFEST_BYTES = 64 * 2**20
REACHING_BEYOND = ("republish", "mirror", "sources", "subject_transform")
"""Settings that make a stream send messages elsewhere or fetch them from elsewhere. No stream of a
swarm has one.
"""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,200}")
_REFERRING = ("_BATCHES", "_ROLLOUTS", "_SCORED")
"""Name endings of streams that refer to other streams, in the order of `backup_order`."""


class ConsumerEntry(msgspec.Struct, frozen=True):
    """A durable consumer, and the message up to which all were acknowledged just before
    the backup.
    """

    name: str
    acknowledged_seq: int


class State(msgspec.Struct, frozen=True):
    """Content of a stream, as the server counts it."""

    messages: int
    bytes: int
    first_seq: int
    last_seq: int


class StreamEntry(msgspec.Struct, frozen=True):
    """A stream in a backup."""

    name: str
    sha256: str
    size_bytes: int
    config: dict[str, Any]
    server_state: dict[str, Any]
    """The state in the server's format; it is passed back to the server on restore."""
    consumers: list[ConsumerEntry] = []

    @property
    def state(self) -> State:
        """The state, typed."""
        return msgspec.convert(self.server_state, State)


class Manifest(msgspec.Struct, frozen=True):
    """The whole backup. `made_at` is Unix time."""

    format: int
    made_at: float
    server_version: str
    swarm_version: str
    streams: list[StreamEntry]


def backup_order(name: str) -> tuple[int, str]:
    """Sort key that puts streams before those that they refer to: positions before the streams,
    batches before the groups they count, a queue before what is made from it, messages before their
    chunks. If a running node stores more meanwhile, the backup then at worst holds something that
    nothing refers to, but no reference to something missing.
    """
    if name.startswith(bucket_stream("")):
        return 0, name
    if name.endswith(companion_name("")):
        return 9, name
    return next((place for place, suffix in enumerate(_REFERRING, 1) if name.endswith(suffix)), 8), name


def file_of(folder: Path, stream: str) -> Path:
    """The file of a stream. Raises CommandError for a name that is unsafe as a file's name."""
    if not _NAME.fullmatch(stream):
        raise CommandError(f"stream {stream[:80]!r}: only names of letters, digits, - and _ are backed up and restored")
    return folder / f"{stream}.snapshot"


def write_manifest(folder: Path, manifest: Manifest) -> str:
    """Write the manifest. Returns its SHA-256, which identifies the whole backup."""
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    (folder / MANIFEST).write_bytes(text)
    return hashlib.sha256(text).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a backup, checked; the streams' files are not.

    Raises:
        CommandError: there is none, or it holds values that `swarm nats backup` never writes.
    """
    path = folder / MANIFEST
    try:
        with regular_file(path) as file:
            text = file.read(_MANIFEST_BYTES + 1)
    except OSError as error:
        raise CommandError(f"{path} cannot be read ({error.strerror}): name the folder that `swarm nats backup` wrote") from None
    if len(text) > _MANIFEST_BYTES:
        raise CommandError(f"{path} is too large to be a manifest: name the folder that `swarm nats backup` wrote")
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
        problem = next(filter(None, map(_problem, manifest.streams)), "")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CommandError(f"{path} is not a backup's manifest ({error}): it was changed, or another version wrote it") from None
    names = [each.name for each in manifest.streams]
    if manifest.format != FORMAT:
        raise CommandError(f"{path} has format {manifest.format} and this version reads {FORMAT}: use the version that wrote it")
    if problem or len(set(names)) != len(names):
        raise CommandError(f"{path}: {problem or 'a stream is listed twice'}: somebody changed it; restore an unchanged backup")
    return manifest


def _problem(entry: StreamEntry) -> str:
    """Why this entry must not be restored; empty if it may be."""
    if not _NAME.fullmatch(entry.name):
        return f"{entry.name[:80]!r} is not a stream's name"
    if entry.config.get("name") != entry.name:
        return f"the settings of stream {entry.name} belong to another stream"
    if found := [setting for setting in REACHING_BEYOND if entry.config.get(setting)]:
        return f"stream {entry.name} has the setting {found[0]}, which sends messages elsewhere or fetches them"
    state = entry.state
    if entry.size_bytes < 0 or min(state.messages, state.bytes, state.first_seq, state.last_seq) < 0:
        return f"stream {entry.name} has a negative size"
    return ""


@contextmanager
def regular_file(path: Path) -> Iterator[BinaryIO]:
    """`path` open for reading. Raises OSError for a link, a pipe or a device, too."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(0, "it is not a regular file")
        yield file


def checked_parts(folder: Path, entry: StreamEntry) -> Iterator[bytes]:
    """A stream's file in parts. Raises CommandError if it cannot be read, and before it ends if it
    is not what was backed up.
    """
    path, digest, read_bytes = file_of(folder, entry.name), hashlib.sha256(), 0
    try:
        with regular_file(path) as file:
            while read_bytes <= entry.size_bytes and (part := file.read(PART_BYTES)):
                read_bytes += len(part)
                digest.update(part)
                yield part
    except OSError as error:
        raise CommandError(
            f"{path} cannot be read ({error.strerror}), so its stream was not restored: copy the backup again"
        ) from None
    if read_bytes != entry.size_bytes or digest.hexdigest() != entry.sha256:
        raise CommandError(f"{path} is not what was backed up (its size or SHA-256 differs): copy the backup here again")


LISTING_S = 30.0

StreamsOption = Annotated[
    list[str] | None, typer.Option("--stream", help="Only this stream; may be repeated.  [default: all that the key can see]")
]


def backup(
    out: Annotated[Path, typer.Option(help="Folder to make: it must be missing or empty.")],
    stream: StreamsOption = None,
    node: Annotated[str, typer.Option(help="Only this node's streams, if the server has several nodes'.")] = "",
    plane: PlaneOption = "node",
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
        with unwinding_on_signals(), atomic_folder(out, private=True) as staging:  # it holds what the streams hold
            manifest = with_connection(
                for_node(load_chosen(config, ViewConfig), node),
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
    """Return whether a stream belongs to the node, by its name."""
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
        entries.append(await _saved(connection, folder, name))
    _, version = connection.client.server
    return Manifest(FORMAT, time.time(), version, VERSION, entries)


async def _saved(connection: Connection, folder: Path, name: str) -> StreamEntry:
    """Save the stream as it is now into its file."""
    consumers = (await administration.consumers(connection, [name], Deadline(LISTING_S)))[name]
    with file_of(folder, name).open("w+b") as file:
        try:
            taken = await take_snapshot(connection, name, file.write)
        except (TransferLost, NotConnected) as error:
            raise CommandError(f"{error}: no backup was made: run it again once `swarm nats report` has no findings") from None
        size_bytes = file.tell()
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    with readable(f"stream {name}"):
        msgspec.convert(taken.state, State)
        durable = _durable(consumers.entries)
    return StreamEntry(name, digest, size_bytes, taken.config, taken.state, durable)


def _durable(consumers: Sequence[dict[str, Any]]) -> list[ConsumerEntry]:
    """The durable consumers. Ephemeral ones are left out, because their programs make
    them again.
    """
    return [
        ConsumerEntry(each["name"], int(each["ack_floor"]["stream_seq"]))
        for each in consumers
        if each["config"].get("durable_name")
    ]


WRITTEN_S = 1800.0
"""What a server may take to write one stream."""
CONSUMERS_S = 60.0
"""A cluster makes consumers after the stream."""


def restore(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder that `swarm nats backup` wrote.")],
    stream: StreamsOption = None,
    node: Annotated[str, typer.Option(help="Only this node's streams.")] = "",
    replicas: Annotated[int | None, typer.Option(min=1, max=5, help="Copies of each stream.  [default: as many as it had]")] = None,
    check: Annotated[bool, typer.Option("--check", help="Check everything, restore nothing.")] = False,
    plane: PlaneOption = "node",
    key: KeyOption = None,
    node_url: NodeUrlOption = "",
    swarm_url: SwarmUrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Restore the streams of a backup: settings, messages and durable consumers.

    A stream that ever held a message is not overwritten. Everything is checked before the first
    stream is made: files and checksums, and which streams exist. Stop the services first. Streams
    cannot be renamed, because their messages' subjects contain the name.
    """
    manifest = read_manifest(folder)
    # Streams that others refer to come first, so that an interrupted restore leaves no reference to
    # something missing.
    by_name = {each.name: each for each in manifest.streams}
    entries = [by_name[name] for name in reversed(chosen(list(by_name), stream or [], node))]
    for entry in entries:
        for _ in checked_parts(folder, entry):
            pass
    node_config = for_node(load_chosen(config, ViewConfig), node)
    refuse_unnamed_server(node_config, node_url, swarm_url)
    what = f"{folder}, made {_told(manifest.made_at)}: {count(len(entries), 'stream')}"

    async def work(connection: Connection) -> None:
        empty = await _existing(connection, [entry.name for entry in entries])
        if check:
            say(f"{what} can be restored; nothing was changed")
            return
        await _remove(connection, empty)
        for place, entry in enumerate(entries):
            note(f"{entry.name} ...")
            try:
                say(await _restored(connection, folder, entry, replicas))
            except Exception as error:
                raise CommandError(_how_to_go_on(folder, [each.name for each in entries[place:]], error)) from error
        say(f"{what} restored")

    with_connection(node_config, plane, key, node_url, swarm_url, work)


def _told(made_at: float) -> str:
    """A time as the manifest has it, which may be none."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(made_at))
    except (OverflowError, ValueError, OSError):
        return "at a time that is none"


async def _existing(connection: Connection, names: Sequence[str]) -> list[str]:
    """Those of the streams that exist and never held a message, such as `swarm nats init` makes:
    they are replaced. Raises CommandError if another exists, or through a leaf server.
    """
    if connection.options.domain:
        raise CommandError("streams cannot be restored through a leaf server: give the url of the servers that are to hold them")
    listed = await administration.streams(connection, Deadline(LISTING_S))
    with readable("the list of streams"):
        last = {each["config"]["name"]: count_of(each["state"]["last_seq"]) for each in listed.entries}
    if filled := [name for name in names if name in listed.missing or last.get(name)]:
        raise CommandError(f"these streams exist and are not overwritten: {', '.join(filled)}: choose others with --stream")
    return [name for name in names if name in last]


async def _remove(connection: Connection, names: Collection[str]) -> None:
    for name in names:
        await call(connection, f"STREAM.DELETE.{name}", None, Deadline(LISTING_S), f"removal of stream {name}")


async def _restored(connection: Connection, folder: Path, entry: StreamEntry, replicas: int | None) -> str:
    """Restore one stream, compare it with the backup, and return a line about it. replicas: its
    copies; None: as many as it had.
    """
    config = {**entry.config, **({"num_replicas": replicas} if replicas else {})}
    config["metadata"] = {name: text for name, text in (config.get("metadata") or {}).items() if not name.startswith("_nats.")}
    # If a file was changed since it was checked, the last part is not sent, and no stream is made.
    parts = checked_parts(folder, entry)
    made = await restore_snapshot(connection, config, entry.server_state, parts, timeout_s=WRITTEN_S)
    with readable(f"stream {entry.name}"):
        found = msgspec.convert(made["state"], State)
    was = entry.state
    if found.last_seq != was.last_seq or found.messages > was.messages:
        await _remove(connection, [entry.name])
        raise CommandError(f"the restored stream holds {found}, but {was} was backed up; it was removed again")
    await _check_consumers(connection, entry)
    gone = was.messages - found.messages
    fewer = f"; {gone:,} more were removed while it was backed up, or had passed the maximum age" if gone else ""
    return f"{entry.name}: {count(found.messages, 'message')} up to {found.last_seq:,} restored and compared{fewer}"


async def _check_consumers(connection: Connection, entry: StreamEntry) -> None:
    """Raises CommandError if a consumer is missing, is behind, is none of the backup's, or pushes
    messages to a subject: none of a swarm's does, and it could send them anywhere.
    """
    deadline, wanted = Deadline(CONSUMERS_S), {each.name: each.acknowledged_seq for each in entry.consumers}
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


def _how_to_go_on(folder: Path, left: Sequence[str], error: Exception) -> str:
    """Tell what happened, and the command that restores the rest. The server itself undoes an
    interrupted transfer, and a stream that is not what was backed up is removed again.
    """
    failed = left[0]
    streams = " ".join(f"--stream {shlex.quote(name)}" for name in left)
    return (
        f"{failed}: {error}. Once the cause is gone, go on with: swarm nats restore {shlex.quote(str(folder))} {streams} and "
        f"the same options. Within 10 s the server itself removes what was transferred so far; if {failed} still exists after "
        "that, incomplete, remove it first"
    )
