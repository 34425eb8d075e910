"""Recognise a group that was seen before: the same message (`ReplayMemory`), or a group that
repeats an earlier one (`CopyMemory`), by fingerprints of its answers.
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
import time
import unicodedata
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from shared.atomic_files import replace_text
from shared.contracts.messages import RolloutGroup, Task
from shared.plain_files import whole_lines
from shared.runtime.writes import Writes
from shared.tasks.file_rows import is_file_name

# Fingerprints of a group's answers, kept without the text, and a measure of how much of one group
# is found in another. Pure.
#
# Answers are compared apart from case, spaces, accents, simple compatibility forms and invisible
# characters. Two short answers are either equal or not. Of a long one the shingles are compared
# (pieces of `SHINGLE` characters): it is found in another group if one answer there has most of
# its shingles, whatever else that says. So a copy does not become something else by text that is
# added to it, which a measure of resemblance (Jaccard) would let it. Shingles from all over a
# group do not count together: nodes of one policy have many phrases in common, and each combines
# them anew.
#
# Text that more than half of a group's different answers share is a typical phrase of its policy
# and says nothing about who wrote it, so it is not looked for elsewhere. Where others' text is
# looked for, it counts as part of each answer: otherwise a copy could hide what it repeats by
# putting it into most of its answers.
#
# The text is written by strangers. So every step takes time linear in the characters, and no
# character expands to several: NFKC takes seconds for 16,384 combining marks and turns one
# character into 18. What is kept of a group, and the time of a comparison, are bounded by the
# number of its answers.

SHINGLE = 12
"""Characters, about two words: shorter pieces occur in every text about the same subject."""
FOUND = 0.7
"""An answer is found in one that has this part of its shingles."""
COPIED = 0.75
"""A group's long answers are copied if this part of them is found."""
SAME = 0.75
"""Two groups of one sender say the same if this part of their answers is equal."""

LONG = 30
"""An answer is evidence from this many characters of its own on. Shorter ones coincide by chance,
however many there are.
"""
SUSPECT = 48
"""A group is refused if the answers found in it have at least this many characters of their own
together.
"""
TELLING = 96
"""The same, but the number from which coincidence is excluded and the sender is blamed."""

_SKETCH = 256
"""Shingles kept of a group to look for elsewhere, shared out among its long answers."""
_LEAST_SKETCH, _MOST_LONG = 8, 64
_KEPT_OWN = 256
"""Shingles kept of a group to look for others' in it."""
_WHOLE_BELOW = 16_384
_QUARTER = 2**30
"""Of a group with more characters than `_WHOLE_BELOW`, only the shingles with a hash below this are
looked at.
"""
_LEAST_LOOKED_FOR = 4

_GROUP_BYTES = 900
_DIGEST_BYTES = 50
_TABLE = 0x20000
_DROPPED = frozenset({"Cf", "Cc", "Mn", "Me", "Zs", "Zl", "Zp"})
_MOST_SLOTS_BITS = 22
_ANSWER_BITS = np.uint64(16)
_ANSWER = np.uint64(2**16 - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprint:
    """A group's answers.

    exact: a digest of each answer, sorted.
    own: the shingles, with the answer that each is of (`hash << 16 | answer`; `_ANSWER` stands for
        all answers if the shingle is common to the group), sorted; all those with a hash below
        `own_below`.
    sketch: for each long answer, the least hashes of its shingles that are not common to the group;
        `sketch_of` says which of the long answers each is of.
    own_chars: for each long answer, how many of its characters are not common to the group.
    """

    exact: tuple[bytes, ...]
    own: NDArray[np.uint64]
    own_below: int
    sketch: NDArray[np.uint64]
    sketch_of: NDArray[np.uint16]
    own_chars: NDArray[np.intp]

    @property
    def size_bytes(self) -> int:
        arrays = (self.own, self.sketch, self.sketch_of, self.own_chars)
        return _GROUP_BYTES + _DIGEST_BYTES * len(self.exact) + sum(each.nbytes for each in arrays)

    @property
    def evidence(self) -> int:
        return int(self.own_chars.sum())

    def to_keep(self) -> Fingerprint:
        """As much of it as is remembered."""
        if len(self.own) <= _KEPT_OWN:
            return replace(self, own=self.own.copy())
        return replace(self, own=self.own[:_KEPT_OWN].copy(), own_below=int(self.own[_KEPT_OWN] >> _ANSWER_BITS))


@dataclass(frozen=True, slots=True)
class GroupPrint:
    """Memory of a group. `task`: dataset, key and item; `question`: the first two only.
    `is_row`: it is a row of a file, which is the same under every seed.
    """

    task: bytes
    question: bytes
    says: Fingerprint
    is_row: bool = False


class Fingerprinter:
    """Computes the fingerprints of texts with a salt, so that nobody can prepare texts against
    them.
    """

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        root = int.from_bytes(self.digest(b"multiplier")[:8], "little") | 1
        _folding()  # Takes a quarter of a second, so it is done at the start and not with the first message.
        self._powers = {length: np.uint64(pow(root, length, 2**64)) for length in (1, 2, 4)}

    def digest(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=16, key=self._salt).digest()

    def fingerprint(self, answers: Sequence[str]) -> Fingerprint:
        codes, ends = normalised(answers)
        pieces = np.split(codes, ends[:-1]) if len(answers) else []
        exact = [self.digest(piece.tobytes()) for piece in pieces]
        different = list(dict(zip(exact, pieces, strict=True)).values())
        hashes, of, common, own_chars = self._shingles(different)
        long = np.flatnonzero(own_chars >= LONG)[:_MOST_LONG]
        own_below = 2**32 if len(codes) <= _WHOLE_BELOW else _QUARTER
        kept = hashes < own_below
        own = np.sort(hashes[kept] << _ANSWER_BITS | np.where(common, _ANSWER, of.astype(np.uint64))[kept])
        own = own[np.concatenate([np.ones(min(1, len(own)), np.bool_), own[1:] != own[:-1]])]
        whose = (own & _ANSWER).astype(np.uint16)
        by_answer = np.argsort(whose, kind="stable")
        begins, stops = np.searchsorted(whose[by_answer], long), np.searchsorted(whose[by_answer], long, side="right")
        each = max(_LEAST_SKETCH, _SKETCH // max(1, len(long)))
        parts = [by_answer[begin : min(begin + each, stop)] for begin, stop in zip(begins, stops, strict=True)]
        return Fingerprint(
            exact=tuple(sorted(exact)),
            own=own,
            own_below=own_below,
            sketch=own[np.concatenate([np.zeros(0, np.intp), *parts])] >> _ANSWER_BITS,
            sketch_of=np.repeat(np.arange(len(parts), dtype=np.uint16), [len(part) for part in parts]),
            own_chars=own_chars[long],
        )

    def _shingles(
        self, texts: Sequence[NDArray[np.uint32]]
    ) -> tuple[NDArray[np.uint64], NDArray[np.intp], NDArray[np.bool_], NDArray[np.intp]]:
        """Of all texts together: the shingles' hashes, which text each is of, whether more than
        half of the texts have it, and how many characters of each text are in no such shingle.
        """
        lengths = [len(text) for text in texts]
        of = np.repeat(np.arange(len(texts)), lengths)
        count = len(of) - SHINGLE + 1
        if count < 1:
            return np.zeros(0, np.uint64), np.zeros(0, np.intp), np.zeros(0, np.bool_), np.array(lengths, np.intp)
        within = of[:count] == of[SHINGLE - 1 :]
        mixed = self._mixed(np.concatenate(texts).astype(np.uint64))
        # A table of counts by the hash's first bits: adding one under all of a text's at once
        # counts a shingle once for each text that has it.
        bits = min(_MOST_SLOTS_BITS, (64 * count).bit_length())
        slots = (mixed >> np.uint64(64 - bits)).astype(np.intp)
        having = np.zeros(1 << bits, np.uint16)
        begin = 0
        for length in lengths:
            having[slots[begin : begin + max(0, length - SHINGLE + 1)]] += 1
            begin += length
        common = within & (2 * having[slots] > len(texts))
        # Each common shingle covers SHINGLE characters.
        steps = np.zeros(len(of) + 1, np.int32)
        steps[:count] += common
        steps[SHINGLE : SHINGLE + count] -= common
        covered = np.cumsum(steps[:-1]) > 0
        own_chars = np.bincount(of[~covered], minlength=len(texts))
        return (mixed & np.uint64(2**32 - 1))[within], of[:count][within], common[within], own_chars

    def _mixed(self, codes: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """A hash for each piece of `SHINGLE` characters: polynomials of 1, 2, 4 and 8, and 8 and 4
        together.
        """
        powers, of = self._powers, {1: codes}
        for length in (1, 2, 4):
            half = of[length]
            of[2 * length] = half[:-length] * powers[length] + half[length:]
        count = len(codes) - SHINGLE + 1
        mixed = of[8][:count] * powers[4] + of[4][8 : 8 + count]
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(32)
        return mixed


def normalised(texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.intp]]:
    """The texts' code points one after the other, without what can be varied without changing the
    meaning, and where each text ends. Each character gives at most one.
    """
    codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    folded = _folding()[np.minimum(codes, _TABLE)]
    # Beyond the table, tags and variation selectors are invisible; everything else stays unchanged.
    folded = np.where((codes >= _TABLE) & (codes >> 12 != 0xE0), codes, folded)
    kept = folded != 0
    until = np.concatenate([np.zeros(1, np.intp), np.cumsum(kept)])
    return folded[kept], until[np.cumsum([len(text) for text in texts], dtype=np.intp)]


@lru_cache(maxsize=1)
def _folding() -> NDArray[np.uint32]:
    """Table from code point to code point; 0: dropped. Its last entry is 0."""
    table = np.array([_folded(chr(code)) for code in range(_TABLE)] + [0], dtype=np.uint32)
    return np.asarray(table[np.minimum(table, _TABLE)], dtype=np.uint32)


def _folded(char: str) -> int:
    if char.isspace() or unicodedata.category(char) in _DROPPED:
        return 0
    plain = "".join(each for each in unicodedata.normalize("NFKD", char) if unicodedata.category(each) not in _DROPPED).casefold()
    return ord(plain) if len(plain) == 1 else ord(char)


def equal(one: Fingerprint, other: Fingerprint) -> bool:
    """Return whether all answers are equal, one for one, and more than half of them differ from
    each other, which hardly ever happens with two samples of one policy.
    """
    return one.exact == other.exact and 2 * len(set(one.exact)) > len(one.exact)


def evidence_of_copy(original: Fingerprint, copy: Fingerprint) -> int:
    """Return how many characters of the original's own are in those of its long answers that are
    found in `copy`; 0 if that is not most of them.
    """
    count = len(original.own_chars)
    if not count or not len(copy.own):
        return 0
    looked_for = original.sketch < copy.own_below
    sketch, of = original.sketch[looked_for], original.sketch_of[looked_for].astype(np.intp)
    begins = np.searchsorted(copy.own, sketch << _ANSWER_BITS)
    having = np.searchsorted(copy.own, sketch << _ANSWER_BITS | _ANSWER, side="right") - begins
    # All answers of the copy that have one of these shingles, one after the other.
    places = np.arange(having.sum()) + np.repeat(begins - (np.cumsum(having) - having), having)
    answers = (copy.own[places] & _ANSWER).astype(np.intp)
    width = len(copy.exact)
    answers = np.minimum(answers, width)
    hits = np.bincount(np.repeat(of, having) * (width + 1) + answers, minlength=count * (width + 1)).reshape(count, width + 1)
    in_one_answer = hits[:, :width].max(axis=1) + hits[:, width]
    tried = np.bincount(of, minlength=count)
    found = (tried >= _LEAST_LOOKED_FOR) & (in_one_answer >= FOUND * tried)
    return int(original.own_chars[found].sum()) if found.sum() >= COPIED * count else 0


def equal_answers(new: Fingerprint, old: Fingerprint) -> bool:
    """Return whether one sender says the same in both: most answers of one are equal to the
    other's, however short, or most long ones are found. The old group may be hidden among as many
    other answers.
    """
    both = (Counter(new.exact) & Counter(old.exact)).total()
    enough = both >= SAME * len(new.exact) or (both >= SAME * len(old.exact) and 2 * len(old.exact) >= len(new.exact))
    return enough or evidence_of_copy(old, new) > 0


GROUPS_OF_A_TASK = 2
"""Groups that one sender may send of a task. Normally there is one, but a node that died while
sampling draws the task again.
"""

GROUPS_OF_A_ROW = 16
"""Groups that one sender may send of a row of a file within `REMEMBERED_S`, under whatever
references; at most `GROUPS_OF_A_TASK` of them with the same answers.
"""

REMEMBERED_S = 3600.0
"""Limited, because a node that starts over repeats its task draws from the first one, and must not
count as a copy of itself for ever.
"""

MAX_GROUPS = 16_384
MAX_BYTES = 64 * 2**20
_PER_TASK = 16
_PER_QUESTION = 16
"""Number of groups with distinctive text remembered per question, under any reference."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """`kind`: whether the earlier group is local, of the same row of a file under another
    reference, or of another node. `telling`: whether the sender is to be blamed. `of`: whose group
    came first.
    """

    kind: Literal["repeated", "row", "copied"]
    telling: bool
    of: str
    same_answers: bool = False
    """Of a row: whether its groups with these answers are what is too many."""


@dataclass(slots=True, eq=False)
class _Seen:
    public_key: str
    seq: int
    stored_at_s: float
    at_s: float
    made: GroupPrint


class CopyMemory:
    """The recently accepted groups, and this node's local ones."""

    def __init__(self, salt: bytes = b"") -> None:
        """`salt` keys the hashes, so that nobody can prepare texts against them; random if
        empty.
        """
        self._printer = Fingerprinter(salt or secrets.token_bytes(16))
        self._tasks: OrderedDict[bytes, list[_Seen]] = OrderedDict()
        self._questions: dict[bytes, list[_Seen]] = {}
        self._rows: dict[tuple[bytes, str], list[_Seen]] = {}
        self._groups = 0
        self._size_bytes = 0

    def __len__(self) -> int:
        return self._groups

    def fingerprint_of(self, group: RolloutGroup) -> GroupPrint:
        task, question = self._ids(group.task)
        says = self.fingerprint([completion.text for completion in group.completions])
        return GroupPrint(task, question, says, is_file_name(group.task.ref.dataset))

    def fingerprint(self, answers: Sequence[str]) -> Fingerprint:
        return self._printer.fingerprint(answers)

    def look(
        self, made: GroupPrint, public_key: str, seq: int, now_s: float, stored_at_s: float = 0.0
    ) -> tuple[Likeness | None, list[str]]:
        """Which earlier group this one is a copy of, if any, and which keys have copied *it*: their
        groups were examined first but are later in the stream, however late this one is examined.

        seq, stored_at_s: position and Unix time in the swarm's stream, which only the server
        assigns; 0 for the node's local groups, which nothing precedes. If the two disagree (the
        stream was created anew), nobody is blamed.
        """
        new = _Seen(public_key, seq, stored_at_s, now_s, made)
        found, copiers = self._same_task(new)
        return found or self._same_question(new) or self._same_row(new), [] if found else copiers

    def _same_task(self, new: _Seen) -> tuple[Likeness | None, list[str]]:
        """The earlier group of the task that `new` resembles, and the keys that have copied `new`.
        All earlier groups are compared, not just up to the first match, because several keys may
        have copied this one; only a repetition by the same key settles it at once. Also forgets
        expired groups.
        """
        made, public_key, now_s = new.made, new.public_key, new.at_s
        groups = self._tasks.get(made.task)
        if groups is None:
            return None, []
        self._tasks.move_to_end(made.task)
        for seen in [seen for seen in groups if now_s - seen.at_s > REMEMBERED_S]:
            groups.remove(seen)
            self._forget(seen)
        if not groups:
            del self._tasks[made.task]
            return None, []
        copiers: list[str] = []
        first: Likeness | None = None
        for seen in groups:
            if seen.public_key == public_key:
                if equal_answers(made.says, seen.made.says):
                    return Likeness("repeated", True, public_key), []
            elif _precedes(new, seen):
                if evidence_of_copy(made.says, seen.made.says) >= TELLING:
                    copiers.append(seen.public_key)
            elif first is None:
                evidence = evidence_of_copy(seen.made.says, made.says)
                if evidence >= SUSPECT or equal(made.says, seen.made.says):
                    first = Likeness("copied", evidence >= TELLING and not _may_precede(new, seen), seen.public_key)
        own = sum(seen.public_key == public_key for seen in groups)
        if first is None and own >= GROUPS_OF_A_TASK:
            first = Likeness("repeated", False, public_key)
        return first, copiers

    def _same_question(self, new: _Seen) -> Likeness | None:
        made = new.made
        for seen in self._questions.get(made.question, ()):
            if seen.made.task == made.task or new.at_s - seen.at_s > REMEMBERED_S or _precedes(new, seen):
                continue
            if evidence_of_copy(seen.made.says, made.says) >= TELLING:
                return Likeness("copied", False, seen.public_key)
        return None

    def _same_row(self, new: _Seen) -> Likeness | None:
        sent = [seen for seen in self._rows.get(_row(new), ()) if new.at_s - seen.at_s <= REMEMBERED_S]
        alike = sum(equal_answers(new.made.says, seen.made.says) for seen in sent)
        if alike < GROUPS_OF_A_TASK and len(sent) < GROUPS_OF_A_ROW:
            return None
        return Likeness("row", False, new.public_key, same_answers=alike >= GROUPS_OF_A_TASK)

    def remember(self, made: GroupPrint, public_key: str, seq: int, now_s: float, stored_at_s: float = 0.0) -> None:
        """Remember an accepted group or a local one."""
        groups = self._tasks.setdefault(made.task, [])
        self._tasks.move_to_end(made.task)
        seen = _Seen(public_key, seq, stored_at_s, now_s, replace(made, says=made.says.to_keep()))
        groups.append(seen)
        self._groups += 1
        self._size_bytes += seen.made.says.size_bytes
        if made.says.evidence >= TELLING:
            alike = self._questions.setdefault(made.question, [])
            alike.append(seen)
            del alike[:-_PER_QUESTION]
        if made.is_row:
            sent = self._rows.setdefault(_row(seen), [])
            sent.append(seen)
            del sent[:-GROUPS_OF_A_ROW]
        if len(groups) > _PER_TASK:
            self._forget(groups.pop(0))
        while self._groups > MAX_GROUPS or self._size_bytes > MAX_BYTES:
            _, oldest = self._tasks.popitem(last=False)
            for each in oldest:
                self._forget(each)

    def _forget(self, seen: _Seen) -> None:
        self._groups -= 1
        self._size_bytes -= seen.made.says.size_bytes
        _leave(self._questions, seen.made.question, seen)
        _leave(self._rows, _row(seen), seen)

    def _ids(self, task: Task) -> tuple[bytes, bytes]:
        question = f"{task.ref.dataset}\x00{task.key}".encode("utf-8", "surrogatepass")
        item = f"{task.ref.seed + task.ref.index}\x00".encode()
        return self._printer.digest(item + question), self._printer.digest(question)


def row_limit(*, same_answers: bool) -> str:
    """Say what a refused group of a row of a file has exceeded, and what to do."""
    count, which = (GROUPS_OF_A_TASK, " with these answers") if same_answers else (GROUPS_OF_A_ROW, "")
    return (
        f"{count} groups of this row of a file{which} were accepted from this sender within {REMEMBERED_S / 60:.0f} minutes, and "
        "more are not taken. That is usual with a file of few rows, and no reason for a ban: more rows help"
    )


K = TypeVar("K")


def _leave(lists: dict[K, list[_Seen]], key: K, seen: _Seen) -> None:
    """Remove a group from one of these lists, and the list itself with its last group."""
    kept = lists.get(key, [])
    if seen in kept:
        kept.remove(seen)
        if not kept:
            del lists[key]


def _row(seen: _Seen) -> tuple[bytes, str]:
    return seen.made.question, seen.public_key


def _precedes(new: _Seen, seen: _Seen) -> bool:
    """Return whether `new` was in the stream before `seen`. A stream that was created anew counts
    from 1 again, but its clock does not.
    """
    return new.seq < seen.seq and new.stored_at_s <= seen.stored_at_s


def _may_precede(new: _Seen, seen: _Seen) -> bool:
    return new.seq < seen.seq or new.stored_at_s < seen.stored_at_s


_LINE = re.compile(r"([0-9a-f]{64}) ([0-9]{1,11})")
"""An id and when it was accepted, in Unix seconds."""
_SPARE_LINES = 1024
"""A file with fewer lines is not worth rewriting."""


class ReplayMemory:
    """The ids of accepted groups, so that none counts twice, even after a restart: the last
    `capacity`, none for longer than `keep_s`, after which their age alone refuses them.

    A process appends to a file of its own, and starts with those of all replicas in the folder;
    what these accept later, it learns from the stream of scored groups
    (`services.verifier.foreign_groups.ForeignStore`). A file that is mostly no longer needed is
    replaced in one step. A process may die at any instant: a partial last line loses that line
    only.
    """

    def __init__(
        self,
        capacity: int,
        path: Path | None = None,
        others: Iterable[Path] = (),
        *,
        keep_s: float = math.inf,
        now_s: float | None = None,
    ) -> None:
        """`path` None keeps the memory in this process only. `others`: files of other replicas;
        one whose ids are all too old is deleted. `now_s` is the time of loading in Unix seconds;
        None: the clock's.
        """
        self.writes = Writes("verifier")
        self._capacity = capacity
        self._path = path
        self._keep_s = keep_s
        self._ids: OrderedDict[str, float] = OrderedDict()
        self._lines = 0
        if path is None:
            return
        now_s = time.time() if now_s is None else now_s
        path.parent.mkdir(parents=True, exist_ok=True)
        for other in others:
            with suppress(FileNotFoundError):  # another replica that starts now has deleted it
                if other != path and self._read(other) and other.stat().st_mtime < now_s - keep_s:
                    other.unlink()
        self._lines = self._read(path)
        self._ids = OrderedDict(sorted(self._ids.items(), key=lambda each: each[1])[-capacity:])
        self._forget(now_s)
        self._shorten(path)

    def __len__(self) -> int:
        return len(self._ids)

    def contains(self, group_id: str) -> bool:
        return group_id in self._ids

    def remember(self, group_id: str, now_s: float) -> None:
        """Remember a group accepted at `now_s`, Unix seconds. Forgets ids that are too old or too
        many.

        A failed write to disk is logged; the group is still known in memory, and the node
        continues.
        """
        self._ids[group_id] = now_s
        if len(self._ids) > self._capacity:
            self._ids.popitem(last=False)
        self._forget(now_s)
        if self._path is None:
            return
        with self.writes.trying("accepted", f"free space at {self._path.parent}; known in memory until the next start"):
            self._append(self._path, group_id, now_s)
            self._shorten(self._path)

    def _forget(self, now_s: float) -> None:
        while self._ids and next(iter(self._ids.values())) < now_s - self._keep_s:
            self._ids.popitem(last=False)

    def _append(self, path: Path, group_id: str, at_s: float) -> None:
        """Write one line. A leading line break ends a line that a killed process left
        incomplete.
        """
        with path.open("ab", buffering=0) as file:
            file.write(f"\n{group_id} {int(at_s)}\n".encode())
        self._lines += 1

    def _shorten(self, path: Path) -> None:
        """Rewrite the file with the ids still needed if these are less than half."""
        if self._lines > 2 * len(self._ids) + _SPARE_LINES:
            replace_text(path, "".join(f"{group_id} {int(at_s)}\n" for group_id, at_s in self._ids.items()), synced=True)
            self._lines = len(self._ids)

    def _read(self, path: Path) -> int:
        """Take in a file's ids. Returns how many lines it has."""
        lines = 0
        with suppress(FileNotFoundError), path.open("rb") as file:
            for block, _ in whole_lines(file, 0):
                for line in block.decode(errors="replace").splitlines():
                    found = _LINE.fullmatch(line)
                    lines += bool(line)
                    if found is not None:
                        self._ids[found[1]] = max(float(found[2]), self._ids.get(found[1], 0.0))
        return lines
