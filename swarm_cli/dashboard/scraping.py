"""Keeps the lists of what the dashboard's Prometheus scrapes: the processes of the swarm that was
seen last, and the NATS server's figures. Processes that do not answer stay on the lists until their
run is over, so that they show as down.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from swarm_cli.console import count
from swarm_cli.dashboard.death_figures import death_figures
from swarm_cli.dashboard.nats_figures import figures
from swarm_cli.dashboard.prometheus import Prometheus
from swarm_cli.dashboard.server import NATS_FIGURES, PageServer
from swarm_cli.dashboard.targets import expected, left_out, process_exists, run_is_over, target_groups, write_targets
from swarm_cli.nats_monitor import monitor_of
from swarm_cli.observe.view import NodeView
from swarm_cli.running import run_at

_HOSTS_TOLD = 4


class Scraping:
    """The lists of targets. `prometheus` None: nothing is scraped, but processes are
    still counted.
    """

    def __init__(
        self, prometheus: Prometheus | None, node_url: str, var_dir: Path, nats_monitor: str = "", hosts: Collection[str] = ()
    ) -> None:
        """`nats_monitor`: monitoring address of the NATS server; empty: that of the server that
        `swarm up` started. `hosts`: other machines to scrape besides this one.
        """
        self._hosts = frozenset(hosts)
        self._prometheus = prometheus
        self._node_url = node_url
        self._var_dir = var_dir
        self._nats_monitor = nats_monitor
        self._monitor_seen: str | None = None
        self._views: Sequence[NodeView] = ()

    def turn_to(self, node_url: str) -> None:
        """Look at the swarm through this server from now on. Forget the processes seen through
        another server.
        """
        if node_url != self._node_url:
            self._node_url, self._views, self._monitor_seen = node_url, (), None

    def saw(self, views: Sequence[NodeView], page: PageServer) -> str:
        """Update the lists from `views`; returns a sentence about what is scraped."""
        self._views = views
        groups = self._write(page)
        nodes = sorted({group["labels"]["node"] for group in groups})
        followed = f"{count(len(groups), 'process')} of {count(len(nodes), 'node')} ({', '.join(nodes) or 'none has started yet'})"
        return f"{'scraping' if self._prometheus else 'found'} {followed}{self._elsewhere(views)}"

    def _elsewhere(self, views: Sequence[NodeView]) -> str:
        number, hosts = left_out(views, time.time(), socket.gethostname(), self._hosts)
        if not number:
            return ""
        named = ", ".join(hosts[:_HOSTS_TOLD]) + (f" and {len(hosts) - _HOSTS_TOLD} more" if len(hosts) > _HOSTS_TOLD else "")
        return f"; {number} more report that they are on {named}: to scrape a host that you know, name it with --scrape"

    def saw_no_server(self, page: PageServer) -> str:
        """Update the lists after a look without an answer: they stay, unless the run is over.
        Returns a sentence about it.
        """
        if run_is_over(self._views, socket.gethostname(), process_exists):
            self._views, self._monitor_seen = (), None
            self._write(page)
            start = "start one with `swarm up` (`make run`) in another terminal, or name its server with --node-url; waiting"
            return f"no swarm answers at {self._node_url}: {start}"
        self._write(page)
        return f"the NATS server at {self._node_url} does not answer, but its nodes' processes are running: see the alerts"

    def nats_figures(self) -> str:
        """The NATS server's figures in Prometheus' format, and how often the processes of its run
        died; empty if it has no monitoring port.
        """
        monitor, run = self._monitor(), run_at(self._var_dir, self._node_url)
        folder, nodes = self._var_dir / "runs" / run, [view.node for view in self._views]
        return (figures(monitor) if monitor else "") + (death_figures(folder, nodes, time.time()) if run else "")

    def forget_all(self) -> None:
        """Empty the lists that an earlier dashboard may have left."""
        if self._prometheus is not None:
            write_targets([], self._prometheus.targets)
            write_targets([], self._prometheus.nats_targets)

    def _write(self, page: PageServer) -> list[dict[str, Any]]:
        groups = target_groups(self._views, time.time(), hosts=self._hosts)
        page.expect(expected(self._views, groups))
        if self._prometheus is not None:
            write_targets(groups, self._prometheus.targets)
            labels = {"instance": self._node_url.rpartition("/")[2], "__metrics_path__": NATS_FIGURES}
            known = bool(groups) and self._monitor() is not None
            nats = [{"targets": [f"127.0.0.1:{urlsplit(page.url).port}"], "labels": labels}] if known else []
            write_targets(nats, self._prometheus.nats_targets)
        return groups

    def _monitor(self) -> str | None:
        """Monitoring address of the server; the last known one if the server, and with it its ports
        file, is gone.
        """
        found = self._nats_monitor or monitor_of(self._node_url, self._var_dir)
        self._monitor_seen = found or self._monitor_seen
        return self._monitor_seen
