"""The progress view of `swarm up`, as the process that its Procfile starts: how the nodes get on, a
table every few seconds, and the end of a run that was given a number of steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from shared.config import NodeConfig, load_config
from shared.identity.permissions import OPERATOR
from shared.runtime.planes import connect_node_plane
from shared.text import visible
from shared.transport.base import NotConnected, Transport
from swarm_cli.errors import checked_node
from swarm_cli.observe.evaluations import newest_step, read_evaluations
from swarm_cli.observe.plot import where_runs_are
from swarm_cli.observe.progress import HEADER, LEGEND, Row, StepRate, evaluations_done, steps_done, summary
from swarm_cli.observe.verdict import run_verdicts
from swarm_cli.observe.view import NodeView, gather
from swarm_cli.running import goes_on

HEADER_EVERY = 10
FINAL_EVALUATION_S = 180.0
"""How long the last evaluation may take before the run ends without it."""


def progress(
    nodes: Annotated[list[str] | None, typer.Argument(help="Nodes to show.  [default: the configuration's node]")] = None,
    steps: Annotated[int, typer.Option(min=0, help="End when all have taken this many steps.  [default: trainer.max_steps]")] = 0,
    every_s: Annotated[float, typer.Option(min=0.2, help="Seconds between tables.")] = 5.0,
    config: Annotated[Path | None, typer.Option(help="Configuration file.  [default: SWARM_CONFIG]")] = None,
) -> None:
    """Show how nodes get on, line by line; with a number of steps, end when all nodes have taken
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
    """One progress view: what it watches, and what it remembers from table to table."""

    def __init__(self, config: NodeConfig, nodes: Sequence[str], steps: int, every_s: float) -> None:
        self._config = config
        self._nodes = nodes
        self._steps = steps
        self._every_s = every_s
        self._run_dir = config.node.var_dir / "runs" / config.node.run
        self._rates = {node: StepRate() for node in nodes}
        self._began = time.monotonic()

    async def run(self) -> None:
        """Print tables until the steps are taken, or for ever."""
        transport = await connect_node_plane(self._config, OPERATOR)
        try:
            await self._follow(transport)
        finally:
            await transport.close()

    async def _follow(self, transport: Transport) -> None:
        """Ends by itself only where `--steps` was given. All steps taken is not the end yet: the
        last policy's held-out score is what the run was for, and it is waited for, for
        `FINAL_EVALUATION_S` at most.
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
            tables += 1
            if self._steps and steps_done(views, self._steps):
                steps_done_at = steps_done_at or heard_at
                waited_s = heard_at - steps_done_at
                if self._evaluated(views) or waited_s > FINAL_EVALUATION_S:
                    self._close(rows, complete=self._evaluated(views))
                    return

    async def _views(self, transport: Transport, heard_at: float) -> list[NodeView] | None:
        try:
            return await gather(transport, self._nodes)
        except NotConnected as error:
            # A view that gives up would end the run where whoever started it ends with the first
            # process (`honcho start`).
            silent_s = time.monotonic() - heard_at
            _say(f"the NATS server has not answered for {silent_s:.0f} s; trying again ({error})")
            return None

    def _rows(self, views: Sequence[NodeView], now: float) -> list[Row]:
        rows = []
        for view in views:
            folder = self._run_dir / view.node
            staleness = newest_step(folder).get("staleness_mean")
            rows.append(Row(view, read_evaluations(folder), self._rates[view.node].update(now, view.step), staleness))
        return rows

    def _evaluated(self, views: Sequence[NodeView]) -> bool:
        return self._config.eval.tasks == 0 or evaluations_done(views, self._steps)

    def _close(self, rows: Sequence[Row], *, complete: bool) -> None:
        minutes = (time.monotonic() - self._began) / 60
        _say("")
        _say(f"all nodes have taken {self._steps} steps, {minutes:.1f} minutes after this view began")
        if not complete:
            _say(f"an evaluation of the last policy did not come within {FINAL_EVALUATION_S:.0f} s: see generator.log")
        for line in summary(rows):
            _say(line)
        for line in run_verdicts(self._run_dir, self._nodes):
            _say(line)
        run = self._config.node.run
        _say(f"files:  {self._run_dir}/<node>/metrics.jsonl, eval.jsonl, <role>.log")
        _say(f"next:   swarm plot {run}{where_runs_are(self._config)}      learning curves as PNG (make plot RUN={run})")
        _say(f"        {goes_on(self._run_dir)}      goes on training")


def _say(line: str) -> None:
    print(visible(line), flush=True)
