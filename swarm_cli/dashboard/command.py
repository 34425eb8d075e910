"""`swarm dashboard` (`make watch`): a Prometheus and a page of the dashboards' panels beside a
running swarm.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from monitoring.dashboards import DASHBOARDS
from monitoring.render import rule_file
from shared.config import NodeConfig
from shared.runtime.tasks import sleep_unless_stopped
from shared.transport.base import NotConnected
from swarm_cli.chosen_config import load_chosen
from swarm_cli.console import note
from swarm_cli.dashboard.nats_figures import figures, monitor_of
from swarm_cli.dashboard.prometheus import PREFIX, SCRAPE_S, Prometheus, find_prometheus
from swarm_cli.dashboard.server import NATS_FIGURES, PageServer, page_panels
from swarm_cli.dashboard.targets import expected, process_exists, run_is_over, target_groups, write_targets
from swarm_cli.local.ports import check_ports
from swarm_cli.observe.snapshot import take_snapshot
from swarm_cli.observe.view import NodeView

DEFAULT_PORT = 8400
SHOWN = ("swarm", "node")
LOOK_EVERY_S = 5.0
LOOK_S = 15.0
CONNECT_S = 3.0
NODES_SCRAPED = 1000
PATIENCE = 0.5
"""Of the cluster's: scrapes are every two seconds here, and who looks is near. A stuck trainer, a
server that does not answer and a flood are told within two minutes."""


def dashboard(
    port: Annotated[int, typer.Option(min=1024, max=65_534, help="Of the page; Prometheus takes the next one.")] = DEFAULT_PORT,
    folder: Annotated[Path | None, typer.Option(help="What Prometheus writes.  [default: watch in node.var_dir]")] = None,
    node_url: Annotated[str, typer.Option(help="Server of the nodes' own streams.  [default: nats.node_url]")] = "",
    nats_monitor: Annotated[
        str, typer.Option(help="Monitoring address of the NATS server, http://host:8222.  [default: of swarm up's]")
    ] = "",
    patience: Annotated[
        float, typer.Option(min=0.01, max=10.0, help="Of the cluster's alerts with what stands still or is silent.")
    ] = PATIENCE,
    config: Annotated[Path | None, typer.Option(help="Configuration file.  [default: SWARM_CONFIG or the demo's]")] = None,
) -> None:
    """Watch a running swarm in a browser: Prometheus with the rules, and a page of the dashboards'
    panels. Ctrl-C ends both.
    """
    program = find_prometheus()
    node_config = load_chosen(config)
    check_ports(
        {port: "the page", port + 1: "Prometheus"},
        "end what has them, or choose others with --port (make watch WATCH_FLAGS='--port 8500')",
    )
    own = folder or node_config.node.var_dir / "watch"
    rules = rule_file(scale=patience)
    prometheus = Prometheus(program, own, port + 1, rules, f"http://127.0.0.1:{port}")
    asyncio.run(Watcher(node_config, prometheus, node_url or node_config.nats.node_url, port, nats_monitor).run())


class Watcher:
    """One Prometheus, one page, and the list of targets that follows the swarm."""

    def __init__(self, config: NodeConfig, prometheus: Prometheus, node_url: str, port: int, nats_monitor: str = "") -> None:
        """`nats_monitor`: of the NATS server; empty: found where `swarm up` started it."""
        self._config = config
        self._nats_monitor = nats_monitor
        self._monitor_seen: str | None = None
        self._views: Sequence[NodeView] = ()
        self._prometheus = prometheus
        self._node_url = node_url
        self._port = port
        self._told = ""

    async def run(self) -> None:
        """Until Ctrl-C or SIGTERM.

        Raises:
            CommandError: Prometheus does not start, or ends by itself.
        """
        stopping = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        write_targets([], self._prometheus.targets)
        write_targets([], self._prometheus.nats_targets)
        self._prometheus.start()
        page = None
        try:
            await asyncio.to_thread(self._prometheus.wait_ready)
            panels = page_panels([DASHBOARDS[name] for name in SHOWN], SCRAPE_S)
            page = PageServer(self._port, self._prometheus.url, panels, self._prometheus.client, self._nats_figures)
            own = page.url.rstrip("/") + PREFIX
            note(f"open {page.url}   (Prometheus itself: {own}/; Ctrl-C ends both, and nothing of the swarm)")
            while not stopping.is_set():
                self._prometheus.check_running()
                await self._look(page)
                await sleep_unless_stopped(stopping, LOOK_EVERY_S)
        finally:
            if page is not None:
                page.close()
            await asyncio.to_thread(self._prometheus.stop)

    async def _look(self, page: PageServer) -> None:
        """Bring the lists of targets up to date. What does not answer stays on them, so that it is
        seen to be down, until its run is over."""
        try:
            async with asyncio.timeout(LOOK_S):
                snapshot = await take_snapshot(self._config, self._node_url, None, [], timeout_s=CONNECT_S, most=NODES_SCRAPED)
        except (NotConnected, TimeoutError):
            self._without_server(page)
            return
        self._views = [node.view for node in snapshot.nodes]
        groups = self._scrape(page)
        nodes = sorted({group["labels"]["node"] for group in groups})
        self._tell(f"scraping {len(groups)} processes of {len(nodes)} nodes ({', '.join(nodes) or 'none has started yet'})")

    def _without_server(self, page: PageServer) -> None:
        if run_is_over(self._views, socket.gethostname(), process_exists):
            self._views, self._monitor_seen = (), None
            self._scrape(page)
            self._tell(
                f"no swarm answers at {self._node_url}: start one with `swarm up` (`make run`) in another terminal; waiting for it"
            )
        else:
            self._scrape(page)
            self._tell(f"the NATS server at {self._node_url} does not answer, and processes of its nodes are there: see the alerts")

    def _scrape(self, page: PageServer) -> list[dict[str, Any]]:
        """Write what Prometheus is to scrape; returns the swarm's targets."""
        groups = target_groups(self._views, time.time())
        write_targets(groups, self._prometheus.targets)
        page.expect(expected(self._views, groups))
        labels = {"instance": self._node_url.rpartition("/")[2], "__metrics_path__": NATS_FIGURES}
        known = bool(groups) and self._monitor() is not None
        nats = [{"targets": [f"127.0.0.1:{urlsplit(page.url).port}"], "labels": labels}] if known else []
        write_targets(nats, self._prometheus.nats_targets)
        return groups

    def _monitor(self) -> str | None:
        """Monitoring address of the server; the last one known while a killed server is away, and
        its note with it."""
        found = self._nats_monitor or monitor_of(self._node_url, self._config.node.var_dir)
        self._monitor_seen = found or self._monitor_seen
        return self._monitor_seen

    def _nats_figures(self) -> str:
        monitor = self._monitor()
        return figures(monitor) if monitor else ""

    def _tell(self, line: str) -> None:
        if line != self._told:
            note(line)
            self._told = line
