"""Which key a node's name belongs to: the first one seen with it, remembered across restarts (open), or the one listed (roster)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from shared.roster import RosterEntry, read_roster

MAX_NAMES = 20_000


class Trust(Protocol):
    """Who may use a name. Nothing here looks at a signature."""

    def may_use(self, name: str, public_key: str) -> bool:
        """Whether `name` is free or belongs to this key."""
        ...

    def bind(self, name: str, public_key: str) -> bool:
        """Give `name` to the key if it is free. False when it belongs to another, or cannot be given."""
        ...

    def key_of(self, name: str) -> str | None:
        """The key that `name` belongs to."""
        ...


class RosterKeys:
    """Only the names and keys in the roster file. Raises RosterError when that cannot be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._stamp()
        self._entries: dict[str, RosterEntry] = read_roster(path)

    def __len__(self) -> int:
        return len(self._entries)

    def may_use(self, name: str, public_key: str) -> bool:
        """Whether the roster lists this name with this key."""
        entry = self._entries.get(name)
        return entry is not None and entry.public_key == public_key

    def bind(self, name: str, public_key: str) -> bool:
        """As `may_use`: a roster gives nothing away."""
        return self.may_use(name, public_key)

    def key_of(self, name: str) -> str | None:
        """The listed key."""
        entry = self._entries.get(name)
        return entry.public_key if entry else None

    def reload(self) -> bool:
        """Read the file again if it changed. Returns whether it did.

        Raises:
            RosterError: it is gone or wrong now; the entries read before stay in force.
        """
        stamp = self._stamp()
        if stamp == self._seen:
            return False
        self._seen = stamp
        self._entries = read_roster(self._path)
        return True

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


class KnownKeys:
    """Names and their keys, in an append-only file of `name key` lines, that replicas on one machine share.

    The first line of a name counts. Lines that other processes added are read before a new name is bound.
    """

    def __init__(self, path: Path, own: tuple[str, str]) -> None:
        """`own` is this node's name and key: nobody else gets that name."""
        self._path = path
        self._read_bytes = 0
        self._keys = dict([own])
        self._read_new_lines()

    def __len__(self) -> int:
        return len(self._keys)

    def may_use(self, name: str, public_key: str) -> bool:
        """Whether `name` is free or belongs to this key."""
        return self._keys.get(name, public_key) == public_key

    def key_of(self, name: str) -> str | None:
        """The key that `name` belongs to."""
        return self._keys.get(name)

    def bind(self, name: str, public_key: str) -> bool:
        """Give `name` to the key if it is free. False when it belongs to another, or there is no room for more names."""
        if name not in self._keys:
            self._read_new_lines()
        if name in self._keys:
            return self._keys[name] == public_key
        if len(self._keys) >= MAX_NAMES:
            return False
        self._keys[name] = public_key
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, f"{name} {public_key}\n".encode())
        finally:
            os.close(descriptor)
        return True

    def _read_new_lines(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                text = file.read()
        except FileNotFoundError:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return
        complete = text.rfind(b"\n") + 1
        self._read_bytes += complete
        for line in text[:complete].decode(errors="replace").splitlines():
            name, _, public_key = line.partition(" ")
            self._keys.setdefault(name, public_key)
