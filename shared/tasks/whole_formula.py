"""Checks that a text is one formula and nothing else, small enough to be parsed and compared in a
fraction of a second.
"""

from __future__ import annotations

import re
from collections import Counter

MAX_CHARS = 1000
SPARE_CHARS, SPARE_DIGITS = 40, 8
"""Characters that an answer may have beyond four times the reference's, and digits beyond twice the
reference's.
"""
MAX_DEPTH = 8
"""Most levels of parentheses, braces and brackets; twice as many keep the LaTeX grammar busy for
seconds.
"""
MAX_POWER_OF_A_GROUP = 20
"""Largest sum of the exponents of everything in parentheses or braces; `(x+y+z)^{999}` has half a
million terms.
"""

FUNCTIONS = frozenset({"sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt", "pi"})
_LETTERS = frozenset({"alpha", "beta", "gamma", "theta", "lambda", "mu", "phi", "varphi"})
_PLAIN_COMMANDS = FUNCTIONS | {"frac", "dfrac", "tfrac", "cdot", "times", "div", "left", "right", "arcsin", "arccos", "arctan"}
_MARK_COMMANDS = frozenset(
    {"pm", "mp", "infty", "cup", "cap", "in", "emptyset", "le", "ge", "lt", "gt", "ne", "binom", "circ", "quad", "qquad"}
    | {"begin", "end", "lfloor", "rfloor"}
)
_SAME_COMMAND = {"leq": "le", "geq": "ge", "neq": "ne", "degree": "circ"}
_SPACES = frozenset(",;:! ")
_MARKS = frozenset("_=,|![]<>;:%\n&")
"""Characters outside of arithmetic. An answer may have only as many of each as the reference,
because text can be written with them.
"""
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), (r"\boxed{", "}"))
_CHARACTERS = re.compile(r"[0-9A-Za-z+\-*/^_=().,|!{}\[\]<>\\;: °%\n&]*")
_COMMAND = re.compile(r"\\([A-Za-z]+|.)")
_WORD = re.compile(r"[A-Za-z]+")
_GROUP_POWER = re.compile(r"[)}\]]\s*(?:\^|\*\*)\s*[{(]?\s*-?\s*([0-9]+)")
_NAMED = re.compile(r"[A-Za-z]\s*=\s*")
_EXPLOSION = re.compile(
    r"[0-9]{40}|[0-9.] *[eE] *[+-]? *[0-9]{3}|!"
    r"|(?:\^|\*\*)\s*[{(]*\s*-?\s*[0-9]{4}|(?:\^|\*\*)[^+\-*/]*(?:\^|\*\*)"
)
"""Short texts that cause unbounded work: long numbers, large decimal exponents, factorials, powers
with four digits, powers of powers.
"""


def unwrapped(text: str) -> str:
    """`text` without the dollars, brackets and boxes around it, a leading `x =`, and a final full
    stop.
    """
    text = text.strip().removesuffix(".")
    changed = True
    while changed:
        changed = False
        for opening, closing in _WRAPPERS:
            if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
                inner = text[len(opening) : -len(closing)]
                if "$" not in inner and _depth(inner) is not None:
                    text, changed = inner.strip(), True
    text = text.removeprefix(r"\displaystyle").strip()
    return _NAMED.sub("", text, count=1) if _NAMED.match(text) else text


def letters(text: str) -> set[str]:
    """The variables in a text: letters outside of commands and function names, and commands for
    Greek letters.
    """
    words = _WORD.findall(_COMMAND.sub(" ", text))
    greek = {f"\\{name}" for name in _COMMAND.findall(text) if name in _LETTERS}
    return greek | {letter for word in words if word not in FUNCTIONS for letter in word}


def is_one_formula(text: str, reference: str) -> bool:
    """Whether an unwrapped answer is a formula in the reference's letters (and e) and marks, and
    about as long as the reference.
    """
    if not is_about_as_long(text, reference) or not _CHARACTERS.fullmatch(text):
        return False
    commands = {_SAME_COMMAND.get(name, name) for name in _COMMAND.findall(text) if name.isalpha()}
    known = commands <= _PLAIN_COMMANDS | _MARK_COMMANDS | _LETTERS
    return known and _marks(text) <= _marks(reference) and letters(text) <= letters(reference) | {"e"}


def is_about_as_long(text: str, reference: str) -> bool:
    """Whether `text` has not many more characters and digits than the reference.

    A term that evaluates to 0 could carry any text, so an answer that is right but much longer, or
    has many more digits, is not accepted.
    """
    return len(text) <= min(MAX_CHARS, SPARE_CHARS + 4 * len(reference)) and _digits(text) <= SPARE_DIGITS + 2 * _digits(reference)


def _digits(text: str) -> int:
    return sum(map(str.isdigit, text))


def _marks(text: str) -> Counter[str]:
    commands = [_SAME_COMMAND.get(name, name) for name in _COMMAND.findall(text)]
    # `\\{` is a printed brace, not a group; `\\,` is a space.
    found = [name for name in commands if name in _MARK_COMMANDS or not (name.isalpha() or name in _SPACES)]
    return Counter([*found, *(character for character in _COMMAND.sub(" ", text) if character in _MARKS)])


def is_small(text: str) -> bool:
    """Whether the formula can be parsed and expanded with bounded work."""
    if not text or len(text) > MAX_CHARS or _EXPLOSION.search(text):
        return False
    depth = _depth(text)
    powers = sum(int(power[:9]) for power in _GROUP_POWER.findall(text))
    return depth is not None and depth <= MAX_DEPTH and powers <= MAX_POWER_OF_A_GROUP


def _depth(text: str) -> int | None:
    # None if a bracket closes that was not opened. Intervals like [0, 1) have balanced numbers of
    # brackets, which is sufficient here.
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return None
        deepest = max(deepest, depth)
    return deepest if depth == 0 else None
