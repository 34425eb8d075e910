"""What a worker process may not do: limits that it sets on itself before it looks at any text."""

from __future__ import annotations

import ctypes
import resource
import sys

OPEN_FILES = 32

_CLONE_NEWUSER_NEWNET = 0x10000000 | 0x40000000
_PR_SET_NO_NEW_PRIVS = 38


def restrict(memory_bytes: int) -> None:
    """Bound address space, open files, file size and core dumps; no new processes or privileges; no network where Linux allows."""
    _lower(resource.RLIMIT_AS, memory_bytes)
    _lower(resource.RLIMIT_NOFILE, OPEN_FILES)
    _lower(resource.RLIMIT_FSIZE, 0)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_NPROC, 0)
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        # Refused in some containers; the other limits hold all the same.
        library.unshare(_CLONE_NEWUSER_NEWNET)


def allow_cpu(seconds: float) -> None:
    """Let this process use `seconds` more of CPU time. Past that the system kills it, also when the parent is gone."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime + seconds) + 1
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _lower(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (bound, bound))
