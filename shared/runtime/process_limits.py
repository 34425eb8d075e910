"""Limits of a child process: it ends together with its parent, even if the parent was killed (on
Linux the kernel sends it a signal), and takes no more memory, files and CPU time than it is given.
"""

from __future__ import annotations

import ctypes
import os
import resource
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


OPEN_FILES = 32


def limit(memory_bytes: int, *, processes: bool = False) -> None:
    """Limit address space, open files, file size and core dumps; without `processes`, also forbid
    new processes.
    """
    _lower(resource.RLIMIT_AS, memory_bytes)
    _lower(resource.RLIMIT_NOFILE, OPEN_FILES)
    _lower(resource.RLIMIT_FSIZE, 0)
    _lower(resource.RLIMIT_CORE, 0)
    if not processes:
        _lower(resource.RLIMIT_NPROC, 0)


def limit_further(memory_bytes: int) -> None:
    """In a forked process: forbid new processes and lower the limit of the address space."""
    _lower(resource.RLIMIT_NPROC, 0)
    _lower(resource.RLIMIT_AS, memory_bytes)


def limit_data(memory_bytes: int, *, soft: bool = False) -> None:
    """Limit memory that files do not back, so that a mapped file counts for nothing. soft: a
    process that this one starts may lift it (`lift_data_limit`).
    """
    if soft:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(
            resource.RLIMIT_DATA, (memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard), hard)
        )
    else:
        _lower(resource.RLIMIT_DATA, memory_bytes)


def lift_data_limit() -> None:
    """Lift a soft limit of `limit_data`."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


class MappedMemory:
    """The address space that this process uses. Its source is opened before files become
    inaccessible.
    """

    def __init__(self) -> None:
        try:
            self._descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = -1

    def size_bytes(self) -> int | None:
        """Bytes of address space; None if the system does not report it."""
        return self._figure(0)

    def data_bytes(self) -> int | None:
        """The part of it that `limit_data` counts, and the stack."""
        return self._figure(5)

    def _figure(self, place: int) -> int | None:
        if self._descriptor < 0:
            return None
        return int(os.pread(self._descriptor, 256, 0).split()[place]) * resource.getpagesize()


class CpuAllowance:
    """A limit on CPU time that is moved ahead as work proceeds. When it is exceeded the system
    kills this process, even if the parent is gone.
    """

    def __init__(self, step_s: float) -> None:
        """`step_s`: CPU seconds that one step may use."""
        self._step_s = step_s
        self._until_s = 0.0

    def extend(self, steps: int, now_s: float) -> None:
        """Allow `steps` more steps, which begin at the time `now_s` (monotonic clock).

        Twice what they need is granted, so that cheap jobs rarely need the system call. CPU time
        never passes faster than wall-clock time, because a worker has one thread.
        """
        needed_s = self._step_s * steps
        if now_s + needed_s <= self._until_s:
            return
        self._until_s = now_s + 2 * needed_s
        _allow_cpu(2 * needed_s)


def _allow_cpu(seconds: float) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime + seconds) + 1
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _lower(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (bound, bound))
