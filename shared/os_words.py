"""Puts the operating system's errors, and those of reading a text file, into words for people."""

from __future__ import annotations

import os
import re

_ASYNCIO = re.compile(r"\[Errno (\d+)\]")


def in_words(error: Exception) -> str:
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
