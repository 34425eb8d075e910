r"""The verifier `final_number`: the answer must end by stating the reference number. For models
that answer in sentences.

`8`, `4 * 2 = 8`, `The answer is **8**.`, `Answer: 8`, `It's 8` and `Therefore, 8 apples.` state 8.
`the product of 4 and 8` and `she has 8 apples` state nothing, so that repeating a question does not
earn the number at its end. `x != 8`, `x >= 8`, `not: 8`, `It is not true that x = 8`,
`negative: 8`, `7 or\n8`, `4 plus\n8`, `7 = 8`, `4:8`, `10/\n8` and `8 hundred` do not state 8
either: the text beside the number turns it into another statement or another number. `5!=120` is
read as a comparison; write the factorial as `5! = 120`.

A truncated answer is judged by where it ends: `4 * 2 = 8` earns the reward even if it is the
beginning of `4 * 2 = 8 + 1` or of `4 * 2 = 81`. Give answers enough room with
`generator.max_new_tokens`.
"""

from __future__ import annotations

import re
from fractions import Fraction

from shared.tasks.answers import extract_answer
from shared.tasks.derive import Item, TaskError
from shared.tasks.numerals import in_ascii_digits, is_unit, joined_thousands, read_number
from shared.tasks.verifiers import AnswerScorer
from shared.tasks.verify_exact import in_usual_characters

MAX_END_CHARS = 80
"""Only this many characters at the end of an answer are examined."""

_OPENING = r"[ *_$\\(\[{\u20ac\u00a3\u00a5]*"
_NUMBER = (
    r"((?:[+\-\u2212\u2013]\(?)?(?:[0-9]{1,3}(?:[ '_\u00a0\u2007\u2009\u202f][0-9]{3})+(?:\.[0-9]{1,17})?"
    r"|[0-9][0-9,]{0,30}(?:\.[0-9]{1,17})?|\.[0-9]{1,17}))"
)
_CLOSING = r"[ *_$\\)\]}.]*"
_END = rf"{_OPENING}{_NUMBER}{_CLOSING}"
_UNIT = r"(?:[*_$]{0,2} (?:\\)?|\\(?:text|textrm|mathrm|mbox)\{ ?)([A-Za-z]+)"
_CONCLUSION = r"\b(?:is|equals|(?:therefore|thus|hence|so),?|(?:it|that|answer|total|sum|result)['\u2019]s)(?![\w'])"
_STATED = re.compile(rf"(?:^|[=:\n]|{_CONCLUSION}){_OPENING}{_NUMBER}(?:{_UNIT}{_CLOSING}|{_CLOSING})$", re.IGNORECASE)
_WHOLE = re.compile(_END)
_THOUSANDS_COMMA = re.compile(r"(?<=[0-9])(?:\{,\}|\\,|,\\!)(?=[0-9]{3})")
_GAP = r"[\s=:*_$\\(\[{]*"
# < > <= >= != ~ +- and + / - times, divided by, to the power of; but not the rule `---`.
# An en dash after a word is punctuation.
_EN_DASH = r"(?<![A-Za-z]{2} )(?<![A-Za-z]{2})\u2013"
_SIGN = re.compile(rf"(?:[<>\u2264\u2265\u2260~\u00b1+/\u2212\u00d7\u00f7^]|(?<!--)-|{_EN_DASH}){_GAP}$")
# `x != 8`, `x ! = 8` and `4 =\= 8`; `4! = 24` is a factorial.
_UNEQUAL = re.compile(rf"(?:!(?==)|=\\(?==)|(?<![\w)\]}}])!(?=\s*=)){_GAP}$")
# The only asterisks of a line, after a number or a space, so they do not end an emphasis.
_TIMES = re.compile(rf"(?:^|\n)(?:[^*\n\0]*[\s0-9)\]}}])?\*{{1,2}}\s*\n{_GAP}$")
# `4:8`, `12:08` and `4 : 8` are ratios or times; `3 + 5: 8` states the sum.
_RATIO = re.compile(rf"[0-9][*_$\\)\]}}]*(?: +:|:(?!\S*\s)){_GAP}$")
_VERB = rf"{_GAP}(?:is|equals)?{_GAP}$"
_NEGATION = (
    r"not(?: true| so| the case)?|no longer|cannot|never|nor|neither|or|than|at (?:least|most)|negative|incorrect|wrong|false"
    r"|untrue|unequal|except(?: for)?|excluding|without|instead of|(?:any|every|no)thing but|all but"
)
_OPERATION = r"minus|plus|mod|modulo|(?:divided|multiplied) by|(?:root|power|cube|square|factorial|half|third|quarter|percent) of"
_WORD = re.compile(rf"(?:\b(?:{_NEGATION}|{_OPERATION})|n['\u2019]t)(?: equal(?: to)?)?{_VERB}", re.IGNORECASE)
# `4 times\n8` and `4 times: 8`; `How many times:\n8` states the number.
_MULTIPLIED = re.compile(rf"(?:[0-9)\]}}][\s*_$]*(?:times|over)\b{_GAP}|\b(?:times|twice)[\s*_$\\(\[{{]*)$", re.IGNORECASE)
_COMMAND = re.compile(
    r"\\(?:neq?|not|l[et]|g[et]|[lg]eq(?:slant)?|sim|approx|times|cdot|div|pm|mp|sqrt|[dt]?frac|ln|log|exp|sin|cos|tan)(?![A-Za-z])"
    rf"{_GAP}$"
)
# All that is visible of the text before is this gap, and perhaps the rest of a word or a few.
_UNSEEN = re.compile(rf"\0\w{{0,12}}(?: \w{{1,8}}){{0,3}}{_VERB}", re.IGNORECASE)
_NOT_ASSERTED = (_SIGN, _UNEQUAL, _TIMES, _RATIO, _WORD, _MULTIPLIED, _COMMAND, _UNSEEN)
"""Text immediately before a number that makes it something other than the stated answer."""
_CLAUSE = re.compile(r"[.,!?]\s|[;:\n]|\b(?:but|so|then|thus|hence|therefore|because|since|instead)\b", re.IGNORECASE)
_DENIAL = re.compile(
    r"\b(?:not|cannot|never|neither|nor|no longer|unless|wrong|false|incorrect|untrue|opposite)\b|n['\u2019]t\b", re.IGNORECASE
)
# `7 = ` and `43 is `, which contradict the number after them unless it is the same.
_ANOTHER_NUMBER = re.compile(
    rf"(?:^|[\n;:!?,]|\. |\b(?:so|then|thus) )[ *_$]*{_NUMBER}[ *_$]*(?:=|\bis|\bequals)[ *_$]*$", re.IGNORECASE
)
_PLAIN_SIGN = {0x2212: "-", 0x2013: "-", ord("("): None}
_TAG = re.compile(r"<[^<>\s][^<>]*>")


def verifier(item: Item) -> AnswerScorer:
    """1 for an answer that ends in the reference number, else 0.

    Raises:
        TaskError: the dataset's reference answer is not a number.
    """
    reference = _WHOLE.fullmatch(_in_ascii(extract_answer(item.task.answer or "") or ""))
    wanted = _value(reference[1]) if reference else None
    if wanted is None:
        raise TaskError(
            "task_verifier",
            f"{item.task.ref.dataset}: verifier final_number needs a number as reference answer, and this dataset gives "
            f"{(item.task.answer or '')[:60]!r}; keep only the number, or use math for formulas, and for words exact (a file) or "
            "reasoning_gym (a dataset)",
        )

    def score(answer: str) -> float:
        text = answer.rstrip()
        # A number at the start of the examined text is the start of the answer only if that is the
        # whole answer.
        end = _in_ascii(text if len(text) <= MAX_END_CHARS else "\0" + text[-MAX_END_CHARS:])
        match = _STATED.search(end)
        if match is None:
            return 0.0
        before = _TAG.sub("", end[: match.start(1)])  # The `>` of a tag is not a comparison.
        if match[2] and not is_unit(match[2]) or any(pattern.search(before) for pattern in _NOT_ASSERTED):
            return 0.0
        if _DENIAL.search(_CLAUSE.split(before)[-1]):
            return 0.0
        other = _ANOTHER_NUMBER.search(before)
        return float(_value(match[1]) == wanted and (other is None or _value(other[1]) == wanted))

    return score


def _in_ascii(text: str) -> str:
    return _THOUSANDS_COMMA.sub(",", in_ascii_digits(in_usual_characters(text)))


def _value(number: str) -> Fraction | None:
    return read_number(joined_thousands(number.translate(_PLAIN_SIGN)))
