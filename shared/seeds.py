"""Numbers derived from a text: seeds and random choices on which replicas and restarts must agree
without communicating.
"""

from __future__ import annotations

import hashlib


def number_from(text: str, n_bytes: int = 8) -> int:
    """A number below `256**n_bytes` that is as good as random and the same everywhere: the first
    bytes of SHA-256, big-endian.

    Begin `text` with what the number is for: two purposes must not share one.
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:n_bytes], "big")
