"""The progress of `swarm up`, a process that the Procfile starts: it prints a line a node every few
seconds, and ends a run that has a number of steps.

Lines are plain, without cursor movement, because honcho puts a prefix before each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from shared.config import NodeConfig, load_config
from shared.contracts.status_figures import StatusFigure
from shared.run_records import EVAL_SETS_FILE, METRICS_FILE, read_jsonl
from shared.text import visible
from shared.transport.base import NotConnected
from swarm_cli.console import count
from swarm_cli.errors import checked_node
from swarm_cli.observe.node_state import NodeState
from swarm_cli.observe.remedies import advice, folder_here, next_commands, server_trouble
from swarm_cli.observe.run_files import newest_step
from swarm_cli.observe.snapshot import take_snapshot
from swarm_cli.observe.step_rate import StepRate
from swarm_cli.observe.verdict import run_verdicts
from swarm_cli.runs import running_since
from swarm_cli.target import Target, where_runs_are

_GROUPS = {"made": 6, "shared": 7, "taken": 6, "refused": 8}
_ROW = {"step": 6, "steps/min": 10, "reward": 7, "held-out": 9, "(base)": 7, **_GROUPS, "stale": 6}
_SUMMARY = {"steps": 6, "held-out": 10, "base": 8, "gain": 8, "tasks": 7, **_GROUPS}
"""Names of the columns after that of the node, with their widths."""


def _columns(widths: Mapping[str, int], cells: Iterable[str]) -> str:
    """Cells side by side, each aligned to the right, and never without a space before it: one as
    wide as its column or wider takes room from the next.
    """
    line, end = "", 0
    for width, cell in zip(widths.values(), cells, strict=True):
        end += width
        line += " " + cell.rjust(end - len(line) - 1)
    return line


HEADER = f"{'time':>7}  {'node':<9}{_columns(_ROW, _ROW)}  state"
SUMMARY_HEADER = f"{'node':<9}{_columns(_SUMMARY, _SUMMARY)}"
LEGEND = (
    "reward: mean over the newest step's local groups; held-out: pass rate on tasks never trained on\n"
    "(r: mean reward, as no pass is defined; ?: most answers have no known reward), (base): that of the\n"
    "base policy; made, shared, taken, refused: rollout groups since each service started, updated every\n"
    "2 s (so shared may be ahead of made); stale: policy versions between sampling and use"
)
LINE_CHARACTERS = 100
STATE_CHARACTERS = 80
HEADER_EVERY = 10
CONNECT_S = 5.0
FINAL_EVALUATION_S = 180.0
"""How long to wait for the last evaluation before the run ends without it."""


def row_lines(node: NodeState, elapsed_s: float, since: float = 0.0, newest: Mapping[str, Any] | None = None) -> list[str]:
    """A node's line under `HEADER`, with a second line if the state is too long for the first.

    Args:
        elapsed_s: Seconds since the run was started.
        since: Unix time. Processes that have not reported since are of an earlier start of the run.
        newest: The record of the newest step since; the row is of that step.
    """
    newest = newest or {"step": node.step}
    cells = (
        str(newest["step"]), _number(node.seen_rate, ".1f"), _number(newest.get("reward_local"), ".3f"), _newest(node),
        str(node.comparison.base or "–"), *_groups(node, since), _number(newest.get("staleness_mean"), ".2f"),
    )  # fmt: skip
    figures = f"{_clock(elapsed_s):>7}  {visible(node.node):<9}{_columns(_ROW, cells)}"
    words = visible("; ".join(filter(None, (node.words, _refused(node, since)))), STATE_CHARACTERS)
    line = f"{figures}  {words}"
    return [line] if len(line) <= LINE_CHARACTERS else [figures, f"{'':>9}{words}"]


def shown_step(line: dict[str, Any], node: NodeState, since: float) -> dict[str, Any]:
    """The record's newest line if its step is of this start and the trainer still has it; else {}.
    A trainer that lost its newest checkpoint takes the steps after the one before it again.
    """
    step, written_at = line.get("step"), line.get("time") or 0.0
    if not isinstance(step, int) or written_at < since:
        return {}
    taken_back = any(step > node.step and written_at < status.started_at for status in node.roles("trainer")[:1])
    return {} if taken_back else line


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


def summary(nodes: Sequence[NodeState], since: float = 0.0, *, went_on: bool = False) -> list[str]:
    """The closing table. The verdicts that follow say why a score is a mean reward, or has no base.
    went_on: whether the run was started before, under the same name."""
    lines = [SUMMARY_HEADER]
    for node in nodes:
        newest, compared = node.newest_score, node.comparison
        tasks = "0" if newest is None else f"{newest.n} of {newest.n + newest.unknown}" if newest.unknown else str(newest.n)
        cells = (
            str(node.step), _newest(node), str(compared.base or "–"), _number(compared.gain, "+.3f"), tasks, *_groups(node, since),
        )  # fmt: skip
        lines.append(f"{visible(node.node):<9}{_columns(_SUMMARY, cells)}")
    lines += [f"{visible(node.node)}: {words}" for node in nodes if (words := _refused(node, since))]
    if went_on:
        lines.append("(made, shared, taken, refused: since this start; shared may include groups made before it)")
    return lines


def _refused(node: NodeState, since: float) -> str:
    reasons = node.refusals(since)
    return f"refused: {reasons}" if reasons else ""


def _newest(node: NodeState) -> str:
    newest = node.newest_score
    return "unknown" if node.unscored else "–" if newest is None else f"{newest}{'?' if newest.unknown > newest.n else ''}"


def _groups(node: NodeState, since: float) -> list[str]:
    """Groups made, shared, taken in and refused."""
    made = node.total("generator", StatusFigure.GROUPS_GENERATED, since)
    verified = (StatusFigure.SHARED, StatusFigure.ACCEPTED, StatusFigure.REFUSED)
    return [f"{total:.0f}" for total in (made, *(node.total("verifier", figure, since) for figure in verified))]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


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
        self._names = nodes
        self._steps = steps
        self._every_s = every_s
        self._run_dir = config.node.var_dir / "runs" / config.node.run
        self._rates = {node: StepRate() for node in nodes}
        self._newest: dict[str, dict[str, Any]] = {}
        self._went_on = any((self._run_dir / node / METRICS_FILE).is_file() for node in nodes)
        # Not this view's own start: it is started again when a node is added, or after a crash.
        now = time.time()
        self._since = min(running_since(self._run_dir) or now, now)
        self._began = time.monotonic() - (now - self._since)

    async def run(self) -> None:
        """Print tables. Ends by itself only with a number of steps, and then not before the last
        policy is evaluated, because its held-out score is the run's result. Waits for that at most
        `_patience_s`.
        """
        for line in LEGEND.splitlines():
            _say(line)
        tables, heard_at, steps_done_at = 0, time.monotonic(), None
        while True:
            await asyncio.sleep(self._every_s)
            nodes = await self._read(heard_at)
            if nodes is None:
                continue
            heard_at = time.monotonic()
            if tables % HEADER_EVERY == 0:
                _say(HEADER)
            for node in nodes:
                for line in row_lines(node, heard_at - self._began, self._since, self._newest[node.node]):
                    _say(line)
            for line in await asyncio.to_thread(self._remedies, nodes):
                _say(line)
            tables += 1
            if self._steps and steps_done(nodes, self._steps):
                steps_done_at = steps_done_at or heard_at
                waited_s = heard_at - steps_done_at
                if self._evaluated(nodes) or waited_s > self._patience_s():
                    self._close(nodes, complete=self._evaluated(nodes))
                    return

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
        for node in found:
            self._newest[node.node] = shown_step(newest_step(self._run_dir / node.node), node, self._since)
        # What another run left under a node's name is none of this run's progress.
        nodes = [node if node.run in ("", run) else NodeState(node.node, at=node.at) for node in found]
        return [
            replace(
                node,
                begun=self._since,
                seen_rate=self._rates[node.node].update(line["time"], line["step"]) if (line := self._newest[node.node]) else None,
            )
            for node in nodes
        ]

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
        for line in summary(nodes, self._since, went_on=self._went_on):
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
        commands = next_commands(self._run_dir, self._names[0], where_runs_are(self._config))
        begin = ["next:", *[""] * (len(commands) - 1)]
        return [
            f"files:  {self._run_dir}/<node>/metrics.jsonl, eval.jsonl, <role>.log",
            *(f"{word:<8}{command}      {what}" for word, (command, what) in zip(begin, commands, strict=True)),
        ]


def _say(line: str) -> None:
    print(visible(line), flush=True)
