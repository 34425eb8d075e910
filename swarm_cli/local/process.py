"""One process of a swarm on this machine: start it, read its output, watch it, end it, kill it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from shared.cancelling import cancel_and_wait
from shared.runtime.exits import FILE_VARIABLE, deaths_file, forget_deaths, note_death
from shared.runtime.process_limits import ending_with_parent

RUN_VARIABLE = "SUPERVISE_RUN"
"""In the environment, the run's folder: the process's deaths are noted there."""
_CHUNK = 2**16
_LONGEST_LINE = 2**20
WAITED_FOR: set[int] = set()
"""Process numbers of those that were started here and whose end was not heard of yet."""


def forget_earlier_deaths(name: str, environment: Mapping[str, str]) -> None:
    """Forget the deaths of the process of this name, because the run or somebody starts it."""
    if run := environment.get(RUN_VARIABLE):
        forget_deaths(deaths_file(Path(run), name))


class Process:
    """A shell command in a separate session, so that the terminal's Ctrl-C reaches only the
    supervisor. It ends when the supervisor does.

    said: called with each line of its output, standard error included.
    """

    def __init__(self, name: str, command: str, environment: Mapping[str, str], said: Callable[[str], None]) -> None:
        self.name = name
        self.command = command
        self._said = said
        self._rest = b""
        run = environment.get(RUN_VARIABLE)
        self._deaths = deaths_file(Path(run), name) if run else None
        self._popen = subprocess.Popen(
            command,
            shell=True,
            env=dict(environment) | ({FILE_VARIABLE: str(self._deaths)} if self._deaths else {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=ending_with_parent(),
        )
        WAITED_FOR.add(self._popen.pid)
        assert self._popen.stdout is not None
        self._out = self._popen.stdout.fileno()
        os.set_blocking(self._out, False)
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(self._popen.pid)
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(self._out, self._read)
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        """The id of the process, which the shell turned into with `exec`."""
        return self._popen.pid

    @property
    def running(self) -> bool:
        """True until it has ended."""
        return not self._ended.done()

    @property
    def left_behind(self) -> bool:
        """True if it has ended but a process that it started has not. This happens if
        `shared.runtime.supervise` was killed and the kernel has only just signalled its service.
        """
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        return not self.running

    async def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit code, negative for a signal; None if it is still running after `timeout_s`."""
        done, _ = await asyncio.wait({self._ended}, timeout=timeout_s)
        return self._ended.result() if done else None

    def note_death(self, code: int, delay_s: float) -> None:
        """Note that it was killed and starts again after `delay_s`. Its crashes beneath
        `shared.runtime.supervise` are noted there.
        """
        if self._deaths and code < 0:
            note_death(self._deaths, code, delay_s)

    def ask_to_end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send it a signal, and wake its group: a stopped process (SIGSTOP, Ctrl-Z) would never
        obey.
        """
        if self.running:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)
                os.killpg(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL to it, to all processes of its group, and to its children in other groups: a
        lingering server that hangs would keep its port.
        """
        if self.running or self.left_behind:
            children = _children(self.pid)
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            for pid in children:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def _read(self) -> None:
        """Pass on the lines it has written; at the end of the output, stop watching the pipe."""
        try:
            chunk = os.read(self._out, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._loop.remove_reader(self._out)
            chunk = b"\n" if self._rest else b""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._said(line.decode(errors="replace"))

    def _reap(self) -> None:
        """Collect the exit code of the ended process. Its last lines are still in the pipe, which
        never reaches its end while a process that it left behind holds it open.
        """
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._popen.wait()
        WAITED_FOR.discard(self._popen.pid)
        self._drain()
        assert self._popen.stdout is not None
        self._loop.remove_reader(self._out)
        self._popen.stdout.close()
        self._ended.set_result(code)

    def _drain(self) -> None:
        """Read the rest of the pipe, at most as much as a pipe holds."""
        taken = b""
        with suppress(OSError):
            while len(taken) < _LONGEST_LINE and (chunk := os.read(self._out, _CHUNK)):
                taken += chunk
        for line in (self._rest + taken).split(b"\n"):
            if line:
                self._said(line.decode(errors="replace"))
        self._rest = b""


def _children(pid: int) -> set[int]:
    """The processes that a running process started, and orphans that became its own."""
    found: set[int] = set()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that ended
            found |= {int(word) for word in file.read_text().split()}
    return found


_KILLED_S = 10.0
"""How long a killed process may take to disappear: it may be waiting in the kernel for a slow disk.
"""


NOW = "you asked for it (--now)"


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
        """True if no process is waited for any more."""
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
            asked = self._why or NOW
            self._say(f"{process.name} is killed: {asked if hurry.is_set() else f'it did not end within {grace_s:g} s'}")
            process.kill()
            if await process.wait(_KILLED_S) is None:
                self._say(f"{process.name} (process {process.pid}) does not end even when killed: it is left running")


_EVERY_S = 0.5


@asynccontextmanager
async def reaping_orphans(own: Collection[int], *, first_process: bool | None = None) -> AsyncIterator[None]:
    """Reap what ends and is not among `own` at that time, the process numbers that somebody else
    waits for. Only where this process is the first one, unless `first_process` says so.

    A killed service's scorers would stay zombies for good, and while its group has a member, even a
    zombie, the service is not started again for half a minute (`Process.left_behind`).
    """
    if first_process is None:
        first_process = os.getpid() == 1
    if not first_process:
        yield
        return
    reaping = asyncio.create_task(_reap(own))
    try:
        yield
    finally:
        await cancel_and_wait(reaping)


async def _reap(own: Collection[int]) -> None:
    while True:
        await asyncio.sleep(_EVERY_S)
        for pid in _children(os.getpid()) - set(own):
            with suppress(ChildProcessError):  # somebody else was quicker
                os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222 (it does not wait)
