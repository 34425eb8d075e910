"""Refuses to start a run whose files were copied here, and so may be somebody else's, if starting
it would fill the disk or memory: the server opens all that is in its store, and services read their
files as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shared.contracts.stream_names import is_swarm_stream
from shared.text import visible
from swarm_cli.errors import CommandError
from swarm_cli.looking.moving_streams import moving_stream
from swarm_cli.looking.store_size import MAX_FILE_BYTES, Sizes, files_in

_STORE = "jetstream"
_STREAMS = "streams"
_REMEDY = "if you trust the run, remove that, else choose another name with --run"


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
        if moving := moving_stream(streams):
            yield f"{visible(str(account))}: {moving}"


def _folders(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from sorted(each for each in folder.iterdir() if each.is_dir())


def _ruinous_file(folder: Path) -> str:
    """Apparent sizes are compared with what files take on disk: holes cost their author nothing."""
    sizes = Sizes()
    for path, found in files_in(folder):
        alone = Sizes()
        alone.add(found)
        if alone.ruinous or (found.st_size > MAX_FILE_BYTES and path.is_relative_to(folder / _STORE)):
            return f"{visible(str(path))} has {alone} (it is all holes, or too long for a server's store)"
        sizes.add(found)
    return f"the files in {visible(str(folder))} have {sizes} (holes, or one file under many names)" if sizes.ruinous else ""
