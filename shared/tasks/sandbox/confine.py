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
import signal
import struct
import sys
import tempfile
from pathlib import Path

from shared.runtime.parent_death import end_with_parent
from shared.tasks.sandbox import landlock, seccomp
from shared.tasks.sandbox.importable import import_folders, others_can_import, readable_paths
from shared.tasks.sandbox.limits import limit

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
            landlock.restrict(readable, listable, [Path(os.devnull)])
        except landlock.LandlockUnavailable as error:
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
        seccomp.install(forking=forking)
    except seccomp.SeccompUnavailable as error:
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
