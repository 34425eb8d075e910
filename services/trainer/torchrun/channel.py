"""How rank 0 tells the others what to do next: a small header that all processes reduce together,
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
    """Process 0: tell the others. Returns whether one of them was asked to stop (SIGTERM). Raises
    RuntimeError when one is gone.
    """
    _, _, stops = _header(command, len(payload), wants_stop=False)
    if payload:
        dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), src=0)
    return stops > 0


def heed(*, wants_stop: bool) -> tuple[Command, bytes]:
    """The others: wait for the next command. Raises RuntimeError when process 0 is gone, or says
    nothing for too long.
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
