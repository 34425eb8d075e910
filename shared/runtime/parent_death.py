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
    """A function for the child to call between fork and exec (`preexec_fn`), so that it gets the
    signal `number` when this process ends. The effect outlives exec. On systems other than Linux it
    does nothing.

    For the kernel the parent is the *thread* that forked, so start such children from a thread that
    lives as long as the process.
    """
    if sys.platform != "linux":
        return lambda: None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # found before the fork, where no lock is held
    parent = os.getpid()

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        _end_if_orphaned(parent, number)

    return in_child


def end_with_parent(number: signal.Signals = signal.SIGTERM, parent: int | None = None) -> None:
    """The same for this process and its present parent. Call it again after a change of user, which
    resets it.

    parent: the process id of the parent, from before the fork. If that process has ended already,
    this one gets the signal now.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if parent is not None:
        _end_if_orphaned(parent, number)


def _end_if_orphaned(parent: int, number: signal.Signals) -> None:
    if os.getppid() != parent:  # the parent ended before the kernel was asked
        os.kill(os.getpid(), number)
