"""Headers of stored messages from any publisher: small ones are parsed; of larger ones only the
server's own lines are kept. Pure.

A stream accepts headers of up to 64 kB: thirteen thousand lines, or bytes that no parser accepts.
Parsing that for each of a hundred messages per second would leave a reader no time for anything
else; ignoring it completely would lose who sent it. The server appends its own lines to a stored
message's headers when it delivers them (direct get, ADR-31), so they are found at the end.
"""

from __future__ import annotations

MAX_HEADER_BYTES = 48 * 1024
"""Largest size of a message's headers; the reference to a blob of 4096 chunks in as many runs is
smaller.
"""
MAX_HEADER_LINES = 128
OVERSIZED_HEADER = "Swarm-Oversized-Headers"
"""Marks a message whose publisher's headers were dropped; the value is their size in bytes."""
STATUS = ("Status", "Description")
"""Where nats-py puts a status line; a publisher's headers with these names appear there too."""
_TAIL_BYTES = 1024
_FIRST_OF_SERVER = b"Nats-Subject: "


def is_oversized(block: bytes) -> bool:
    """Whether a header block is larger than any honest publisher's."""
    return len(block) > MAX_HEADER_BYTES or block.count(b"\n") > MAX_HEADER_LINES


def is_stored(block: bytes) -> bool:
    """Whether the server says where the message is stored."""
    return b"\r\nNats-Sequence: " in block[-_TAIL_BYTES:]


def server_lines(block: bytes) -> dict[str, str]:
    """The server's own lines at the end of a block, and the mark; without lines if the server
    appended none.
    """
    tail = block[-_TAIL_BYTES:]
    start = tail.rfind(_FIRST_OF_SERVER)
    found = {OVERSIZED_HEADER: str(len(block))}
    if start < 0:
        return found
    for line in tail[start:].split(b"\r\n"):
        name, colon, value = line.partition(b": ")
        if colon:
            found[name.decode(errors="replace")] = value.decode(errors="replace")
    return found
