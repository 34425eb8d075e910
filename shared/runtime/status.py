"""A process's status in the node's key-value bucket, for `swarm status` and the progress view."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
from typing import TYPE_CHECKING

from shared.contracts.codec import encode
from shared.contracts.control import ServiceStatus
from shared.contracts.status_figures import FamilyFigure, StatusFigure
from shared.contracts.subjects import node_bucket, status_key
from shared.roles import Role
from shared.runtime.pace import WorkPace
from shared.transport.base import Transport, TransportError

if TYPE_CHECKING:  # commands that read statuses need no Prometheus client
    from shared.runtime.clock import ClockSkew

STARTING = "starting"
"""The first state of a process."""
EVALUATING_BASE = "evaluating the base policy"
FIRST_GROUPS = "waiting for the first groups"
"""States of a generator and of a trainer before the first step."""
STOPPED = "stopped"
"""The last state of a process that shut down in order."""
STATUS_INTERVAL_S = 2.0
"""Each status also serves as a heartbeat."""
MISSED_HEARTBEATS = 15
"""How many statuses must be missing before a process counts as gone. On a busy machine, or while a
server restarts, a working process may be late by several.
"""
CLOCK_EVERY_REPORTS = 15
SILENT_S = MISSED_HEARTBEATS * STATUS_INTERVAL_S
"""Age of the last status from which a process counts as gone, wherever that is judged."""


def is_alive(status: ServiceStatus, now: float) -> bool:
    """Check whether the process that wrote `status` is running: it has not reported its stop, and
    the status is less than `SILENT_S` old.
    """
    return status.state != STOPPED and now - status.updated_at <= SILENT_S


class StatusBoard:
    """The named numbers in one process's status (`shared.contracts.status_figures`)."""

    def __init__(self, node: str, role: Role, replica: str) -> None:
        self._node = node
        self._role = role
        self._replica = replica
        self._state = STARTING
        self._figures: dict[str, float] = {}
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
        """Add to a figure."""
        self._figures[str(name)] = self._figures.get(name, 0.0) + amount

    def state(self, text: str) -> None:
        """Set the state: one or two words on what the process does now."""
        self._state = text

    def get(self, name: str) -> float:
        """A figure's value, 0 if it was never set."""
        return self._figures.get(name, 0.0)

    def snapshot(self) -> ServiceStatus:
        """The status as a message."""
        return ServiceStatus(
            node=self._node,
            role=self._role,
            replica=self._replica,
            pid=os.getpid(),
            host=socket.gethostname(),
            state=self._state,
            started_at=self._started_at,
            updated_at=time.time(),
            figures=dict(self._figures),
        )

    async def report(self, transport: Transport, clock: ClockSkew | None = None) -> None:
        """Loop forever, writing the status every `STATUS_INTERVAL_S`. Failures are ignored, because
        an unreachable server is reported elsewhere. `clock`: updated by some of these writes.
        """
        for number in itertools.count():
            await self.report_once(transport, clock if number % CLOCK_EVERY_REPORTS == 0 else None)
            await asyncio.sleep(STATUS_INTERVAL_S)

    async def report_once(self, transport: Transport, clock: ClockSkew | None = None) -> None:
        """Write the status now; failures are ignored."""
        bucket, key = node_bucket(self._node), status_key(self._role, self._replica)
        sent_at = time.time()
        try:
            revision = await transport.kv.put(bucket, key, encode(self.snapshot()))
            answered_at = time.time()
            if clock is not None:
                entry = await transport.kv.get(bucket, key)
                if entry is not None and entry.revision == revision:
                    clock.measured(sent_at, entry.stored_at, answered_at)
        except TransportError:
            return
