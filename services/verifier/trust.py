"""Which key owns a node's name, and who is banned: the first key that used a name, remembered
across restarts (open), or the one in the roster.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from shared.atomic_files import replace_text
from shared.contracts.senders import Ban, BanList
from shared.identity.roster import RosterEntry, read_roster
from shared.plain_files import whole_lines
from shared.runtime.writes import Writes

MAX_NAMES = 20_000
"""Most names remembered. Beyond it the least important ones are forgotten, so that a newcomer
always finds room.
"""

IDLE_S = 30 * 86_400.0
"""A name without an accepted group for this long is free again.
"""

RENAME_AFTER_S = 3600.0
"""A key has one name at any time. It may take another name when its present one has had no accepted
group for this long.
"""

KEPT_GROUPS = 32
"""A name with at least this many accepted groups is forgotten only when no name with fewer is
left.
"""

_WRITTEN_EVERY_S = 3600.0
_NEVER_S = -_WRITTEN_EVERY_S
_FREED_AT_ONCE = 100


class Trust(Protocol):
    """Who may use a name. This does not check signatures; `now_s` is Unix time."""

    def may_use(self, name: str, public_key: str, now_s: float) -> bool:
        """Return whether `name` is free or belongs to this key, and the key has no other name."""
        ...

    def bind(self, name: str, public_key: str, now_s: float) -> bool:
        """Record an accepted group of this key: `name` is its name from now on. False if `may_use`
        is False.
        """
        ...

    def key_of(self, name: str) -> str | None:
        """The key that `name` belongs to."""
        ...


class RosterKeys:
    """Admits only the names and keys in the roster file. Raises RosterError if it cannot be
    used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._stamp()
        self._entries: dict[str, RosterEntry] = read_roster(path)

    def __len__(self) -> int:
        return len(self._entries)

    def may_use(self, name: str, public_key: str, now_s: float) -> bool:
        entry = self._entries.get(name)
        return entry is not None and entry.public_key == public_key

    def bind(self, name: str, public_key: str, now_s: float) -> bool:
        """Like `may_use`, because a roster assigns no names."""
        return self.may_use(name, public_key, now_s)

    def key_of(self, name: str) -> str | None:
        entry = self._entries.get(name)
        return entry.public_key if entry else None

    def reload(self) -> bool:
        """Read the file again if it has changed. Returns whether it had.

        Raises:
            RosterError: it is missing or invalid now; the entries read before stay in force.
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


@dataclass(slots=True)
class _Name:
    public_key: str
    seen_s: float
    groups: int
    written_s: float


class KnownKeys:
    """One name for each key and one key for each name, in a file that replicas on one machine
    share.

    A name is assigned with the first accepted group, never on arrival, because a signature alone
    costs nothing. It is free again after `idle_s` without an accepted group. When all `MAX_NAMES`
    are taken, names with few accepted groups that were unused for longest are forgotten, so that
    nobody can fill the list against newcomers or take an established node's name.
    """

    def __init__(self, path: Path, own: tuple[str, str], idle_s: float = IDLE_S) -> None:
        """`own` is this node's name and key: no other key gets that name, and it never expires."""
        self.writes = Writes("verifier")
        self._path = path
        self._file = NamesFile(path)
        self._own = own
        self._idle_s = idle_s
        self._names: dict[str, _Name] = {}
        self._name_of: dict[str, str] = {}
        self._take_over(self._file.read())

    def __len__(self) -> int:
        return len(self._names) + 1

    def may_use(self, name: str, public_key: str, now_s: float) -> bool:
        if name == self._own[0] or public_key == self._own[1]:
            return (name, public_key) == self._own
        known = self._names.get(name)
        if known is not None and known.public_key != public_key and now_s - known.seen_s <= self._idle_s:
            return False
        other = self._name_of.get(public_key, name)
        return other == name or now_s - self._names[other].seen_s > min(RENAME_AFTER_S, self._idle_s)

    def key_of(self, name: str) -> str | None:
        if name == self._own[0]:
            return self._own[1]
        known = self._names.get(name)
        return known.public_key if known else None

    def bind(self, name: str, public_key: str, now_s: float) -> bool:
        """Record an accepted group of this key under this name. False if the name belongs to
        another key, or the key has another name.

        A failed write to disk is logged; the name is still known in memory, and is written with a
        later group.
        """
        if self.key_of(name) != public_key:
            return self._bind_new(name, public_key, now_s)
        known = self._names.get(name)
        if known is not None:
            known.seen_s = max(known.seen_s, now_s)
            known.groups += 1
            if now_s - known.written_s >= _WRITTEN_EVERY_S or known.groups == KEPT_GROUPS:
                try:
                    with self._file.locked():
                        self._file.append(self._line(name))
                    known.written_s = now_s
                    self.writes.succeeded("names")
                except OSError as error:
                    known.written_s = _NEVER_S
                    self._say_unwritten(error)
        return True

    def _bind_new(self, name: str, public_key: str, now_s: float) -> bool:
        """Give a free name to a key, under the file's lock, so that no two replicas give it away.
        If the disk refuses the file, in memory only.
        """
        try:
            with self._file.locked():
                self._take_over(self._file.read())
                if not self._take(name, public_key, now_s):
                    return False
                self._file.append(self._line(name))
                self._names[name].written_s = now_s
                if self._file.lines > 2 * MAX_NAMES:
                    self._file.rewrite([self._line(each) for each in self._names])
            self.writes.succeeded("names")
        except OSError as error:
            self._say_unwritten(error)
            return self.key_of(name) == public_key or self._take(name, public_key, now_s)
        return True

    def _take(self, name: str, public_key: str, now_s: float) -> bool:
        """Record a first group in memory only. False if another key owns the name, or the key has
        another name.
        """
        if not self.may_use(name, public_key, now_s):
            return False
        self._set(NameLine(name, public_key, now_s, 1))
        self._names[name].written_s = _NEVER_S
        self._make_room()
        return True

    def _say_unwritten(self, error: OSError) -> None:
        self.writes.failed("names", f"free space at {self._path.parent}; known in memory until the next start", error)

    def _take_over(self, lines: list[NameLine]) -> None:
        for line in lines:
            if line.name == self._own[0] or line.public_key == self._own[1]:
                continue
            self._set(line)
        self._make_room()

    def _set(self, line: NameLine) -> None:
        """The newest line of a name and of a key counts, because it was written under the file's
        lock by a process that had read the earlier ones.
        """
        known = self._names.pop(line.name, None)
        if known is not None and self._name_of.get(known.public_key) == line.name:
            del self._name_of[known.public_key]
        if (other := self._name_of.get(line.public_key)) is not None:
            del self._names[other]
        groups, seen_s = line.groups, line.seen_s
        if known is not None and known.public_key == line.public_key:
            groups, seen_s = max(groups, known.groups), max(seen_s, known.seen_s)
        self._names[line.name] = _Name(line.public_key, seen_s, groups, line.seen_s)
        self._name_of[line.public_key] = line.name

    def _make_room(self) -> None:
        if len(self._names) < MAX_NAMES:
            return
        # The newest entry is last and is never forgotten here.
        by_worth = sorted(list(self._names)[:-1], key=self._worth)
        for name in by_worth[: len(self._names) - MAX_NAMES + min(_FREED_AT_ONCE, MAX_NAMES // 2)]:
            del self._name_of[self._names.pop(name).public_key]

    def _worth(self, name: str) -> tuple[bool, float]:
        known = self._names[name]
        return known.groups >= KEPT_GROUPS, known.seen_s

    def _line(self, name: str) -> NameLine:
        known = self._names[name]
        return NameLine(name, known.public_key, known.seen_s, known.groups)


_LINE = re.compile(r"([a-z0-9][a-z0-9-]{0,31}) (\S{1,64}) (\d{1,12}(?:\.\d{1,6})?) (\d{1,12})")


class NameLine(NamedTuple):
    """One line."""

    name: str
    public_key: str
    seen_s: float
    groups: int


class NamesFile:
    """The file of names and keys: lines `name key seen groups`, appended under a lock, so that
    replicas on one machine agree.

    `seen` is the Unix time of the newest accepted group when the line was written. Incomplete or
    invalid lines are skipped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._read_bytes = 0
        self.lines = 0
        """Number of lines read so far."""
        path.parent.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside the block no other process appends or rewrites. Raises OSError if the folder
        cannot be written.
        """
        descriptor = os.open(self._path.with_suffix(".lock"), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def read(self) -> list[NameLine]:
        """The complete lines that were not read before; all lines if another process has rewritten
        the file.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self._inode or stat.st_size < self._read_bytes:
                self._inode, self._read_bytes, self.lines = stat.st_ino, 0, 0
            found: list[NameLine] = []
            for block, end in whole_lines(file, self._read_bytes):
                self._read_bytes = end
                texts = block.decode(errors="replace").splitlines()
                self.lines += sum(map(bool, texts))
                found += [_parsed(match) for text in texts if (match := _LINE.fullmatch(text))]
        return found

    def append(self, line: NameLine) -> None:
        """Append a line; call it under the lock. Raises OSError if the disk refuses it."""
        text = f"\n{_text(line)}"  # ends a line that a process could not finish
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            written = os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
        if written < len(text):
            raise OSError(errno.ENOSPC, "part of a line was written", str(self._path))

    def rewrite(self, lines: Sequence[NameLine]) -> None:
        """Replace the file by these lines; call it under the lock."""
        replace_text(self._path, "".join(map(_text, lines)), mode=0o600, synced=True)
        stat = self._path.stat()
        self._inode, self._read_bytes, self.lines = stat.st_ino, stat.st_size, len(lines)


def _text(line: NameLine) -> str:
    return f"{line.name} {line.public_key} {line.seen_s:.0f} {line.groups}\n"


def _parsed(match: re.Match[str]) -> NameLine:
    name, public_key, seen_s, groups = match.groups()
    return NameLine(name, public_key, float(seen_s), int(groups))


class Bans:
    """The bans in force. A banned name bans the key it belongs to, and a banned key every name that
    it signs for, so that a banned node cannot return by changing either.
    """

    def __init__(self, trust: Trust) -> None:
        self._trust = trust
        self._bans: dict[str, Ban] = {}
        self._by_key: dict[str, Ban] = {}
        self._keys: dict[str, frozenset[str | None]] = {}
        self.unreadable = ""
        """Why the bans are unknown. Until a list can be read, every sender counts as banned."""

    def count(self, now_s: float) -> int:
        return sum(_in_force(ban, now_s) is not None for ban in self._bans.values())

    def replace(self, listed: BanList) -> None:
        self.unreadable = ""
        self._bans = {ban.sender: ban for ban in listed.bans}
        self.refresh()

    def refresh(self) -> None:
        """Look up again which keys the banned names belong to."""
        # The ban of the key stays even if its name expires or is given up.
        self._keys = {sender: self._keys.get(sender, frozenset()) | {self._trust.key_of(sender)} for sender in self._bans}
        self._by_key = {key: self._bans[sender] for sender, keys in self._keys.items() for key in keys if key is not None}

    def ban_for_name(self, name: str | None, now_s: float) -> Ban | None:
        return _in_force(self._bans.get(name or ""), now_s)

    def ban_for_key(self, public_key: str, now_s: float) -> Ban | None:
        return _in_force(self._bans.get(public_key), now_s) or _in_force(self._by_key.get(public_key), now_s)


def _in_force(ban: Ban | None, now_s: float) -> Ban | None:
    return ban if ban is not None and (ban.until is None or ban.until > now_s) else None
