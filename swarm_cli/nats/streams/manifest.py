"""What a backup's folder holds: a file for each stream, and a manifest with settings, counts and
checksums. Whoever wrote the folder is not trusted: no path comes from it, every size is bounded,
and settings that reach beyond the stream itself are refused.
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
"""Settings with which a stream sends messages elsewhere or fetches them from there. No stream of a
swarm has one.
"""
_REFERRING = ("_BATCHES", "_ROLLOUTS", "_SCORED")
"""In this order; see `backup_order`."""


class ConsumerEntry(msgspec.Struct, frozen=True):
    """A durable consumer, and up to which message all was acknowledged shortly before."""

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
    """State in the server's words, for the server."""
    consumers: list[ConsumerEntry] = []

    @property
    def state(self) -> State:
        """The same in ours."""
        return msgspec.convert(self.server_state, State)

    @property
    def replicas(self) -> int:
        """Copies that the stream had."""
        found = self.config.get("num_replicas", 1)
        return found if isinstance(found, int) else 1

    @property
    def reserved_bytes(self) -> int:
        """What one copy takes of a server's room: a stream with a bound has it set aside."""
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
    """Sorts streams so that what refers to others comes before what it refers to: positions before
    the streams, batches before the groups they count, a queue before what is made of it, a message
    before its chunks. What a running node stores meanwhile is then at worst stored without being
    referred to.
    """
    if name.startswith(bucket_stream("")):
        return 0, name
    if name.endswith(companion_name("")):
        return 9, name
    return next((place for place, suffix in enumerate(_REFERRING, 1) if name.endswith(suffix)), 8), name


def file_of(folder: Path, stream: str) -> Path:
    """The file of a stream. Raises CommandError for a name that no file should have."""
    if not _NAME.fullmatch(stream):
        raise CommandError(f"stream {stream[:80]!r}: only names of letters, digits, - and _ are backed up and restored")
    return folder / f"{stream}.snapshot"


def write_manifest(folder: Path, manifest: Manifest) -> str:
    """Write it; returns its SHA-256, which stands for the whole backup."""
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    (folder / MANIFEST).write_bytes(text)
    return hashlib.sha256(text).hexdigest()


def read_manifest(folder: Path, sha256: str = "") -> Manifest:
    """The manifest of a backup, checked but for the streams' files.

    Raises:
        CommandError: there is none, it is not the one with `sha256`, or it asks for what a backup
            of this command never does.
    """
    path = folder / MANIFEST
    try:
        with regular_file(path) as file:
            text = file.read(_MANIFEST_BYTES + 1)
    except OSError as error:
        raise CommandError(f"{path} cannot be read ({error.strerror}): name the folder that `swarm nats backup` wrote") from None
    if len(text) > _MANIFEST_BYTES:
        raise CommandError(f"{path} is larger than any backup's")
    if sha256 and hashlib.sha256(text).hexdigest() != sha256.lower():
        raise CommandError(f"{path} is not the manifest with that SHA-256: the backup is another one, or was changed")
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
        problem = next(filter(None, map(_problem, manifest.streams)), "")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CommandError(f"{path} is no manifest of a backup ({error}): it was changed or is of another version") from None
    names = [each.name for each in manifest.streams]
    if manifest.format != FORMAT:
        raise CommandError(f"{path} has format {manifest.format} and this version reads {FORMAT}: use the version that wrote it")
    if problem or len(set(names)) != len(names):
        raise CommandError(f"{path}: {problem or 'a stream is in it twice'}: restore nothing that somebody has changed")
    return manifest


def _problem(entry: StreamEntry) -> str:
    """Why this entry is not restored; empty: it may be."""
    if not _NAME.fullmatch(entry.name):
        return f"{entry.name[:80]!r} is no stream's name"
    if entry.config.get("name") != entry.name:
        return f"the settings of stream {entry.name} are another stream's"
    if found := [setting for setting in REACHING_BEYOND if entry.config.get(setting)]:
        return f"stream {entry.name} has the setting {found[0]}, with which messages leave it or come from elsewhere"
    state = entry.state
    if entry.size_bytes < 0 or min(state.messages, state.bytes, state.first_seq, state.last_seq) < 0:
        return f"stream {entry.name} has a negative size"
    return ""


@contextmanager
def regular_file(path: Path) -> Iterator[BinaryIO]:
    """`path` open for reading. Raises OSError also for a link, a pipe or a device."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(0, "it is no regular file")
        yield file


class StreamFile:
    """A stream's file while it is read, which has to be what the manifest says of it."""

    def __init__(self, folder: Path, entry: StreamEntry) -> None:
        self._path, self._entry = file_of(folder, entry.name), entry
        self._sum, self._read_bytes = hashlib.sha256(), 0

    def parts(self) -> Iterator[bytes]:
        """The file in parts. Raises CommandError where it cannot be read or is longer."""
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
            raise CommandError(f"{self._path} cannot be read ({error.strerror}): nothing of it was restored") from None

    def confirm(self) -> None:
        """Raises CommandError unless all parts together are what was backed up."""
        if self._read_bytes != self._entry.size_bytes or self._sum.hexdigest() != self._entry.sha256:
            raise CommandError(self._damage())

    def _damage(self) -> str:
        return f"{self._path} is not what was backed up (size or SHA-256): copy the backup here again"
