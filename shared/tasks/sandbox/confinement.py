"""Gives up a worker's permissions before it sees any text, and reports which of these protections
the system lacks.

The order is: the superuser's identity, the network (a namespace), files (Landlock), resource
limits; and after the imports, system calls (seccomp). The protections overlap, so a missing one
does not stop the worker, but it is reported: counted, logged with the remedy, and shown by `swarm
status`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import stat
import struct
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.machinery import all_suffixes
from pathlib import Path

from shared.runtime.process_limits import end_with_parent, limit

PROTECTIONS = ("unprivileged_user", "network_namespace", "landlock", "seccomp")
"""Names of the protections that may be missing, which are labels of the metric
`swarm_sandbox_protections`.
"""

NOBODY = 65534
_CLONE_NEWUSER_NEWNET = 0x10000000 | 0x40000000
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITIES_V3 = 0x20080522


def confine(memory_bytes: int, *, forking: bool = False) -> dict[str, str]:
    """Give up everything but computing and importing. Returns the protections that could not be
    applied, with cause and remedy.

    `forking`: the process will start processes itself, which call `forbid_system_calls` on their
    own.
    """
    missing: dict[str, str] = {}
    if sys.platform == "linux":
        library = ctypes.CDLL(None, use_errno=True)
        readable, listable = readable_paths(), import_folders()
        end_with_parent(signal.SIGKILL)
        if os.geteuid() == 0:
            missing |= _drop_root(library)
        _find_folders()
        library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if library.unshare(_CLONE_NEWUSER_NEWNET) != 0:
            cause = errno.errorcode.get(ctypes.get_errno(), "refused")
            missing["network_namespace"] = (
                f"unshare is refused ({cause}); where seccomp is in force, scorers cannot open sockets anyway: allow user "
                "namespaces (a seccomp profile with unshare), or cut the pod off from the network with a network policy"
            )
        # Drop the capabilities of the superuser, or of the new namespace; none is needed.
        library.capset(struct.pack("Ii", _CAPABILITIES_V3, 0), bytes(24))
        # Set again, because a change of user resets it.
        end_with_parent(signal.SIGKILL)
        try:
            restrict_files(readable, listable, [Path(os.devnull)])
        except LandlockUnavailable as error:
            missing["landlock"] = (
                f"{error}: until then a scorer can read everything that this user can, including the node's key file"
            )
    else:
        missing |= dict.fromkeys(
            PROTECTIONS[1:], f"{sys.platform} has no such protection; run nodes that accept foreign groups on Linux"
        )
        _find_folders()
    limit(memory_bytes, processes=forking)
    return missing


def forbid_system_calls(*, forking: bool = False) -> dict[str, str]:
    """The last step, once everything that is certainly needed is imported. Returns the protections
    that could not be applied.
    """
    if sys.platform != "linux":
        return {}
    try:
        install_filter(forking=forking)
    except SeccompUnavailable as error:
        return {"seccomp": str(error)}
    return {}


def _find_folders() -> None:
    # Python finds it by writing a file, which the limits forbid later.
    folder = tempfile.gettempdir()
    # Matplotlib, which a library of reasoning-gym imports, requires a folder that looks writable,
    # but does not need to write to it.
    if not os.access(os.environ.get("MPLCONFIGDIR", ""), os.W_OK):
        os.environ["MPLCONFIGDIR"] = folder


def _drop_root(library: ctypes.CDLL) -> dict[str, str]:
    remedy = "start the service as another user (a container with runAsNonRoot, or User= in systemd)"
    if not others_can_import():
        return {"unprivileged_user": f"started as root, and no other user can read this Python or its packages: {remedy}"}
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError as error:
        return {"unprivileged_user": f"started as root, and cannot become another user ({error}): {remedy}"}
    return {}


# Landlock (landlock(7)): restricts this process to opening the listed files, whoever owns them.
#
# It also restricts the superuser, works inside containers, and needs no privilege. Newer versions
# of the interface (ABI) know more kinds of access; every kind that the kernel knows is forbidden.


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""System call numbers, the same on every architecture."""
_VERSION_FLAG = 1
_PATH_BENEATH = 1

_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_FILE_ACCESS_BITS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_TCP = 0b11
_SCOPES = 0b11
"""Forbids signals to processes outside, and connections to abstract Unix sockets of theirs."""


class LandlockUnavailable(Exception):
    """Files are not protected; the message states the cause and the remedy."""


def landlock_abi() -> int:
    """The newest version of the interface that the kernel supports; 0 for none."""
    version = int(_library().syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG))
    return max(0, version)


def restrict_files(readable: Iterable[Path], listable: Iterable[Path], writable: Iterable[Path]) -> None:
    """Allow reading files at and under `readable`, listing folders under `listable`, and reading
    and writing the files `writable`, and forbid the rest: other files, TCP ports, signals to
    processes outside.

    Applies to this process and its children, and cannot be undone.

    Raises:
        LandlockUnavailable: the kernel has no Landlock, or refuses.
    """
    version = landlock_abi()
    if not version:
        raise LandlockUnavailable(
            "this kernel has no Landlock; run on Linux 5.13 or newer with landlock among its security modules"
        )
    handled = (1 << _FILE_ACCESS_BITS[min(version, max(_FILE_ACCESS_BITS))]) - 1
    fields = [handled, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0]
    attributes = struct.pack(f"{1 + (version >= 4) + (version >= 6)}Q", *fields[: 1 + (version >= 4) + (version >= 6)])
    ruleset = _call(_CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for paths, access in ((readable, _READ_FILE | _READ_DIR), (listable, _READ_DIR), (writable, _READ_FILE | _WRITE_FILE)):
            for path in paths:
                _allow(ruleset, path, access)
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            access &= ~_READ_DIR
        if access:
            _call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", access, descriptor), 0)
    finally:
        os.close(descriptor)


def _call(number: int, *arguments: int | bytes) -> int:
    result = int(_library().syscall(number, *arguments))
    if result < 0:
        cause = errno.errorcode.get(ctypes.get_errno(), "refused")
        raise LandlockUnavailable(f"the kernel refuses a Landlock rule set ({cause})")
    return result


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


# The seccomp filter: it allows the system calls that a scorer needs, and no others (seccomp(2) and
# the kernel's seccomp documentation).
#
# The filter lists allowed calls, because the kernel keeps gaining new ones. fork, clone, exec,
# ptrace, signals to others, sockets, `process_vm_*`, io_uring, mounts, keyrings and everything else
# fail with EPERM, and a library that tries one continues.


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


def install_filter(*, forking: bool) -> None:
    """Restrict this process and its children to the calls above, permanently. `forking`: also allow
    those in `FORKING`.

    A second filter narrows the first. `no_new_privs` must be set.

    Raises:
        SeccompUnavailable: unknown architecture, or the kernel refuses.
    """
    filters = filter_program(platform.machine(), forking=forking)
    buffer = ctypes.create_string_buffer(filters, len(filters))
    header = struct.pack("HxxxxxxP", len(filters) // 8, ctypes.addressof(buffer))
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.create_string_buffer(header, len(header)), 0, 0) != 0:
        cause = errno.errorcode.get(ctypes.get_errno(), "refused")
        raise SeccompUnavailable(f"the kernel accepts no filter ({cause}); run on a kernel with CONFIG_SECCOMP_FILTER")


def filter_program(machine: str, *, forking: bool) -> bytes:
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


# System call numbers, by `platform.machine()`: the kernel's `syscall_64.tbl` and
# `asm-generic/unistd.h`.


def _table(text: str) -> dict[str, int]:
    return {name: int(number) for name, _, number in (entry.partition("=") for entry in text.split())}


NUMBERS = {
    "x86_64": _table("""
    read=0 write=1 open=2 close=3 stat=4 fstat=5 lstat=6 poll=7 lseek=8 mmap=9 mprotect=10 munmap=11 brk=12
    rt_sigaction=13 rt_sigprocmask=14 rt_sigreturn=15 ioctl=16 pread64=17 readv=19 writev=20 access=21 select=23
    sched_yield=24 mremap=25 madvise=28 dup=32 dup2=33 nanosleep=35 getitimer=36 setitimer=38 getpid=39 clone=56
    fork=57 vfork=58 exit=60 wait4=61 kill=62 uname=63 fcntl=72 getdents=78 getcwd=79 chdir=80 readlink=89
    gettimeofday=96 getrlimit=97 getrusage=98 sysinfo=99 times=100 getuid=102 getgid=104 geteuid=107 getegid=108
    getppid=110 sigaltstack=131 prctl=157 arch_prctl=158 setrlimit=160 gettid=186 time=201 futex=202 sched_getaffinity=204
    getdents64=217 set_tid_address=218 restart_syscall=219 fadvise64=221 clock_gettime=228 clock_getres=229
    clock_nanosleep=230 exit_group=231 waitid=247 openat=257 newfstatat=262 readlinkat=267 faccessat=269 pselect6=270
    ppoll=271 set_robust_list=273 dup3=292 pipe2=293 prlimit64=302 getcpu=309 getrandom=318 membarrier=324 statx=332
    rseq=334 clone3=435 close_range=436 faccessat2=439
    """),
    "aarch64": _table("""
    getcwd=17 dup=23 dup3=24 fcntl=25 ioctl=29 faccessat=48 chdir=49 openat=56 close=57 pipe2=59 getdents64=61
    lseek=62 read=63 write=64 readv=65 writev=66 pread64=67 pselect6=72 ppoll=73 readlinkat=78 newfstatat=79 fstat=80
    exit=93 exit_group=94 waitid=95 set_tid_address=96 futex=98 set_robust_list=99 nanosleep=101 getitimer=102
    setitimer=103 clock_gettime=113 clock_getres=114 clock_nanosleep=115 sched_getaffinity=123 sched_yield=124
    restart_syscall=128 kill=129 sigaltstack=132 rt_sigaction=134 rt_sigprocmask=135 rt_sigreturn=139 times=153
    uname=160 getrusage=165 prctl=167 getcpu=168 gettimeofday=169 getpid=172 getppid=173 getuid=174 geteuid=175 getgid=176
    getegid=177 gettid=178 sysinfo=179 brk=214 munmap=215 mremap=216 clone=220 mmap=222 fadvise64=223 mprotect=226
    madvise=233 wait4=260 prlimit64=261 getrandom=278 membarrier=283 statx=291 rseq=293 clone3=435 close_range=436
    faccessat2=439
    """),
}


# The files that Python needs in order to import modules. A scorer may read these and no others.
#
# Libraries import lazily, so a worker needs the files at any time. Installed packages are fully
# readable, including another environment's (`pip install --user`, a .pth file). In any other folder
# on the import path (a checkout, a folder in PYTHONPATH) only modules and packages are, because a
# node's run folder may be next to them.


_SYSTEM = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/usr/share/zoneinfo",
)
_DEVICES = ("/dev/urandom", "/dev/zero")
_MODULES = (".py", ".so", ".pyc", ".zip")
_OF_INSTALLED = ("site-packages", "dist-packages")
"""Names of folders that installers alone write to."""
_BESIDE_PACKAGES = (".dist-info", ".egg-info", ".libs")
"""A wheel's metadata, and the shared libraries that its modules load."""


def readable_paths() -> list[Path]:
    """Files and whole folders that a scorer may read."""
    installed = {Path(path) for path in sysconfig.get_paths().values()} | {Path(sys.base_prefix) / "lib"}
    readable = [*installed, *map(Path, _SYSTEM + _DEVICES), Path(sys.prefix) / "pyvenv.cfg", *_editable()]
    if "MPLCONFIGDIR" in os.environ:
        # Only its font cache, not the rest of a folder that may be /tmp.
        readable += Path(os.environ["MPLCONFIGDIR"]).glob("fontlist-*.json")
    for folder in import_folders():
        if not any(folder.is_relative_to(path) for path in installed):
            readable += [folder] if folder.name in _OF_INSTALLED else _modules(folder)
    # `os.path` reports a path that may not be looked at as missing.
    return [path for path in readable if os.path.exists(path)]


def import_folders() -> list[Path]:
    """The folders on the import path. Their listings must be readable, or nothing in them can be
    found.
    """
    return [folder for folder in (Path(entry or ".").absolute() for entry in sys.path) if os.path.isdir(folder)]


def path_from_elsewhere(entries: str) -> str:
    """The entries of this process's PYTHONPATH for one that starts in another folder, where a
    relative one would name another folder. An empty one is the folder of this process, as Python
    takes it, unless there is no other. Left out is what cannot be named so: a folder with a colon
    in its path, and a relative one if this process's own is gone. Empty if nothing is left, or if
    this process itself was told to import from none of them (`python -E`, `-I`).
    """
    if not entries or sys.flags.ignore_environment:
        return ""
    folders = []
    for entry in entries.split(os.pathsep):
        with suppress(FileNotFoundError):
            folders.append(os.path.abspath(entry))
    return os.pathsep.join(folder for folder in folders if os.pathsep not in folder)


def others_can_import() -> bool:
    """Check whether a user without privileges can read all of it."""
    needed = {Path(sys.executable), Path(sysconfig.get_paths()["stdlib"]), *import_folders()}
    return all(_open_to_others(path.resolve()) for path in needed)


def _open_to_others(path: Path) -> bool:
    try:
        return path.stat().st_mode & 0o4 != 0 and all(folder.stat().st_mode & 0o1 for folder in path.parents)
    except OSError:
        return False


def _modules(folder: Path) -> Iterator[Path]:
    try:
        inside = sorted(folder.iterdir())
    except OSError:
        return
    for path in inside:
        if path.suffix in _MODULES + _BESIDE_PACKAGES or os.path.isfile(path / "__init__.py"):
            yield path


def _editable() -> Iterator[Path]:
    # Packages installed in place (setuptools): their finders know where they are.
    for name, module in list(sys.modules.items()):
        # Others are not asked: a module that imports on demand would fetch what is not installed.
        mapping = getattr(module, "MAPPING", None) if name.startswith("__editable__") else None
        if isinstance(mapping, dict):
            for path in map(Path, mapping.values()):
                # A package's folder; of a single module, its file without the suffix.
                yield path
                yield from (path.with_suffix(suffix) for suffix in all_suffixes())
