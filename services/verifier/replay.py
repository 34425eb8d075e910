"""Which foreign groups were taken in: none counts twice, also after a restart."""

from __future__ import annotations

import os
import re
from pathlib import Path

_ID = re.compile(r"[0-9a-f]{64}")


class ReplayMemory:
    """The ids of the last `capacity` accepted groups, kept in an append-only file that is cut down when it is loaded."""

    def __init__(self, capacity: int, path: Path | None = None) -> None:
        """`path` None keeps the memory in this process only."""
        self._capacity = capacity
        self._path = path
        self._ids: dict[str, None] = {}
        if path is not None:
            self._load(path)

    def contains(self, group_id: str) -> bool:
        """Whether this group was accepted before."""
        return group_id in self._ids

    def remember(self, group_id: str) -> None:
        """Note an accepted group; forgets the oldest beyond the capacity."""
        self._ids[group_id] = None
        if len(self._ids) > self._capacity:
            del self._ids[next(iter(self._ids))]
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(group_id + "\n")

    def _load(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            return
        lines = path.read_text(errors="replace").splitlines()
        kept = [line for line in lines if _ID.fullmatch(line)][-self._capacity :]
        self._ids = dict.fromkeys(kept)
        if len(lines) > 2 * self._capacity:
            draft = path.with_suffix(f".{os.getpid()}")
            draft.write_text("".join(line + "\n" for line in kept))
            draft.replace(path)
