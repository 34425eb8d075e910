"""How often the processes of a run of this machine died lately, for Prometheus: what a process
exports itself is never seen if it dies before it is scraped.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shared.contracts.wire import is_node_name
from shared.roles import ROLES
from shared.runtime.deaths import deaths_file, read_deaths

WITHIN_S = 1800.0
"""The window of the alert SwarmCrashLooping."""


def death_figures(run: Path, nodes: Iterable[str], now: float) -> str:
    """Lines in Prometheus' format for each process of the nodes that has died. run: the run's
    folder.
    """
    lines = []
    for node in filter(is_node_name, nodes):
        for role in ROLES:
            deaths = read_deaths(deaths_file(run, f"{node}-{role}"))
            number = 0 if deaths is None else sum(now - WITHIN_S <= at <= now for at in deaths.times)
            if number:
                lines.append(f'swarm_process_recent_deaths{{node="{node}", role="{role}"}} {number}\n')
    return "".join(lines)
