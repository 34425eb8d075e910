"""The progress view of `swarm up`, a process that the Procfile starts: it prints the nodes'
progress every few seconds, and ends a run that has a number of steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from shared.config import NodeConfig, load_config
from shared.identity.permissions import OPERATOR
from shared.run_records import METRICS_FILE
from shared.runtime.planes import connect_node_plane
from shared.text import visible
from shared.transport.base import NotConnected, Transport
from swarm_cli.console import count
from swarm_cli.errors import checked_node
from swarm_cli.looking.target import Target
from swarm_cli.observe.evaluations import newest_step, read_evaluations
from swarm_cli.observe.plot import where_runs_are
from swarm_cli.observe.progress import HEADER, LEGEND, Row, StepRate, evaluations_done, steps_done, summary
from swarm_cli.observe.start_again import advice, folder_here, server_trouble
from swarm_cli.observe.verdict import run_verdicts
from swarm_cli.observe.view import NodeView, gather
from swarm_cli.running import goes_on, running_since
from swarm_cli.silent_server import silent_server

HEADER_EVERY = 10
FINAL_EVALUATION_S = 180.0
"""How long to wait for the last evaluation before the run ends without it."""


def progress(
    nodes: Annotated[
        list[str] | None, typer.Argument(metavar="NODE", help="Nodes to show.  [default: the configuration's node]")
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="End when all have taken this many steps.  [default: trainer.max_steps]")] = 0,
    every_s: Annotated[float, typer.Option(min=0.2, help="Seconds between tables.")] = 5.0,
    config: Annotated[Path | None, typer.Option(help="Configuration file.  [default: SWARM_CONFIG]")] = None,
) -> None:
    """Show nodes' progress, line by line; with a number of steps, end when all nodes have taken
    them.
    """
    node_config = load_config(config)
    asyncio.run(
        ProgressView(
            node_config,
            [checked_node(name) for name in nodes or [node_config.node.id]],
            steps or node_config.trainer.max_steps,
            every_s,
        ).run()
    )


class ProgressView:
    """One progress view: what it shows, and what it remembers between tables."""

    def __init__(self, config: NodeConfig, nodes: Sequence[str], steps: int, every_s: float) -> None:
        self._config = config
        self._nodes = nodes
        self._steps = steps
        self._every_s = every_s
        self._run_dir = config.node.var_dir / "runs" / config.node.run
        self._rates = {node: StepRate() for node in nodes}
        self._went_on = any((self._run_dir / node / METRICS_FILE).is_file() for node in nodes)
        # Not this view's own start: it is started again when a node is added, or after a crash.
        now = time.time()
        self._since = min(running_since(self._run_dir) or now, now)
        self._began = time.monotonic() - (now - self._since)

    async def run(self) -> None:
        """Print tables until the steps are taken; without a number of steps, for ever."""
        transport = await connect_node_plane(self._config, OPERATOR)
        try:
            await self._follow(transport)
        finally:
            await transport.close()

    async def _follow(self, transport: Transport) -> None:
        """Print tables. Ends by itself only with a number of steps, and then not before the last
        policy is evaluated, because its held-out score is the run's result. Waits for that at most
        `FINAL_EVALUATION_S`.
        """
        for line in LEGEND.splitlines():
            _say(line)
        tables, heard_at, steps_done_at = 0, time.monotonic(), None
        while True:
            await asyncio.sleep(self._every_s)
            views = await self._views(transport, heard_at)
            if views is None:
                continue
            heard_at = time.monotonic()
            rows = self._rows(views, heard_at)
            if tables % HEADER_EVERY == 0:
                _say(HEADER)
            for row in rows:
                for line in row.lines(heard_at - self._began, time.time()):
                    _say(line)
            for line in await asyncio.to_thread(self._remedies, views):
                _say(line)
            tables += 1
            if self._steps and steps_done(views, self._steps):
                steps_done_at = steps_done_at or heard_at
                waited_s = heard_at - steps_done_at
                if self._evaluated(views) or waited_s > FINAL_EVALUATION_S:
                    self._close(rows, complete=self._evaluated(views))
                    return

    async def _views(self, transport: Transport, heard_at: float) -> list[NodeView] | None:
        try:
            views = await gather(transport, self._nodes)
            run = self._run_dir.name
            # What another run left under a node's name is none of this run's progress.
            return [replace(view if view.run in ("", run) else NodeView(view.node), begun=self._since) for view in views]
        except NotConnected as error:
            # Do not give up: `honcho start` ends the whole run when its first process ends.
            silent_s = time.monotonic() - heard_at
            why = await asyncio.to_thread(silent_server, self._config.node.var_dir, self._config.nats.node_url)
            _say(f"the NATS server has not answered for {silent_s:.0f} s; trying again ({why or error})")
            return None

    def _remedies(self, views: Sequence[NodeView]) -> list[str]:
        run = self._run_dir.name if running_since(self._run_dir) is not None else ""
        here = Target(self._config.nats.node_url, None, run)
        if server := server_trouble(views, time.time(), self._config.node.var_dir, here):
            return [server]
        return [f"{'':>9}{line}" for line in advice(views, time.time(), folder_here(self._config.node.var_dir, here))]

    def _rows(self, views: Sequence[NodeView], now: float) -> list[Row]:
        rows = []
        for view in views:
            folder = self._run_dir / view.node
            staleness = newest_step(folder).get("staleness_mean")
            rate = self._rates[view.node].update(now, view.step)
            rows.append(Row(view, read_evaluations(folder), rate, staleness, self._since))
        return rows

    def _evaluated(self, views: Sequence[NodeView]) -> bool:
        return self._config.eval.tasks == 0 or evaluations_done(views, self._steps)

    def _close(self, rows: Sequence[Row], *, complete: bool) -> None:
        minutes = (time.monotonic() - self._began) / 60
        _say("")
        _say(f"all nodes have taken {count(self._steps, 'step')}, {minutes:.1f} minutes after this start")
        if not complete:
            _say(f"the last policy was not evaluated within {FINAL_EVALUATION_S:.0f} s: see generator.log")
        for line in summary(rows, went_on=self._went_on):
            _say(line)
        for line in run_verdicts(self._run_dir, self._nodes):
            _say(line)
        run = self._config.node.run
        _say(f"files:  {self._run_dir}/<node>/metrics.jsonl, eval.jsonl, <role>.log")
        _say(f"next:   swarm plot {run}{where_runs_are(self._config)}      learning curves as PNG (make plot RUN={run})")
        _say(f"        {goes_on(self._run_dir)}      continues training")


def _say(line: str) -> None:
    print(visible(line), flush=True)
