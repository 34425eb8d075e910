"""Checks that an answer which consists of words or text is right as a whole."""

from __future__ import annotations

import re
from typing import Any

from shared.tasks.strict_json import read_json, same_json

MAX_CODEIO_WORK = 4_000_000
"""Largest product of the lengths of answer and reference in characters; more would keep the edit
distance (pure Python) busy for seconds.
"""
MAX_CODEIO_NODES = 60
"""Largest number of values in each of the two documents. The tree distance compares pairs of
subtrees, so more would also take seconds.
"""

_LADDER = re.compile(r"[A-Za-z]{1,40}(?:\s*,\s*[A-Za-z]{1,40})*")


def same_text(answer: str, entry: dict[str, Any]) -> bool:
    """The reference answer, character for character."""
    return bool(answer == entry["answer"])


def same_text_any_case(answer: str, entry: dict[str, Any]) -> bool:
    """The reference answer, ignoring case and surrounding space."""
    return bool(answer.strip().lower() == str(entry["answer"]).strip().lower())


def same_letters(answer: str, entry: dict[str, Any]) -> bool:
    """The reference answer, ignoring case and spaces."""
    return "".join(answer.split(" ")).lower() == "".join(str(entry["answer"]).split(" ")).lower()


def same_tokens(answer: str, entry: dict[str, Any]) -> bool:
    """The reference answer, ignoring how much white space is between its parts."""
    return bool(answer.split() == str(entry["answer"]).split())


def same_tokens_any_case(answer: str, entry: dict[str, Any]) -> bool:
    """The reference answer, ignoring case and how much white space is between its parts."""
    return bool(answer.lower().split() == str(entry["answer"]).lower().split())


def same_rows(answer: str, entry: dict[str, Any]) -> bool:
    """The reference answer's rows, ignoring spaces within and around them."""
    ours, wanted = ([row.split() for row in text.strip().split("\n")] for text in (answer, str(entry["answer"])))
    return ours == wanted


def same_board(answer: str, entry: dict[str, Any]) -> bool:
    """The reference answer's board, with any white space."""
    return "".join(answer.split()) == "".join(str(entry["answer"]).split())


def word_list(answer: str, entry: dict[str, Any]) -> bool:
    """The sorted words separated by commas, ignoring space around them."""
    return bool([word.strip() for word in answer.split(",")] == entry["metadata"]["sorted_words"])


def ladder(answer: str, entry: dict[str, Any]) -> bool:
    """Words separated by commas, and nothing else."""
    return len(answer) <= 4000 and _LADDER.fullmatch(answer) is not None


def role_statement(answer: str, entry: dict[str, Any]) -> bool:
    """Every inhabitant once, each followed by one of the two roles, with nothing but `is`, `a`,
    `an` and `and` between them.
    """
    if len(answer) > 2 * len(entry["answer"]):
        return False
    words = re.sub(r"[.,()]", " ", answer.lower()).split()
    names = {name.lower() for name in entry["metadata"]["names"]}
    roles = {role.lower() for role in _plain_roles(entry)}
    found = []
    for word in words:
        if word in names or word in roles:
            found.append(word)
        elif word not in ("is", "a", "an", "and"):
            return False
    people = found[::2]
    return len(found) == 2 * len(names) and set(people) == names and all(word in roles for word in found[1::2])


def _plain_roles(entry: dict[str, Any]) -> list[str]:
    terms = entry["metadata"]["knight_knave_terms"]
    return [terms["knight"], terms["knave"]]


def codeio_readable(answer: str, entry: dict[str, Any]) -> bool:
    """Whether the similarity of answer and reference can be computed quickly enough to give partial
    credit.
    """
    if len(answer) * len(entry["answer"]) > MAX_CODEIO_WORK:
        return same_text(answer, entry)
    return answer == entry["answer"].strip() or max(_nodes(answer), _nodes(entry["answer"])) <= MAX_CODEIO_NODES


def _nodes(text: str) -> int:
    return text.count(",") + text.count("{") + text.count("[")


def codeio_equal(answer: str, entry: dict[str, Any]) -> bool:
    """The same JSON document, all of it; `1` and `1.0` differ."""
    return answer == entry["answer"].strip() or same_json(read_json(answer), read_json(entry["answer"]))
