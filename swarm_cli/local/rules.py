"""What a swarm on one machine does when one of its processes ends. Pure: times are arguments.

| what ended | what follows |
|---|---|
| the progress view, with all steps done | the run ends, with code 0 |
| the progress view, in any other way | it is restarted: a failed view must not end the run |
| a service, with 0 or by a signal, unasked | it is restarted, after a longer pause each time |
| a service for good (code 78, or too many crashes) | it stays down and the others go on, except |
| ... in a run with a number of steps | the run ends, with its code: it cannot be completed |
| ... if no complete node is left | the run ends, with its code |
| the NATS server, for good | the run ends, with its code |
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.runtime.exits import BACKOFF_S, CRASH_WINDOW_S

SERVER, VIEW = "nats", "progress"
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


def node_of(process: str) -> str:
    """The node that a process belongs to: alpha for `alpha-trainer`; "" for server and view."""
    return process.rpartition("-")[0]


@dataclass(slots=True)
class RunRules:
    """Decides what follows when a process ends, from the ends so far.

    ends_by_steps: whether the run has a number of steps, after which the view ends it.
    """

    ends_by_steps: bool
    given_up: set[str] = field(default_factory=set)
    _ends: dict[str, list[float]] = field(default_factory=dict)

    def after_end(self, process: str, code: int, now_s: float, processes: frozenset[str]) -> StartAgain | StayAway | EndRun:
        """What follows when `process`, one of `processes`, ends unasked with `code` (negative: by
        that signal).
        """
        if process == VIEW and code == 0 and self.ends_by_steps:
            return EndRun(0)
        if process == VIEW or code <= 0:
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
        """Whether signal `number` belongs to a request that is less than `ECHO_S` old."""
        asked = self._asked.get(number)
        if asked is not None and now_s - asked < ECHO_S:
            return True
        self._asked[number] = now_s
        return False
