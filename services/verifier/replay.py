"""Remembers the accepted foreign groups, so that none counts twice, even after a restart or at
another replica on the same machine.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import time
import uuid
from collections import OrderedDict
from pathlib import Path

from shared import disk
from shared.plain_files import whole_lines
from shared.runtime.writes import Writes

_LINE = re.compile(r"([0-9a-f]{64})(?: ([0-9]{1,11}))?")
"""An id and when it was accepted, in Unix seconds; files of earlier versions have no time."""
_MARK_BYTES = 34
"""The first line of a rewritten file: `#` and 32 letters that no other file has."""
_SPARE_LINES = 1024
"""A file with fewer lines is not worth rewriting."""


class ReplayMemory:
    """The ids of accepted groups: the last `capacity`, none for longer than `keep_s`, after which
    their age alone refuses them.

    The file only grows by appending, until most of it is no longer needed and it is rewritten. Any
    process may die at any instant. The new file replaces the old one in one step, a partial last
    line loses that line only, and what another process appends meanwhile is carried over (unless
    the rewriting process is killed between these two steps; the other process then still knows it).
    What other processes appended is read before an id counts as new.
    """

    def __init__(self, capacity: int, path: Path | None = None, *, keep_s: float = math.inf, now_s: float | None = None) -> None:
        """`path` None keeps the memory in this process only. `now_s` is the time of loading in Unix
        seconds; None: the clock's.
        """
        self.writes = Writes("verifier")
        self._capacity = capacity
        self._path = path
        self._keep_s = keep_s
        self._ids: OrderedDict[str, float] = OrderedDict()
        self._version = 0, b""
        self._read_bytes = 0
        self._lines = 0
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._read_new_lines(path)
            self._shorten(path, time.time() if now_s is None else now_s)

    def __len__(self) -> int:
        """Number of ids."""
        return len(self._ids)

    def contains(self, group_id: str) -> bool:
        """Whether this group was accepted before."""
        if group_id not in self._ids and self._path is not None:
            self._read_new_lines(self._path)
        return group_id in self._ids

    def remember(self, group_id: str, now_s: float) -> None:
        """Remember a group accepted at `now_s`, Unix seconds. Forgets ids that are too old or too
        many.

        A failed write to disk is logged; the group is still known in memory, and the node
        continues.
        """
        self._add(group_id, now_s)
        self._forget(now_s)
        if self._path is None:
            return
        with self.writes.trying("accepted", f"free space at {self._path.parent}; known in memory until the next start"):
            self._append(self._path, group_id, now_s)
            self._read_new_lines(self._path)
            self._shorten(self._path, now_s)

    def _add(self, group_id: str, at_s: float) -> None:
        self._ids[group_id] = at_s
        if len(self._ids) > self._capacity:
            self._ids.popitem(last=False)

    def _forget(self, now_s: float) -> None:
        while self._ids and next(iter(self._ids.values())) < now_s - self._keep_s:
            self._ids.popitem(last=False)

    def _append(self, path: Path, group_id: str, at_s: float) -> None:
        """Write one line. A leading line break ends a line that a killed process left
        incomplete.
        """
        line = f"\n{group_id} {int(at_s)}\n".encode()
        while True:
            with path.open("ab", buffering=0) as file:
                file.write(line)
                try:
                    replaced = os.fstat(file.fileno()).st_ino != path.stat().st_ino
                except FileNotFoundError:
                    replaced = True
            if not replaced:  # otherwise the file may have been rewritten without this line
                return

    def _shorten(self, path: Path, now_s: float) -> None:
        """Rewrite the file with the ids still needed if these are less than half. One process at a
        time; the others continue.
        """
        if self._lines <= 2 * len(self._ids) + _SPARE_LINES:
            return
        with path.with_suffix(".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return
            self._read_new_lines(path)
            self._forget(now_s)
            self._write_again(path)

    def _write_again(self, path: Path) -> None:
        draft = path.with_suffix(".new")
        with path.open("rb") as old:
            old.seek(self._read_bytes)
            with draft.open("wb") as new:
                new.write(f"#{uuid.uuid4().hex}\n".encode())
                new.writelines(f"{group_id} {int(at_s)}\n".encode() for group_id, at_s in self._ids.items())
                new.flush()
                disk.sync(new.fileno())
            draft.replace(path)
            late = old.read()  # appended by others since, if they opened the file before it was replaced
        if late:
            with path.open("ab", buffering=0) as new:
                new.write(late)

    def _read_new_lines(self, path: Path) -> None:
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return
        with file:
            stat = os.fstat(file.fileno())
            # Inode numbers are soon reused, so a rewritten file has a mark of its own.
            version = stat.st_ino, file.read(_MARK_BYTES)
            if version != self._version and (stat.st_ino != self._version[0] or self._read_bytes >= _MARK_BYTES):
                self._read_bytes = self._lines = 0
            self._version = version
            if stat.st_size < self._read_bytes:
                self._read_bytes = self._lines = 0
            for block, end in whole_lines(file, self._read_bytes):
                self._read_bytes = end
                self._take(block, stat.st_mtime)

    def _take(self, lines: bytes, written_s: float) -> None:
        for line in lines.decode(errors="replace").splitlines():
            found = _LINE.fullmatch(line)
            self._lines += bool(line)
            if found is not None and found[1] not in self._ids:
                self._add(found[1], float(found[2]) if found[2] else written_s)
