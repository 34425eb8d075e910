"""How key-value buckets are stored (ADR-8): a bucket is a stream, and each key is one of its
subjects.
"""

from __future__ import annotations

import re

from shared.transport.base import KvEntry, StoredMessage, TransportError

_KEY = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*")
_STREAM_PREFIX = "KV_"


def bucket_stream(bucket: str) -> str:
    """Name of the stream that holds the bucket."""
    return f"{_STREAM_PREFIX}{bucket}"


def bucket_of_stream(stream: str) -> str:
    """Inverse of `bucket_stream`."""
    return stream.removeprefix(_STREAM_PREFIX)


def subject(bucket: str, key: str) -> str:
    """Subject of a key. Raises TransportError for an invalid key."""
    if not _KEY.fullmatch(key):
        raise TransportError(f"bucket {bucket}: {key!r} is not a valid key: use letters, digits, - / _ = and single dots")
    return f"$KV.{bucket}.{key}"


def entry(bucket: str, message: StoredMessage | None) -> KvEntry | None:
    """The entry in a stored message; None for a deletion marker."""
    if message is None or message.inline is None or "KV-Operation" in message.headers:
        return None
    return KvEntry(message.subject.removeprefix(f"$KV.{bucket}."), message.inline, message.seq, message.stored_at)
