"""Finds streams and consumers in a server's store that do something by themselves as soon as a
server opens it: two that send each other their messages fill the disk. In a run that somebody
handed on, whoever made it may have put them there. No swarm makes any.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from shared.plain_files import NO_FILE, read_plain
from shared.text import visible
from swarm_cli.nats.streams.manifest import REACHING_BEYOND

_SETTINGS = "meta.inf"
_MOST_BYTES = 2**20
_OF_STREAMS = (*REACHING_BEYOND, "allow_msg_schedules")
_OF_CONSUMERS = ("deliver_subject",)
_OTHERWISE_NAMED = "a name that is not its folder's"


def moving_stream(streams: Iterable[Path]) -> str:
    """What one of these streams' folders has that no swarm makes, such as `the consumer c of A has
    deliver_subject`; empty if they only keep messages.
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
        json.loads(read_plain(folder / _SETTINGS, _MOST_BYTES), object_pairs_hook=take)
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
