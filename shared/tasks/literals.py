"""Reads a list that a model wrote as a Python or JSON literal, without evaluating anything."""

from __future__ import annotations

import ast
import re
from typing import Any

MAX_CHARS = 65_536
MAX_DEPTH = 4

_CHARACTERS = re.compile(r"""[\[\](),'"A-Za-z0-9_.+\- \t\r\n]+""")


def read_literal(text: str) -> Any:
    """The list, tuple, number or string that `text` represents.

    Raises:
        ValueError: `text` is anything else, too long, or nested more than `MAX_DEPTH` deep.
    """
    if len(text) > MAX_CHARS or not _CHARACTERS.fullmatch(text):
        raise ValueError("not a plain literal")
    depth = 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
    try:
        return ast.literal_eval(text)
    except (SyntaxError, MemoryError, RecursionError, TypeError) as error:
        raise ValueError(f"not a literal: {type(error).__name__}") from None
