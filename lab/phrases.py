"""Finds the fixed phrases of a task's questions from examples; each becomes one token of an
experiment's tokenizer.

Reasoning-gym's questions are long templates around a few numbers. Encoding a template as one token
instead of eighty makes an experiment several times faster and loses nothing: what varies between
questions is still spelled out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

_WORD = re.compile(r"\S+\s*")
_VARIABLE = re.compile(r"[0-9]|(?<![A-Za-z])[A-Z](?![A-Za-z])|[+\-<>\[\]]{2}")
"""Words that differ between questions: numbers, single capital letters, sequences of signs."""
_LONG_WORD = 6
_LEAST_PART = 0.03


def fixed_phrases(questions: Sequence[str]) -> list[str]:
    """Runs of words, or long single words, that recur in at least 3 % of the questions of one
    dataset, longest first.

    A run breaks at a word that varies, or where what follows a word is hardly ever the same.
    Deterministic.
    """
    split = [_WORD.findall(question) for question in questions]
    pairs: Counter[tuple[str, str]] = Counter()
    for words in split:
        pairs.update(set(zip(words, words[1:], strict=False)))
    enough = max(2, int(_LEAST_PART * len(questions)))
    runs: Counter[str] = Counter()
    for words in split:
        runs.update(set(_runs(words, pairs, enough)))
    return sorted((run for run, count in runs.items() if count >= enough), key=lambda run: (-len(run), run))


def _runs(words: Sequence[str], pairs: Counter[tuple[str, str]], enough: int) -> Iterable[str]:
    run: list[str] = []
    for word in words:
        fixed = not _VARIABLE.search(word)
        if run and (not fixed or pairs[(run[-1], word)] < enough):
            yield from _phrase(run)
            run = []
        if fixed:
            run.append(word)
    yield from _phrase(run)


def _phrase(run: Sequence[str]) -> Iterable[str]:
    text = "".join(run)
    if len(run) > 1 or len(text) >= _LONG_WORD:
        yield text
