"""Ends processes: asks, waits for the grace period, and kills what has not ended by then or what
somebody no longer wants to wait for.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from shared.cancelling import cancel_and_wait
from swarm_cli.local.process import Process

_KILLED_S = 10.0
"""How long a killed process may take to disappear: it may be waiting in the kernel for a slow disk.
"""


class Endings:
    """The processes that are being ended. `say`: called with a line about each one that is
    killed.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._waiting: dict[str, tuple[asyncio.Event, float]] = {}
        self._why = ""

    @property
    def hurried(self) -> bool:
        """Whether no process is waited for any more."""
        return bool(self._why)

    def hurry_all(self, why: str) -> None:
        """Kill the processes that have not ended yet, and wait for none that is ended from now on.
        `why` is given for each.
        """
        self._why = why
        for event, _ in self._waiting.values():
            event.set()

    def hurry(self, name: str) -> bool:
        """Kill this process if it is being waited for; returns whether it is."""
        if name not in self._waiting:
            return False
        self._waiting[name][0].set()
        return True

    def grace_s(self, name: str) -> float | None:
        """The grace period of a process that is being ended; None if it is not."""
        return self._waiting[name][1] if name in self._waiting else None

    async def end(self, process: Process, number: signal.Signals, grace_s: float) -> None:
        """Ask a process to end by a signal. Kill it after the grace period, or when hurried."""
        hurry = asyncio.Event()
        if self.hurried or grace_s <= 0:
            hurry.set()
        self._waiting[process.name] = (hurry, grace_s)
        try:
            process.ask_to_end(number)
            ended, hurried = asyncio.ensure_future(process.wait()), asyncio.ensure_future(hurry.wait())
            await asyncio.wait({ended, hurried}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            await cancel_and_wait(ended, hurried)
        finally:
            del self._waiting[process.name]
        if process.running:
            asked = self._why or "you asked for it (--now)"
            self._say(f"{process.name} is killed: {asked if hurry.is_set() else f'it did not end within {grace_s:g} s'}")
            process.kill()
            if await process.wait(_KILLED_S) is None:
                self._say(f"{process.name} (process {process.pid}) does not end even when killed: it is left running")
