"""The seccomp filter: it allows the system calls that a scorer needs, and no others (seccomp(2) and
the kernel's seccomp documentation).

The filter lists allowed calls, because the kernel keeps gaining new ones. fork, clone, exec,
ptrace, signals to others, sockets, `process_vm_*`, io_uring, mounts, keyrings and everything else
fail with EPERM, and a library that tries one continues.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from shared.tasks.sandbox.system_calls import NUMBERS

_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_RET_ALLOW = 0x7FFF0000
_RET_ERRNO = 0x00050000
_RET_KILL_PROCESS = 0x80000000

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_X32_BIT = 0x40000000

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_COMMON = (
    "read write readv writev pread64 lseek close fstat newfstatat statx openat faccessat faccessat2 readlinkat getdents64 "
    "fcntl ioctl dup dup3 getcwd mmap munmap mprotect mremap madvise brk rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack "
    "setitimer getitimer nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday times getrusage prlimit64 "
    "getpid getppid gettid getuid geteuid getgid getegid uname sysinfo futex sched_yield sched_getaffinity getrandom "
    "set_robust_list rseq set_tid_address exit exit_group restart_syscall ppoll pselect6 getcpu fadvise64 close_range"
)
_X86_ONLY = "open stat lstat access readlink getdents poll select dup2 arch_prctl getrlimit setrlimit time"
FORKING = frozenset({"clone", "clone3", "fork", "vfork", "wait4", "waitid", "kill", "pipe2", "prctl"})
"""Further calls for the parent of the processes that score foreign groups; those processes do not
get them.
"""


class SeccompUnavailable(Exception):
    """The filter is not in force; the message states the cause and the remedy."""


def install(*, forking: bool) -> None:
    """Restrict this process and its children to the calls above, permanently. `forking`: also allow
    those in `FORKING`.

    A second filter narrows the first. `no_new_privs` must be set.

    Raises:
        SeccompUnavailable: unknown architecture, or the kernel refuses.
    """
    filters = program(platform.machine(), forking=forking)
    buffer = ctypes.create_string_buffer(filters, len(filters))
    header = struct.pack("HxxxxxxP", len(filters) // 8, ctypes.addressof(buffer))
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.create_string_buffer(header, len(header)), 0, 0) != 0:
        cause = errno.errorcode.get(ctypes.get_errno(), "refused")
        raise SeccompUnavailable(f"the kernel accepts no filter ({cause}); run on a kernel with CONFIG_SECCOMP_FILTER")


def program(machine: str, *, forking: bool) -> bytes:
    """The filter as struct sock_filter[], 8 bytes each, for `platform.machine()`.

    Raises:
        SeccompUnavailable: the system call numbers of this architecture are not known here.
    """
    if machine not in _ARCHITECTURES:
        raise SeccompUnavailable(f"no filter for {machine}; run on {' or '.join(_ARCHITECTURES)}")
    numbers = NUMBERS[machine]
    names = [*_COMMON.split(), *(_X86_ONLY.split() if machine == "x86_64" else ()), *(FORKING if forking else ())]
    allowed = sorted(numbers[name] for name in names if name in numbers and name != "prlimit64")
    code = [
        _line(_LOAD, _ARCH_AT),
        _line(_EQUAL, _ARCHITECTURES[machine], 1, 0),
        _line(_RETURN, _RET_KILL_PROCESS),
        _line(_LOAD, _NUMBER_AT),
        # The same calls under other numbers (x32).
        _line(_AT_LEAST, _X32_BIT, 0, 1),
        _line(_RETURN, _RET_ERRNO | errno.EPERM),
    ]
    for number in allowed:
        code += [_line(_EQUAL, number, 0, 1), _line(_RETURN, _RET_ALLOW)]
    code += [
        # Only the process's own limits: with another process's id the call would set that one's.
        _line(_EQUAL, numbers["prlimit64"], 0, 3),
        _line(_LOAD, _FIRST_ARGUMENT_AT),
        _line(_EQUAL, 0, 0, 1),
        _line(_RETURN, _RET_ALLOW),
        _line(_RETURN, _RET_ERRNO | errno.EPERM),
    ]
    return b"".join(code)


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
