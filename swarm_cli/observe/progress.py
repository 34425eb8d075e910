"""The progress of `swarm up`, a process that the Procfile starts: it prints at every change, or
else once a minute, how far each node is, in the words of `swarm status`, and ends a run that has a
number of steps.

Lines are plain, without cursor movement, because honcho puts a prefix before each.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from shared.config import NodeConfig, load_config
from shared.contracts.status_figures import StatusFigure
from shared.run_records import EVAL_SETS_FILE, read_jsonl
from shared.text import visible
from shared.transport.base import NotConnected
from swarm_cli.console import count
from swarm_cli.errors import checked_node
from swarm_cli.observe.node_lines import node_lines, rough
from swarm_cli.observe.node_state import NodeState
from swarm_cli.observe.remedies import advice, folder_here, next_commands, server_trouble
from swarm_cli.observe.snapshot import take_snapshot
from swarm_cli.observe.step_rate import StepRates
from swarm_cli.observe.verdict import run_verdicts
from swarm_cli.runs import running_since
from swarm_cli.target import Target, where_runs_are

CONNECT_S = 5.0
FINAL_EVALUATION_S = 180.0
"""How long to wait for the last evaluation before the run ends without it."""
UNCHANGED_S = 60.0
"""How long nothing is printed while only counts and times change."""
_NUMBER = re.compile(r"[0-9][0-9.,]*")


def row_lines(node: NodeState, elapsed_s: float) -> list[str]:
    """The lines of a node: of one that runs well without what its processes do, of one that starts
    without the groups that it has not made yet. elapsed_s: since the run was started.
    """
    head, *rest = (line.plain for line in node_lines(node))
    shown = rest[-1:] if node.kind == "starting" else rest[:1] if node.health in ("good", "rest") else rest
    return [f"{_clock(elapsed_s):>7}  {head}", *(f"{'':>7}{line}" for line in shown)]


def first_estimate(node: NodeState, answers: int) -> str:
    """Before the first step, how long a step's `answers` take to generate at the pace of the base
    policy's evaluation; empty if that is not known, or under a minute.
    """
    base = node.evaluation
    if node.step or base is None or base.policy_version or not (judged := base.n + base.unknown):
        return ""
    takes_s = base.seconds * answers / judged
    if takes_s < UNCHANGED_S:
        return ""
    pace = f"{judged:,} took {rough(base.seconds)}"
    return (
        f"a step's {answers:,} answers take about {rough(takes_s)}, by the base policy's evaluation ({pace}), and training on top"
    )


def steps_done(nodes: Sequence[NodeState], steps: int) -> bool:
    """Check whether every node's trainer has taken `steps` steps and published the last step's
    policy.
    """
    taken = [min(node.position.policy_version, node.version or 0) if node.position is not None else 0 for node in nodes]
    return bool(taken) and min(taken) >= steps


def evaluations_done(nodes: Sequence[NodeState], steps: int) -> bool:
    """Check whether, for every node, the policy after `steps` steps or a later one was evaluated.
    An evaluation without any known reward counts: it has a line in the node's file and no report.
    """
    return all(
        any(score.policy_version >= steps for score in node.scores)
        or (node.evaluation is not None and node.evaluation.policy_version >= steps)
        for node in nodes
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def progress(
    nodes: Annotated[
        list[str] | None, typer.Argument(metavar="NODE", help="Nodes to show.  [default: the configuration's node]")
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="End when all have taken this many steps.  [default: trainer.max_steps]")] = 0,
    every_s: Annotated[float, typer.Option(min=0.2, help="Seconds between looks.")] = 5.0,
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
    """One progress view: what it shows, and what it remembers between looks."""

    def __init__(self, config: NodeConfig, nodes: Sequence[str], steps: int, every_s: float) -> None:
        self._config = config
        self._names = nodes
        self._steps = steps
        self._every_s = every_s
        self._run_dir = config.node.var_dir / "runs" / config.node.run
        self._rates = StepRates()
        self._alone = len(nodes) == 1 and config.nats.swarm_url in (None, config.nats.node_url)
        self._told: object = None
        self._told_at = 0.0
        self._furthest: dict[str, int] = {}
        # Not this view's own start: it is started again after a crash.
        now = time.time()
        self._since = min(running_since(self._run_dir) or now, now)
        self._began = time.monotonic() - (now - self._since)

    async def run(self) -> None:
        """Print lines. Ends by itself only with a number of steps, and then not before the last
        policy is evaluated, because its held-out score is the run's result. Waits for that at most
        `_patience_s`.
        """
        heard_at, steps_done_at = time.monotonic(), None
        while True:
            await asyncio.sleep(self._every_s)
            nodes = await self._read(heard_at)
            if nodes is None:
                continue
            heard_at = time.monotonic()
            remedies = await asyncio.to_thread(self._remedies, nodes)
            if self._is_news(nodes, remedies, heard_at):
                for node in nodes:
                    for line in (*row_lines(node, heard_at - self._began), *self._notes(node)):
                        _say(line)
                for line in remedies:
                    _say(line)
            if self._steps and steps_done(nodes, self._steps):
                steps_done_at = steps_done_at or heard_at
                waited_s = heard_at - steps_done_at
                if self._evaluated(nodes) or waited_s > self._patience_s():
                    self._close(nodes, complete=self._evaluated(nodes))
                    return

    def _notes(self, node: NodeState) -> list[str]:
        """Lines below a node's: how long the first step may take, and which steps are repeated."""
        local = int(node.figure("sampler", StatusFigure.WANTED_LOCAL)) or self._config.sampler.local
        estimate = first_estimate(node, local * self._config.generator.completions)
        furthest = self._furthest[node.node] = max(node.step, self._furthest.get(node.node, 0))
        again = f"steps {node.step + 1:,} to {furthest:,} are" if furthest > node.step + 1 else f"step {furthest:,} is"
        back = f"{again} taken again, as no checkpoint had the policy after it" if furthest > node.step else ""
        return [f"{'':>9}{line}" for line in (estimate, back) if line]

    def _is_news(self, nodes: Sequence[NodeState], remedies: Sequence[str], now: float) -> bool:
        """Check whether anything but counts and times has changed, a pace is known for the first
        time, or a minute has passed, since lines were printed.
        """
        told = [
            (node.kind, node.step, node.steps_per_minute is None, node.version, node.held_out, _NUMBER.sub("", node.words))
            for node in nodes
        ]
        seen = (told, [_NUMBER.sub("", line) for line in remedies])
        if seen == self._told and now - self._told_at < UNCHANGED_S:
            return False
        self._told, self._told_at = seen, now
        return True

    async def _read(self, heard_at: float) -> list[NodeState] | None:
        run = self._run_dir.name
        target = Target(self._config.nats.node_url, None, run)
        try:
            found = (await take_snapshot(self._config, target, self._names, timeout_s=CONNECT_S, expected=True)).nodes
        except NotConnected as error:
            # Do not give up: `honcho start` ends the whole run when its first process ends.
            silent_s = time.monotonic() - heard_at
            _say(f"the NATS server has not answered for {silent_s:.0f} s; trying again ({error})")
            return None
        # What another run left under a node's name is none of this run's progress.
        nodes = [node if node.run in ("", run) else NodeState(node.node, at=node.at) for node in found]
        return [self._rates.rated(replace(node, begun=self._since, alone=self._alone)) for node in nodes]

    def _remedies(self, nodes: Sequence[NodeState]) -> list[str]:
        run = self._run_dir.name if running_since(self._run_dir) is not None else ""
        here = Target(self._config.nats.node_url, None, run)
        if server := server_trouble(nodes, self._config.node.var_dir, here):
            return [server]
        crowded = [f"{visible(node.node)}: {words}" for node in nodes for words in node.crowding]
        return [f"{'':>9}{line}" for line in [*crowded, *advice(nodes, folder_here(self._config.node.var_dir, here))]]

    def _evaluated(self, nodes: Sequence[NodeState]) -> bool:
        return self._config.eval.tasks == 0 or evaluations_done(nodes, self._steps)

    def _patience_s(self) -> float:
        """The longest wait for the last evaluation: evaluation sets come first, and take about as
        long as they last did.
        """
        seconds: dict[tuple[str, str], float] = {}
        for node in self._names:
            for line in read_jsonl(self._run_dir / node / EVAL_SETS_FILE):
                if isinstance(took_s := line.get("seconds"), int | float):
                    seconds[node, str(line.get("set"))] = took_s
        return FINAL_EVALUATION_S + 2 * sum(seconds.values())

    def _close(self, nodes: Sequence[NodeState], *, complete: bool) -> None:
        minutes = (time.monotonic() - self._began) / 60
        _say("")
        _say(f"all nodes have taken {count(self._steps, 'step')}, {minutes:.1f} minutes after this start")
        if not complete:
            _say(f"the last policy was not evaluated within {self._patience_s():.0f} s: see generator.log")
        for line in (line.plain for node in nodes for line in node_lines(node)):
            _say(line)
        for line in run_verdicts(self._run_dir, self._names):
            _say(line)
        for node in nodes:
            # The services have not ended, so whether the last policy is saved is not known yet.
            if node.unwritten:
                _say(f"{visible(node.node)}: {node.unwritten}")
        for line in self._next_commands():
            _say(line)

    def _next_commands(self) -> list[str]:
        commands = next_commands(self._run_dir, self._names[0], where_runs_are(self._config), complete=True)
        begin = ["next:", *[""] * (len(commands) - 1)]
        return [
            f"files:  {self._run_dir}/<node>/metrics.jsonl, eval.jsonl, <role>.log",
            *(f"{word:<8}{command}      {what}" for word, (command, what) in zip(begin, commands, strict=True)),
        ]


def _say(line: str) -> None:
    print(visible(line), flush=True)
