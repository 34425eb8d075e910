"""Room on an open hub for the swarm's streams, which the first node there makes: a server reserves
each stream's limit when it is made, and refuses the stream if it cannot. `room_asked` asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.contracts.streams import swarm_streams
from shared.transport.blobs import companion

ALL_STREAMS = tuple(each.name for spec in swarm_streams() for each in (spec, companion(spec)) if each is not None)
"""The swarm's streams that reserve space; the directory has no limit and reserves none."""


@dataclass(frozen=True, slots=True)
class Room:
    """What the missing streams reserve, with all copies, and what the hub lets them.

    `there_bytes`: what it could still reserve; None if that is enough or not known.
    `account_bytes`: the account's limit if that is too small. `off`: why it keeps no streams.
    """

    missing: tuple[str, ...]
    needed_bytes: int
    there_bytes: int | None = None
    account_bytes: int | None = None
    off: str = ""


def in_gib(size_bytes: int, *, up: bool = False) -> str:
    """A size for people, rounded down, or `up`, so that nobody allots too little."""
    tenths = -(-size_bytes * 10 // 2**30) if up else size_bytes * 10 // 2**30
    return f"{tenths / 10:g} GiB"


def told_names(names: Sequence[str]) -> str:
    """Names of streams in a sentence."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if names[1:] else "".join(names)
