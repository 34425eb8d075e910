"""Removes the age limit of a copied stream before a server opens it. Otherwise the server would
drop old messages at once, and nothing shared in a run that ended an hour ago would be left.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from swarm_cli.looking.highway_hash import highway_hash_64

_SETTINGS, _SEAL, _CIPHER = "meta.inf", "meta.sum", "meta.key"


def keep_whatever_its_age(stream: Path) -> bool:
    """Let the stream in this folder keep its messages for ever. False if its settings are in a
    format that is not known here (another version of the server, an encrypted store): it stays
    unchanged.

    The server's own checksum is verified first. A stream with a checksum that the server does not
    accept would be left out as a whole.
    """
    if not (stream / _SETTINGS).exists():
        return True  # the server does not treat it as a stream either
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
