"""A network of pods on one machine that nothing leaves: a network namespace per pod, joined by a
bridge in another.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class PodNetwork:
    """Addresses 10.244.0.2 and up, as pods have them. This machine's own network is not touched."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._switch = f"{prefix}-switch"
        self._made: list[str] = []
        self._add_namespace(self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")

    def add_pod(self, pod: str) -> str:
        """Give a pod its namespace; returns its address."""
        number = len(self._made) + 1
        name, address = self.namespace(pod), f"10.244.0.{number}"
        self._add_namespace(name)
        _ip("link", "add", f"pod{number}", "netns", self._switch, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", self._switch, "link", "set", f"pod{number}", "master", "br0", "up")
        _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        return address

    def namespace(self, pod: str) -> str:
        """Name of a pod's namespace, for `ip netns exec`."""
        return f"{self._prefix}-{pod}"

    def inside(self, pod: str, call: Callable[[], T]) -> T:
        """Return what `call` returns or raises in the pod's network."""
        outcome: list[T] = []
        problem: list[BaseException] = []

        def run() -> None:
            namespace = os.open(f"/run/netns/{self.namespace(pod)}", os.O_RDONLY)
            try:
                if _libc.setns(namespace, CLONE_NEWNET):  # of this thread alone, which ends with the call
                    raise OSError(ctypes.get_errno(), f"cannot enter the network of {pod}")
                outcome.append(call())
            except BaseException as error:
                problem.append(error)
            finally:
                os.close(namespace)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if problem:
            raise problem[0]
        return outcome[0]

    def close(self) -> None:
        """Remove every namespace; the links in them go with them."""
        for name in reversed(self._made):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def _add_namespace(self, name: str) -> None:
        _ip("netns", "add", name)
        self._made.append(name)
        _ip("-n", name, "link", "set", "lo", "up")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
