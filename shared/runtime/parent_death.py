"""Ends a process together with its parent: on Linux the kernel sends a signal to a process whose
parent has ended, even if the parent was killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def ending_with_parent(number: signal.Signals = signal.SIGTERM) -> Callable[[], None]:
    """What a child calls between fork and exec (`preexec_fn`), so that it gets `number` when this
    process ends. It outlives exec. On other systems it does nothing.

    The kernel means the *thread* that forked: start such children from one that lives as long as
    the process.
    """
    if sys.platform != "linux":
        return lambda: None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # found before the fork, where no lock is held
    parent = os.getpid()

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it ended before the kernel was asked
            os.kill(os.getpid(), number)

    return in_child


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """The same for this process itself and the parent that it has now."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
