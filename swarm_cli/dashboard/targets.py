"""Lists a running swarm's processes for Prometheus, from their own reports, in a file that it
rereads.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from shared.contracts.control import ServiceStatus
from shared.contracts.status_figures import StatusFigure
from shared.drafts import replace_text
from shared.roles import ROLES, SEVERAL
from shared.runtime.status import STOPPED
from swarm_cli.loopback import LOOPBACK
from swarm_cli.observe.view import NodeView

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}|[0-9A-Fa-f:]{2,39}")
FORGET_S = 24 * 3600.0
"""A silent process stays a target for this long, so that Prometheus shows it as down. A process
that was killed and never replaced is dropped after a day.
"""


def target_groups(
    views: Sequence[NodeView], now: float, here: str | None = None, hosts: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Targets in the format of Prometheus' file discovery, each with its node and role. `here` is
    this machine's host name.

    Anybody who may write into a node's bucket can claim where its processes are; on a server
    without accounts that is everybody. So only this machine's loopback and `hosts`, which the user
    named, are scraped. If two processes claim one address, the older one is gone and its port was
    taken over. A status with an invalid host or port makes no target: Prometheus would refuse the
    whole file.
    """
    here = here or socket.gethostname()
    scraped = {here, *LOOPBACK, *hosts}
    by_address: dict[str, ServiceStatus] = {}
    for status in sorted(_listening(views, now), key=lambda status: status.updated_at):
        if status.host in scraped:
            by_address[address(status, here)] = status
    return [
        {"targets": [where], "labels": {"node": status.node, "role": status.role}} for where, status in sorted(by_address.items())
    ]


def left_out(views: Sequence[NodeView], now: float, here: str, hosts: Collection[str] = ()) -> tuple[int, list[str]]:
    """How many processes `target_groups` leaves out because they claim to be on hosts that were not
    named, and these hosts.
    """
    scraped = {here, *LOOPBACK, *hosts}
    elsewhere = [status.host for status in _listening(views, now) if status.host not in scraped]
    return len(elsewhere), sorted(set(elsewhere))


def _listening(views: Sequence[NodeView], now: float) -> Iterator[ServiceStatus]:
    for view in views:
        for status in view.statuses:
            listens = 0 < status.figures.get(StatusFigure.HTTP_PORT, 0) <= 65_535 and _HOST.fullmatch(status.host)
            if listens and status.state != STOPPED and now - status.updated_at <= FORGET_S:
                yield status


def expected(views: Sequence[NodeView], groups: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Processes that should be running, as `{"node": ..., "role": ...}`: every target, and the
    missing roles of each node with a target. A node whose policy is trained elsewhere has never had
    a sampler or trainer, and needs neither.
    """
    found = [{"node": str(group["labels"]["node"]), "role": str(group["labels"]["role"])} for group in groups]
    for view in views:
        has = {each["role"] for each in found if each["node"] == view.node}
        trains = any(view.roles(role) for role in ("sampler", "trainer"))
        needed = [role for role in ROLES if role in SEVERAL or trains]
        found += [{"node": view.node, "role": role} for role in needed if has and role not in has]
    return sorted(found, key=lambda each: (each["node"], ROLES.index(each["role"])))


def run_is_over(views: Sequence[NodeView], here: str, exists: Callable[[int], bool]) -> bool:
    """Whether all known processes are gone. Used when their server does not answer: a run's server
    ends with the run, so nothing is left to report the end. `exists` says whether a process id is
    in use on this machine, `here`; a process elsewhere may be alive.
    """
    known = [status for view in views for status in view.statuses if status.state != STOPPED]
    return all(status.host == here and not exists(status.pid) for status in known)


def process_exists(pid: int) -> bool:
    """Whether a process on this machine has this id, including other users' processes."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return pid > 0


def address(status: ServiceStatus, here: str) -> str:
    """Host and port of a process's metrics. On this machine it is loopback, on which every process
    listens.
    """
    host = "127.0.0.1" if status.host in (here, "localhost") else status.host
    return f"{f'[{host}]' if ':' in host else host}:{int(status.figures[StatusFigure.HTTP_PORT])}"


def write_targets(groups: list[dict[str, Any]], target: Path) -> None:
    """Replace the file atomically, so that Prometheus never reads half of it. If nothing changed,
    the file is left alone.
    """
    text = json.dumps(groups, indent=1) + "\n"
    if target.exists() and target.read_text() == text:
        return
    replace_text(target, text)
