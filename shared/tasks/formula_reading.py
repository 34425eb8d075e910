r"""Reads a mathematical answer: all of it, or not at all.

`read` takes what people and models write (LaTeX, plain `2*x**2`, Unicode's signs) and returns a
`Reading`: numbers and formulas as sympy expressions, and around them lists, tuples, sets,
intervals, matrices, equations and inequalities. A sign, a word or an order of signs that has no one
meaning here makes it `Unreadable`: `3-5` may be a range, `1/2x` one of two fractions, `east` a
word. References and answers are read by the same code.

No text is evaluated as code. The work is linear in the length of a text, which `MAX_CHARS` and the
limits on depth, digits and powers bound.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import sympy  # type: ignore[import-untyped]

from shared.tasks.formula_signs import CLOSED, CURRENCY, GREEK, MAX_CHARS, OPEN, Unreadable, in_ascii, split_unit
from shared.tasks.numerals import read_number

SPARE_CHARS, SPARE_DIGITS = 40, 8
"""Characters that an answer may have beyond four times the reference's, and digits beyond twice the
reference's.
"""
MAX_PARTS = 30
MAX_DEPTH = 8
MAX_POWER_OF_A_GROUP = 20
"""Largest sum of the exponents of everything in parentheses or braces; `(x+y+z)^{999}` has half a
million terms.
"""
MAX_POWER_IN_AN_EXPONENT = 9
MAX_POWER_BITS = 20_000
"""Largest power of numbers, in bits."""
MAX_EXPONENT = 690
"""Largest exponent of e. What is beyond a double is 0 or infinite to most programs."""
SMALLEST, LARGEST = sympy.Float(10) ** -300, sympy.Float(10) ** 300
"""Least and greatest size of a number that is not rational, and so not compared exactly."""


@dataclass(frozen=True, slots=True)
class Reading:
    """`kind` is `number` (a plain one, `value` exact), `formula`, `sign` (infinity, the empty set),
    `base` (digits in a base that is not ten), or what `parts` make together: `set`, `()`, `[]`,
    `(]`, `[)`, `matrix RxC`, `union`, `=`, or a chain of comparisons such as `< le`.

    `name`: of `x = 5` and `x \\in [0, 1]`. `mark`: `%`, `°`, a currency or a unit. `text`: as it is
    compared, without name and mark. `letters`: the variables in it.
    """

    kind: str
    text: str
    value: Any = None
    parts: tuple[Reading, ...] = ()
    name: str = ""
    mark: str = ""
    letters: frozenset[str] = frozenset()

    @property
    def is_unordered(self) -> bool:
        return self.kind in ("set", "union", "=", "ne")


def read(text: str, *, of_reference: bool = False) -> Reading:
    """Read the whole of `text`. A reference that may be a decimal or two values, `1,5`, has no one
    meaning; an answer has that of two values.

    Raises:
        Unreadable: it says nothing, or nothing that has one meaning.
    """
    plain = in_ascii(text)
    if len(plain) > MAX_CHARS:
        raise Unreadable(f"has more than {MAX_CHARS:,} characters")
    if of_reference and _DECIMAL_COMMA.fullmatch(plain):
        raise Unreadable("has a comma that may part decimals or two values: write a point, or a space after the comma")
    if of_reference and _LETTER_OR_UNIT.fullmatch(plain):
        raise Unreadable(r"ends in a letter that may be a unit: write it as \text{m}, or without the space")
    return _read(plain, MAX_DEPTH)


def is_about_as_long(text: str, reference: str) -> bool:
    """Check whether `text` has not many more characters and digits than the reference.

    A term that evaluates to 0 could carry any text, so an answer that is right but much longer, or
    has many more digits, is not accepted.
    """
    return len(text) <= min(MAX_CHARS, SPARE_CHARS + 4 * len(reference)) and _digits(text) <= SPARE_DIGITS + 2 * _digits(reference)


def _digits(text: str) -> int:
    return sum(map(str.isdigit, text))


# --- One way of writing -------------------------------------------------------------------------

_NAME = re.compile(
    rf"\s*((?:[A-Za-z]|\\(?:{'|'.join(GREEK.values())})(?![A-Za-z]))"
    r"(?:_(?:[0-9A-Za-z]|\{[0-9A-Za-z]\}))?(?:\([A-Za-z]\))?|\([A-Za-z](?:,\s*[A-Za-z])+\))\s*(=|\\in(?![A-Za-z]))"
)
_RELATION = re.compile(r"[<>=]|\\(?:le|ge|ne)(?![A-Za-z])")
_FLIPPED = {">": "<", "ge": "le"}
_CUP = re.compile(r"\\cup(?![A-Za-z])")
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])")
_BASE = re.compile(r"\(?\s*([0-9A-Za-z]*[0-9][0-9A-Za-z]*)\s*\)?\s*_\s*(?:([0-9])|\{\s*([0-9]{1,2})\s*\})")
_MATRIX = re.compile(r"\\begin\s*\{([pbvB]?)matrix\}(.*)\\end\s*\{\1matrix\}", re.DOTALL)
_ATOMS = frozenset({r"\infty", r"+\infty", r"-\infty", r"\emptyset", r"\mathbb{R}", r"\mathbb{Z}", r"\mathbb{N}"})
_SETS = frozenset({"set", "union", "()", "[]", "(]", "[)", "one []"})
_NUMBER_SETS = frozenset({r"\mathbb{R}", r"\mathbb{Z}", r"\mathbb{N}", r"\emptyset"})
_JOINED = re.compile(r"[0-9.]+(?:\s*-\s*[0-9.]+)+|[0-9.]+(?:\s*/\s*[0-9.]+){2,}")
_SIDES = re.compile(r"[0-9.]+(?:\s*\\times\s*[0-9.]+)+")
_REPEATING = re.compile(r"([0-9]{0,9})\.([0-9]{0,9})\\(?:overline|bar)\s*\{?\s*([0-9]{1,6})\s*\}?")
_SUM = re.compile(r"[+-]")
_AMOUNT = re.compile(rf"([+-]?)\s*([{CURRENCY}])\s*")
_LEADING_ZEROS = re.compile(r"0[0-9]")
_ENDS_IN_ZERO, _ENDS_IN_PLACES = re.compile(r"(?<![0-9.])0[0-9]*$"), re.compile(r"[0-9]\.[0-9]+$")
_DECIMAL_COMMA = re.compile(r"(?:[^,=]*=)?\s*[+-]?[0-9]+,[0-9]+[^,0-9]*")
_LETTER_OR_UNIT = re.compile(r"(?:[^=]*=)?\s*[+-]?[0-9.]+\s+(?:[mghlLs]|m/s)")
_THREE_DIGITS = re.compile(r"[0-9]{3}(?![0-9])")


def _read(text: str, depth: int) -> Reading:
    """From the outside in: what binds least is split first."""
    if depth < 0:
        raise Unreadable("is nested too deeply")
    text = text.strip()
    if not text:
        raise Unreadable("lacks a part")
    items = _split(text, re.compile(","))
    if len(items) > 1:
        _refuse_decimal_commas([item for item, _ in items])
        return _list(text, [_read(item, depth - 1) for item, _ in items])
    if (name := _NAME.match(text)) and not _RELATION.search(text, name.end()):
        inner = _read(text[name.end() :], depth - 1)
        if name[2] != "=" and inner.kind not in _SETS and inner.text not in _NUMBER_SETS:
            raise Unreadable("names a value that is no set to be in")
        if not inner.name and inner.kind not in ("=", "ne"):
            return _with(inner, name=re.sub(r"[\\{}\s]", "", name[1]))
    sides = _split(text, _RELATION)
    if len(sides) > 1:
        return _relation(text, sides, depth)
    parts = _split(text, _CUP)
    if len(parts) > 1:
        return _group("union", text, [_read(part, depth - 1) for part, _ in parts])
    if (whole := _whole_bracket(text, depth)) is not None:
        return whole
    if (matrix := _MATRIX.fullmatch(text)) is not None:
        rows = [row.split("&") for row in matrix[2].strip().removesuffix(r"\\").split(r"\\")]
        if len({len(row) for row in rows}) > 1:
            raise Unreadable("is a matrix with rows of different lengths")
        cells = [_read(cell, depth - 1) for row in rows for cell in row]
        bars = matrix[1] if matrix[1] in "vV" else ""
        return _group(f"matrix {bars} {len(rows)}x{len(rows[0])}", text, cells)
    if _PLUS_MINUS.search(text):
        return _list(text, [_read(_PLUS_MINUS.sub(f" {sign} ", text), depth - 1) for sign in "+-"], once=_PLUS_MINUS)
    return _leaf(text)


def _refuse_decimal_commas(items: list[str]) -> None:
    # `0,125` and `-0,5` may be decimals, thousands or two values, `0.125,000` may be one value or
    # two. After a space, or within brackets, a comma parts values.
    for item, following in itertools.pairwise(items):
        group = _THREE_DIGITS.match(following)
        as_decimals = _ENDS_IN_ZERO.search(item) and following[:1].isdigit() and (group or len(items) == 2)
        if as_decimals or (group and _ENDS_IN_PLACES.search(item)):
            raise Unreadable("has a comma that may part decimals, thousands or values")


def _with(reading: Reading, *, name: str) -> Reading:
    return Reading(reading.kind, reading.text, reading.value, reading.parts, name, reading.mark, reading.letters)


def _group(kind: str, text: str, parts: list[Reading]) -> Reading:
    if len(parts) > MAX_PARTS:
        raise Unreadable(f"has more than {MAX_PARTS} parts")
    return Reading(kind, text, None, tuple(parts), letters=frozenset().union(*(part.letters for part in parts)))


def _list(text: str, parts: list[Reading], once: re.Pattern[str] | None = None) -> Reading:
    """Values without brackets are those of a set: `1, 2` are two solutions. `x = 1, 2` and `x = 1,
    x = 2` say the same.
    """
    if once is not None and len(once.findall(text)) > 1:
        raise Unreadable("has several signs ±")
    names = {part.name for part in parts}
    first = parts[0].name
    if len(names - {""}) > 1 and len(names) < len(parts):
        raise Unreadable("gives several values to one of several names: write pairs, as (1,2), (3,4)")
    if first and (names == {first} or not any(part.name for part in parts[1:])):
        return _with(_group("set", text, [_with(part, name="") for part in parts]), name=first)
    return _group("set", text, parts)


def _relation(text: str, sides: list[tuple[str, str]], depth: int) -> Reading:
    signs = [sign.lstrip("\\") for _, sign in sides[:-1]]
    parts = [_read(side, depth - 1) for side, _ in sides]
    if all(sign in _FLIPPED for sign in signs):
        signs, parts = [_FLIPPED[sign] for sign in reversed(signs)], parts[::-1]
    if (interval := _interval(text, signs, parts)) is not None:
        return interval
    if signs == ["="]:
        for one, other in (parts, parts[::-1]):
            if getattr(one.value, "is_Symbol", False) and "_" not in one.text and not other.name:
                return _with(other, name=one.value.name)
    return _group(" ".join(signs), text, parts)


def _interval(text: str, signs: list[str], parts: list[Reading]) -> Reading | None:
    """`1 < x \\le 3` and `x \\ge 2` as the interval that x is in; None for other comparisons."""
    if not all(sign in ("<", "le") for sign in signs):
        return None
    if len(parts) == 2:
        if parts[0].letters:
            signs, parts = ["<", *signs], [Reading("sign", r"-\infty"), *parts]
        else:
            signs, parts = [*signs, "<"], [*parts, Reading("sign", r"\infty")]
    name = next(iter(parts[1].letters), "") if len(parts) == 3 else ""
    if not name or parts[1].text != name or any(bound.letters or bound.parts for bound in (parts[0], parts[2])):
        return None
    kind = ("[" if signs[0] == "le" else "(") + ("]" if signs[1] == "le" else ")")
    return _with(_group(kind, text, [parts[0], parts[2]]), name=name)


def _whole_bracket(text: str, depth: int) -> Reading | None:
    """A set, tuple or interval, if the first bracket closes at the end; None for a formula, as in
    `(x + 1)`.
    """
    opening, closing = OPEN.find(text[0]), CLOSED.find(text[-1])
    if opening < 0 or closing < 0 or next(_closings(text)) != len(text) - 1:
        return None
    items = _split(text[1:-1], re.compile(","))
    if "\x01" in (text[0], OPEN[closing]):
        if opening != closing:
            raise Unreadable("has a brace that another bracket closes")
        inner = text[1:-1].strip()
        if not inner:
            return Reading("sign", r"\emptyset")
        return _group("set", text, [_read(item, depth - 1) for item, _ in items])
    if len(items) == 1:
        if text[0] == "(" and text[-1] == ")":
            return None
        return _group(f"one {text[0]}{text[-1]}", text, [_read(text[1:-1], depth - 1)])
    parts = [_read(item, depth - 1) for item, _ in items]
    if any(_LEADING_ZEROS.match(item.strip()) for item, _ in items):
        raise Unreadable("has commas that may part numbers or thousands")
    return _group(text[0] + text[-1], text, parts)


def _closings(text: str) -> Iterator[int]:
    """Where the brackets that are open at no other place close."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character in OPEN) - (character in CLOSED)
        if depth == 0 and character in CLOSED:
            yield place
    yield -1


def _split(text: str, separator: re.Pattern[str]) -> list[tuple[str, str]]:
    """The parts between separators outside of all brackets, each with the separator after it."""
    depth, start, parts = 0, 0, []
    places = {match.start(): match for match in separator.finditer(text)}
    for place, character in enumerate(text):
        depth += (character in OPEN or character == "{") - (character in CLOSED or character == "}")
        if depth < 0:
            raise Unreadable("closes a bracket that was not opened")
        if depth == 0 and (match := places.get(place)) is not None:
            parts.append((text[start:place], match[0]))
            start = match.end()
    if depth:
        raise Unreadable("opens a bracket that is not closed")
    return [*parts, (text[start:], "")]


def _leaf(text: str) -> Reading:
    plain, mark = text, ""
    if text[-1] in "%°" + CURRENCY:
        plain, mark = text[:-1].strip(), text[-1]
    elif (amount := _AMOUNT.match(text)) is not None:
        plain, mark = f"{amount[1]}{text[amount.end() :]}", amount[2]
    elif (number_and_unit := split_unit(text))[0]:
        plain, mark = number_and_unit
    if (sign := "".join(plain.split())) in _ATOMS and not mark:
        return Reading("sign", sign.removeprefix("+"))
    if (base := _BASE.fullmatch(plain)) is not None and plain.count("(") == plain.count(")"):
        return _in_base(plain, base[1], int(base[2] or base[3]))
    if (repeating := _REPEATING.fullmatch(plain)) is not None:
        plain = _repeated(*repeating.groups())
    if mark and _SIDES.fullmatch(plain):
        raise Unreadable("may be the sides of a rectangle or their product")
    if _JOINED.fullmatch(plain):
        raise Unreadable("may be a range, a date or a difference")
    number = read_number(plain)
    if number is not None:
        # `compared` is exact; what has a percent sign is no plain number any more.
        value = sympy.Rational(*(number / (100 if mark == "%" else 1)).as_integer_ratio())
        return Reading("formula" if mark == "%" else "number", plain, value, mark=mark)
    parser = _Parser(plain)
    value = parser.whole()
    if (mark == "%" and len(_split(plain[1:], _SUM)) > 1) or (mark == "°" and parser.has_functions):
        raise Unreadable(f"has a {mark} that may belong to its last part only: write parentheses")
    return Reading("formula", plain, value / 100 if mark == "%" else value, mark=mark, letters=frozenset(parser.letters))


def _repeated(whole: str, places: str, period: str) -> str:
    """`0.1\\overline{6}` as the fraction 15/90."""
    value = int(whole + places + period) - int(whole + places or "0")
    return f"\\frac{{{value}}}{{{'9' * len(period) + '0' * len(places)}}}"


def _in_base(text: str, digits: str, base: int) -> Reading:
    if base == 10 or not 2 <= base <= 36:
        raise Unreadable(f"has a subscript {base} that is no base")
    try:
        int(digits, base)
    except ValueError:
        raise Unreadable(f"has digits that base {base} has not") from None
    return Reading("base", text, (digits.lstrip("0").upper(), base))


# --- Formulas -----------------------------------------------------------------------------------

_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    **{name: getattr(sympy, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "exp", "log", "sqrt")},
    "ln": sympy.log,
    "arcsin": sympy.asin,
    "arccos": sympy.acos,
    "arctan": sympy.atan,
    "asin": sympy.asin,
    "acos": sympy.acos,
    "atan": sympy.atan,
}
_CONSTANTS = {"pi": sympy.pi}
_TOKEN = re.compile(
    r"\s*(?:([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?|\.[0-9]+)|\\([A-Za-z]+)|([A-Za-z]+)|(\*\*|[+\-*/^_(){}\[\]|]))"
)
_EXPLOSION = re.compile(
    r"[0-9]{40}|[0-9.] *[eE] *[+-]? *[0-9]{3}|(?:\^|\*\*)\s*[{(]*\s*-?\s*[0-9]{4}|(?:\^|\*\*)\s*(?:[0-9.]+|[A-Za-z])\s*(?:\^|\*\*)"
)
"""Short texts that cause unbounded work or have two readings: long numbers, large decimal
exponents, powers with four digits, `2^3^4`.
"""
_GROUP_POWER = re.compile(r"[)}\]]\s*(?:\^|\*\*)\s*[{(]?\s*-?\s*([0-9]+)")


class _Parser:
    """Recursive descent over one formula. `letters`: the variables that it has met."""

    def __init__(self, text: str) -> None:
        powers = sum(int(power[:9]) for power in _GROUP_POWER.findall(text))
        if _EXPLOSION.search(text) or powers > MAX_POWER_OF_A_GROUP:
            raise Unreadable("has numbers or powers that are too large")
        if max(_depths(text), default=0) > MAX_DEPTH:
            raise Unreadable("is nested too deeply")
        self.letters: set[str] = set()
        self._tokens = list(_tokens(text))
        self._at = 0
        self.has_functions = self._in_bars = False
        self._exponents = 0
        self._bare_argument_end = -1
        """Where the argument of the last function ended, if it had no parentheses."""
        words = [value for kind, value in self._tokens if kind == "word"]
        if any(len(word) > 1 for word in words) and len(words) == len(self._tokens):
            raise Unreadable(f"is the word {text[:40]!r}")
        self._tokens = [token for kind, value in self._tokens for token in _letters(kind, value)]

    def whole(self) -> Any:
        value = self._sum()
        if self._at < len(self._tokens):
            raise Unreadable(f"cannot be read from {self._tokens[self._at][1]!r} on")
        return _usual_size(value)

    def _next(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "its end")

    def _take(self, *values: str) -> str:
        kind, value = self._next()
        if kind == "sign" and value in values:
            self._at += 1
            return value
        return ""

    def _need(self, value: str) -> None:
        if not self._take(value):
            raise Unreadable(f"has {self._next()[1]!r} where {value!r} is needed")

    def _sum(self) -> Any:
        sign = self._take("+", "-")
        value = self._product()
        value = -value if sign == "-" else value
        while sign := self._take("+", "-"):
            other = self._product()
            value = value - other if sign == "-" else value + other
        return value

    def _product(self) -> Any:
        """A number after a factor without a sign between them is no product: `x 2`, `3 hours 20`.
        Nor is it known what a factor after a slash belongs to: `1/2x`.
        """
        value, after_slash = self._factor(), False
        while True:
            kind, token = self._next()
            if sign := self._take("*", "/", "cdot", "times"):
                if sign == "/" and self._at - 1 == self._bare_argument_end and self._next()[0] != "function":
                    raise Unreadable("has a slash after a function, which may belong to its argument: write parentheses")
                other = self._signed_factor()
                after_slash = sign == "/"
                if other == 0 or (value == 0 and not (after_slash and other.is_Rational)):
                    raise Unreadable("multiplies by zero, which would hide the other factor, or divides by it")
                value = value / other if after_slash else value * other
                continue
            if kind not in ("number", "letter", "constant", "function", "frac", "sqrt") and not (
                kind == "sign" and (token in "({" or (token == "|" and not self._in_bars))
            ):
                return value
            if token == "(" and self._at == self._bare_argument_end:
                raise Unreadable("has a parenthesis after a function's argument, which may belong to it: write it around all of it")
            if kind == "number":
                raise Unreadable(f"has {token!r} after a factor without a sign between them")
            if after_slash:
                raise Unreadable("has a factor after a fraction with a slash, which may belong to either part: write parentheses")
            if value == 0:
                raise Unreadable("multiplies by zero, which would hide the other factor")
            value = value * self._factor()

    def _signed_factor(self) -> Any:
        sign = self._take("+", "-")
        factor = self._factor()
        return -factor if sign == "-" else factor

    def _factor(self) -> Any:
        return self._raised(self._atom())

    def _raised(self, base: Any) -> Any:
        # Each refusal comes before sympy computes what it would take too long for.
        if not self._take("^", "**"):
            return base
        self._exponents += 1
        exponent = self._exponent()
        self._exponents -= 1
        if self._exponents and not (exponent.is_Rational and abs(exponent) <= MAX_POWER_IN_AN_EXPONENT):
            raise Unreadable("has a power of a power")
        if exponent == 0 or base in (0, 1):
            raise Unreadable("has a power that is the same whatever its other part is")
        if base == sympy.E:
            _refuse_large_exponent(exponent)
        elif base.is_number and exponent.is_number:
            size = abs(exponent.evalf(5))
            if not (size.is_Float or size.is_Rational) or _bits(base) * size > MAX_POWER_BITS:
                raise Unreadable("has a power that is too large")
        if base.is_number and base.is_negative and exponent.is_Rational and exponent.q % 2 and exponent.q > 1:
            raise Unreadable(r"has a power that may be a real or a complex root: write the real one as \sqrt[3]{-8}")
        if base.free_symbols and exponent.is_Rational and exponent.q % 2 and exponent.q > 1 and not base.has(sympy.I):
            return _real_root(base, int(exponent.p), int(exponent.q))
        return _usual_size(base**exponent)

    def _exponent(self) -> Any:
        if self._take("{"):
            value = self._sum()
            self._need("}")
            return value
        sign = self._take("+", "-")
        value = self._atom()
        return -value if sign == "-" else value

    def _atom(self) -> Any:
        """The smallest part that has a value: nothing before or after it belongs to it."""
        kind, token = self._next()
        self._at += 1
        if kind == "number":
            return self._number(token)
        if kind == "letter":
            return self._letter(token)
        if kind == "constant":
            return _CONSTANTS[token]
        if kind == "frac":
            top, bottom = self._argument(), self._argument()
            if bottom == 0:
                raise Unreadable("divides by zero")
            return top / bottom
        if kind == "sqrt":
            return self._sqrt()
        if kind == "function":
            self.has_functions = True
            return self._function(token)
        if kind == "sign" and token in ("(", "{"):
            value = self._sum()
            self._need(")" if token == "(" else "}")
            return value
        if kind == "sign" and token == "|" and not self._in_bars:
            self._in_bars = True
            value = self._sum()
            self._in_bars = False
            self._need("|")
            return sympy.Abs(value)
        raise Unreadable(f"has {token!r} where a number or a letter is needed")

    def _number(self, token: str) -> Any:
        value = _rational(token)
        if not token.isdigit():
            return value
        # Mixed numbers: `3 1/2` and `3\frac{1}{2}`.
        following = self._tokens[self._at : self._at + 7]
        kinds, texts = [kind for kind, _ in following], [text for _, text in following]
        if kinds[:1] == ["number"] and texts[1:2] == ["/"] and kinds[2:3] == ["number"]:
            top, bottom, count = texts[0], texts[2], 3
        elif kinds[:1] == ["frac"] and [*texts[1:2], *texts[3:5], *texts[6:7]] == ["{", "}", "{", "}"]:
            top, bottom, count = texts[2], texts[5], 7
        else:
            return value
        if not (top.isdigit() and bottom.isdigit()):
            return value
        before = self._tokens[self._at - 2] if self._at > 1 else ("sign", "(")
        if not int(top) < int(bottom) or before[0] != "sign" or before[1] in "^_**/)}|":
            raise Unreadable("has a number before a fraction that do not make a mixed number")
        self._at += count
        return value + sympy.Rational(int(top), int(bottom))

    def _letter(self, token: str) -> Any:
        if self._take("_"):
            token = f"{token}_{self._index()}"
        elif token == "f" and self._next() == ("sign", "("):
            raise Unreadable("has a value of a function f, which may be a product")
        elif token in ("e", "i"):
            self.letters.add(token)
            return sympy.E if token == "e" else sympy.I
        self.letters.add(token)
        return sympy.Symbol(token)

    def _index(self) -> str:
        braced = self._take("{")
        kind, token = self._next()
        if kind not in ("number", "letter") or not token.isalnum() or (kind == "number" and len(token) > (2 if braced else 1)):
            raise Unreadable("has a subscript that is neither a number nor a letter")
        self._at += 1
        if braced:
            self._need("}")
        return token

    def _argument(self) -> Any:
        r"""In braces, or one digit or letter: `\frac12`."""
        kind, token = self._next()
        if kind == "number" and len(token) > 1 and token.isdigit():
            self._tokens[self._at] = ("number", token[1:])
            return _rational(token[0])
        if self._take("{"):
            value = self._sum()
            self._need("}")
            return value
        return self._atom()

    def _sqrt(self) -> Any:
        degree = sympy.Integer(2)
        if self._take("["):
            kind, token = self._next()
            self._at += 1
            if kind != "number" or not token.isdigit() or not 2 <= int(token[:3]) <= 20 or len(token) > 2:
                raise Unreadable("has a root of no small degree")
            degree = sympy.Integer(int(token))
            self._need("]")
        argument = self._argument()
        if degree % 2 == 0 or argument.has(sympy.I) or argument.is_nonnegative:
            return argument ** (1 / degree)
        # The real root: sympy's principal root of -8 is complex.
        return _real_root(argument, 1, int(degree))

    def _function(self, name: str) -> Any:
        r"""Without parentheses, the argument reaches to the next sign or function: `\sin 2x \cos x`
        is a product of two functions.
        """
        base = None
        if name == "log" and self._take("_"):
            base = self._argument()
        elif name == "log":
            raise Unreadable(r"has a logarithm that may be natural or decimal: write \ln, or the base as in \log_{10}")
        power = None
        if self._take("^", "**"):
            power = self._exponent()
            if power == -1 and f"a{name}" in _FUNCTIONS:
                name, power = f"a{name}", None
            elif not power.is_Integer or not 2 <= power <= MAX_POWER_OF_A_GROUP:
                raise Unreadable(f"has a power of the function {name} that is read in several ways")
        kind, token = self._next()
        if kind == "sign" and token in ("(", "{"):
            argument = self._atom()
        else:
            argument = self._signed_factor()
            while self._next()[0] in ("letter", "constant", "frac", "sqrt"):
                argument = argument * self._factor()
            self._bare_argument_end = self._at
        if name in ("exp", "sinh", "cosh"):
            _refuse_large_exponent(argument)
        value = _FUNCTIONS[name](argument)
        if base is not None:
            if base in (0, 1):
                raise Unreadable("has a logarithm to a base that is none")
            value = value / sympy.log(base)
        if value.has(sympy.zoo, sympy.oo, -sympy.oo, sympy.nan):
            raise Unreadable("is infinite in a part")
        return _usual_size(value if power is None else value**power)


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """Kind and text of each token. What is not known here is not skipped."""
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            if not text[at:].strip():
                return
            raise Unreadable(f"cannot be read from {text[at:].strip()[:20]!r} on")
        at = match.end()
        number, command, word, sign = match.groups()
        if number:
            yield "number", number
        elif sign:
            yield "sign", sign
        elif word:
            yield "word", word
        elif command in ("frac", "sqrt"):
            yield command, command
        elif command in ("cdot", "times"):
            yield "sign", command
        elif command in _FUNCTIONS:
            yield "function", command
        elif command in _CONSTANTS:
            yield "constant", command
        elif command in GREEK.values():
            yield "letter", command
        else:
            raise Unreadable(f"contains \\{command}, which has no meaning in a formula here")


def _letters(kind: str, value: str) -> Iterator[tuple[str, str]]:
    """A run of letters is a product only if nobody would read a word: `abc` is, `hours` is not."""
    if kind != "word":
        yield kind, value
    elif value == "sqrt":
        yield "sqrt", value
    elif value in _FUNCTIONS:
        yield "function", value
    elif value in _CONSTANTS:
        yield "constant", value
    elif len(value) > 2 and list(value) != sorted(set(value)):
        raise Unreadable(f"contains the word {value[:40]!r}")
    else:
        yield from (("letter", letter) for letter in value)


def _rational(token: str) -> Any:
    return sympy.Rational(*Fraction(token).as_integer_ratio())


def _real_root(base: Any, power: int, degree: int) -> Any:
    """The real value of an odd root, also where `base` is negative: sympy's is complex there."""
    size = sympy.Rational(power, degree)
    return base * sympy.Abs(base) ** (size - 1) if power % 2 else sympy.Abs(base) ** size


def _refuse_large_exponent(exponent: Any) -> None:
    # Before the value is computed, which takes time without bound.
    if exponent.is_number:
        size = abs(exponent.evalf(5))
        if not (size.is_Float or size.is_Rational) or size > MAX_EXPONENT:
            raise Unreadable("has a power of e that is too large or too small")


def _usual_size(value: Any) -> Any:
    # Rational numbers are compared exactly, whatever their size.
    if value.is_number and not value.is_Rational:
        size = abs(value.evalf(15))
        if size.is_Float and size != 0 and not SMALLEST <= size <= LARGEST:
            raise Unreadable("has a number that is too large or too small, and is not rational")
    return value


def _bits(base: Any) -> int:
    return max(int(base.p).bit_length(), int(base.q).bit_length()) if base.is_Rational else 64


def _depths(text: str) -> Iterator[int]:
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        yield depth
