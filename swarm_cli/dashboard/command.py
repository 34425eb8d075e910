"""`swarm dashboard` (`make dashboard`): the swarm's page in a browser."""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated

import typer

from shared.cancelling import sleep_unless_stopped
from swarm_cli.chosen_config import ConfigOption, NodeUrlOption, SwarmUrlOption, load_chosen
from swarm_cli.console import count, note
from swarm_cli.dashboard.server import PageServer
from swarm_cli.dashboard.swarm_source import SwarmSource
from swarm_cli.local.procfile import check_ports
from swarm_cli.observe.snapshot import SwarmState
from swarm_cli.target import Following, LookRunOption, looking_at

DEFAULT_PORT = 8400
LOOK_EVERY_S = 5.0


def dashboard(
    port: Annotated[int, typer.Option(min=1024, max=65_535, help="Port of the page.")] = DEFAULT_PORT,
    node_url: NodeUrlOption = "",
    swarm_url: SwarmUrlOption = "",
    run: LookRunOption = "",
    config: ConfigOption = None,
) -> None:
    """Show a swarm in a browser: which nodes learn, whose groups they train on, questions and
    answers. --run also shows a run that has ended, from its records. When the run ends and another
    one starts, the page switches to it, unless a run or a server was named. Ctrl-C ends it.
    """
    node_config = load_chosen(config)
    check_ports(
        {port: "the page"}, "stop that process, or choose another with --port 8500 (make dashboard: DASHBOARD_FLAGS='--port 8500')"
    )
    with looking_at(node_config, run, node_url, swarm_url) as target:
        following = Following(node_config, target, fixed=bool(run or node_url or swarm_url))
        asyncio.run(Dashboard(following, SwarmSource(node_config, following, config), port).run())


class Dashboard:
    """Serves the page, and looks at the swarm every few seconds."""

    def __init__(self, following: Following, source: SwarmSource, port: int) -> None:
        self._following = following
        self._source = source
        self._port = port
        self._told = ""

    async def run(self) -> None:
        """Run until Ctrl-C or SIGTERM."""
        stopping = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        page = PageServer(self._port, self._source.answer)
        note(f"open {page.url}   (Ctrl-C ends it and nothing else)")
        try:
            while not stopping.is_set():
                self._tell(self._seen(await self._source.look()))
                await sleep_unless_stopped(stopping, LOOK_EVERY_S)
        finally:
            await asyncio.to_thread(page.close)

    def _seen(self, snapshot: SwarmState | None) -> str:
        """Say what the page shows, or why it shows nothing."""
        target = self._following.target
        if target.ended is not None:
            return f"{target.ended.sentence(target.run)}; the page shows its records"
        if snapshot is not None:
            nodes = [node.node for node in snapshot.nodes if node.statuses]
            found = f"found {count(len(nodes), 'node')} ({', '.join(nodes) or 'none has started yet'})"
            return f"run {target.run}: {found}" if target.run else found
        instead = self._following.instead
        if (ended := self._following.before) is None:
            start = "start a swarm with `swarm up` (`make run`) in another terminal, or name its server with --node-url; waiting"
            return f"no server answers at {target.node_url}: {instead or start}"
        run, end = ended
        next_one = instead or "waiting for the next run" if self._following.follows else "no other run is running here"
        return f"{end.sentence(run)}; `swarm dashboard --run {run}` shows it; {next_one}"

    def _tell(self, line: str) -> None:
        if line != self._told:
            note(line)
            self._told = line
