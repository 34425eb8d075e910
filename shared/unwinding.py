"""Makes SIGTERM end work the way Ctrl-C does, so that unfinished work is undone."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_TERMINATED = 128 + signal.SIGTERM


class _Asked:
    """The exception that a signal raised in the block, or None."""

    exception: BaseException | None = None


_asked = _Asked()


@contextmanager
def unwinding_on_signals() -> Iterator[None]:
    """In the block SIGTERM raises SystemExit with `EXIT_TERMINATED`, and SIGINT KeyboardInterrupt,
    so that `finally` clauses undo unfinished work.

    A second signal does not interrupt these clauses. Python drops an exception raised within a
    destructor, a weak reference's callback or an attribute that compiled code looks up; if it
    dropped the first one, a second signal raises again, and so does `stop_if_asked`. Outside the
    main thread, which alone receives signals, the block runs unchanged.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _asked.exception = None
    before = {number: signal.signal(number, _unwind) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
        stop_if_asked()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _asked.exception = None


def stop_if_asked() -> None:
    """Raise a signal's exception that Python dropped in the block of `unwinding_on_signals`."""
    if _asked.exception is not None and threading.current_thread() is threading.main_thread():
        raise _asked.exception


def _unwind(number: int, _: object) -> None:
    if _asked.exception is not None and _being_handled(_asked.exception):
        return
    _asked.exception = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(EXIT_TERMINATED)
    raise _asked.exception


def _being_handled(exception: BaseException) -> bool:
    """Check whether the interrupted code is handling `exception`, or another exception raised
    during that handling.
    """
    handled, seen = sys.exc_info()[1], 0
    while handled is not None and seen < 100:
        if handled is exception:
            return True
        handled, seen = handled.__context__, seen + 1
    return False
