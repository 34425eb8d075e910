"""Text that others wrote, made safe to look at: the one place that knows which characters act on a
terminal instead of being seen.

Names, models, states, causes and answers come from other nodes and from models. Written as they
are, they can move the cursor, set a window's title, turn a line's reading order round (bidi
overrides) or forge a line of a log. `visible` shows such characters as escapes (`\\x1b`), so that
text is seen and never acted on. It does not double backslashes: it is to be read, not parsed back.
"""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

HIDDEN = (
    r"\x00-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0"
    r"\ufff0-\ufffb\U000e0000-\U000e0fff"
)
"""Inside a regular expression's brackets: C0, DEL, C1, line separators, zero-width characters, bidi
controls, fillers, tags.
"""

_BLANK = frozenset("\u115f\u1160\u3164\uffa0\u2800")
"""Letters by category that draw nothing."""
_MARKS_IN_A_ROW = 3
"""Scripts that stack marks need up to three; more of them climb over the lines above."""
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def visible(text: str, limit: int | None = None) -> str:
    """`text` on one line, with every character that cannot be seen as an escape, and `…` at the end
    when it is longer than `limit`.

    Escaped is what Unicode does not call printable (controls, bidi overrides, zero-width
    characters, separators but the space, surrogates, private and unassigned code points), blank
    letters, and the fourth and later of a row of combining marks.
    """
    cut = text if limit is None else text[: limit + 1]
    if not cut.isascii() or not cut.isprintable():
        cut = "".join(_escaped(cut))
    return cut if limit is None or len(cut) <= limit else cut[: max(0, limit - 1)] + "…"


def visible_lines(text: str) -> str:
    """As `visible`, but lines stay lines and a tab is spaces: for text of several lines, such as an
    answer or a traceback.
    """
    return "\n".join(visible(line.expandtabs(4)) for line in text.split("\n"))


def visible_json(value: Any, **options: Any) -> str:
    """`value` as JSON in which all text is printable ASCII and reads back as it was: `json.dumps`
    leaves DEL as it is.
    """
    return json.dumps(value, **options).replace("\x7f", "\\u007f")


def _escaped(text: str) -> list[str]:
    parts, marks = [], 0
    for character in text:
        marks = marks + 1 if unicodedata.category(character) in ("Mn", "Me") else 0
        if character.isprintable() and character not in _BLANK and marks <= _MARKS_IN_A_ROW:
            parts.append(character)
        else:
            parts.append(_SHORT.get(character) or _escape(ord(character)))
    return parts


def _escape(point: int) -> str:
    if point <= 0xFF:
        return f"\\x{point:02x}"
    return f"\\u{point:04x}" if point <= 0xFFFF else f"\\U{point:08x}"


_USER = re.compile(r"(?<=://)[^/\s@]*@")
_QUERY = re.compile(r"(?<=[^\s?])\?[^\s?'\"()<>]+")


def without_secrets(text: str) -> str:
    """`text` with what is secret in addresses left out: names and passwords, and queries.

    >>> without_secrets("POST https://me:secret@host:4318/v1?key=secret failed")
    'POST https://host:4318/v1?… failed'
    """
    return _QUERY.sub("?…", _USER.sub("", text))
