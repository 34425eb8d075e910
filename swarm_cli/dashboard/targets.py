"""Where Prometheus finds a running swarm's processes: from what they say of themselves, as a file
that it reads again.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.contracts.control import ServiceStatus
from shared.contracts.status_figures import StatusFigure
from shared.runtime.status import SILENT_S, STOPPED
from swarm_cli.observe.view import NodeView

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}|[0-9A-Fa-f:]{2,39}")
FORGET_S = 20 * SILENT_S
"""A process that is silent this long is no target any more; before, Prometheus sees that it is
down.
"""


def target_groups(views: Sequence[NodeView], now: float, here: str | None = None) -> list[dict[str, Any]]:
    """Targets as Prometheus' file discovery wants them, each with its node and role. `here` is this
    machine's host name.

    Where two processes claim one address, the older one is gone and its port was taken over. A
    status whose host or port is none makes no target: Prometheus would refuse the whole file for
    it.
    """
    here = here or socket.gethostname()
    by_address: dict[str, ServiceStatus] = {}
    statuses = (status for view in views for status in view.statuses)
    for status in sorted(statuses, key=lambda status: status.updated_at):
        listens = 0 < status.figures.get(StatusFigure.HTTP_PORT, 0) <= 65_535 and _HOST.fullmatch(status.host)
        if listens and status.state != STOPPED and now - status.updated_at <= FORGET_S:
            by_address[address(status, here)] = status
    return [
        {"targets": [where], "labels": {"node": status.node, "role": status.role}} for where, status in sorted(by_address.items())
    ]


def address(status: ServiceStatus, here: str) -> str:
    """Host and port of a process's metrics. On this machine it listens on loopback, whatever else
    it listens on.
    """
    host = "127.0.0.1" if status.host == here else status.host
    return f"{f'[{host}]' if ':' in host else host}:{int(status.figures[StatusFigure.HTTP_PORT])}"


def write_targets(groups: list[dict[str, Any]], target: Path) -> None:
    """Replace the file at once, so that Prometheus never reads half of it. An unchanged file is
    left alone.
    """
    text = json.dumps(groups, indent=1) + "\n"
    if target.exists() and target.read_text() == text:
        return
    draft = target.with_suffix(".new")
    draft.write_text(text)
    os.replace(draft, target)
