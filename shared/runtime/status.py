"""A process's status in the node's key-value bucket, for `swarm status` and the progress view: its
pace, and how far its clock is from its NATS server's, by the time that the server gives a write.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from shared.contracts.codec import encode
from shared.contracts.control import ServiceStatus
from shared.contracts.status_figures import STARTING, STATUS_INTERVAL_S, FamilyFigure, StatusFigure
from shared.contracts.subjects import node_bucket, status_key
from shared.roles import Role
from shared.runtime.logs import Log
from shared.transport.base import StreamFull, TooLarge, Transport, TransportError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


def ahead_s(sent_at: float, stored_at: float, answered_at: float) -> float:
    """Seconds by which this clock is ahead of the server's. All arguments are Unix times in
    seconds; `stored_at` is the server's. The offset is uncertain by half the duration of the write,
    and an offset within that uncertainty counts as 0.
    """
    middle, half = (sent_at + answered_at) / 2, (answered_at - sent_at) / 2
    off = middle - stored_at
    return max(0.0, off - half) if off > 0 else min(0.0, off + half)


class ClockSkew:
    """Exports the newest measurement on /metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from shared.runtime.metrics import LateGauge  # commands that read a status do without Prometheus

        self._gauge = LateGauge(
            "swarm_clock_skew_seconds",
            "How far this machine's clock is ahead of its NATS server's; negative: behind. Other nodes judge the age of this "
            "node's groups by this clock (60 s).",
            registry=registry,
        )

        self.ahead_s = 0.0

    def measured(self, sent_at: float, stored_at: float, answered_at: float) -> None:
        """A write that this process sent at `sent_at` was answered at `answered_at`."""
        self.ahead_s = ahead_s(sent_at, stored_at, answered_at)
        self._gauge.set(self.ahead_s)


CLOCK_EVERY_REPORTS = 15
CLOCK_OFF_S = 20.0
"""From here on a clock is called wrong, as by the alert SwarmClockSkewed."""
PAUSES_KEPT = 50
PAUSE_S = 0.5
"""Units of work that follow each other more quickly are one burst, as when a verifier scores what a
generator has just made. Only pauses say how long it may be quiet.
"""
KNOWN_AFTER_S = 60.0
"""Work of less than a minute says nothing of its usual pauses: a process that is started again
first does what was waiting, and the first pause of one that works in bursts is yet to come.
"""
FEWEST_PAUSES = 3


class WorkPace:
    """The newest pauses between units of work, such as steps, and the bursts before them."""

    def __init__(self) -> None:
        self._pauses: deque[tuple[float, float, float]] = deque(maxlen=PAUSES_KEPT)
        """Each pause, and the seconds and squared gaps of the burst before it."""
        self._burst_s = self._burst_squares = 0.0
        self._units = 0
        self._first = self._last = 0.0

    def worked(self, now: float) -> None:
        """Record a unit of work that ended at `now`, in seconds of a monotonic clock."""
        if self._units:
            gap = max(0.0, now - self._last)
            if gap > PAUSE_S:
                self._pauses.append((gap, self._burst_s, self._burst_squares))
                self._burst_s = self._burst_squares = 0.0
            else:
                self._burst_s += gap
                self._burst_squares += gap * gap
        else:
            self._first = now
        self._last = now
        self._units += 1

    @property
    def usual_s(self) -> float | None:
        """The typical gap: the gap that a random moment falls into. None before the third unit of
        work, and while all of it was done within `KNOWN_AFTER_S`.

        Not the mean, because most gaps in bursts of work are close to 0. The longest pause is left
        out if it may be a stall, which must not hide the next: there are several others, or the
        work once went on for longer without any.
        """
        if self._units < 3 or self._last - self._first < KNOWN_AFTER_S:
            return None
        pauses = sorted(pause for pause, _, _ in self._pauses)
        bursts = [*(burst_s for _, burst_s, _ in self._pauses), self._burst_s]
        if len(pauses) >= FEWEST_PAUSES or (pauses and max(bursts) > pauses[-1]):
            pauses.pop()
        total = sum(pauses) + sum(bursts)
        squares = sum(pause * pause for pause in pauses) + sum(each for _, _, each in self._pauses) + self._burst_squares
        return squares / total if total > 0 else 0.0


class StatusBoard:
    """The named numbers in one process's status (`shared.contracts.status_figures`)."""

    def __init__(self, node: str, role: Role, replica: str, roles: Sequence[Role] = ()) -> None:
        """`roles`: those that the node has; empty: all four."""
        self._node = node
        self._roles = list(roles)
        self.role = role
        self._replica = replica
        self._state = STARTING
        self._figures: dict[str, float] = {}
        self.scorer: str | None = None
        """As in `ServiceStatus`."""
        self._pace = WorkPace()
        self._started_at = time.time()

    def set(self, name: StatusFigure | FamilyFigure, value: float | None) -> None:
        """Set a figure; None removes it, because its value is now unknown."""
        if value is None:
            self._figures.pop(str(name), None)
        else:
            self._figures[str(name)] = float(value)

    def worked(self) -> None:
        """Record one completed unit of the role's work: a generator's call, a scored group, a
        batch, a step. It shows that the process makes progress and does not merely respond.
        """
        self._pace.worked(time.monotonic())
        self.set(StatusFigure.WORKED_AT, time.time())
        self.set(StatusFigure.WORK_EVERY_S, self._pace.usual_s)

    def add(self, name: StatusFigure | FamilyFigure, amount: float = 1.0) -> None:
        self._figures[str(name)] = self._figures.get(name, 0.0) + amount

    def state(self, text: str) -> None:
        self._state = text

    def get(self, name: str) -> float:
        """A figure's value, 0 if it was never set."""
        return self._figures.get(name, 0.0)

    def snapshot(self) -> ServiceStatus:
        return ServiceStatus(
            node=self._node,
            role=self.role,
            replica=self._replica,
            pid=os.getpid(),
            host=socket.gethostname(),
            state=self._state,
            started_at=self._started_at,
            updated_at=time.time(),
            figures=dict(self._figures),
            roles=self._roles,
            scorer=self.scorer,
        )

    async def report(self, transport: Transport, log: Log, clock: ClockSkew | None = None) -> None:
        """Loop forever, writing the status every `STATUS_INTERVAL_S`. A status that the bucket does
        not take is logged once; other failures are ignored, because an unreachable server is
        reported elsewhere. `clock`: updated by some of these writes.
        """
        refused = wrong = False
        for number in itertools.count():
            try:
                await self._write(transport, clock if number % CLOCK_EVERY_REPORTS == 0 else None)
                refused = False
                wrong = self._tell_clock(clock, wrong, log)
            except (StreamFull, TooLarge) as error:
                if not refused:
                    log.error("status_refused", reason=str(error), consequence="displays take this process for gone; it works on")
                refused = True
            except TransportError:
                pass
            await asyncio.sleep(STATUS_INTERVAL_S)

    def _tell_clock(self, clock: ClockSkew | None, told: bool, log: Log) -> bool:
        """Show a clock that is off by much, and log it once. Returns whether it is."""
        ahead = 0.0 if clock is None else clock.ahead_s
        wrong = abs(ahead) > CLOCK_OFF_S
        self.set(StatusFigure.CLOCK_AHEAD_S, ahead if wrong else None)
        if wrong and not told:
            log.warning(
                "clock_off",
                ahead_s=round(ahead, 1),
                consequence="other nodes refuse this node's groups as from_future or too_old, and it refuses theirs",
                remedy="set the clock of this machine, or of the NATS server's: both need a time service",
            )
        return wrong

    async def report_once(self, transport: Transport) -> None:
        """Write the status now; failures are ignored."""
        with suppress(TransportError):
            await self._write(transport, None)

    async def _write(self, transport: Transport, clock: ClockSkew | None) -> None:
        bucket, key = node_bucket(self._node), status_key(self.role, self._replica)
        sent_at = time.time()
        revision = await transport.kv.put(bucket, key, encode(self.snapshot()))
        answered_at = time.time()
        if clock is not None:
            entry = await transport.kv.get(bucket, key)
            if entry is not None and entry.revision == revision:
                clock.measured(sent_at, entry.stored_at, answered_at)
