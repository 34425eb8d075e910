"""Takes the age limit from a copied stream, before a server opens it: a server drops at once what
has grown too old, and of a run that ended an hour ago nothing that was shared would be left.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from swarm_cli.looking.highway_hash import highway_hash_64

_SETTINGS, _SEAL, _CIPHER = "meta.inf", "meta.sum", "meta.key"


def keep_whatever_its_age(stream: Path) -> bool:
    """Let the stream in this folder keep its messages for ever. False: it is written down in a way
    that is not known here (another version of the server, an encrypted store), and stays as it is.

    The seal that the server wrote is computed first, so that a stream is never sealed in a way that
    the server would not take: it would leave the whole stream out.
    """
    if not (stream / _SETTINGS).exists():
        return True  # no stream, to the server neither
    try:
        written, seal = (stream / _SETTINGS).read_bytes(), (stream / _SEAL).read_text()
        if (stream / _CIPHER).exists() or _sealed(stream.name, written) != seal:
            return False
        settings = json.loads(written)
        if not settings.get("max_age"):
            return True
        settings["max_age"] = 0
    except (OSError, ValueError, AttributeError):
        return False
    changed = json.dumps(settings, separators=(",", ":")).encode()
    (stream / _SETTINGS).write_bytes(changed)
    (stream / _SEAL).write_text(_sealed(stream.name, changed))
    return True


def _sealed(name: str, settings: bytes) -> str:
    return highway_hash_64(hashlib.sha256(name.encode()).digest(), settings).hex()
