"""The progress view's rows, and the decision when a run is complete. Pure functions over node
views; time is an argument.

Lines are plain, without cursor movement, because honcho puts a prefix before each.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from shared.config import NodeConfig, load_config
from shared.contracts.status_figures import StatusFigure
from shared.identity.permissions import OPERATOR
from shared.roles import ROLES
from shared.run_records import METRICS_FILE
from shared.runtime.planes import connect_node_plane
from shared.runtime.status import EVALUATING_BASE, FIRST_GROUPS, STARTING
from shared.text import visible
from shared.transport.base import NotConnected, Transport
from swarm_cli.console import count
from swarm_cli.errors import checked_node
from swarm_cli.observe.node_state import NodeView, absent, finished, gather, none_taken, top_refusal, trouble
from swarm_cli.observe.plot import where_runs_are
from swarm_cli.observe.remedies import advice, folder_here, server_trouble
from swarm_cli.observe.run_files import NO_PASS_SHOWN, Evaluation, gain_of, newest_step, read_evaluations
from swarm_cli.observe.verdict import run_verdicts
from swarm_cli.runs import goes_on, running_since
from swarm_cli.server_diagnosis import silent_server
from swarm_cli.target import Target

HEADER = (
    f"{'time':>7}  {'node':<9}{'step':>6}{'steps/min':>10}{'reward':>7}{'held-out':>9}{'(base)':>7}"
    f"{'made':>6}{'shared':>7}{'taken':>6}{'refused':>8}{'stale':>6}  state"
)
SUMMARY_HEADER = (
    f"{'node':<9}{'steps':>6}{'held-out':>10}{'base':>8}{'gain':>8}{'tasks':>7}{'made':>6}{'shared':>7}{'taken':>6}{'refused':>8}"
)
LEGEND = (
    "reward: mean over the newest step's local groups; held-out: pass rate on tasks never trained on\n"
    "(r: mean reward, as no pass is defined), (base): that of the base policy; made, shared, taken,\n"
    "refused: rollout groups since each service started, updated every 2 s (so shared may be ahead of\n"
    "made); stale: policy versions between sampling and use"
)
_RATE_WINDOW_S = 60.0
BEFORE_FIRST_GROUPS = {STARTING: "the generator loads the model", EVALUATING_BASE: EVALUATING_BASE}
"""What a generator does, by its state, while the trainer waits for the first groups."""
LINE_CHARACTERS = 100
STATE_CHARACTERS = 80


class StepRate:
    """One node's steps per minute, over the last minute, and since it last fell back: a trainer
    that was killed takes the steps after its checkpoint again.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def update(self, now: float, step: int) -> float | None:
        """Record `step` at `now` (seconds). Returns the rate, or None at the first call and after a
        fall.
        """
        if self._seen and step < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now, step))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _RATE_WINDOW_S:
            self._seen.popleft()
        elapsed_s = now - self._seen[0][0]
        return 60.0 * (step - self._seen[0][1]) / elapsed_s if elapsed_s > 0 else None


@dataclass(frozen=True, slots=True)
class Row:
    """One node's line of the progress view."""

    view: NodeView
    evaluations: Sequence[Evaluation]
    steps_per_minute: float | None
    staleness: float | None = None
    """Mean over the newest step's local groups, in policy versions."""
    since: float = 0.0
    """Unix time. Processes that have not reported since are of an earlier start of the run."""

    def lines(self, elapsed_s: float, now: float) -> list[str]:
        """The line under `HEADER`, with a second line if the state is too long for the first."""
        view = self.view
        newest, base = newest_evaluation(view, self.evaluations), base_evaluation(self.evaluations)
        figures = (
            f"{_clock(elapsed_s):>7}  {visible(view.node):<9}{view.step:>6}{_number(self.steps_per_minute, 10, 1)}"
            f"{_number(view.newest('trainer', StatusFigure.REWARD_LOCAL), 7, 3)}"
            f"{_score(newest):>9}{_score(base):>7}"
            f"{_groups(view, self.since)}{_number(self.staleness, 6, 2)}"
        )
        words = visible("; ".join(filter(None, (state(view, now), refused_mostly(view, self.since)))), STATE_CHARACTERS)
        line = f"{figures}  {words}"
        return [line] if len(line) <= LINE_CHARACTERS else [figures, f"{'':>9}{words}"]


def newest_evaluation(view: NodeView, evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """The evaluation of the highest policy version, from the bucket or the run's folder."""
    known = list(evaluations)
    if view.evaluation:
        known.append(Evaluation.of(view.evaluation))
    return max(known, key=lambda evaluation: evaluation.policy_version, default=None)


def base_evaluation(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """The evaluation of version 0, the base policy."""
    return next((evaluation for evaluation in evaluations if evaluation.policy_version == 0), None)


def state(view: NodeView, now: float) -> str:
    """What the node is doing, or which of its services do not answer."""
    missing = [role for role in ROLES if not view.alive(role, now)]
    if missing:
        return ", ".join(absent(view, now)) or f"{'ended' if view.statuses else 'never seen'}: {', '.join(missing)}"
    still = trouble(view, now)
    if still:
        return ", ".join(still)
    none = "" if finished(view) else none_taken(view, now)
    trainer, generator = view.alive("trainer", now)[0].state, view.alive("generator", now)[0].state
    if trainer == FIRST_GROUPS and generator in BEFORE_FIRST_GROUPS:
        return f"starting: {BEFORE_FIRST_GROUPS[generator]}"
    if view.step == 0 and trainer != "training" and not finished(view):
        return f"starting: {trainer}"
    return trainer + (f", {none}" if none else "")


def refused_mostly(view: NodeView, since: float = 0.0) -> str:
    """For what most of the refused groups were refused; empty if none was."""
    begun = max(since, view.life_began)
    most = top_refusal(status for status in view.roles("verifier") if status.updated_at >= begun)
    return f"{most[1]} refused: {visible(most[0], 40)}" if most else ""


def steps_done(views: Sequence[NodeView], steps: int) -> bool:
    """Whether every node's trainer has taken `steps` steps and published the last step's policy."""
    taken = [min(view.position.policy_version, view.version) if view.position is not None else 0 for view in views]
    return bool(taken) and min(taken) >= steps


def evaluations_done(views: Sequence[NodeView], steps: int) -> bool:
    """Whether, for every node, the policy after `steps` steps or a later one was evaluated."""
    return all(view.evaluation is not None and view.evaluation.policy_version >= steps for view in views)


def summary(rows: Sequence[Row], *, went_on: bool = False) -> list[str]:
    """The closing table. went_on: whether the run was started before, under the same name."""
    lines = [SUMMARY_HEADER]
    for row in rows:
        newest, base = newest_evaluation(row.view, row.evaluations), base_evaluation(row.evaluations)
        lines.append(
            f"{visible(row.view.node):<9}{row.view.step:>6}{_score(newest):>10}"
            f"{_score(base):>8}{_number(gain_of(newest, base), 8, 3, sign=True)}{newest.n if newest else 0:>7}"
            f"{_groups(row.view, row.since)}"
        )
        if newest and newest.pass_rate is None:
            lines.append(f"({NO_PASS_SHOWN})")
    lines += [f"{visible(row.view.node)}: {words}" for row in rows if (words := refused_mostly(row.view, row.since))]
    if went_on:
        lines.append("(made, shared, taken, refused: since this start; shared may include groups made before it)")
    return lines


def _score(evaluation: Evaluation | None) -> str:
    return "–" if evaluation is None else str(evaluation)


def _groups(view: NodeView, since: float) -> str:
    """Groups made, shared, taken in and refused."""
    made = view.total("generator", StatusFigure.GROUPS_GENERATED, since)
    verified = (StatusFigure.SHARED, StatusFigure.ACCEPTED, StatusFigure.REFUSED)
    shared, taken, refused = (view.total("verifier", figure, since) for figure in verified)
    return f"{made:>6.0f}{shared:>7.0f}{taken:>6.0f}{refused:>8.0f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _number(value: float | None, width: int, digits: int, *, sign: bool = False) -> str:
    if value is None:
        return f"{'–':>{width}}"
    return f"{value:>{'+' if sign else ''}{width}.{digits}f}"


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
