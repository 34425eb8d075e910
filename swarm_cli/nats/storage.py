"""How much a node may store on a server that it shares with others. Pure."""

from __future__ import annotations

from dataclasses import dataclass

HOSTED_GIB = 64
"""A node on a shared server: its streams reserve 5.3 GiB, 16 in three copies; the rest is for
policies, which are not reserved and stay four at a time: 4 GiB of weights in three copies.
"""
MOST_STREAMS = 64
"""A node has about a dozen, with those for chunks and the bucket."""


@dataclass(frozen=True, slots=True)
class Storage:
    """What an account may store. The server counts every copy of a stream, also what a stream has
    reserved and not used.
    """

    gib: int
    streams: int = MOST_STREAMS

    def render(self) -> str:
        """The value of `jetstream` in an account. Nothing is kept in memory, so nothing may be."""
        return f"{{ max_file: {self.gib}GB, max_mem: 0, max_streams: {self.streams} }}"
