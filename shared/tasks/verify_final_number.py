"""The verifier `final_number`: the answer ends by stating the reference number. For models that answer in sentences.

`8`, `4 * 2 = 8`, `The answer is **8**.` and `Answer: 8` state 8; `the product of 4 and 8` and `8 apples` state nothing, so that
a question said again is not paid for the number that it happens to end with. What is cut off is judged by where it ends:
`4 * 2 = 8` is paid, were it the beginning of `4 * 2 = 8 + 1` or of `4 * 2 = 81` too: give answers room with
`generator.max_new_tokens`.
"""

from __future__ import annotations

import re

from shared.tasks.derive import Item, TaskError
from shared.tasks.numerals import read_number
from shared.tasks.verifiers import AnswerScorer

MAX_END_CHARS = 80
"""As much of an answer's end is looked at."""

_STATED = re.compile(r"(?:^|[=:\n]|\b(?:is|equals)\b)[ *_$\\(\[{]*([+-]?[0-9][0-9,]{0,30}(?:\.[0-9]{1,17})?)[ *_$\\)\]}.]*$")


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
        # A number at the start of what is looked at is the answer's start only if that is all there is.
        match = _STATED.search(text if len(text) <= MAX_END_CHARS else "\x00" + text[-MAX_END_CHARS:])
        return float(match is not None and read_number(match[1]) == wanted)

    return score
