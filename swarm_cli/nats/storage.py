"""How much a node may store on a server that it shares with others. Pure."""

from __future__ import annotations

from dataclasses import dataclass

HOSTED_GIB = 64
"""For a node on a shared server: its streams reserve 5.3 GiB, which is 16 GiB in three copies. The
rest is for policies, which reserve nothing; four are kept: 4 GiB of weights in three copies.
"""
MOST_STREAMS = 64
"""A node has about a dozen, including those for chunks and the bucket."""


@dataclass(frozen=True, slots=True)
class Storage:
    """What an account may store. The server counts every copy of a stream, and space that a stream
    reserves even if it is unused.
    """

    gib: int
    streams: int = MOST_STREAMS

    def render(self) -> str:
        """The value of `jetstream` in an account. No memory is allowed, because no stream
        uses it.
        """
        return f"{{ max_file: {self.gib}GB, max_mem: 0, max_streams: {self.streams} }}"
