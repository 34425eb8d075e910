r"""The signs of a formula in ASCII: LaTeX's ways of writing, Unicode's letters, powers and roots,
marks around the whole and between thousands. What has no sign here makes the text `Unreadable`.
"""

from __future__ import annotations

import re
import unicodedata

from shared.tasks.answers import bare
from shared.tasks.numerals import in_ascii_digits, is_unit, joined_thousands
from shared.tasks.verify_exact import in_usual_characters

MAX_CHARS = 1000


class Unreadable(ValueError):
    """A text is no formula as a whole. The message continues `the answer ...`."""

    def __str__(self) -> str:
        """The message with the braces of sets as they are written."""
        return super().__str__().replace("\x01", r"\{").replace("\x02", r"\}")


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
_LEADING_DASH = re.compile(r"(?:(?<=^)|(?<=[(\[{=,<>])|(?<=[,=<>] ))\u2013(?=[0-9.A-Za-z\\])")
_ROOT = re.compile(r"([√∛])\s*([0-9]+(?:\.[0-9]+)?|[A-Za-z](?![A-Za-z])|(?=\())")
_WHITE_SPACE = re.compile(r"\s+")
_SPACES = re.compile(r"(\\\\)|\\(?:[,;: !]|quad(?![A-Za-z])|qquad(?![A-Za-z]))|~")
_NO_MEANING = re.compile(r"\\(?:left|right|displaystyle|textstyle|limits|big|Big|bigg|Bigg)(?![A-Za-z])")
_WORD_BETWEEN = re.compile(
    r"\s*,?\s*(?:\\(?:text|mbox|mathrm|textrm)\s*\{\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*"
)
_CHOICE = re.compile(r"^\\(?:text|textbf|textrm|mathrm|mathbf)\s*\{\s*\(?([A-Z])\)?\.?\s*\}$")
_UPRIGHT_NAME = re.compile(r"\\(?:mathrm|operatorname)\s*\{([a-z]+)\}")
_DEGREE = re.compile(r"\s*(?:\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?|\\degree(?![A-Za-z])|(?<=[0-9])\s*degrees?(?![A-Za-z]))")
_PERCENT = re.compile(r"\s*\\?%|(?<=[0-9])\s*(?:\\text\s*\{\s*)?percent(?![A-Za-z])\s*\}?")
_SYNONYMS = {"dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "leq": "le", "leqslant": "le", "geq": "ge", "geqslant": "ge"}
_SYNONYMS |= {"neq": "ne", "lt": "<", "gt": ">", "lbrace": "\x01", "rbrace": "\x02", "varnothing": "emptyset", "varphi": "phi"}
_SYNONYMS |= {"lvert": "|", "rvert": "|", "mid": "|", "lbrack": "[", "rbrack": "]", "ast": "*", "varepsilon": "epsilon", "div": "/"}
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_LETTERS_AND_SIGNS = re.compile(r"[0-9A-Za-z+\-*/^_=().,|{}\[\]<>\\ %°&\n$€£¥'\x01\x02]*")
_SHORT_FRACTION = re.compile(r"\\frac\s*([0-9])\s*([0-9])")
_UNITS = (
    "mm millimeter millimetre|cm centimeter centimetre|m meter metre|km kilometer kilometre|in inch inches|ft foot feet|yd yard"
    "|mi mile|mg milligram|g gram|kg kilogram|lb pound|oz ounce|ml mL milliliter millilitre|l L liter litre|gallon|s sec second"
    "|min minute|h hr hour|day|week|month|year|m/s|km/h kmh kph|mph|cent|$ dollar|€ euro|°C|°F"
)
_UNIT_NAMES = {name + end: names.split()[0] for names in _UNITS.split("|") for name in names.split() for end in ("", "s")}
_UNIT_NAMES |= {"unit": "", "units": "", "degrees": "°", "percent": "%"}
_UNIT_POWERS = {"square": "^2", "sq": "^2", "sq.": "^2", "cubic": "^3", "cu.": "^3"}
_UNIT = re.compile(
    r"(?:\\(?:text|textrm|textbf|mathrm|mbox)\s*\{(?P<upright>[^{}]*)\}"
    r"|(?:(?<=[0-9)}° ])|\\pi )(?P<bare>(?:(?:square|sq\.?|cubic|cu\.) )?[A-Za-z]{2,}\.?|km/h|(?<=°)[CF]))"
    r"\s*(?:\^\s*\{?\s*(?P<power>[23])\s*\}?)?$"
)
LETTER_UNIT = re.compile(r"(?<=[0-9)}])\s*(m/s|[mghlLs])$")
_LETTERS_IF_JOINED = frozenset({"mg", "ml", "mi", "ft"})
COUNTED = "of "
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
        text = in_ascii_digits(in_usual_characters(text))
        text = _RAISED.sub(lambda run: "^{" + "".join(map(_SUPERSCRIPTS.__getitem__, run[0])) + "}", text)
        text = _LOWERED.sub(lambda run: "_{" + "".join(map(_SUBSCRIPTS.__getitem__, run[0])) + "}", text)
        text = _LEADING_DASH.sub("-", _ROOT.sub(_root, text))
        text = "".join(_fraction(sign) for sign in text)
    text = _UPRIGHT_NAME.sub(_plain_name, _CHOICE.sub(r"\1", text))
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


def split_unit(text: str) -> tuple[str, str]:
    r"""Split `5 cm` or `5\text{ cm}^2` into what stands before the unit, and one name of the unit.
    Both are empty if it has none. A single letter is a unit only in upright text, as `5 m` may be
    a product; so may `2mg`. Another word in upright text, which says what is counted, is named with
    `COUNTED` before it.
    """
    match = _UNIT.search(text)
    if match is None:
        return "", ""
    *prefix, name = (match["upright"] if match["bare"] is None else match["bare"]).split() or [""]
    before = text[: match.start() if match["bare"] is None else match.start("bare")]
    if before.endswith("°") and name in ("C", "F"):
        before, name = before[:-1], f"°{name}"
    name = name.removesuffix(".")
    unit = _UNIT_NAMES.get(name, COUNTED + name.lower().removesuffix("s") if match["bare"] is None and is_unit(name) else None)
    number = before.rstrip()
    if unit is None or not number or (before == number and match["bare"] in _LETTERS_IF_JOINED):
        return "", ""
    if match["bare"] is not None and not (number[-1] in "0123456789)}" or number.endswith("\\pi")):
        return "", ""
    power = "".join(_UNIT_POWERS.get(word, "?") for word in prefix) + (f"^{match['power']}" if match["power"] else "")
    return ("", "") if power not in ("", "^2", "^3") else (number, unit + power if unit else "")


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


def _plain_name(match: re.Match[str]) -> str:
    r"""`e` of `\mathrm{e}`, and `\sin` of `\operatorname{sin}`. Others may be units."""
    if match[1] in ("e", "i"):
        return match[1]
    return f"\\{match[1]} " if "operatorname" in match[0] else match[0]


def _one_name(match: re.Match[str]) -> str:
    name = _SYNONYMS.get(match[1], match[1])
    return f"\\{name}" if name.isalpha() else name


# --- Structure ----------------------------------------------------------------------------------
