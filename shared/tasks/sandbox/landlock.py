"""Landlock (landlock(7)): restricts this process to opening the listed files, whoever owns them.

It also restricts the superuser, works inside containers, and needs no privilege. Newer versions of
the interface (ABI) know more kinds of access; every kind that the kernel knows is forbidden.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

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


def abi() -> int:
    """The newest version of the interface that the kernel supports; 0 for none."""
    version = int(_library().syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG))
    return max(0, version)


def restrict(readable: Iterable[Path], listable: Iterable[Path], writable: Iterable[Path]) -> None:
    """Allow reading files at and under `readable`, listing folders under `listable`, and reading
    and writing the files `writable`, and forbid the rest: other files, TCP ports, signals to
    processes outside.

    Applies to this process and its children, and cannot be undone.

    Raises:
        LandlockUnavailable: the kernel has no Landlock, or refuses.
    """
    version = abi()
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
