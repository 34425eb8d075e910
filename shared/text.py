"""Makes text from others safe to display: the one place that knows which characters act on a
terminal instead of being visible.

Names, models, states, causes and answers come from other nodes and from models. Printed unchanged,
they can move the cursor, set a window's title, reverse a line's reading order (bidi overrides) or
forge a log line. `visible` shows such characters as escapes (`\\x1b`), so that they are seen and
have no effect. It does not double backslashes, because its output is to be read, not parsed back.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Collection
from itertools import islice
from typing import Any

HIDDEN = (
    r"\x00-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0"
    r"\ufff0-\ufffb\U000e0000-\U000e0fff"
)
"""For use inside a regular expression's brackets: C0, DEL, C1, line separators, zero-width
characters, bidi controls, fillers, tags.
"""

_BLANK = frozenset("\u115f\u1160\u3164\uffa0\u2800")
"""Characters that Unicode classes as letters or symbols but that draw nothing."""
_MARKS_IN_A_ROW = 3
"""Scripts that stack marks need up to three; more would overlap the lines above."""
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def visible(text: str, limit: int | None = None) -> str:
    """`text` on one line, with every invisible character written as an escape, and `…` at the end
    if it is longer than `limit`.

    It escapes characters that Unicode does not class as printable (controls, bidi overrides,
    zero-width characters, separators other than the space, surrogates, private and unassigned code
    points), blank letters, and the fourth and later combining marks in a row.
    """
    cut = text if limit is None else text[: limit + 1]
    if not cut.isascii() or not cut.isprintable():
        cut = "".join(_escaped(cut))
    return cut if limit is None or len(cut) <= limit else cut[: max(0, limit - 1)] + "…"


def visible_lines(text: str) -> str:
    """Like `visible`, but keeps line breaks and expands tabs: for text of several lines, such as an
    answer or a traceback.
    """
    return "\n".join(visible(line.expandtabs(4)) for line in text.split("\n"))


def listed(names: Collection[str], most: int, characters: int | None = None) -> str:
    """The first `most` names, each cut to so many `characters`, and how many more there are:
    `a, b and 3 more`.
    """
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(visible(name, characters) for name in islice(names, most)) + more


def cut_text(text: str, characters: int) -> str:
    """`visible_lines` of at most the first `characters` of `text`, and how many are left out."""
    cut = text if len(text) <= characters else text[:characters] + f"… ({len(text) - characters:,} more characters)"
    return visible_lines(cut)


def visible_json(value: Any, **options: Any) -> str:
    """`value` as JSON in printable ASCII that decodes to the same value. `json.dumps` alone leaves
    DEL unescaped.
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
    """`text` without the secret parts of addresses: user names, passwords and queries.

    >>> without_secrets("POST https://me:secret@host:4318/v1?key=secret failed")
    'POST https://host:4318/v1?… failed'
    """
    return _QUERY.sub("?…", _USER.sub("", text))


_ASYNCIO = re.compile(r"\[Errno (\d+)\]")


def error_text(error: Exception) -> str:
    """Describe an error without the system's error number and the file's name: for `[Errno 2] No
    such file or directory: 'x'` it is `No such file or directory`. For other errors: their text.
    """
    if isinstance(error, UnicodeDecodeError):
        return f"it is not text in UTF-8, see byte {error.start + 1}"
    if isinstance(error, OSError):
        # asyncio puts addresses into the text, and joins the errors of several addresses.
        if isinstance(error, ConnectionError) and error.errno:
            return os.strerror(error.errno)
        if (found := _ASYNCIO.search(str(error))) and not error.errno:
            return os.strerror(int(found[1]))
        if error.strerror:
            return error.strerror
    return str(error) or type(error).__name__
