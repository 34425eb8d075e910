"""Lets several processes of a machine take turns on one device: one computes while the others wait
(`model.device_turns`).

Two files are locked with `flock(2)`, so a process that dies releases its locks. The process that is
next holds the second lock while it waits for the first; all others wait for the second. A process
that gives up the device while others want it stays away from the second lock long enough for each
of them to try it, so that no process gets two turns while another waits for its first.
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
    """The device cannot be locked; the message names the cause and the remedy."""


class DeviceTurns:
    """One process's turns on a device.

    Args:
        file: the same for all processes that share the device; created if missing. Its folder must
            exist.
        who: written into the file so that others can see who holds the device, such as `trainer of
            alpha`.
    """

    def __init__(self, file: Path, who: str) -> None:
        self._file, self._door = file, file.with_name(f"{file.name}.next")
        self._who = who
        self._held: int | None = None
        self._keep_away_until = 0.0

    async def take(self) -> float:
        """Wait for a turn and return the seconds waited. If cancelled, it leaves no lock behind.

        Raises:
            TurnError: the files cannot be created or locked.
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
        with suppress(OSError):  # Only informs others; a full disk must not cost the turn.
            os.ftruncate(self._held, 0)
            os.pwrite(self._held, f"{self._who} (process {os.getpid()})".encode(), 0)
        return time.monotonic() - started

    def give_up(self) -> None:
        """Let the next process in. Does nothing without a turn."""
        held, self._held = self._held, None
        if held is not None:
            self._keep_away_until = time.monotonic() + _KEEP_AWAY_S if self.wanted() else 0.0
            _unlock(held)

    def wanted(self) -> bool:
        """Check whether another process waits for the device; False if the files cannot be read."""
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
        """Hold the device for the block; yields the seconds waited."""
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
            # A constant interval: with a growing one, a process that has waited long would lose to
            # every newcomer.
            await asyncio.sleep(_POLL_S)
        return locked

    def _holder(self) -> str:
        with suppress(OSError):
            return self._file.read_text("utf-8", "replace")
        return "unknown"


def device_turns(config: NodeConfig, role: str) -> DeviceTurns | None:
    """The turns of a node's `role` on its device; None if `model.device_turns` is off.

    Raises:
        FatalError: the file's folder cannot be created.
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
    """The lock file of a device: one for each device and each value of `CUDA_VISIBLE_DEVICES`."""
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
    # Closing alone would leave the file locked by a process forked in the meantime, such as vLLM's.
    fcntl.flock(opened, fcntl.LOCK_UN)
    os.close(opened)
