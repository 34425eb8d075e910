"""Ports for swarms that must not depend on what else runs on the machine."""

from __future__ import annotations

import socket


def free_ports(count: int = 1) -> int:
    """A port that is free with those after it, `count` in all, until another process takes one.

    Raises:
        OSError: a hundred places were tried.
    """
    for _ in range(100):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
        if first + count <= 65_536 and all(_is_free(first + number) for number in range(count)):
            return first
    raise OSError(f"no {count} ports in a row are free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
