"""Fingerprints of a group's answers, kept without the text, and a measure of how alike two groups
are. Pure.

Two answers are alike if they are equal apart from case, spaces, accents, simple compatibility forms
and invisible characters, or if their texts, without their groups' common text, have a Jaccard index
of about `ALIKE` or more over sets of 5-character shingles (one-permutation MinHash, Li et al. 2012,
with 64 bins of 8 bits). Text that more than half of a group's different answers share is a typical
phrase of its policy and says nothing about who wrote it: those bins stay empty.

This runs in the verifier's event loop on text that strangers write. So every step takes time linear
in the characters, and no character expands to several: NFKC takes seconds for 16,384 combining
marks and turns one character into 18.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

SHINGLE = 5
BINS = 64
ALIKE = 0.7
COPIED = 0.75

LONG = 24
"""An answer's own text counts as evidence from this many filled bins on, which is about thirty
characters. Shorter answers coincide by chance, however many there are.
"""

SUSPECT = 48
"""A group is refused if its different, long, matching answers have at least this many filled bins
together.
"""

TELLING = 96
"""The same, but the number from which coincidence is excluded and the sender is blamed: about a
hundred characters of text.
"""

_GROUP_BYTES = 800
_TEXT_BYTES = BINS + 90
_TABLE = 0x20000
_DROPPED = frozenset({"Cf", "Cc", "Mn", "Me", "Zs", "Zl", "Zp"})
_KEPT_HASHES = 2048


@dataclass(frozen=True, slots=True)
class Text:
    """An answer. `bins`: 1 + (least hash mod 255), or 0 if the bin is empty or holds text that is
    common to the group.
    """

    exact: bytes
    bins: bytes

    @property
    def filled(self) -> int:
        """Number of bins that hold text not common to the group."""
        return BINS - self.bins.count(0)


@dataclass(frozen=True, slots=True)
class Print:
    """What is remembered of a group. `task`: dataset, question and item; `question`: the first two
    only. `is_row`: it is a row of a file, which is the same under every seed.
    """

    task: bytes
    question: bytes
    texts: tuple[Text, ...]
    is_row: bool = False

    @property
    def size_bytes(self) -> int:
        """Its approximate memory use."""
        return _GROUP_BYTES + _TEXT_BYTES * len(self.texts)

    @property
    def evidence(self) -> int:
        """The evidence that an exact copy of it would give."""
        return _evidence(self.texts)


@dataclass(frozen=True, slots=True)
class Match:
    """Most answers of one group are like another group's. `whole`: they are equal, one for one, and
    more than half of them differ from each other, which hardly ever happens with two samples of one
    policy. `evidence`: filled bins of the long ones.
    """

    whole: bool
    evidence: int


class Printer:
    """Computes the fingerprints of texts with a salt, so that nobody can prepare texts against
    them.
    """

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        root = int.from_bytes(self.digest(b"multiplier")[:8], "little") | 1
        _folding()  # Takes a quarter of a second, so it is done at the start and not with the first message.
        self._powers = [np.uint64(pow(root, power + 1, 2**64)) for power in range(SHINGLE)]

    def texts(self, answers: Sequence[str]) -> tuple[Text, ...]:
        """Prints of one group's answers, in order."""
        plain = [normalised(answer) for answer in answers]
        exact = [self.digest(codes.tobytes()) for codes in plain]
        different = dict(zip(exact, plain, strict=True))
        least = np.stack([self._least(codes) for codes in different.values()]) if different else np.zeros((0, BINS), np.uint64)
        bins = dict(zip(different, _without_common(least), strict=True))
        return tuple(Text(each, bins[each]) for each in exact)

    def digest(self, content: bytes) -> bytes:
        """16 bytes that identify the content."""
        return hashlib.blake2b(content, digest_size=16, key=self._salt).digest()

    def _least(self, codes: NDArray[np.uint32]) -> NDArray[np.uint64]:
        """The smallest hash per bin; all ones in an empty bin."""
        least = np.full(BINS, np.iinfo(np.uint64).max, dtype=np.uint64)
        count = len(codes) - SHINGLE + 1
        if count < 1:
            return least
        wide = codes.astype(np.uint64)
        mixed = np.zeros(count, dtype=np.uint64)
        for place, power in enumerate(self._powers):
            mixed += wide[place : place + count] * power
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(32)
        rank = mixed & np.uint64(2**58 - 1)
        if count > 2 * _KEPT_HASHES:
            # The minima of 64 bins are among the smallest of all hashes, except for a text that
            # keeps repeating itself.
            low = rank < np.uint64(2**58 * _KEPT_HASHES // count)
            if np.count_nonzero(low) > _KEPT_HASHES // 2:
                mixed, rank = mixed[low], rank[low]
        np.minimum.at(least, (mixed >> np.uint64(58)).astype(np.intp), rank)
        return least


def normalised(text: str) -> NDArray[np.uint32]:
    """The text's code points without what can be varied without changing the meaning; each
    character gives at most one.
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    folded = _folding()[np.minimum(codes, _TABLE)]
    # Beyond the table, tags and variation selectors are invisible; everything else stays unchanged.
    folded = np.where((codes >= _TABLE) & (codes >> 12 != 0xE0), codes, folded)
    return np.asarray(folded[folded != 0], dtype=np.uint32)


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


def compare(new: Sequence[Text], old: Sequence[Text]) -> Match | None:
    """None if `new` is not mostly the same as `old`."""
    left = Counter(text.exact for text in old)
    matched: list[Text] = []
    others: list[Text] = []
    for text in new:
        if left[text.exact] > 0:
            left[text.exact] -= 1
            matched.append(text)
        else:
            others.append(text)
    unmatched = [text for text in old if _take(left, text.exact)]
    whole = not others and not unmatched and 2 * len({text.exact for text in new}) > len(new)
    matched += _nearly_equal(others, unmatched)
    # A group that is mostly copied is a copy. So is one that hides a whole copied group among as
    # many other answers.
    if len(matched) < COPIED * len(new) and (len(matched) < COPIED * len(old) or 2 * len(old) < len(new)):
        return None
    return Match(whole, _evidence(matched))


def _evidence(texts: Sequence[Text]) -> int:
    return sum(text.filled for text in {text.exact: text for text in texts}.values() if text.filled >= LONG)


def _without_common(least: NDArray[np.uint64]) -> list[bytes]:
    """Bins of different answers, shape (answers, BINS), without the values that more than half of
    them have.
    """
    ordered = np.sort(least, axis=0)
    # A value that more than half have is in the middle of the sorted column.
    middle = ordered[len(least) // 2] if len(least) else np.zeros(BINS, np.uint64)
    common = 2 * (least == middle).sum(axis=0) > len(least)
    empty = (least == np.iinfo(np.uint64).max) | (common & (least == middle))
    return [row.tobytes() for row in np.where(empty, 0, 1 + least % np.uint64(255)).astype(np.uint8)]


def _take(left: Counter[bytes], exact: bytes) -> bool:
    if left[exact] <= 0:
        return False
    left[exact] -= 1
    return True


def _nearly_equal(new: Sequence[Text], old: Sequence[Text]) -> list[Text]:
    """The answers in `new` that have a partner of their own in `old` with nearly the same
    shingles.
    """
    if not new or not old:
        return []
    alike = _jaccard(_matrix(new), _matrix(old)) >= ALIKE
    free = np.ones(len(old), dtype=bool)
    found: list[Text] = []
    for place, text in enumerate(new):
        partners = np.flatnonzero(alike[place] & free)
        if len(partners):
            free[partners[0]] = False
            found.append(text)
    return found


def _matrix(texts: Sequence[Text]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(text.bins for text in texts), dtype=np.uint8).reshape(len(texts), BINS)


def _jaccard(new: NDArray[np.uint8], old: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Estimates for all pairs, shape (new, old), from the bins that either fills; 0 if neither
    fills any.
    """
    left, right = new[:, None, :], old[None, :, :]
    filled = ((left > 0) | (right > 0)).sum(axis=2)
    equal = ((left == right) & (left > 0)).sum(axis=2)
    return np.asarray(equal / np.maximum(filled, 1), dtype=np.float64)
