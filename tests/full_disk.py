"""Makes a disk full, small or slow: for one process, or for a command and what that starts."""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def no_file_above(size_bytes: int) -> Iterator[None]:
    """Make the kernel refuse to let any file of this process grow beyond `size_bytes`, as on a full
    disk.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def can_mount() -> bool:
    """Return whether a small file system of its own can be made for a process."""
    command = ["unshare", "--mount", "--map-root-user", "mount", "-t", "tmpfs", "none", "/mnt"]
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(command, capture_output=True, timeout=180, check=False).returncode == 0


def on_small_disk(folder: Path, size_bytes: int, command: Sequence[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run `command`, for which `folder` is a file system of this size that nobody else sees. Use it
    only where `can_mount`.
    """
    script = 'mount -t tmpfs -o "size=$1" none "$2" && shift 2 && exec "$@"'
    there = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh", str(size_bytes), str(folder)]
    return subprocess.run([*there, *command], capture_output=True, text=True, timeout=timeout_s, check=False)


def strace_works() -> bool:
    """Return whether this machine has strace and lets it trace."""
    if shutil.which("strace") is None:
        return False
    return (
        subprocess.run(["strace", "-f", "-o", "/dev/null", "true"], capture_output=True, timeout=180, check=False).returncode == 0
    )
