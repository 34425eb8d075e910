"""Resource limits that a worker process sets on itself before it sees any text."""

from __future__ import annotations

import os
import resource

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


def limit_data(memory_bytes: int) -> None:
    """Limit memory that files do not back, so that a mapped file counts for nothing."""
    _lower(resource.RLIMIT_DATA, memory_bytes)


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
