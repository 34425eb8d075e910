"""Fingerprints of a group's answers, kept without the text, and a measure of how much of one group
is found in another. Pure.

Answers are compared apart from case, spaces, accents, simple compatibility forms and invisible
characters. Two short answers are either equal or not. Of a long one the shingles are compared
(pieces of `SHINGLE` characters): it is found in another group if one answer there has most of its
shingles, whatever else that says. So a copy does not become something else by text that is added to
it, which a measure of resemblance (Jaccard) would let it. Shingles from all over a group do not
count together: nodes of one policy have many phrases in common, and each combines them anew.

Text that more than half of a group's different answers share is a typical phrase of its policy and
says nothing about who wrote it. It is left out on both sides.

The text is written by strangers. So every step takes time linear in the characters, and no
character expands to several: NFKC takes seconds for 16,384 combining marks and turns one character
into 18. What is kept of a group, and the time of a comparison, are bounded by the number of its
answers.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

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
    own: the shingles that are not common to the group, with the answer that each is of
        (`hash << 16 | answer`), sorted; all those with a hash below `own_below`.
    sketch: for each long answer, the least hashes of its shingles; `sketch_of` says which of the
        long answers each is of.
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
        """Its approximate memory use."""
        arrays = (self.own, self.sketch, self.sketch_of, self.own_chars)
        return _GROUP_BYTES + _DIGEST_BYTES * len(self.exact) + sum(each.nbytes for each in arrays)

    @property
    def evidence(self) -> int:
        """The evidence that an exact copy of it would give, in characters."""
        return int(self.own_chars.sum())

    def to_keep(self) -> Fingerprint:
        """As much of it as is remembered."""
        if len(self.own) <= _KEPT_OWN:
            return replace(self, own=self.own.copy())
        return replace(self, own=self.own[:_KEPT_OWN].copy(), own_below=int(self.own[_KEPT_OWN] >> _ANSWER_BITS))


@dataclass(frozen=True, slots=True)
class Print:
    """What is remembered of a group. `task`: dataset, question and item; `question`: the first two
    only. `is_row`: it is a row of a file, which is the same under every seed.
    """

    task: bytes
    question: bytes
    says: Fingerprint
    is_row: bool = False


class Printer:
    """Computes the fingerprints of texts with a salt, so that nobody can prepare texts against
    them.
    """

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        root = int.from_bytes(self.digest(b"multiplier")[:8], "little") | 1
        _folding()  # Takes a quarter of a second, so it is done at the start and not with the first message.
        self._powers = {length: np.uint64(pow(root, length, 2**64)) for length in (1, 2, 4)}

    def digest(self, content: bytes) -> bytes:
        """16 bytes that identify the content."""
        return hashlib.blake2b(content, digest_size=16, key=self._salt).digest()

    def fingerprint(self, answers: Sequence[str]) -> Fingerprint:
        """The fingerprint of one group's answers."""
        codes, ends = normalised(answers)
        pieces = np.split(codes, ends[:-1]) if len(answers) else []
        exact = [self.digest(piece.tobytes()) for piece in pieces]
        different = list(dict(zip(exact, pieces, strict=True)).values())
        hashes, of, common, own_chars = self._shingles(different)
        long = np.flatnonzero(own_chars >= LONG)[:_MOST_LONG]
        own_below = 2**32 if len(codes) <= _WHOLE_BELOW else _QUARTER
        kept = ~common & (hashes < own_below)
        own = np.sort(hashes[kept] << _ANSWER_BITS | of[kept].astype(np.uint64))
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
    """Whether all answers are equal, one for one, and more than half of them differ from each
    other, which hardly ever happens with two samples of one policy.
    """
    return one.exact == other.exact and 2 * len(set(one.exact)) > len(one.exact)


def evidence_of_copy(original: Fingerprint, copy: Fingerprint) -> int:
    """How many characters of the original's own are in those of its long answers that are found in
    `copy`; 0 if that is not most of them.
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
    hits = np.bincount(np.repeat(of, having) * width + answers, minlength=count * width).reshape(count, width).max(axis=1)
    tried = np.bincount(of, minlength=count)
    found = (tried >= _LEAST_LOOKED_FOR) & (hits >= FOUND * tried)
    return int(original.own_chars[found].sum()) if found.sum() >= COPIED * count else 0


def say_the_same(new: Fingerprint, old: Fingerprint) -> bool:
    """Whether one sender says the same in both: most answers of one are equal to the other's,
    however short, or most long ones are found. The old group may be hidden among as many other
    answers.
    """
    both = (Counter(new.exact) & Counter(old.exact)).total()
    enough = both >= SAME * len(new.exact) or (both >= SAME * len(old.exact) and 2 * len(old.exact) >= len(new.exact))
    return enough or evidence_of_copy(old, new) > 0
