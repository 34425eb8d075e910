"""`swarm dashboard` (`make dashboard`): the swarm's page in a browser and, if Prometheus is
installed, panels and alerts from a Prometheus with the cluster's rules.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer

from monitoring.dashboards import dashboards
from monitoring.rules import RULES, rule_file
from shared.runtime.tasks import sleep_unless_stopped
from swarm_cli.chosen_config import ConfigOption, NodeUrlOption, SwarmUrlOption, load_chosen
from swarm_cli.console import note
from swarm_cli.dashboard.prometheus import INSTALL, PREFIX, SCRAPE_S, Prometheus, installed_prometheus
from swarm_cli.dashboard.scraping import Scraping
from swarm_cli.dashboard.server import PageServer, page_panels
from swarm_cli.dashboard.swarm_source import SwarmSource
from swarm_cli.local.ports import check_ports
from swarm_cli.looking.following import Following
from swarm_cli.looking.target import LookRunOption, looking_at

DEFAULT_PORT = 8400
SHOWN = ("swarm", "node")
LOOK_EVERY_S = 5.0
PATIENCE = 0.5
"""Alerts wait half as long as in the cluster, because scrapes come every two seconds here and
somebody is watching. A stuck trainer, a silent server and a flood are reported within two minutes.
"""


def dashboard(
    port: Annotated[
        int, typer.Option(min=1024, max=65_534, help="Port of the page; Prometheus takes the next one.")
    ] = DEFAULT_PORT,
    folder: Annotated[Path | None, typer.Option(help="Folder for Prometheus' data.  [default: watch in node.var_dir]")] = None,
    node_url: NodeUrlOption = "",
    swarm_url: SwarmUrlOption = "",
    run: LookRunOption = "",
    nats_monitor: Annotated[
        str, typer.Option(help="Monitoring address of the NATS server, http://HOST:8222.  [default: swarm up's]")
    ] = "",
    scrape: Annotated[
        list[str] | None,
        typer.Option(help="Another machine whose processes to scrape, by the host name they report; may be repeated."),
    ] = None,
    patience: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=10.0,
            help="How long an alert about a stalled or silent process waits: 1 as long as in a cluster, 0.5 half as long.",
        ),
    ] = PATIENCE,
    config: ConfigOption = None,
) -> None:
    """Show a swarm in a browser: which nodes learn, whose groups they train on, questions and
    answers, and, if prometheus is installed, all panels and alerts. --run also shows a run that has
    ended, from a copy of its server's store. When the run ends and another one starts, the page
    switches to it, unless a run or a server was named. Ctrl-C ends it.
    """
    program = installed_prometheus() if RULES.exists() else None
    node_config = load_chosen(config)
    wanted = {port: "the page"} | ({port + 1: "Prometheus"} if program else {})
    check_ports(wanted, "stop those processes, or choose others with --port 8500 (make dashboard: DASHBOARD_FLAGS='--port 8500')")
    prometheus = None
    if program is None:
        note(INSTALL)
    else:
        own = folder or node_config.node.var_dir / "watch"
        prometheus = Prometheus(program, own, port + 1, rule_file(scale=patience), f"http://127.0.0.1:{port}")
    with looking_at(node_config, run, node_url, swarm_url) as target:
        following = Following(node_config, target, fixed=bool(run or node_url or swarm_url))
        scraping = Scraping(prometheus, target.node_url, node_config.node.var_dir, nats_monitor, scrape or ())
        asyncio.run(Dashboard(following, SwarmSource(node_config, following, config), prometheus, scraping, port).run())


class Dashboard:
    """Serves the page, looks at the swarm every few seconds, and keeps Prometheus' list of targets
    up to date.
    """

    def __init__(
        self, following: Following, source: SwarmSource, prometheus: Prometheus | None, scraping: Scraping, port: int
    ) -> None:
        self._following = following
        self._source = source
        self._prometheus = prometheus
        self._scraping = scraping
        self._port = port
        self._told = ""

    async def run(self) -> None:
        """Run until Ctrl-C or SIGTERM.

        Raises:
            CommandError: Prometheus does not start, or ends by itself.
        """
        stopping = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        page = None
        try:
            self._scraping.forget_all()
            if self._prometheus is not None:
                self._prometheus.start()
                await asyncio.to_thread(self._prometheus.wait_ready)
            page = self._serve()
            while not stopping.is_set():
                if self._prometheus is not None:
                    self._prometheus.check_running()
                snapshot = await self._source.look()
                self._scraping.turn_to(self._following.target.node_url)
                if snapshot is None:
                    self._tell_away(self._scraping.saw_no_server(page))
                else:
                    self._tell_seen(self._scraping.saw([node.view for node in snapshot.nodes], page))
                await sleep_unless_stopped(stopping, LOOK_EVERY_S)
        finally:
            if page is not None:
                await asyncio.to_thread(page.close)
            if self._prometheus is not None:
                await asyncio.to_thread(self._prometheus.stop)

    def _serve(self) -> PageServer:
        known = dashboards()  # empty where only the packages are installed
        shown = [known[name] for name in SHOWN if name in known]
        panels = page_panels(shown, SCRAPE_S, prometheus=self._prometheus is not None)
        page = PageServer(
            self._port,
            self._prometheus.url if self._prometheus else "",
            panels,
            self._prometheus.client if self._prometheus else None,
            self._scraping.nats_figures,
            self._source.answer,
        )
        also = f"Prometheus itself: {page.url.rstrip('/')}{PREFIX}/; " if self._prometheus else ""
        note(f"open {page.url}   ({also}Ctrl-C ends {'both' if also else 'it'} and nothing else)")
        return page

    def _tell_seen(self, followed: str) -> None:
        target = self._following.target
        if target.ended is not None:
            self._tell(f"{target.ended.sentence(target.run)}; the page shows a copy of what its server had stored")
        else:
            self._tell(f"run {target.run}: {followed}" if target.run else followed)

    def _tell_away(self, followed: str) -> None:
        """Print that no server answers and, if it is known, that its run has ended."""
        end, instead = self._following.end, self._following.instead
        if end is None:
            self._tell(f"{followed}; {instead}" if instead else followed)
            return
        run, told = end
        next_one = instead or "waiting for the next run" if self._following.follows else "no other run is running here"
        self._tell(f"{told.sentence(run)}; `swarm dashboard --run {run}` shows it; {next_one}")

    def _tell(self, line: str) -> None:
        if line != self._told:
            note(line)
            self._told = line
