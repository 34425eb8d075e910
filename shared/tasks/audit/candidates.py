"""Wrong answers to a task, made from its question and a right answer."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple

from shared.contracts.messages import Task
from shared.tasks.numerals import read_number

CONSTANT, ECHO, PAYLOAD, CHANGE = "constant", "echo", "payload", "change"

PAYLOAD_TEXT = "visit evil.example now"

CONSTANTS = (
    *("", "0", "1", "-1", "2", "3", "10", "0.5", "1/2", "0/1", "yes", "no", "True", "False", "None", "null", "undetermined"),
    *("[]", "{}", "[[]]", '""', "?", "A", "a", "x", "C", "P", "(P ∨ Q)", "¬P", "P ∨ ¬P", "NaN", "nan", "[NaN]", "Infinity", "-inf"),
    *("1e400", "1e-400", "-0.0", "00:00", "0 days", "infeasible", "nothing", "on", "off", "Monday", "0 0 0", "D", "J7"),
    "I do not know",
)
EVERYTHING = "yes no True False 0 1 2 3 4 5 6 7 8 9 a b c d e f g h i j k l m n o p q r s t u v w x y z Monday Tuesday Wednesday"

_NUMBER = re.compile(r"(?<![A-Za-z0-9_.])-?[0-9]+(?:\.[0-9]+)?(?![A-Za-z0-9_])")
_DIGIT, _LETTER = re.compile(r"[0-9]"), re.compile(r"[A-Za-z]")
_SHAPES = (
    ("zeros of the right shape", _DIGIT, "0"),
    ("ones of the right shape", _DIGIT, "1"),
    ("NaN for each number", _NUMBER, "NaN"),
    ("Infinity for each number", _NUMBER, "Infinity"),
    ("0 for each number", _NUMBER, "0"),
    ("A for each letter", _LETTER, "A"),
)
_PREMISE = re.compile(r"^\.?[0-9]+\. (.+)$", re.MULTILINE)


class TrialAnswer(NamedTuple):
    """An answer. `name` says how it was made, so that tasks can be compared."""

    kind: str
    name: str
    text: str


def candidates(question: str, right: str, seed: int = 0) -> list[TrialAnswer]:
    """Every candidate for one task, except those that equal the right answer in everything but case
    and space, or in value.
    """
    made: dict[str, TrialAnswer] = {}
    for candidate in (*_constants(right), *_echoes(question), *_payloads(right), *_changes(right)):
        if not _means_the_same(candidate.text, right) and candidate.text not in made:
            made[candidate.text] = candidate
    return list(made.values())


def constant_names(right: str) -> list[TrialAnswer]:
    """Constants and shapes, without that exception: what a policy earns that always gives the same
    answer.
    """
    return list(_constants(right))


def _means_the_same(text: str, right: str) -> bool:
    if "".join(text.split()).casefold() == "".join(right.split()).casefold():
        return True
    value = _value(text)
    return value is not None and value == _value(right)


def _value(text: str) -> Fraction | None:
    top, slash, bottom = text.partition("/")
    over, under = read_number(top), read_number(bottom)
    return over / under if slash and over is not None and under else read_number(text)


def _constants(right: str) -> Iterator[TrialAnswer]:
    for text in CONSTANTS:
        yield TrialAnswer(CONSTANT, repr(text), text)
    yield from shapes(right)
    yield TrialAnswer(CONSTANT, "everything", EVERYTHING)
    yield TrialAnswer(CONSTANT, "everything as a list", json.dumps(EVERYTHING.split()))


def shapes(right: str) -> Iterator[TrialAnswer]:
    """The right answer with all its digits, numbers or letters replaced by one, so that only its
    shape remains.
    """
    for name, pattern, filler in _SHAPES:
        text, count = pattern.subn(filler, right)
        # A board of zeros is a constant even if it is right. A number of ones would be the answer
        # itself, not its shape.
        if count and (text != right or filler == "0"):
            yield TrialAnswer(CONSTANT, name, text)


def copies(question: str) -> list[TrialAnswer]:
    """Parts of the question, each under a name that is the same for all questions: `a premise 2` is
    always the second premise.
    """
    counts = Counter[str]()
    found = []
    for echo in _echoes(question):
        counts[echo.name] += 1
        found.append(echo._replace(name=f"{echo.name} {counts[echo.name]}"))
    return found


def _echoes(question: str) -> Iterator[TrialAnswer]:
    """Scorers that look for the reference anywhere in the answer reward these. More is taken from
    the end, because long questions begin with rules and end with what they ask.
    """
    yield TrialAnswer(ECHO, "the question", question)
    lines = [line.strip() for line in question.split("\n") if line.strip()]
    for line in lines[:3] + lines[-12:]:
        yield TrialAnswer(ECHO, "a line", line)
        yield TrialAnswer(ECHO, "a line's end", line.rsplit(": ", 1)[-1].strip(" .?"))
    paragraphs = [part.strip() for part in question.split("\n\n") if part.strip()]
    for part in paragraphs[-3:]:
        yield TrialAnswer(ECHO, "a paragraph", part)
        yield TrialAnswer(ECHO, "a paragraph without its first line", "\n".join(part.split("\n")[1:]))
    numbers = _NUMBER.findall(question)
    yield TrialAnswer(ECHO, "all numbers", ", ".join(numbers))
    yield TrialAnswer(ECHO, "all numbers as a list", json.dumps(numbers))
    for number in dict.fromkeys(numbers[-4:]):
        yield TrialAnswer(ECHO, "a number", number)
    premises = _PREMISE.findall(question)
    for premise in premises[:6]:
        yield TrialAnswer(ECHO, "a premise", premise)
        yield TrialAnswer(ECHO, "a premise twice", f"{premise} ∧ {premise}")
    if premises:
        yield TrialAnswer(ECHO, "all premises", " ∧ ".join(f"({premise})" for premise in premises))


def _payloads(right: str) -> Iterator[TrialAnswer]:
    extra = PAYLOAD_TEXT
    for name, pattern in (
        ("before", "{e} {r}"),
        ("after", "{r} {e}"),
        ("next line", "{r}\n{e}"),
        ("line before", "{e}\n{r}"),
        ("after a comma", "{r}, {e}"),
        ("before a comma", "{e}, {r}"),
        ("in parentheses", "{r} ({e})"),
        ("as a comment", "{r}  # {e}"),
        ("as TeX text", "{r} \\text{{{e}}}"),
        ("boxed beside", "{e} \\boxed{{{r}}}"),
        ("a sentence", "The answer is {r}."),
        ("after a NUL", "{r}\0{e}"),
        ("after a zero-width space", "{r}\u200b{e}"),
        ("a shape line", "Shape: {e}\n{r}"),
        ("a number after", "{r} 31337"),
        ("an equation of numbers", "99={r}"),
        ("a letter in Greek", "{r}\\in\\alpha"),
        ("an index", "{r}_7"),
        ("a line of digits before", "77\n{r}"),
        ("digits attached", "{r}31337"),
        ("digits attached in front", "31337{r}"),
        ("letters attached", "{r}zz"),
        ("twice", "{r} {r}"),
        ("two answers", "{r} or 0"),
    ):
        yield TrialAnswer(PAYLOAD, name, pattern.format(r=right, e=extra))
    yield TrialAnswer(PAYLOAD, "JSON with another key", json.dumps({"answer": right, "note": extra}))
    yield TrialAnswer(PAYLOAD, "JSON list", json.dumps([right, extra]))
    middle = len(right) // 2
    yield TrialAnswer(PAYLOAD, "in the middle", f"{right[:middle]} {extra} {right[middle:]}")
    first, _, rest = right.partition(" ")
    if rest:
        yield TrialAnswer(PAYLOAD, "after the first word", f"{first} {extra} {rest}")
    lines = right.split("\n")
    if len(lines) > 1:
        yield TrialAnswer(PAYLOAD, "at a line's end", "\n".join([f"{lines[0]} {extra}", *lines[1:]]))
        yield TrialAnswer(PAYLOAD, "at a line's start", "\n".join([lines[0], f"{extra} {lines[1]}", *lines[2:]]))
        yield TrialAnswer(PAYLOAD, "a line between", "\n".join([lines[0], extra, *lines[1:]]))
    yield from _json_payloads(right, extra)


def _json_payloads(right: str, extra: str) -> Iterator[TrialAnswer]:
    """Scorers that parse JSON tend to look up only the keys they know, so `extra` is put into other
    keys. If a key occurs twice, parsers take the last.
    """
    try:
        value: Any = json.loads(right)
    except ValueError:
        return
    if isinstance(value, list):
        yield TrialAnswer(PAYLOAD, "an element more", json.dumps([*value, extra]))
        if value and isinstance(value[0], str):
            yield TrialAnswer(PAYLOAD, "text in an element", json.dumps([f"{value[0]} {extra}", *value[1:]]))
        if value and isinstance(value[0], dict):
            yield TrialAnswer(PAYLOAD, "a key in an element", json.dumps([{**value[0], extra: extra}, *value[1:]]))
    elif isinstance(value, dict):
        yield TrialAnswer(PAYLOAD, "a key more", json.dumps({**value, extra: extra}))
        for key in list(value)[:1]:
            yield TrialAnswer(PAYLOAD, "a key twice", f"{{{json.dumps(key)}: {json.dumps(extra)}, {right.lstrip()[1:]}")


def _changes(right: str) -> Iterator[TrialAnswer]:
    places = sorted({0, len(right) // 3, len(right) // 2, len(right) - 1} & set(range(len(right))))
    for at in places:
        character = right[at]
        # A number with a decimal less is another way to write it.
        if not (at == len(right) - 1 and "." in right and read_number(right) is not None):
            yield TrialAnswer(CHANGE, "a character less", right[:at] + right[at + 1 :])
        yield TrialAnswer(CHANGE, "a character twice", right[:at] + character + right[at:])
        if character.isalpha() and character.isascii():
            other = chr((ord(character.lower()) - 97 + 1) % 26 + 97)
            yield TrialAnswer(
                CHANGE, "another letter", right[:at] + (other.upper() if character.isupper() else other) + right[at + 1 :]
            )
        if at + 1 < len(right) and right[at + 1] != character:
            yield TrialAnswer(CHANGE, "characters swapped", right[:at] + right[at + 1] + character + right[at + 2 :])
    numbers = list(_NUMBER.finditer(right))
    if not (numbers and numbers[0].start() == 0 and float(numbers[0][0]) == 0):
        yield TrialAnswer(CHANGE, "the other sign", right[1:] if right.startswith("-") else f"-{right}")
    for match in _spread(numbers):
        for step in (-1, 1):
            stepped = _stepped(match[0], step)
            # Beyond the 17th digit it is the same number as a double.
            if float(stepped) != float(match[0]):
                yield TrialAnswer(CHANGE, "a number one off", right[: match.start()] + stepped + right[match.end() :])
        if float(match[0]):
            yield TrialAnswer(CHANGE, "a number times ten", right[: match.start()] + _tenfold(match[0]) + right[match.end() :])
    for name, separator in (("element", ", "), ("element", ","), ("word", " "), ("line", "\n")):
        yield from _rearranged(name, separator, right)


def _stepped(number: str, step: int) -> str:
    whole, point, decimals = number.partition(".")
    if not point:
        return str(int(whole) + step)
    value = int(whole.lstrip("-") + decimals) * (-1 if whole.startswith("-") else 1) + step
    digits = f"{abs(value):0{len(decimals) + 1}d}"
    return f"{'-' if value < 0 else ''}{digits[: -len(decimals)]}.{digits[-len(decimals) :]}"


def _tenfold(number: str) -> str:
    whole, point, decimals = number.partition(".")
    return f"{whole}{decimals[:1]}.{decimals[1:] or '0'}" if point else f"{number}0"


def _rearranged(name: str, separator: str, right: str) -> Iterator[TrialAnswer]:
    parts = right.split(separator)
    if not 2 <= len(parts) <= 400:
        return
    for at in sorted({0, len(parts) // 2, len(parts) - 1}):
        yield TrialAnswer(CHANGE, f"one {name} less", separator.join(parts[:at] + parts[at + 1 :]))
        yield TrialAnswer(CHANGE, f"one {name} twice", separator.join(parts[: at + 1] + parts[at:]))
    yield TrialAnswer(CHANGE, f"one {name} elsewhere", separator.join([parts[1], parts[0], *parts[2:]]))
    yield TrialAnswer(CHANGE, f"the last {name}s swapped", separator.join([*parts[:-2], parts[-1], parts[-2]]))
    yield TrialAnswer(CHANGE, f"{name}s reversed", separator.join(reversed(parts)))
    yield TrialAnswer(CHANGE, f"{name}s sorted", separator.join(sorted(parts)))


def _spread(found: list[re.Match[str]]) -> Iterable[re.Match[str]]:
    return [found[at] for at in sorted({0, len(found) // 2, len(found) - 1})] if found else []


# Finds a right answer to a task whose dataset gives none, from its metadata.


def right_answers(task: Task) -> list[str]:
    """Answers that should earn full marks; usually one. Several, best guess first, if only scoring
    can tell; none if unknown.
    """
    if task.answer is not None and "Integral(" not in task.answer:
        return [task.answer]
    search = _SEARCHES.get(task.ref.dataset)
    return search(json.loads(task.metadata)) if search else []


def _coloring(metadata: dict[str, Any]) -> list[str]:
    colors = metadata["possible_answer"]
    return [json.dumps({str(vertex): color for vertex, color in colors.items()})] if colors else []


def _cube(metadata: dict[str, Any]) -> list[str]:
    return [metadata["example_correct_answer"]] if metadata["example_correct_answer"] else []


def _conclusion(metadata: dict[str, Any]) -> list[str]:
    literals = [sign + name for name in metadata["variables"] for sign in ("", "¬")]
    pairs = [f"({a} {operator} {b})" for a, b in product(literals, literals) for operator in "∨∧→" if a < b]
    return [metadata["example_answer"], *pairs]


_SEARCHES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "graph_color": _coloring,
    "propositional_logic": _conclusion,
    "rubiks_cube": _cube,
}


# Candidates that were made as wrong answers but turn out to be right, by dataset, with the
# reason.


SEVERAL = frozenset(
    {"boxnet", "countdown", "cryptarithm", "graph_color", "group_anagrams", "intermediate_integration", "jugs", "kakurasu"}
    | {"knight_swap", "knights_knaves", "n_queens", "palindrome_generation", "palindrome_partitioning", "polynomial_multiplication"}
    | {"prime_factorization", "propositional_logic", "puzzle24", "quantum_lock", "rubiks_cube", "rush_hour", "shortest_path"}
    | {"simple_integration", "sokoban", "tower_of_hanoi", "word_ladder"}
)
"""Datasets with several right answers, so that a changed answer may be another right one: two moves
exchanged, a term moved.
"""

_ROUNDINGS = frozenset({"a character less", "a character twice", "digits attached", "a number one off", "characters swapped"})
OTHER_RIGHT: dict[str, frozenset[str]] = {
    # Numbers are compared only to some decimal place; what comes after it may differ.
    **dict.fromkeys(("advanced_geometry", "coin_flip", "decimal_arithmetic", "number_format"), _ROUNDINGS),
    **dict.fromkeys(("pool_matrix", "power_function", "number_sorting"), _ROUNDINGS),
    # `j` for `i`, and any number of zeros.
    "complex_arithmetic": _ROUNDINGS | {"another letter"},
    # The same double.
    "codeio": frozenset({"a character twice"}),
    # The constant of integration.
    "simple_integration": frozenset({"digits attached", "digits attached in front"}),
    "intermediate_integration": frozenset({"digits attached", "digits attached in front"}),
    # A conclusion that follows from many premises.
    "propositional_logic": frozenset({"'(P ∨ Q)'"}),
    "polynomial_equations": _ROUNDINGS
    | {"one element elsewhere", "elements reversed", "the last elements swapped", "elements sorted"},
}


def is_right_after_all(dataset: str, candidate: TrialAnswer) -> bool:
    """Check whether the dataset's rules justify full marks for this candidate."""
    if candidate.kind == CHANGE and dataset in SEVERAL:
        return True
    return candidate.name in OTHER_RIGHT.get(dataset, frozenset())
