r"""The signs of a formula in ASCII: LaTeX's ways of writing, Unicode's letters, powers and roots,
marks around the whole and between thousands. What has no sign here makes the text `Unreadable`.
"""

from __future__ import annotations

import re
import unicodedata

from shared.tasks.answers import bare
from shared.tasks.numerals import joined_thousands
from shared.tasks.verify_exact import in_usual_characters

MAX_CHARS = 1000


class Unreadable(ValueError):
    """A text is no formula as a whole. The message continues `the answer ...`."""


GREEK = {sign: unicodedata.name(sign).rpartition(" ")[2].lower().replace("lamda", "lambda") for sign in "αβγδεζηθκλμνξρστφχψω"}
_SIGNS = {sign: f" \\{name} " for sign, name in GREEK.items()} | {
    "π": r" \pi ",
    "∞": r" \infty ",
    "∅": r" \emptyset ",
    "ℝ": r" \mathbb{R} ",
    "ℤ": r" \mathbb{Z} ",
    "ℕ": r" \mathbb{N} ",
    "−": "-",
    "\u2010": "-",
    "\u2011": "-",
    "×": r" \times ",
    "·": r" \cdot ",
    "⋅": r" \cdot ",
    "∗": "*",
    "÷": "/",
    "∕": "/",
    "⁄": "/",
    "≤": r" \le ",
    "≥": r" \ge ",
    "≠": r" \ne ",
    "±": r" \pm ",
    "∪": r" \cup ",
    "∈": r" \in ",
}
_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿˣ", "0123456789+-()nx", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_RAISED, _LOWERED = (re.compile(f"[{''.join(signs)}]+") for signs in (_SUPERSCRIPTS, _SUBSCRIPTS))
_ROOT = re.compile(r"([√∛])\s*([0-9]+(?:\.[0-9]+)?|[A-Za-z](?![A-Za-z])|(?=\())")
_WHITE_SPACE = re.compile(r"\s+")
_SPACES = re.compile(r"(\\\\)|\\(?:[,;: !]|quad(?![A-Za-z])|qquad(?![A-Za-z]))|~")
_NO_MEANING = re.compile(r"\\(?:left|right|displaystyle|textstyle|limits|big|Big|bigg|Bigg)(?![A-Za-z])")
_WORD_BETWEEN = re.compile(
    r"\s*,?\s*(?:\\(?:text|mbox|mathrm|textrm)\s*\{\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*"
)
_DEGREE = re.compile(r"\s*(?:\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?|\\degree(?![A-Za-z])|(?<=[0-9])\s*degrees?(?![A-Za-z]))")
_PERCENT = re.compile(r"\s*\\?%|(?<=[0-9])\s*(?:\\text\s*\{\s*)?percent(?![A-Za-z])\s*\}?")
_SYNONYMS = {"dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "leq": "le", "leqslant": "le", "geq": "ge", "geqslant": "ge"}
_SYNONYMS |= {"neq": "ne", "lt": "<", "gt": ">", "lbrace": "\x01", "rbrace": "\x02", "varnothing": "emptyset", "varphi": "phi"}
_SYNONYMS |= {"lvert": "|", "rvert": "|", "mid": "|", "lbrack": "[", "rbrack": "]", "ast": "*", "varepsilon": "epsilon", "div": "/"}
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_LETTERS_AND_SIGNS = re.compile(r"[0-9A-Za-z+\-*/^_=().,|{}\[\]<>\\ %°&\n$€£¥'\x01\x02]*")
_SHORT_FRACTION = re.compile(r"\\frac\s*([0-9])\s*([0-9])")
OPEN, CLOSED = "([\x01", ")]\x02"
CURRENCY = "$€£¥"


def in_ascii(text: str) -> str:
    """The text with one spelling for each sign: ASCII and LaTeX commands, and °, \x01 and \x02 for
    degrees and the braces of sets.
    """
    if len(text) > 2 * MAX_CHARS:
        raise Unreadable(f"has more than {MAX_CHARS:,} characters")
    text = bare(bare(_WHITE_SPACE.sub(_one_space, text.strip())).removesuffix("."))
    if "\x01" in text or "\x02" in text:
        raise Unreadable("has control characters")
    if not text.isascii():
        text = _RAISED.sub(lambda run: "^{" + "".join(map(_SUPERSCRIPTS.__getitem__, run[0])) + "}", in_usual_characters(text))
        text = _LOWERED.sub(lambda run: "_{" + "".join(map(_SUBSCRIPTS.__getitem__, run[0])) + "}", text)
        text = _ROOT.sub(_root, text)
        text = "".join(_fraction(sign) for sign in text)
    text = _DEGREE.sub("°", _PERCENT.sub("%", text))
    text = _WORD_BETWEEN.sub(", ", joined_thousands(text)).replace(",\\!", ",")
    text = (
        _NO_MEANING.sub("", _SPACES.sub(lambda space: space[1] or " ", text))
        .replace(r"\$", "$")
        .replace(r"\{", "\x01")
        .replace(r"\}", "\x02")
    )
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", _COMMAND.sub(_one_name, text))
    if odd := _LETTERS_AND_SIGNS.sub("", text)[:1]:
        raise Unreadable(f"contains {odd!r}, which has no meaning in a formula here")
    return text.strip()


def _one_space(run: re.Match[str]) -> str:
    # Two for a line break or a tab: a single space may be that of thousands.
    return " " if all(unicodedata.category(character) == "Zs" for character in run[0]) else "  "


def _root(match: re.Match[str]) -> str:
    command = r"\sqrt" if match[1] == "√" else r"\sqrt[3]"
    return f"{command}{{{match[2]}}}" if match[2] else command


def _fraction(sign: str) -> str:
    if unicodedata.decomposition(sign).startswith("<fraction>"):
        top, _, bottom = unicodedata.normalize("NFKC", sign).partition("⁄")
        if bottom:
            return f"\\frac{{{top}}}{{{bottom}}}"
    return _SIGNS.get(sign, sign)


def _one_name(match: re.Match[str]) -> str:
    name = _SYNONYMS.get(match[1], match[1])
    return f"\\{name}" if name.isalpha() else name


# --- Structure ----------------------------------------------------------------------------------
