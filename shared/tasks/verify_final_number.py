"""The verifier `final_number`: the answer ends by stating the reference number. For models that
answer in sentences.

`8`, `4 * 2 = 8`, `The answer is **8**.` and `Answer: 8` state 8; `the product of 4 and 8` and `8
apples` state nothing, so that a question said again is not paid for the number that it happens to
end with. Nor do `x != 8`, `x >= 8`, `not: 8`, `7 or\n8`, `4:8` and `10/\n8`: what stands
immediately before the number makes it another statement, or another number. `5!=120` is read as the
comparison; the factorial is `5! = 120`. What is cut off is judged by where it ends: `4 * 2 = 8` is
paid, were it the beginning of `4 * 2 = 8 + 1` or of `4 * 2 = 81` too: give answers room with
`generator.max_new_tokens`.
"""

from __future__ import annotations

import re

from shared.tasks.derive import Item, TaskError
from shared.tasks.numerals import read_number
from shared.tasks.verifiers import AnswerScorer

MAX_END_CHARS = 80
"""As much of an answer's end is looked at."""

_STATED = re.compile(
    r"(?:^|[=:\n]|\b(?:is|equals)\b)[ *_$\\(\[{]*"
    r"([+\-\u2212]?(?:[0-9][0-9,]{0,30}(?:\.[0-9]{1,17})?|\.[0-9]{1,17}))[ *_$\\)\]}.]*$",
    re.IGNORECASE,
)
_GAP = r"[\s=:*_$\\(\[{]*"
# < > <= >= != ~ +- and + / - times, divided by, to the power of; but not the rule `---`.
_SIGN = re.compile(rf"(?:[<>\u2264\u2265\u2260~\u00b1+/\u2212\u00d7\u00f7^]|(?<!--)-){_GAP}$")
# `x != 8` and `x ! = 8`; `4! = 24` is a factorial.
_UNEQUAL = re.compile(rf"(?:!(?==)|(?<![\w)\]}}])!(?=\s*=)){_GAP}$")
# A line's only asterisks, behind a number or a space: no emphasis ends there.
_TIMES = re.compile(rf"(?:^|\n)(?:[^*\n\0]*[\s0-9)\]}}])?\*{{1,2}}\s*\n{_GAP}$")
# `4:8`, `12:08` and `4 : 8`; `3 + 5: 8` says what the sum is.
_RATIO = re.compile(rf"[0-9][*_$\\)\]}}]*(?: +:|:(?!\S*\s)){_GAP}$")
_VERB = rf"{_GAP}(?:is|equals)?{_GAP}$"
_WORD = re.compile(rf"(?:\b(?:not|cannot|never|or|than|at (?:least|most))|n['\u2019]t)(?: equal(?: to)?)?{_VERB}", re.IGNORECASE)
# All that is seen of the text before is this gap.
_UNSEEN = re.compile(rf"\0{_VERB}", re.IGNORECASE)
_NOT_ASSERTED = (_SIGN, _UNEQUAL, _TIMES, _RATIO, _WORD, _UNSEEN)
"""What may stand immediately before a number that is then not said to be the answer."""
_TAG = re.compile(r"<[^<>\s][^<>]*>")


def verifier(item: Item) -> AnswerScorer:
    """1 for an answer that ends in the reference number, else 0.

    Raises:
        TaskError: the dataset's reference answer is not a number.
    """
    wanted = read_number(item.task.answer or "")
    if wanted is None:
        raise TaskError(
            "task_verifier",
            f"{item.task.ref.dataset}: verifier final_number needs a number as reference answer, and this dataset gives "
            f"{(item.task.answer or '')[:60]!r}; use reasoning_gym or math",
        )

    def score(answer: str) -> float:
        text = answer.rstrip()
        # A number at the start of what is looked at is the answer's start only if that is all there
        # is.
        end = text if len(text) <= MAX_END_CHARS else "\0" + text[-MAX_END_CHARS:]
        match = _STATED.search(end)
        if match is None:
            return 0.0
        before = _TAG.sub("", end[: match.start(1)])  # The `>` of a tag compares nothing.
        asserted = not any(pattern.search(before) for pattern in _NOT_ASSERTED)
        return float(asserted and read_number(match[1].replace("\u2212", "-")) == wanted)

    return score
