"""A verifier of a user's own, installed as a package would be, that does what an answer says: what
a scorer taken over would.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import installed_packages

OBEYS = """
import ctypes, os, signal, socket, subprocess, time


def refused(result):
    if result < 0:
        raise PermissionError
    return result


def syscall(*arguments):
    return refused(ctypes.CDLL(None, use_errno=True).syscall(*arguments))


def fork():
    if os.fork() == 0:
        os._exit(0)


def unix_socket():
    socket.socket(socket.AF_UNIX)


def inet_socket():
    socket.socket(socket.AF_INET)


def ptrace_parent():
    refused(ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0))


def read_parents_memory():
    refused(ctypes.CDLL(None).process_vm_readv(os.getppid(), None, 0, None, 0, 0))


def limit_parent():
    import resource
    resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)


def import_late():
    import wave, xml.dom.minidom, sympy.physics.units


def burn(seconds):
    end = time.process_time() + float(seconds)
    while time.process_time() < end:
        pass


KEPT = []


def keep(megabytes):
    KEPT.append(b"x" * (int(megabytes) * 2**20))


ACTIONS = {
    "keep": keep,
    "fork": fork,
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "subprocess": lambda: subprocess.run(["/bin/true"], check=True),
    "signal_parent": lambda: os.kill(os.getppid(), 0),
    "signal_all": lambda: os.kill(-1, 0),
    "pidfd": lambda: os.close(os.pidfd_open(os.getppid())),
    "read": lambda path: open(path, "rb").read(1),
    "write": lambda path: open(path, "wb").close(),
    "mkdir": os.mkdir,
    "unix_socket": unix_socket,
    "inet_socket": inet_socket,
    "ptrace_parent": ptrace_parent,
    "read_parents_memory": read_parents_memory,
    "limit_parent": limit_parent,
    "io_uring": lambda: syscall(425, 1, 0),
    "unshare": lambda: syscall(272, 0x10000000),
    "import_late": import_late,
    "burn": burn,
    "die": lambda: ctypes.string_at(0),
    "allocate": lambda megabytes: bytearray(int(megabytes) * 2**20),
}


def obeys(item):
    def score(answer):
        if answer == str(item.task.answer):
            return 1.0
        name, _, argument = answer.partition(" ")
        if name not in ACTIONS:
            return 0.0
        try:
            ACTIONS[name](*([argument] if argument else []))
        except (OSError, MemoryError, subprocess.SubprocessError):
            return 0.25
        return 0.75
    return score
"""
DONE, REFUSED = 0.75, 0.25

HANGS = """
import time


def hangs(item):
    def score(answer):
        while answer.startswith("hang"):
            if answer == "hang asleep":
                time.sleep(1)
        return float(answer == str(item.task.answer))
    return score
"""
HANG = "hang"
"""No scorer of this project's is known to hang any more, so that a user's own has to."""
HANG_ASLEEP = "hang asleep"
"""The same for whoever waits for it, without the processor: of this node's own answers the time
counts.
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: str) -> None:
    """Install a package with a `swarm.verifiers` entry point where both processes find it."""
    installed_packages.install(folder, monkeypatch, "swarm.verifiers", name, code)
