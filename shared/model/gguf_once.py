"""Reads a GGUF file's fields once. `transformers` reads them for config, tokenizer and weights, and
makes its table of names for every module: more than half of an import's time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MADE_ONCE = ("GGUFReader", "get_tensor_name_map")
"""What `transformers` takes from the package `gguf` at each call."""


@contextmanager
def gguf_read_once() -> Iterator[None]:
    """In the block, a file's reader and an architecture's table of names are made once. Without the
    package `gguf`, nothing is changed.
    """
    try:
        import gguf
    except ImportError:
        yield
        return
    before: dict[str, Any] = {name: getattr(gguf, name) for name in _MADE_ONCE}
    for name, made in before.items():
        setattr(gguf, name, functools.cache(made))
    try:
        yield
    finally:
        for name, made in before.items():
            setattr(gguf, name, made)
