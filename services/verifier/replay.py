"""Which foreign groups were taken in: none counts twice, also after a restart or at another replica on the same machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

_ID = re.compile(r"[0-9a-f]{64}")


class ReplayMemory:
    """The ids of the last `capacity` accepted groups, kept in an append-only file that is cut down when it is loaded.

    What other processes appended is read before an id is called new.
    """

    def __init__(self, capacity: int, path: Path | None = None) -> None:
        """`path` None keeps the memory in this process only."""
        self._capacity = capacity
        self._path = path
        self._ids: dict[str, None] = {}
        self._inode = 0
        self._read_bytes = 0
        if path is not None:
            self._load(path)

    def __len__(self) -> int:
        """How many ids it holds."""
        return len(self._ids)

    def contains(self, group_id: str) -> bool:
        """Whether this group was accepted before."""
        if group_id not in self._ids and self._path is not None:
            self._read_new_lines(self._path)
        return group_id in self._ids

    def remember(self, group_id: str) -> None:
        """Note an accepted group; forgets the oldest beyond the capacity."""
        self._add(group_id)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(group_id + "\n")

    def _add(self, group_id: str) -> None:
        self._ids[group_id] = None
        if len(self._ids) > self._capacity:
            del self._ids[next(iter(self._ids))]

    def _load(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            return
        lines = path.read_text(errors="replace").splitlines()
        if len(lines) > 2 * self._capacity:
            kept = [line for line in lines if _ID.fullmatch(line)][-self._capacity :]
            draft = path.with_suffix(f".{os.getpid()}")
            draft.write_text("".join(line + "\n" for line in kept))
            draft.replace(path)
        self._read_new_lines(path)

    def _read_new_lines(self, path: Path) -> None:
        try:
            stat = path.stat()
        except FileNotFoundError:
            return
        if stat.st_ino != self._inode or stat.st_size < self._read_bytes:
            self._inode, self._read_bytes = stat.st_ino, 0  # cut down by another process
        if stat.st_size == self._read_bytes:
            return
        with path.open("rb") as file:
            file.seek(self._read_bytes)
            text = file.read()
        complete = text.rfind(b"\n") + 1
        self._read_bytes += complete
        for line in text[:complete].decode(errors="replace").splitlines():
            if _ID.fullmatch(line):
                self._add(line)
