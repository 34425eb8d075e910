"""Refuses to start a run whose files were copied here, and so may be somebody else's, if starting
it would fill the disk or memory: the server opens all that is in its store, and services read their
files as a whole. A store may hold streams and consumers that do something by themselves as soon as
a server opens it (two that send each other their messages fill the disk), and a file of a kilobyte
on disk can have terabytes. No swarm makes any of these."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from shared.contracts import subjects
from shared.contracts.wire import is_node_name
from shared.plain_files import NO_FILE, read_plain
from shared.text import visible
from shared.transport.base import bucket_of_stream, bucket_stream
from shared.transport.blobs import companion_name
from swarm_cli.errors import CommandError

_STORE = "jetstream"
_STREAMS = "streams"
_REMEDY = "if you trust the run, remove that, else choose another name with --run"
_SETTINGS = "meta.inf"
_SETTINGS_BYTES = 2**20
REACHING_BEYOND = ("republish", "mirror", "sources", "subject_transform")
"""Settings that make a stream send messages elsewhere or fetch them from elsewhere. No stream of a
swarm has one.
"""
_OF_STREAMS = (*REACHING_BEYOND, "allow_msg_schedules")
_OF_CONSUMERS = ("deliver_subject",)
_OTHERWISE_NAMED = "a name that is not its folder's"
_MAX_FILE_BYTES = 256 * 2**20
"""A server's blocks have 8 MiB and at most one message of 64 MiB more; its lists of streams and
consumers are smaller.
"""
_MAX_UNFOLDED = 16
_SLACK_BYTES = 64 * 2**20
"""A file system that compresses keeps less than the files' sizes, though hardly a sixteenth."""


def refuse_what_would_grow(folder: Path) -> None:
    """Raises CommandError for a store that holds more than a swarm's streams or streams that do
    something by themselves, and for a file far longer than what it takes on disk. `folder`: of a
    run that is not known to be this user's own.
    """
    if found := next(_in_store(folder / _STORE), "") or _ruinous_file(folder):
        raise CommandError(
            f"{found}, which no run makes; the files of run {folder.name} were copied here or changed since its last start, so it "
            f"may be somebody else's: {_REMEDY}"
        )


def _in_store(store: Path) -> Iterator[str]:
    for account in _folders(store):
        for inside in _folders(account):
            if inside.name != _STREAMS:
                yield f"{visible(str(inside))} lies in the server's store"
        streams = list(_folders(account / _STREAMS))
        for stream in streams:
            if not is_swarm_stream(stream.name):
                yield f"{visible(str(stream))} is no stream of a swarm"
        if moving := _moving_stream(streams):
            yield f"{visible(str(account))}: {moving}"


def _folders(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from sorted(each for each in folder.iterdir() if each.is_dir())


def _ruinous_file(folder: Path) -> str:
    """Apparent sizes are compared with what files take on disk: holes cost their author nothing."""
    sizes = _Sizes()
    for path, found in _files_in(folder):
        alone = _Sizes()
        alone.add(found)
        if alone.ruinous or (found.st_size > _MAX_FILE_BYTES and path.is_relative_to(folder / _STORE)):
            return f"{visible(str(path))} has {alone} (it is all holes, or too long for a server's store)"
        sizes.add(found)
    return f"the files in {visible(str(folder))} have {sizes} (holes, or one file under many names)" if sizes.ruinous else ""


def _moving_stream(streams: Iterable[Path]) -> str:
    """Find something in these streams' folders that no swarm makes, such as `the consumer c of A
    has deliver_subject`; empty if they only keep messages.
    """
    return next((found for stream in streams for found in _moving(stream)), "")


def _moving(stream: Path) -> Iterator[str]:
    name = visible(stream.name, 100)
    for what in _settings(stream, _OF_STREAMS, stream.name):
        yield f"the stream {name} has {what}"
    consumers = stream / "obs"
    for consumer in sorted(consumers.iterdir()) if consumers.is_dir() else []:
        for what in _settings(consumer, _OF_CONSUMERS, ""):
            yield f"the consumer {visible(consumer.name, 100)} of {name} has {what}"


def _settings(folder: Path, refused: tuple[str, ...], name: str) -> Iterator[str]:
    """Those of the `refused` settings that are set in the folder, or what else is wrong with them.

    A server takes a setting in capitals or small letters, and one that is there twice: so each is
    looked at, not only the last of a name.
    """
    pairs: list[tuple[str, Any]] = []

    def take(found: list[tuple[str, Any]]) -> bool:
        pairs.extend(found)
        return True  # an object counts as set, even an empty one

    try:
        json.loads(read_plain(folder / _SETTINGS, _SETTINGS_BYTES), object_pairs_hook=take)
    except OSError as error:
        if error.errno not in NO_FILE:
            yield f"settings that cannot be read ({error.strerror})"
        return  # what has no settings is left out by the server
    except (ValueError, RecursionError):
        yield "settings that cannot be read"
        return
    for setting, value in pairs:
        if setting.casefold() in refused and value:
            yield setting.casefold()
        if name and setting.casefold() == "name" and value != name and isinstance(value, str):
            yield _OTHERWISE_NAMED


class _Sizes:
    """Sizes of files together, and what they take on disk, where one file under many names counts
    once.
    """

    def __init__(self) -> None:
        self._apparent = 0
        self._real: dict[tuple[int, int], int] = {}

    def add(self, found: os.stat_result) -> None:
        """Count a file under one of its names."""
        self._apparent += found.st_size
        self._real[found.st_dev, found.st_ino] = found.st_blocks * 512

    @property
    def ruinous(self) -> bool:
        """True if they have far more than they take."""
        return self._apparent > _MAX_UNFOLDED * sum(self._real.values()) + _SLACK_BYTES

    def __str__(self) -> str:
        return f"{self._apparent / 2**20:,.0f} MiB, of which {sum(self._real.values()) / 2**20:,.0f} MiB are on disk"


def _files_in(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """All files in a folder and the folders in it, with what the system knows of each."""
    for place, _, names in os.walk(folder):
        for path in (Path(place) / name for name in names):
            try:
                yield path, path.lstat()
            except FileNotFoundError:  # gone meanwhile
                continue


def reject_escaping_links(folder: Path) -> None:
    """Raises CommandError if anything in `folder` is a link that leads out of it, a pipe or device,
    or a file that has a name elsewhere as well. Sockets and links within the folder stay, because a
    run makes those. `folder` itself may be a link: its owner has put it elsewhere.
    """
    inside = Path(os.path.realpath(folder))
    several: dict[tuple[int, int], list[Path]] = {}
    for place, folders, files in os.walk(inside):
        for path in (Path(place) / name for name in folders + files):
            try:
                found = path.lstat()
            except OSError:  # gone meanwhile
                continue
            kind = found.st_mode
            if stat.S_ISREG(kind) and found.st_nlink > 1:
                several.setdefault((found.st_dev, found.st_ino), []).append(path)
            if stat.S_ISLNK(kind) and not _within(path, inside) and not _is_wandb_s(path, inside):
                what = f"is a link to {visible(os.readlink(path), 200)}, out of the run's folder"
            elif stat.S_ISFIFO(kind) or stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
                what = "is a pipe or device"
            else:
                continue
            raise _escape_error(folder / path.relative_to(inside), what)
    for names in several.values():
        with suppress(OSError):  # gone meanwhile
            if names[0].lstat().st_nlink > len(names) and not all(_is_newest_policy(name, inside) for name in names):
                what = "is a file that has a name outside the run's folder as well (a hard link)"
                raise _escape_error(folder / names[0].relative_to(inside), what)


def _escape_error(path: Path, what: str) -> CommandError:
    return CommandError(
        f"{visible(str(path))} {what}, which no run makes: what the run writes there would go elsewhere; if you trust the run, "
        "remove that or put a copy in its place, or choose another name with --run"
    )


def _is_newest_policy(file: Path, folder: Path) -> bool:
    """A node's newest policy may be the same file in a volume elsewhere; under this name it is only
    ever removed or replaced. Under any other name in the folder it would be written to.
    """
    return file.relative_to(folder).parts[1:] == ("published", "newest.safetensors")


def _within(link: Path, folder: Path) -> bool:
    return Path(os.path.realpath(link)).is_relative_to(folder)


def _is_wandb_s(link: Path, folder: Path) -> bool:
    """Weights & Biases leaves a link to its process's log, and writes to no earlier run's."""
    parts = link.relative_to(folder).parts
    return len(parts) == 5 and parts[1] == "wandb" and parts[3:] == ("logs", "debug-core.log")


_OF_A_NODE = (
    subjects.node_rollouts_stream,
    subjects.node_scored_stream,
    subjects.node_batches_stream,
    subjects.node_dead_letters_stream,
    subjects.node_name_stream,
    subjects.node_policies_stream,
)


def is_swarm_stream(name: str) -> bool:
    """Check whether a node or a swarm makes a stream of this name: one of messages, of their
    chunks, or a bucket.
    """
    if name.startswith(bucket_stream("")):
        bucket = bucket_of_stream(name)
        return bucket == subjects.SWARM_NODES_BUCKET or subjects.node_of_bucket(bucket) is not None
    base = name.removesuffix(companion_name(""))
    node = base.rpartition("_")[0].partition("_")[2].lower()
    of_node = is_node_name(node) and base in [stream(node) for stream in _OF_A_NODE]
    return of_node or base in (subjects.SWARM_ROLLOUTS, subjects.SWARM_EVALS)
