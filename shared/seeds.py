"""Numbers and bytes derived from a text: seeds and random choices on which replicas and restarts
must agree without communicating.
"""

from __future__ import annotations

import hashlib


def bytes_from(text: str) -> bytes:
    """32 bytes that are as good as random and the same everywhere: SHA-256 of `text`.

    Begin `text` with what they are for: two purposes must not share them.
    """
    return hashlib.sha256(text.encode()).digest()


def number_from(text: str, n_bytes: int = 8) -> int:
    """A number below `256**n_bytes`: the first of `bytes_from`, big-endian."""
    return int.from_bytes(bytes_from(text)[:n_bytes], "big")
