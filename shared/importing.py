"""Imports that would take too long where they stand."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_collection() -> Iterator[None]:
    """Do without garbage collection while modules are imported: what they make stays, and looking
    at it again and again takes a fifth of the time. Later collections pass over it too.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def on_first_use(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The function `__getattr__` of a package whose names are imported when they are first used, so
    that whoever needs one of its modules loads no other. homes: name to the module of the package
    that has it.
    """

    def named(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return named
