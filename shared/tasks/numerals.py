"""Reads numbers as models write them. The whole text must be the number; its value is exact and
does not depend on the process's decimal context.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

MAX_CHARS = 400
MAX_PLACES = 17
"""Most decimal places of a number that is compared by rounding. A double has no more, and further
digits could carry text.
"""

_NUMBER = re.compile(r"[+-]?(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)?(?:\.([0-9]*))?(?:[eE]([+-]?[0-9]{1,3}))?")
_THOUSANDS = re.compile(
    r"(?<![0-9.,_A-Za-z])[1-9][0-9]{0,2}(,\\!|\\,|\{,\}|[,_' \u00a0\u2007\u2009\u202f])[0-9]{3}(?:\1[0-9]{3})*"
    r"(?!,?[0-9]|[0-9 ]*\s*/)"
)
_NO_UNIT = re.compile(
    r"(?:"
    r"half|halves|third|quarter|fourth|fifth|sixth|seventh|eighth|ninth"
    r"|(?:ten|hundred|thousand|[a-z]*illion)th|hundred|thousand|[a-z]*illion|dozen|score|gross|pair|couple"
    r"|lakh|crore|point|percent|percentage|pi|squared?|cubed?|factorial|root|power|plus|minus|times|twice"
    r"|mod|modulo|over|by|divided|multiplied|doubled|tripled|halved|negative|inverse|reciprocal|or|and|not"
    r"|no|nor|neither|never|than|less|fewer|more|greater|larger|smaller|higher|lower|under|above|below|off"
    r"|short|except|about|around|approximately|roughly|almost|nearly|maybe|perhaps|least|most|maximum"
    r"|minimum|wrong|false|incorrect|untrue|invalid|zero|one|two|three|four|five|six|seven|eight|nine|ten"
    r"|eleven|twelve|[a-z]*teen|[a-z]*ty|base|hex|hexadecimal|binary|octal|ln|log|sin|cos|tan|sqrt|exp"
    r")s?",
    re.IGNORECASE,
)
_UNIT = re.compile(r"[A-Za-z]{2,20}")
_SEPARATORS = {"\u066b": ".", "\u066c": ","}
_HAS_DIGIT = re.compile(r"[+-]?[,.]?[0-9]")


def read_number(text: str) -> Fraction | None:
    """The value of `1000`, `+1,000.50`, `.5` or `1.5e3`; None for anything else, including `nan`
    and a number with text around it. `0,125` is none either: it may be an eighth or 125.
    """
    text = text.strip()
    if len(text) > MAX_CHARS or not _HAS_DIGIT.match(text) or not _NUMBER.fullmatch(text):
        return None
    return Fraction(text.replace(",", ""))


def is_unit(word: str) -> bool:
    """Check whether a word after a number says what is counted, as in `8 apples`, and neither
    changes its value (`8 hundred`) nor takes it back (`8 or`).
    """
    return _UNIT.fullmatch(word) is not None and _NO_UNIT.fullmatch(word) is None


def in_ascii_digits(text: str) -> str:
    """`text` with the decimal digits of all scripts as 0 to 9, and Arabic's separators as a point
    and a comma. Raised and lowered digits are none.
    """
    if text.isascii():
        return text
    return "".join(_SEPARATORS.get(sign) or str(unicodedata.decimal(sign, sign)) for sign in text)


def joined_thousands(text: str) -> str:
    """`text` without the separators of thousands in its numbers: `1,000`, `1 000`, `1_000`, `1'000`
    and LaTeX's `1{,}000`. A comma within brackets separates the parts of a tuple: `(100,200)`.
    `0,125` stays as it is, because no thousands begin with 0.
    """
    depth, at, parts = 0, 0, []
    for match in _THOUSANDS.finditer(text):
        before = text[at : match.start()]
        depth += sum(map(before.count, "([")) + before.count("\\{") - sum(map(before.count, ")]")) - before.count("\\}")
        parts += [before, match[0] if depth and match[1] == "," else re.sub("[^0-9]", "", match[0])]
        at = match.end()
    return "".join([*parts, text[at:]])


def decimal_places(text: str) -> int:
    """Decimal places of a number that `read_number` accepts; -2 for `1.5e3`, because its last digit
    stands for hundreds.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError("not a number")
    return len(match[1] or "") - int(match[2] or 0)


def rounds_from(text: str, exact: Fraction, places: int) -> bool:
    """Check whether `text` equals `exact`, or equals `exact` rounded or truncated to at least
    `places` decimal places.

    Zero, or a number that is off by a hundredth of the value, never counts as a rounding of it.
    """
    value = read_number(text)
    if value is None:
        return False
    if value == exact:
        return True
    written = decimal_places(text)
    if not places <= written <= MAX_PLACES:
        return False
    units = abs(value - exact) * 10**written
    truncated = abs(value) < abs(exact) and units < 1
    return (units * 2 <= 1 or truncated) and abs(value - exact) * 100 < abs(exact)
