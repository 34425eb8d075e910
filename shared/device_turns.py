"""Turns on a device shared by several processes of a machine: one computes while the others wait
(`model.device_turns`).

Two files are locked with `flock(2)`, so a process that dies releases its locks. Whoever wants the
device waits for it while holding the second lock, alone; the others wait for that second lock. A
process that gives up the device while others want it keeps away from the second lock long enough
for each of them to have tried it, so that nobody has two turns while another waits for its first.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import structlog

from shared.config import NodeConfig
from shared.runtime import FatalError

_POLL_S = 0.002
_KEEP_AWAY_S = 0.01
_LONG_S = 60.0


class TurnError(RuntimeError):
    """No turn can be had; the message says why and what helps."""


class DeviceTurns:
    """One process's place at a device.

    Args:
        file: the same for all who share the device; made where it is missing, in a folder that must
            be there.
        who: what the others are told of the holder, such as `trainer of alpha`.
    """

    def __init__(self, file: Path, who: str) -> None:
        self._file, self._door = file, file.with_name(f"{file.name}.next")
        self._who = who
        self._held: int | None = None
        self._keep_away_until = 0.0

    async def take(self) -> float:
        """Wait for the turn and return how many seconds that took. Cancelled, it leaves no lock
        behind.

        Raises:
            TurnError: the files cannot be made or locked.
        """
        started = time.monotonic()
        await asyncio.sleep(max(0.0, self._keep_away_until - started))
        try:
            door = await self._locked(self._door)
            try:
                self._held = await self._locked(self._file)
            finally:
                _unlock(door)
        except OSError as error:
            raise TurnError(f"no turn on the device ({error}): check node.var_dir, or unset model.device_turns") from error
        with suppress(OSError):  # Told to others; a full disk must not keep the turn.
            os.ftruncate(self._held, 0)
            os.pwrite(self._held, f"{self._who} (process {os.getpid()})".encode(), 0)
        return time.monotonic() - started

    def give_up(self) -> None:
        """Let the next one in. Does nothing without a turn."""
        held, self._held = self._held, None
        if held is not None:
            self._keep_away_until = time.monotonic() + _KEEP_AWAY_S if self.wanted() else 0.0
            _unlock(held)

    def wanted(self) -> bool:
        """Whether somebody waits for the device, as far as can be seen: not where the files are out
        of reach.
        """
        try:
            door = _try_lock(self._door)
        except OSError:
            return False
        if door is None:
            return True
        _unlock(door)
        return False

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[float]:
        """Hold the device; gives the seconds waited."""
        waited = await self.take()
        try:
            yield waited
        finally:
            self.give_up()

    async def _locked(self, file: Path) -> int:
        started, told = time.monotonic(), False
        while (locked := _try_lock(file)) is None:
            if not told and time.monotonic() - started > _LONG_S:
                told = True
                structlog.get_logger("device_turns").warning(
                    "device_busy", file=str(self._file), holder=self._holder(), waited_s=round(time.monotonic() - started)
                )
            # Always as often: who asks less often the longer it waits comes after every newcomer.
            await asyncio.sleep(_POLL_S)
        return locked

    def _holder(self) -> str:
        with suppress(OSError):
            return self._file.read_text("utf-8", "replace")
        return "unknown"


def device_turns(config: NodeConfig, role: str) -> DeviceTurns | None:
    """The place of `role` of a node at its device, or None where `model.device_turns` is off.

    Raises:
        FatalError: the folder of the file cannot be made.
    """
    if not config.model.device_turns:
        return None
    file = turns_file(Path(config.node.var_dir), config.model.device)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FatalError(f"model.device_turns: {file.parent} cannot be created ({error}): check node.var_dir") from None
    return DeviceTurns(file, f"{role} of {config.node.id}")


def turns_file(var_dir: Path, device: str) -> Path:
    """Where the processes of a machine meet: one file for each device, and each choice of
    `CUDA_VISIBLE_DEVICES`.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    name = "-".join(part for part in ("device", device, visible) if part)
    return var_dir / f"{re.sub(r'[^A-Za-z0-9-]', '_', name)[:100]}.turns"


def _try_lock(file: Path) -> int | None:
    opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(opened)
        return None
    except BaseException:
        os.close(opened)
        raise
    return opened


def _unlock(opened: int) -> None:
    # Closing alone would leave it locked by a process that was forked meanwhile, as vLLM's is.
    fcntl.flock(opened, fcntl.LOCK_UN)
    os.close(opened)
