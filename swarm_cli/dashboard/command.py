"""`swarm dashboard` (`make dashboard`): the swarm's page in a browser."""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated

import typer

from shared.cancelling import sleep_unless_stopped
from shared.config import NodeConfig
from swarm_cli.chosen_config import ConfigOption, NodeUrlOption, SwarmUrlOption, load_chosen
from swarm_cli.console import count, note
from swarm_cli.dashboard.server import PageServer
from swarm_cli.dashboard.swarm_source import SwarmSource
from swarm_cli.local.procfile import check_ports
from swarm_cli.observe.snapshot import SwarmState
from swarm_cli.runs import RunEnd
from swarm_cli.target import LookRunOption, Target, check_listening, looking_at

DEFAULT_PORT = 8400
LOOK_EVERY_S = 5.0


def dashboard(
    port: Annotated[int, typer.Option(min=1024, max=65_535, help="Port of the page.")] = DEFAULT_PORT,
    node_url: NodeUrlOption = "",
    swarm_url: SwarmUrlOption = "",
    run: LookRunOption = "",
    config: ConfigOption = None,
) -> None:
    """Show a swarm in a browser: whether its models get better, what they say, who teaches whom.
    --run also shows a run that has ended, from its records. Ctrl-C ends it.
    """
    node_config = load_chosen(config, NodeConfig)
    check_ports(
        {port: "the page"}, "stop that process, or choose another with --port 8500 (make dashboard: DASHBOARD_FLAGS='--port 8500')"
    )
    with looking_at(node_config, run, node_url, swarm_url) as target:
        if not target.named:
            check_listening(node_config.node.var_dir, target)
        asyncio.run(serve(target, SwarmSource(node_config, target, config), port))


async def serve(target: Target, source: SwarmSource, port: int) -> None:
    """Serve the page, and look at the swarm every few seconds, until Ctrl-C or SIGTERM."""
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    page, said = PageServer(port, source.answer), ""
    note(f"open {page.url}   (Ctrl-C ends it and nothing else)")
    try:
        while not stopping.is_set():
            found = _seen(target, await source.look(), source.ended)
            if found != said:
                note(found)
            said = found
            await sleep_unless_stopped(stopping, LOOK_EVERY_S)
    finally:
        await asyncio.to_thread(page.close)


def _seen(target: Target, snapshot: SwarmState | None, ended: tuple[str, RunEnd] | None) -> str:
    """Say what the page shows, or why it shows nothing."""
    if ended is not None:
        return f"{ended[1].sentence(ended[0])}; the page shows its records"
    if snapshot is None:
        start = "start a swarm with `swarm up` (`make run`) in another terminal, or name its server with --node-url"
        return f"no server answers at {target.node_url}: {start}; waiting"
    nodes = [node.node for node in snapshot.nodes if node.statuses]
    found = f"found {count(len(nodes), 'node')} ({', '.join(nodes) or 'none has started yet'})"
    return f"run {target.run}: {found}" if target.run else found
