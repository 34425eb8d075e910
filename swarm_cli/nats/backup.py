"""`swarm nats backup`: save streams with settings, messages and durable consumers to a folder that
appears complete or not at all.

The folder holds a file for each stream, and a manifest with settings, counts and checksums. They
are not trusted when they are read: no path is taken from them, every size is bounded, and settings
that affect more than the stream itself are refused."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import msgspec
import typer

from shared.atomic_folder import atomic_folder, refuse_filled, unwinding_on_signals
from shared.config.view_config import ViewConfig
from shared.contracts.subjects import node_bucket
from shared.roles import OPERATOR
from shared.runtime.planes import connect_node_plane, connect_swarm_plane
from shared.text import visible
from shared.transport.base import Deadline, NotConnected, bucket_stream
from shared.transport.blobs import companion_name
from shared.transport.nats import administration
from shared.transport.nats.administration import TransferLost, take_snapshot
from shared.transport.nats.answers import count_of, readable
from shared.transport.nats.connection import Connection
from shared.transport.nats.jetstream_api import call
from shared.transport.nats.transport import connection_of
from shared.version import VERSION
from swarm_cli.chosen_config import ConfigOption, NodeUrlOption, SwarmUrlOption, for_node, load_chosen
from swarm_cli.console import count, note, say
from swarm_cli.errors import CommandError
from swarm_cli.local.untrusted_run import REACHING_BEYOND
from swarm_cli.nats.account_list import Plane
from swarm_cli.target import default_target, is_named, unnamed_server

CONNECT_TIMEOUT_S = 10.0
T = TypeVar("T")

PlaneOption = Annotated[
    Plane, typer.Option(help="Whose server and key to use: the node's or the swarm's. Without keys both may be on one server.")
]
KeyOption = Annotated[
    Path | None, typer.Option(help="Operator's key file.  [default: nats.node_key_file or swarm_key_file, as operator]")
]


def with_connection(
    config: ViewConfig, plane: Plane, key: Path | None, node_url: str, swarm_url: str, work: Callable[[Connection], Awaitable[T]]
) -> T:
    """Run `work` with an operator's connection to the plane's servers.

    Raises:
        CommandError: there is no such plane, or two were named.
        TransportError: no server answers, or the key is refused.
    """
    if plane is Plane.BOTH:
        raise CommandError("choose one plane, because each has its own key: --plane node, then --plane swarm")
    target = default_target(config, node_url, swarm_url)
    named = is_named(config, target, swarm_url)
    return asyncio.run(_with_connection(config, plane, key, (target.node_url, target.swarm_url), work, named=named))


async def _with_connection(
    config: ViewConfig,
    plane: Plane,
    key: Path | None,
    urls: tuple[str, str | None],
    work: Callable[[Connection], Awaitable[T]],
    *,
    named: bool,
) -> T:
    # A key from the command line replaces the configured one of the chosen plane only.
    node_url, swarm_url = urls
    field = "node_key_file" if plane is Plane.NODE else "swarm_key_file"
    if key is not None:
        config = config.model_copy(update={"nats": config.nats.model_copy(update={field: str(key)})})
    if plane is Plane.SWARM and swarm_url is None:
        raise CommandError("nats.swarm_url is none, so this node has no swarm plane: set nats.swarm_url, or use --plane node")
    if plane is Plane.NODE:
        transport = await connect_node_plane(config, OPERATOR, timeout_s=CONNECT_TIMEOUT_S, url=node_url)
    else:
        transport = await connect_swarm_plane(config, OPERATOR, timeout_s=CONNECT_TIMEOUT_S, url=swarm_url or "")
    try:
        if not named:
            note(f"{unnamed_server(config.node.var_dir, node_url)}: it is used here. --node-url names another")
        return await work(connection_of(transport))
    finally:
        await transport.close()


FORMAT = 1
MANIFEST = "backup.json"
PART_BYTES = 128 * 1024
_MANIFEST_BYTES = 64 * 2**20
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
    removed: int = 0
    """How many messages were removed while the stream was backed up, by newer values of their keys,
    by limits or because they were acknowledged. The state counts those of them that the file lacks.
    """

    @property
    def state(self) -> State:
        """The state, typed."""
        return msgspec.convert(self.server_state, State)

    @property
    def replicas(self) -> int:
        """Copies that the stream had."""
        found = self.config.get("num_replicas", 1)
        return found if isinstance(found, int) else 1

    @property
    def reserved_bytes(self) -> int:
        """Bytes that one copy takes on a server: a stream with a size limit reserves all of it."""
        bound = self.config.get("max_bytes", -1)
        return max(self.state.bytes, bound if isinstance(bound, int) else 0)


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


def read_manifest(folder: Path, sha256: str = "") -> Manifest:
    """The manifest of a backup, checked; the streams' files are not.

    Raises:
        CommandError: there is none, its SHA-256 is not `sha256`, or it holds values that `swarm
        nats
            backup` never writes.
    """
    path = folder / MANIFEST
    try:
        with regular_file(path) as file:
            text = file.read(_MANIFEST_BYTES + 1)
    except OSError as error:
        raise CommandError(f"{path} cannot be read ({error.strerror}): name the folder that `swarm nats backup` wrote") from None
    if len(text) > _MANIFEST_BYTES:
        raise CommandError(f"{path} is too large to be a manifest: name the folder that `swarm nats backup` wrote")
    if sha256 and hashlib.sha256(text).hexdigest() != sha256.lower():
        raise CommandError(f"{path} does not have that SHA-256: it is another backup, or it was changed; get the right one")
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
        entries.append(await _one(connection, folder, name))
    _, version = connection.client.server
    return Manifest(FORMAT, time.time(), version, VERSION, entries)


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
    with file_of(folder, name).open("w+b") as file:
        taken = await take_snapshot(connection, name, file.write)
        size_bytes = file.tell()
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    after = await call(connection, f"STREAM.INFO.{name}", None, Deadline(LISTING_S), f"stream {name}")
    with readable(f"stream {name}"):
        was, now = (msgspec.convert(state, State) for state in (taken.state, after["state"]))
        durable = _durable(consumers.entries)
    removed = max(0, (now.last_seq - now.messages) - (was.last_seq - was.messages))
    return StreamEntry(name, digest, size_bytes, taken.config, taken.state, durable, removed)


def _durable(consumers: Sequence[dict[str, Any]]) -> list[ConsumerEntry]:
    """The durable consumers. Ephemeral ones are left out, because their programs make
    them again.
    """
    return [
        ConsumerEntry(each["name"], int(each["ack_floor"]["stream_seq"]))
        for each in consumers
        if each["config"].get("durable_name")
    ]
