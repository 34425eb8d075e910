"""The permissions that a worker gives up before it sees any text, and which of these protections
the system lacks.

In this order: the superuser's identity, the network (a namespace), files (Landlock), resource
limits; after the imports, system calls (seccomp). Each protects where another is missing, so a
missing one is no reason to stop, but it is reported: counted, logged with the remedy, and shown by
`swarm status`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
import tempfile
from pathlib import Path

from shared.tasks.sandbox import landlock, seccomp
from shared.tasks.sandbox.importable import import_folders, others_can_import, readable_paths
from shared.tasks.sandbox.limits import limit

PROTECTIONS = ("unprivileged_user", "network_namespace", "landlock", "seccomp")
"""Names of what may be missing: labels of the metric `swarm_sandbox_protections`."""

NOBODY = 65534
_CLONE_NEWUSER_NEWNET = 0x10000000 | 0x40000000
_PR_SET_NO_NEW_PRIVS, _PR_SET_PDEATHSIG = 38, 1
_CAPABILITIES_V3 = 0x20080522
_SIGKILL = 9


def confine(memory_bytes: int, *, forking: bool = False) -> dict[str, str]:
    """Give up everything but computing and importing. Returns what could not be had, with cause and
    remedy.

    `forking`: it will start processes itself, and these call `forbid_system_calls` on their own.
    """
    missing: dict[str, str] = {}
    if sys.platform == "linux":
        library = ctypes.CDLL(None, use_errno=True)
        readable, listable = readable_paths(), import_folders()
        library.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
        if os.geteuid() == 0:
            missing |= _drop_root(library)
        _find_folders()
        library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if library.unshare(_CLONE_NEWUSER_NEWNET) != 0:
            cause = errno.errorcode.get(ctypes.get_errno(), "refused")
            missing["network_namespace"] = (
                f"unshare is refused ({cause}); scorers open no sockets all the same where seccomp is had: allow user namespaces "
                "(a seccomp profile with unshare), or keep the pod from the network by a network policy"
            )
        # Of the privileges that being superuser, or a new namespace, brought: none is needed.
        library.capset(struct.pack("Ii", _CAPABILITIES_V3, 0), bytes(24))
        # Lost with the change of user.
        library.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
        try:
            landlock.restrict(readable, listable, [Path(os.devnull)])
        except landlock.LandlockUnavailable as error:
            missing["landlock"] = f"{error}: until then a scorer can read what this user can, the node's key file among it"
    else:
        missing |= dict.fromkeys(PROTECTIONS[1:], f"{sys.platform} has nothing of the kind; run nodes with strangers on Linux")
        _find_folders()
    limit(memory_bytes, processes=forking)
    return missing


def forbid_system_calls(*, forking: bool = False) -> dict[str, str]:
    """The last step, once everything is imported that is surely needed. Returns what could not be
    had.
    """
    if sys.platform != "linux":
        return {}
    try:
        seccomp.install(forking=forking)
    except seccomp.SeccompUnavailable as error:
        return {"seccomp": str(error)}
    return {}


def die_with_parent() -> None:
    """For a forked process: SIGKILL when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)


def _find_folders() -> None:
    # Found by writing a file, which the limits forbid.
    folder = tempfile.gettempdir()
    # Matplotlib, which a library of reasoning-gym imports, wants a folder that looks writable, and
    # does not need to write.
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
