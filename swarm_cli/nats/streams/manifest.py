"""The contents of a backup's folder: a file for each stream, and a manifest with settings, counts
and checksums. They are not trusted: no path is taken from them, every size is bounded, and settings
that affect more than the stream itself are refused.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from shared.transport.blobs import companion_name
from shared.transport.keys import bucket_stream
from swarm_cli.errors import CommandError

FORMAT = 1
MANIFEST = "backup.json"
PART_BYTES = 128 * 1024
_MANIFEST_BYTES = 64 * 2**20
_NAME = re.compile(r"[A-Za-z0-9_-]{1,200}")
REACHING_BEYOND = ("republish", "mirror", "sources", "subject_transform")
"""Settings that make a stream send messages elsewhere or fetch them from elsewhere. No stream of a
swarm has one.
"""
_REFERRING = ("_BATCHES", "_ROLLOUTS", "_SCORED")
"""Name endings of streams that refer to other streams, in the order of `backup_order`."""


class ConsumerEntry(msgspec.Struct, frozen=True):
    """A durable consumer, and the message up to which all were acknowledged just before
    the backup.
    """

    name: str
    acknowledged_seq: int


class State(msgspec.Struct, frozen=True):
    """What a stream held, as the server counts it."""

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


class StreamFile:
    """A stream's file, checked against the manifest while it is read."""

    def __init__(self, folder: Path, entry: StreamEntry) -> None:
        self._path, self._entry = file_of(folder, entry.name), entry
        self._sum, self._read_bytes = hashlib.sha256(), 0

    def parts(self) -> Iterator[bytes]:
        """The file in parts. Raises CommandError if it cannot be read or is too long."""
        self._sum, self._read_bytes = hashlib.sha256(), 0
        try:
            with regular_file(self._path) as file:
                while part := file.read(PART_BYTES):
                    self._read_bytes += len(part)
                    if self._read_bytes > self._entry.size_bytes:
                        raise CommandError(self._damage())
                    self._sum.update(part)
                    yield part
        except OSError as error:
            raise CommandError(
                f"{self._path} cannot be read ({error.strerror}), so its stream was not restored: copy the backup again"
            ) from None

    def confirm(self) -> None:
        """Raises CommandError unless all the parts together are what was backed up."""
        if self._read_bytes != self._entry.size_bytes or self._sum.hexdigest() != self._entry.sha256:
            raise CommandError(self._damage())

    def _damage(self) -> str:
        return f"{self._path} is not what was backed up (its size or SHA-256 differs): copy the backup here again"
