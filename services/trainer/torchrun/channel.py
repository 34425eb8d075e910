"""How rank 0 sends commands to the other ranks: a small header in an all-reduce of all processes,
then a payload.

It uses the host's network (gloo) even if weights use NCCL, so that waiting for a command occupies
no GPU.
"""

from __future__ import annotations

from enum import IntEnum

import torch
import torch.distributed as dist


class Command(IntEnum):
    """What all processes do next. BEAT: nothing; it only shows that every process is alive."""

    BEAT = 1
    STEP = 2
    POLICY = 3
    STATE = 4
    RESTORE = 5
    END = 6


def announce(command: Command, payload: bytes = b"") -> bool:
    """Called by rank 0: send a command. Returns whether one of the other ranks was asked to stop
    (SIGTERM). Raises RuntimeError if one has exited.
    """
    _, _, stops = _header(command, len(payload), wants_stop=False)
    if payload:
        dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), src=0)
    return stops > 0


def heed(*, wants_stop: bool) -> tuple[Command, bytes]:
    """Called by the other ranks: wait for the next command. Raises RuntimeError if rank 0 has
    exited or is silent for too long.
    """
    command, size, _ = _header(0, 0, wants_stop=wants_stop)
    payload = torch.empty(size, dtype=torch.uint8)
    if size:
        dist.broadcast(payload, src=0)
    return Command(command), payload.numpy().tobytes()


def _header(command: int, size: int, *, wants_stop: bool) -> tuple[int, int, int]:
    header = torch.tensor([command, size, int(wants_stop)])
    dist.all_reduce(header)
    command, size, stops = header.tolist()
    return command, size, stops
