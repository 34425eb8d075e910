"""A command that SIGTERM ends as Ctrl-C does: what it has begun is taken back."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

EXIT_TERMINATED = 128 + signal.SIGTERM


@contextmanager
def unwinding_on_sigterm() -> Iterator[None]:
    """In the block SIGTERM raises SystemExit with `EXIT_TERMINATED`, so that `finally` clauses take
    away what is half done.

    Of a second signal nothing comes: it would interrupt the clauses. Outside the main thread, which
    alone gets signals, the block runs as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _unwind(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(EXIT_TERMINATED)
