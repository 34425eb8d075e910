"""Runs a swarm's processes on this machine until the run is over: starts, restarts, ends.

`honcho start` runs the same lines, for developers. `swarm up` does not use it, because honcho ends
all processes when one ends, and hangs when nobody reads its output.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from shared.cancelling import cancel_and_wait
from shared.config import NodeConfig
from shared.runtime.exits import BACKOFF_S, CRASH_WINDOW_S, EXIT_CONFIG, EXIT_UNSAVED
from swarm_cli.installation import own_modules
from swarm_cli.local.output import SYSTEM, Output
from swarm_cli.local.process import RUN_VARIABLE, WAITED_FOR, Endings, Process, forget_earlier_deaths, reaping_orphans
from swarm_cli.local.procfile import SERVER, VIEW, node_of

SERVER_GRACE_S = 20.0
_LEFT_BEHIND_S = 30.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run's exit code, and the name of the process that ended it; None: somebody stopped it."""

    code: int
    first: str | None


class Supervisor:
    """Runs the processes in `lines` (name to shell command).

    rules: decides what follows when a process ends.
    grace_s: seconds that a process may take to end, once asked, before it is killed.
    """

    def __init__(
        self, lines: Mapping[str, str], environment: Mapping[str, str], rules: RunRules, output: Output, grace_s: float
    ) -> None:
        self._lines = dict(lines)
        self._environment = environment
        self._rules = rules
        self._output = output
        self._grace_s = grace_s
        self._running: dict[str, Process] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._over: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._endings = Endings(self._say)
        self._signals = Signals()
        self._changing = asyncio.Lock()
        for name in lines:
            output.expect(name)

    async def run(self) -> Outcome:
        """Start every process. Returns when the run is over and all processes have ended. If one
        could then not save its state, that is how the run ended.
        """
        self._obey_signals()
        try:
            for name in self._lines:
                if self._over.done():
                    break
                self._start(name)
                await asyncio.sleep(0)
            outcome = await self._over
        finally:
            await self._end_all()
        if outcome.code and outcome.first is not None:
            return outcome
        unsaved = [name for name, process in self._running.items() if await process.wait(0.0) == EXIT_UNSAVED]
        return Outcome(EXIT_UNSAVED, unsaved[0]) if unsaved else outcome

    def end(self, code: int, first: str | None = None) -> None:
        """End the run with `code`; `first` is the process that ended it."""
        if not self._over.done():
            self._over.set_result(Outcome(code, first))

    def hurry(self, why: str) -> None:
        """Kill the processes that have not ended yet, without waiting out the grace period."""
        self._endings.hurry_all(why)

    @property
    def states(self) -> dict[str, str]:
        """The state of each process, in a few words."""
        return {name: self._state(name) for name in self._lines}

    @property
    def grace_s(self) -> float:
        """Seconds that a process may take to end, once asked, before it is killed."""
        return self._grace_s

    async def restart(self, name: str, grace_s: float | None = None) -> str:
        """End one process, within `grace_s` (None: the run's; 0: kill it), and start it again;
        returns a line about it. If it is being restarted already, 0 ends that wait.

        Raises: KeyError: there is no such process.
        """
        if grace_s == 0 and self._endings.hurry(name):
            async with self._changing:
                return f"{name}: {self._state(name)}"
        async with self._changing:
            return await self._restart(name, grace_s)

    async def _restart(self, name: str, grace_s: float | None) -> str:
        before = self._running.get(name)
        await self._stop_watching(name)
        if before is not None and before.running:
            grace_s = self._grace_s if grace_s is None else grace_s
            within = f"asked to end within {grace_s:g} s" if grace_s else "killed"
            self._say(f"{name} (process {before.pid}) is to start again: it is {within}")
            await self._endings.end(before, signal.SIGINT if name == SERVER else signal.SIGTERM, grace_s)
        if self._over.done():
            return f"{name}: the run is ending"
        self._rules.started_again(name)
        self._start(name)
        return f"{name}: process {self._running[name].pid}" + (f", was {before.pid}" if before else "")

    def _state(self, name: str) -> str:
        process = self._running.get(name)
        if process is not None and process.running:
            ending = self._endings.grace_s(name)
            return f"process {process.pid}" + ("" if ending is None else f", ending (killed after {ending:g} s)")
        return "given up" if name in self._rules.given_up else "about to start again"

    def _start(self, name: str) -> None:
        forget_earlier_deaths(name, self._environment)
        self._launch(name)
        self._watches[name] = asyncio.create_task(self._watch(name))

    def _launch(self, name: str) -> None:
        self._running[name] = Process(name, self._lines[name], self._environment, lambda line: self._output.write(name, line))

    async def _watch(self, name: str) -> None:
        """Wait until a process ends, and do what the rules say."""
        while True:
            code = await self._running[name].wait()
            assert code is not None
            if self._over.done():
                return
            follows = self._rules.after_end(name, code, time.monotonic(), frozenset(self._lines))
            if isinstance(follows, EndRun):
                self.end(_as_exit_code(follows.code), name)
                return
            if not isinstance(follows, StartAgain):
                why = "cannot go on" if code == EXIT_CONFIG else f"was given up with code {code}"
                self._say(f"{name} {why}; the others go on. Fix the cause, which it names above, then: swarm restart {name}")
                return
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            self._say(f"{name} {how}: it starts again in {follows.delay_s:g} s")
            self._running[name].note_death(code, follows.delay_s)
            await self._launch_later(name, follows.delay_s)
            if self._over.done():
                return

    async def _launch_later(self, name: str, delay_s: float) -> None:
        """Start a process again once all its earlier processes are gone. Retries as long as the
        system refuses to start it (too many processes, no memory).
        """
        left = self._running[name]
        give_up_at = time.monotonic() + min(self._grace_s, _LEFT_BEHIND_S)
        while True:
            await asyncio.sleep(delay_s)
            if self._over.done():
                return
            if left.left_behind and time.monotonic() < give_up_at:
                delay_s = 0.1
                continue
            left.kill()
            try:
                self._launch(name)
                return
            except OSError as error:
                delay_s = BACKOFF_S[-1]
                self._say(f"{name} cannot be started ({error.strerror or error}): trying again in {delay_s:g} s")

    async def _stop_watching(self, name: str) -> None:
        watch = self._watches.pop(name, None)
        if watch is not None:
            await cancel_and_wait(watch)

    async def _end_all(self) -> None:
        """End the services and the view, each within the grace period, and then the server: a
        service that is ending still needs its answers.
        """
        others = [process for name, process in self._running.items() if name != SERVER]
        await asyncio.gather(*(self._endings.end(process, signal.SIGTERM, self._grace_s) for process in others))
        if SERVER in self._running:
            await self._endings.end(self._running[SERVER], signal.SIGINT, min(self._grace_s, SERVER_GRACE_S))
        await cancel_and_wait(*self._watches.values())

    def _obey_signals(self) -> None:
        """SIGINT and SIGTERM end the run; a second one kills its processes. Closing the terminal
        (SIGHUP) does not end the run; `swarm down` does.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._asked_by_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._hung_up)

    def _asked_by_signal(self, number: int) -> None:
        if self._signals.is_echo(number, time.monotonic()):
            return
        if self._over.done():
            self.hurry("you asked a second time")
        else:
            self._say(f"ending every process, within {self._grace_s:g} s; Ctrl-C again kills them")
            self.end(128 + number)

    def _hung_up(self) -> None:
        self._output.detach()
        self._say("the terminal was closed; the swarm goes on, and `swarm down` ends it")

    def _say(self, text: str) -> None:
        self._output.write(SYSTEM, text)


Beside = Callable[[Supervisor], AbstractAsyncContextManager[None]]


def _as_exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


# What follows when a process ends. Pure: times are arguments.

ECHO_S = 1.0
"""Within this time, the same signal again is the same request: `timeout` sends its signal to its
command and then to the whole process group, where the command meets it a second time.
"""


@dataclass(frozen=True, slots=True)
class StartAgain:
    """Start the process again, after `delay_s` seconds."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class StayAway:
    """The process stays down; the others go on."""


@dataclass(frozen=True, slots=True)
class EndRun:
    """The run is over, with `code`."""

    code: int


@dataclass(slots=True)
class RunRules:
    """Decides what follows when a process ends, from the ends so far.

    | what ended | what follows |
    |---|---|
    | the progress view, with all steps done | the run ends, with code 0 |
    | the progress view, in any other way | it is restarted: a failed view must not end the run |
    | a service, with 0, 74 or by a signal, unasked | it is restarted, each time later |
    | a service for good (code 78, or many crashes) | it stays down and the others go on, except |
    | ... in a run with a number of steps | the run ends, with its code: it cannot be completed |
    | ... if no complete node is left | the run ends, with its code |
    | the NATS server, for good | the run ends, with its code |

    ends_by_steps: whether the run has a number of steps, after which the view ends it.
    """

    ends_by_steps: bool
    given_up: set[str] = field(default_factory=set)
    _ends: dict[str, list[float]] = field(default_factory=dict)

    def after_end(self, process: str, code: int, now_s: float, processes: frozenset[str]) -> StartAgain | StayAway | EndRun:
        """Decide what follows when `process`, one of `processes`, ends unasked with `code`
        (negative: by that signal).
        """
        if process == VIEW and code == 0 and self.ends_by_steps:
            return EndRun(0)
        if process == VIEW or code <= 0 or code == EXIT_UNSAVED:
            return StartAgain(self._delay_s(process, now_s))
        self.given_up.add(process)
        nodes = {node_of(each) for each in processes} - {""}
        broken = {node_of(each) for each in self.given_up} - {""}
        if process == SERVER or self.ends_by_steps or nodes <= broken:
            return EndRun(code)
        return StayAway()

    def started_again(self, process: str) -> None:
        """Forget that `process` was given up and its crashes: it was restarted by hand."""
        self.given_up.discard(process)
        self._ends.pop(process, None)

    def _delay_s(self, process: str, now_s: float) -> float:
        ends = [end for end in self._ends.get(process, []) if end > now_s - CRASH_WINDOW_S] + [now_s]
        self._ends[process] = ends
        return BACKOFF_S[min(len(ends), len(BACKOFF_S)) - 1]


@dataclass(slots=True)
class Signals:
    """Tells a signal that asks again from one that only arrives twice."""

    _asked: dict[int, float] = field(default_factory=dict)

    def is_echo(self, number: int, now_s: float) -> bool:
        """Check whether signal `number` belongs to a request that is less than `ECHO_S` old."""
        asked = self._asked.get(number)
        if asked is not None and now_s - asked < ECHO_S:
            return True
        self._asked[number] = now_s
        return False


# A whole run, for `swarm up` and for experiments.

GRACE_S = 180.0
"""Seconds that a process may take to end before it is killed: longer than writing a checkpoint of a
policy with a few billion parameters.
"""


def run_lines(
    lines: Mapping[str, str],
    environment: Mapping[str, str],
    *,
    ends_by_steps: bool = True,
    grace_s: float = GRACE_S,
    log_file: Path | None = None,
    beside: Beside | None = None,
) -> Outcome:
    """Start every line as a process, pass on the output, and apply `RunRules` when one ends.
    Returns when the run is over and all processes have ended.

    ends_by_steps: the run has a number of steps, and ends when it is complete or can no longer be
        completed.
    grace_s: seconds that a process may take to end.
    log_file: receives the output too; each process's deaths are noted in its folder.
    beside: opens a context for the length of the run (the control socket).
    """
    output = Output(log_file=log_file)
    environment = _with_own_python_first(environment) | ({RUN_VARIABLE: str(log_file.parent.absolute())} if log_file else {})

    async def run() -> Outcome:
        supervisor = Supervisor(lines, environment, RunRules(ends_by_steps), output, grace_s)
        async with beside(supervisor) if beside else nullcontext(), reaping_orphans(WAITED_FOR):
            return await supervisor.run()

    try:
        return asyncio.run(run())
    finally:
        output.close()


def lines_for_people(config: NodeConfig) -> dict[str, str]:
    """The environment variable with which processes write lines as on a terminal, unless the
    configuration asks for JSON: they write to a pipe, but people read what `Output` makes of it.
    """
    return {"SWARM_LOG__FORMAT": "console"} if config.log.format == "auto" else {}


def _with_own_python_first(environment: Mapping[str, str]) -> dict[str, str]:
    """Put the environment that `swarm` is installed in first on the PATH, because the lines name
    only `python` and `nats-server`.
    """
    own = str(Path(sys.executable).parent)
    path = environment.get("PATH", os.defpath)
    return {**environment, **own_modules(), "PATH": f"{own}{os.pathsep}{path}", "PYTHONUNBUFFERED": "1"}
