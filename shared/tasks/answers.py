r"""Finds the answer in a completion: one rule for all verifiers (docs/tasks.md, "The answer").

Everything takes time linear in the length of the text, also of hostile text.
"""

from __future__ import annotations

import re

OPENING_TAG = "<answer>"
CLOSING_TAG = "</answer>"

MAX_ANSWER_CHARS = 65_536
"""Longest answer that is scored."""
FREE_SPACE_CHARS, SPACE_PER_VISIBLE_CHAR = 100, 6
"""White space that an answer may have in one place, and in all beside that which its visible
characters allow: a board of reasoning-gym's `futoshiki` takes five for each. More could carry text
that nobody sees.
"""

_THOUGHTS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
)
_BOX = re.compile(r"\\{1,3}(?:boxed|fbox)[ ]{0,3}\{|\\.|[{}]", re.DOTALL)
_AROUND_A_BOX = frozenset(" \t\n*$\\()[].")
_MOST_AROUND_A_BOX = 12
_HEADING = "####"
_LONG_SPACE = re.compile(rf"\s{{{FREE_SPACE_CHARS + 1}}}")
_WRAPPERS = (
    *(("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), (r"\boxed{", "}"), (r"\fbox{", "}")),
    *((rf"\{command}{{", "}") for command in ("text", "textbf", "textrm", "mathbf", "mathrm", "mbox")),
    *(("**", "**"), ("*", "*"), ("`", "`")),
)
_MOST_WRAPPERS = 8


def extract_answer(text: str) -> str | None:
    r"""The answer in a completion, stripped; None if there is none that can be scored.

    A thought ends at the last closing tag such as `</think>`; one that is not closed reaches to the
    end. In what is left, the answer is the content of the last closed `<answer>...</answer>`, else
    of the last closed `\boxed{...}`, else what follows `####` on the last line, else all of it.

    None if there is only a thought, if the answer is longer than `MAX_ANSWER_CHARS`, or if it has
    more white space than `FREE_SPACE_CHARS` allows.
    """
    answer = text
    if "<" in text or "[THINK]" in text or "[/THINK]" in text:
        answer = without_thought(text)
        if len(answer) < len(text) and not answer.strip():
            return None
    tagged = _in_tags(answer) if CLOSING_TAG in answer else None
    if tagged is not None:
        answer = _in_a_box_alone(tagged) if "{" in tagged else tagged
    elif "{" in answer and (box := _last_box(answer)) is not None:
        answer = answer[box[0] : box[1]]
    elif _HEADING in answer:
        answer = _after_heading(answer)
    stripped = answer.strip()
    if len(answer) <= FREE_SPACE_CHARS:
        return stripped
    return stripped if len(stripped) <= MAX_ANSWER_CHARS and _has_little_space(answer) else None


def bare(text: str) -> str:
    """`text` without the dollars, boxes, fonts and marks of emphasis around all of it."""
    text = text.strip()
    for _ in range(_MOST_WRAPPERS):
        for opening, closing in _WRAPPERS:
            if not (text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing)):
                continue
            inner = text[len(opening) : -len(closing)]
            if closing == "}" and not _is_balanced(inner) or closing != "}" and (opening in inner or closing in inner):
                continue
            text = inner.strip()
            break
        else:
            break
    return text


def without_thought(text: str) -> str:
    """The text after its thoughts. A closing tag ends all thoughts before it, as many templates
    open one in the prompt; an opening tag after it begins one that is not closed.
    """
    start = max((at + len(closing) for _, closing in _THOUGHTS if (at := text.rfind(closing)) >= 0), default=0)
    ends = [at for opening, _ in _THOUGHTS if (at := text.find(opening, start)) >= 0]
    return text[start : min(ends, default=len(text))]


def _in_tags(text: str) -> str | None:
    end = text.rfind(CLOSING_TAG)
    previous_end = text.rfind(CLOSING_TAG, 0, end)
    start = text.find(OPENING_TAG, previous_end + 1 if previous_end >= 0 else 0, end)
    return None if start < 0 else text[start + len(OPENING_TAG) : end]


def _in_a_box_alone(text: str) -> str:
    r"""`8` of `$\boxed{8}$.`; what has anything else besides the box is an answer as it stands."""
    box = _last_box(text)
    if box is None:
        return text
    opening = text.rfind("\\", 0, box[0])
    around = text[:opening] + text[box[1] + 1 :]
    return text[box[0] : box[1]] if len(around) <= _MOST_AROUND_A_BOX and _AROUND_A_BOX.issuperset(around) else text


def _last_box(text: str) -> tuple[int, int] | None:
    """Where the content of the box begins and ends that opens last, of those that are closed."""
    found: tuple[int, int] | None = None
    open_braces: list[int] = []
    for match in _BOX.finditer(text):
        mark = match[0]
        if mark == "{":
            open_braces.append(-1)
        elif mark == "}":
            start = open_braces.pop() if open_braces else -1
            if start >= 0 and (found is None or start > found[0]):
                found = (start, match.start())
        elif mark[-1] == "{" and len(mark) > 2:
            open_braces.append(match.end())
    return found


def _is_balanced(text: str) -> bool:
    depth = 0
    for match in _BOX.finditer(text):
        depth += (match[0] == "{" or len(match[0]) > 2) - (match[0] == "}")
        if depth < 0:
            return False
    return depth == 0


def _after_heading(text: str) -> str:
    line = text.rstrip().rpartition("\n")[2]
    before, heading, after = line.rpartition(_HEADING)
    return after if heading and after.strip() and (not before or before[-1].isspace()) else text


def _has_little_space(text: str) -> bool:
    visible = sum(map(len, text.split()))
    return len(text) - visible <= FREE_SPACE_CHARS + SPACE_PER_VISIBLE_CHAR * visible and not _LONG_SPACE.search(text)
