"""Checks that an answer which is a number, or consists of numbers, is right as a whole."""

from __future__ import annotations

import re
from datetime import timedelta
from fractions import Fraction
from typing import Any

from shared.tasks.numerals import MAX_PLACES, decimal_places, read_number, rounds_from
from shared.tasks.strict_json import read_json

_INTEGER = re.compile(r"[+-]?[0-9]{1,400}")
_PREFIXED = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]{1,400}|0[bB][01]{1,400}|0[oO][0-7]{1,400}|[0-9]{1,400})")
_FRACTION = re.compile(
    r"(?:(\$)?\s*\\d?frac\s*\{\s*([0-9]{1,30})\s*\}\s*\{\s*([0-9]{1,30})\s*\}\s*(\$)?"
    r"|(\$)?\s*([0-9]{1,30})\s*/\s*([0-9]{1,30})\s*(\$)?)",
    re.IGNORECASE,
)
_RATIO = re.compile(r"[0-9]{1,400}/0*[1-9][0-9]{0,400}")
_INTEGERS = re.compile(r"-?[0-9]{1,18}")
_INTEGER_LIST = re.compile(r"\[ *-?[0-9]{1,18}(?: *, *-?[0-9]{1,18})* *\]")
_LONG_DECIMALS = re.compile(rf"\.0*[1-9][0-9]{{{MAX_PLACES}}}")
_FACTORS = re.compile(r"[0-9]{1,60}(?:\s*×\s*[0-9]{1,60})*")
_CLOCK = re.compile(r"([0-9]{1,2}|[1-9][0-9]{2,5}):([0-9]{2})(?::([0-9]{2})(?:\.([0-9]{3}))?)?")
_DAYS = re.compile(r"(-?[0-9]{1,9})(?: days?(?:, ([0-9:]{4,12}))?)?")
_POINT = re.compile(r"\(?\s*([^,()\s]+)\s*,\s*([^,()\s]+)\s*\)?")

CLOCK_FORMATS = {"HH:MM": (2, False), "HH:MM:SS": (3, False), "HH:MM:SS.mmm": (3, True)}


def same_number(answer: str, entry: dict[str, Any]) -> bool:
    """The reference answer's value, in any notation of `read_number`."""
    value = read_number(answer)
    return value is not None and value == read_number(str(entry["answer"]))


def same_integer(answer: str, entry: dict[str, Any]) -> bool:
    """The same integer, with a sign or leading zeros."""
    return _INTEGER.fullmatch(answer) is not None and int(answer) == int(entry["answer"])


def is_prefixed_integer(answer: str, entry: dict[str, Any]) -> bool:
    """An integer in decimal, hexadecimal, octal or binary, and nothing else."""
    return _PREFIXED.fullmatch(answer) is not None


def is_number(answer: str, entry: dict[str, Any]) -> bool:
    """One number with no more decimal places than are compared, and nothing else."""
    return read_number(answer) is not None and not _LONG_DECIMALS.search(answer)


def first_number(answer: str, entry: dict[str, Any]) -> float:
    """Full marks for the value and 0.01 for anything else, like reasoning-gym's scorer, which takes
    the first number in any text.
    """
    return 1.0 if same_number(answer, entry) else 0.01


def near_decimal(answer: str, entry: dict[str, Any]) -> bool:
    """The value or a rounding of it. The dataset's own tolerance, which a configuration sets, must
    hold as well.
    """
    exact = read_number(entry["answer"])
    return exact is not None and rounds_from(answer, exact, 1)


def probability(answer: str, entry: dict[str, Any]) -> bool:
    """The value as a fraction or decimal, or rounded to at least four decimal places."""
    text, ratio = answer.replace(" ", ""), entry["metadata"]["rational"]
    exact = Fraction(ratio["numerator"], ratio["denominator"])
    if _RATIO.fullmatch(text):
        return Fraction(text) == exact
    return rounds_from(text, exact, 4) or rounds_from(text, Fraction(entry["answer"]), 4)


def whole_complex(answer: str, entry: dict[str, Any]) -> bool:
    """Every result is a whole complex number, so rounding explains at most half a unit of the
    second decimal place.
    """
    if _LONG_DECIMALS.search(answer):
        return False
    text = re.sub(r"\s", "", answer).lower().replace("i", "j").strip("()")
    text = re.sub(r"(?<![0-9.])j", "1j", text)
    return abs(complex(text) - complex(*entry["metadata"]["result"])) <= 0.005


def simplified_fraction(answer: str, entry: dict[str, Any]) -> bool:
    """The simplified fraction with a slash or in LaTeX, and nothing else."""
    match = _FRACTION.fullmatch(answer)
    if match is None:
        return False
    opening, top, bottom, closing = match.group(1, 2, 3, 4) if match[2] else match.group(5, 6, 7, 8)
    metadata = entry["metadata"]
    wanted = (metadata["simplified_numerator"], metadata["simplified_denominator"])
    return opening == closing and (int(top), int(bottom)) == wanted


def factor_list(answer: str, entry: dict[str, Any]) -> bool:
    """Integers with multiplication signs between them, and nothing else."""
    return _FACTORS.fullmatch(answer) is not None


def nearest_candidate(answer: str, entry: dict[str, Any]) -> bool:
    """The right one of the numbers offered, as it is offered or rounded to at least two decimal
    places.
    """
    metadata = entry["metadata"]
    offered = metadata["formatted_candidates"][metadata["candidates"].index(metadata["solution"])]
    return read_number(answer) == read_number(offered) or rounds_from(answer, Fraction(metadata["solution"]), 2)


def number_list(answer: str, entry: dict[str, Any]) -> bool:
    """The same values in the same order, each as a number or as a string that contains one."""
    ours, wanted = (_values(text) for text in (answer, entry["answer"]))
    return ours is not None and ours == wanted


def integer_list(answer: str, entry: dict[str, Any]) -> bool:
    """The same list of integers, with any spacing."""
    lists = [
        [int(number) for number in _INTEGERS.findall(text)] for text in (answer, entry["answer"]) if _INTEGER_LIST.fullmatch(text)
    ]
    return len(lists) == 2 and lists[0] == lists[1]


def _values(text: str) -> list[Fraction | None] | None:
    found = read_json(text.replace("'", '"'))
    if not isinstance(found, list):
        return None
    values = [read_number(item if isinstance(item, str) else repr(item)) for item in found]
    return None if None in values else values


def root_list(answer: str, entry: dict[str, Any]) -> bool:
    """As many roots as there are, in any order, each right to four decimal places. An empty answer
    means no roots.
    """
    roots = [Fraction(part.strip()) for part in entry["answer"].split(",") if part.strip()]
    if not roots:
        return answer in ("", '""')
    given = sorted(answer.split(","), key=lambda part: read_number(part) or 0)
    if len(given) != len(roots) or any(read_number(part) is None or decimal_places(part) > MAX_PLACES for part in given):
        return False
    # The reference answer is itself rounded to four decimal places, so a longer expansion differs
    # from it by up to half a unit.
    values = [read_number(part) for part in given]
    return all(value is not None and abs(value - root) * 20_000 <= 1 for value, root in zip(values, sorted(roots), strict=True))


def is_number_list(answer: str, entry: dict[str, Any]) -> bool:
    """Numbers separated by commas, and nothing else."""
    return answer in ("", '""') or all(read_number(part) is not None for part in answer.split(","))


def pooled_matrix(answer: str, entry: dict[str, Any]) -> bool:
    """Each element is right to two decimal places."""
    ours, exact = answer.split("\n"), entry["answer"].split("\n")
    if len(ours) != len(exact):
        return False
    for row, wanted in zip(ours, exact, strict=True):
        cells, right = row.split(), [Fraction(number) for number in wanted.split()]
        values = [read_number(cell) for cell in cells]
        if len(cells) != len(right) or None in values:
            return False
        if any(decimal_places(cell) > MAX_PLACES for cell in cells):
            return False
        if any(value is not None and abs(value - number) * 200 > 1 for value, number in zip(values, right, strict=True)):
            return False
    return True


def is_number_grid(answer: str, entry: dict[str, Any]) -> bool:
    """Rows of numbers and nothing else."""
    return len(answer) <= 100_000 and all(read_number(cell) is not None for row in answer.split("\n") for cell in row.split())


def geometry(answer: str, entry: dict[str, Any]) -> bool:
    """A number (for an angle, optionally with a degree sign) or a point, and nothing else."""
    kind = entry["metadata"]["task_type"]
    if kind == "angle_measure":
        return is_number(answer.removesuffix("°"), entry)
    if kind == "orthocenter":
        match = _POINT.fullmatch(answer)
        return match is not None and all(is_number(part, entry) for part in match.groups())
    return is_number(answer, entry)


def duration(answer: str, entry: dict[str, Any]) -> float:
    """Full marks for the duration in the requested format; otherwise partial credit by the relative
    error, at most 0.9.

    reasoning-gym's scorer measures the error in units of the configuration's longest interval,
    which a sender chooses.
    """
    wanted_format = entry["metadata"]["expected_format"]
    given, wanted = _duration(answer, wanted_format), _duration(entry["answer"], wanted_format)
    if answer == entry["answer"]:
        return 1.0
    if given is None or wanted is None:
        return 0.0
    if given == wanted:
        return 1.0
    error = abs(given - wanted) / abs(wanted) if wanted else 1.0
    return 0.9 * max(0.0, 1.0 - error)


def _duration(text: str, wanted_format: str) -> timedelta | None:
    if wanted_format in CLOCK_FORMATS:
        return _clock(text)
    match = _DAYS.fullmatch(text)
    if match is None or (match[2] is None) != (wanted_format == "D days"):
        return None
    time = _clock(match[2]) if match[2] else timedelta()
    return None if time is None else timedelta(days=int(match[1])) + time


def _clock(text: str) -> timedelta | None:
    match = _CLOCK.fullmatch(text)
    if match is None:
        return None
    hours, minutes, seconds, milliseconds = (int(part or 0) for part in match.groups())
    if minutes > 59 or seconds > 59:
        return None
    return timedelta(hours=hours, minutes=minutes, seconds=seconds, milliseconds=milliseconds)
