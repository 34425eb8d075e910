"""The swarm's data for the page: one look every few seconds, and a step or a group when somebody
opens it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from shared.config import NodeConfig
from shared.contracts.messages import Batch
from shared.contracts.wire import is_node_name
from shared.roles import OPERATOR
from shared.runtime.planes import connect_node_plane
from shared.text import visible, visible_json
from shared.transport.base import NotConnected, Transport, TransportError
from swarm_cli.chosen_config import for_node
from swarm_cli.dashboard.group_page import group_object, step_object
from swarm_cli.dashboard.page_state import leaderboard, swarm_object
from swarm_cli.dashboard.recent_groups import BatchFollower
from swarm_cli.dashboard.run_records import RunRecords, as_shown, lengths_object, steps_object
from swarm_cli.errors import CommandError
from swarm_cli.observe.evaluation_log import EvaluationLog, configured_swarm, roster_of
from swarm_cli.observe.node_state import NodeState
from swarm_cli.observe.remedies import folder_here, next_commands, server_trouble
from swarm_cli.observe.run_files import thinned
from swarm_cli.observe.snapshot import SwarmState, ended_run, take_snapshot
from swarm_cli.observe.step_rate import StepRates
from swarm_cli.rollouts.judge import judge_of
from swarm_cli.rollouts.records import BatchReader, RecordedBatches, TrainedRecords
from swarm_cli.runs import RunEnd, RunGone
from swarm_cli.target import Target, run_here, where_runs_are

CONNECT_S = 3.0
BATCHES_S = 10.0
"""Time for reading batches after a look; the rest is left for the next look."""
ASKED_S = 10.0
NODES_LOOKED_AT = 1000
TASKS_KEPT = 8
LOGS_KEPT = 256
CURVE_POINTS = 200
GROUPS_SENT = 100

Answer = tuple[int, dict[str, Any]]
"""HTTP status and the object."""
NOTHING_MORE: Mapping[str, Any] = {}
NOT_READ_YET = {"problem": "the swarm has not been read yet: try again in a moment"}


class SwarmSource:
    """The result of the last look, ready to be sent, and answers about details. One event loop owns
    it; `answer` may be called from any thread.
    """

    def __init__(self, config: NodeConfig, target: Target, given: Path | None = None) -> None:
        """given: the file of --config."""
        self._config = config
        self._given = given
        self._target = target
        self._loop: asyncio.AbstractEventLoop | None = None
        self._forget()

    def _forget(self) -> None:
        """Forget everything, because another run is looked at now."""
        config, server = self._config, self._target.node_url
        self._scores = EvaluationLog(TASKS_KEPT, LOGS_KEPT, roster_of(config), configured_swarm(config))
        self._batches = BatchFollower()
        self._records = RunRecords(config)
        self._steps: dict[str, TrainedRecords] = {}
        self._nodes: dict[str, NodeState] = {}
        self._rates = StepRates()
        self._state: dict[str, Any] = {"state": "waiting", "at": time.time(), "server": server, "problem": "", "ended": None}
        self._heard_at: float | None = None
        self._runs: dict[str, str] = {}
        self._recorded: dict[str, RecordedBatches] | None = None
        self._server = ""
        self.ended: tuple[str, RunEnd] | None = None
        """The run whose records are shown, and its end."""

    async def look(self) -> SwarmState | None:
        """Look at the swarm. None if no server answers; the state is then `waiting`, `lost` or
        `ended`.
        """
        self._loop = asyncio.get_running_loop()
        target, var_dir = self._target, self._config.node.var_dir
        if target.ended is not None:
            return await self._look_at_records(target.run, target.ended)
        try:
            snapshot = await take_snapshot(
                self._config, target, [], timeout_s=CONNECT_S, evaluations=self._scores, most=NODES_LOOKED_AT
            )
        except RunGone as gone:
            return await self._look_at_records(gone.folder.name, gone.end)
        except NotConnected as error:
            # What was seen last stays.
            state = "waiting" if self._heard_at is None else "lost"
            self._state = self._state | {"state": state, "problem": visible(str(error), 1000), "ended": None}
            return None
        runs = {node.node: node.run for node in snapshot.here if node.statuses}
        others = any(runs.get(node) != known for node, known in self._runs.items() if known and node not in snapshot.earlier)
        if others or self._recorded is not None or not self._runs.keys() <= {*runs, *snapshot.earlier}:
            self._forget()  # another store or another run is at this address now, or the run goes on
            return await self.look()
        snapshot = replace(snapshot, nodes=tuple(map(self._rates.rated, snapshot.nodes)))
        self._heard_at, self._runs, self._recorded = snapshot.at, runs, None
        self.ended = None
        await asyncio.to_thread(self._records.read, snapshot, run_here(var_dir, target))
        self._server = await asyncio.to_thread(server_trouble, snapshot.here, var_dir, target)
        self._show(snapshot)
        with suppress(NotConnected, TimeoutError):  # the next look reports it if the server is gone
            async with asyncio.timeout(BATCHES_S):
                await self._read_batches(snapshot)
        self._show(snapshot)
        return snapshot

    async def _look_at_records(self, run: str, end: RunEnd) -> SwarmState:
        """Show a run that has ended: what its processes have recorded here, once."""
        folder = self._config.node.var_dir / "runs" / run
        snapshot = await asyncio.to_thread(ended_run, folder, end)
        self._heard_at, self.ended = time.time(), (run, end)
        if self._recorded is None:
            self._steps, self._batches = {}, BatchFollower()
            await asyncio.to_thread(self._records.read, snapshot, run)
            self._recorded = {node.node: RecordedBatches(folder / node.node, node.node) for node in snapshot.nodes}
            self._runs = dict.fromkeys(self._recorded, run)
            for node, batches in self._recorded.items():
                await self._batches.read_recorded(node, batches)
        self._server = ""
        self._show(snapshot, {"state": "ended", "ended": self._end_object(run, end, snapshot)})
        return snapshot

    def _show(self, snapshot: SwarmState, told: Mapping[str, Any] = NOTHING_MORE) -> None:
        """Make the first view of `snapshot`, so that no request waits for it. told: what it says
        besides.
        """
        self._nodes = {
            node.node: node for node in snapshot.nodes if node.statuses or node.entry is not None or node.lost or node.scores
        }
        runs = set(self._runs.values())
        shown_run = self._target.run or (next(iter(runs)) if len(runs) == 1 else "")
        state = {"run": visible(shown_run, 80)} | swarm_object(
            snapshot,
            self._batches.recent,
            self._records.trained,
            self._records.names,
            ended=self._recorded is not None,
            run=folder_here(self._config.node.var_dir, self._target),
        )
        emptied = any(node.lost for node in snapshot.nodes)
        self._state = state | _told_of_server(self._target.node_url, self._server, emptied=emptied) | dict(told)

    def _end_object(self, run: str, end: RunEnd, snapshot: SwarmState) -> dict[str, Any]:
        """The page's object about a run's end."""
        folder = self._config.node.var_dir / "runs" / run
        best = next((node.node for node, _ in leaderboard(snapshot.nodes)), next((node.node for node in snapshot.nodes), "NODE"))
        return {
            "in_order": end.in_order,
            "at": end.at,
            "words": visible(end.sentence(run), 400),
            "next": [[what, visible(command, 400)] for command, what in next_commands(folder, best, where_runs_are(self._config))],
        }

    async def _read_batches(self, snapshot: SwarmState) -> None:
        plane = await self._plane()
        try:
            await self._batches.follow(plane, [node.node for node in snapshot.nodes if node.statuses])
        finally:
            await plane.close()

    def answer(self, path: str, asked: Mapping[str, str]) -> tuple[int, bytes] | None:
        """Status and JSON for a path of the page; None for an unknown path."""
        if path == "/swarm.json":
            return 200, _json(self._state | {"now": time.time()})
        if path not in ("/node.json", "/step.json", "/group.json"):
            return None
        node = asked.get("node", "")
        if not is_node_name(node):
            return 400, _json({"problem": "node is missing or not a node's name"})
        if path == "/node.json":
            status, found = self._node(node)
            return status, _json(found)
        numbers = [asked.get(name, "0") for name in ("step", "place")]
        if not all(number.isascii() and number.isdigit() and len(number) < 16 for number in numbers):
            return 400, _json({"problem": "step and place are whole numbers"})
        step, place = map(int, numbers)
        status, found = self._in_loop(node, step, place if path == "/group.json" else None)
        return status, _json(found)

    def _node(self, node: str) -> Answer:
        """A node's page. One of whom nothing was ever heard is not found, not an empty page."""
        seen = self._nodes.get(node)
        if seen is None and not self._named(node):
            if self._heard_at is None:
                return 503, NOT_READ_YET
            return 404, {"problem": f"no node {node}: no process, directory entry, score or group of that name has been seen here"}
        found = {} if seen is None else seen.comparison.curves
        curves = {dataset: [(version, as_shown(score)) for version, score in curve] for dataset, curve in found.items()}
        groups = self._batches.recent.recent(GROUPS_SENT, node)
        recorded, read = self._records.rewards(node), self._batches.recent.steps(node)
        return 200, {
            "node": node,
            "curves": {self._records.names.shown(dataset): thinned(curve, CURVE_POINTS) for dataset, curve in curves.items()},
            "answers": self._records.answers(node),
            "sets": self._records.sets(node),
            "groups": [group.card(self._records.names) for group in groups],
            "steps": steps_object(recorded, read, self._batches.first_held(node)),
            **lengths_object(recorded, read),
        }

    def _named(self, node: str) -> bool:
        return self._batches.recent.names(node) or self._records.trained.names(node)

    def _in_loop(self, node: str, step: int, place: int | None) -> Answer:
        if self._loop is None:
            return 503, NOT_READ_YET
        future = asyncio.run_coroutine_threadsafe(self._batch(node, step, place), self._loop)
        try:
            return future.result(2 * ASKED_S)
        except TimeoutError:
            return 504, {"problem": f"the server took longer than {ASKED_S:.0f} s to answer: try again"}

    async def _batch(self, node: str, step: int, place: int | None) -> Answer:
        """A step or a group of it. It is read now, because batches are too large to be kept."""
        try:
            async with asyncio.timeout(ASKED_S):
                if self._recorded is not None:
                    batch = await self._recorded.get(node, RecordedBatches(None, node)).batch_at(step)
                else:
                    plane = await self._plane()
                    try:
                        batch = await BatchReader(plane, node).batch_at(step)
                    finally:
                        await plane.close()
        except (CommandError, TransportError) as error:
            return 404, {"problem": visible(str(error), 400)}
        if place is None:
            return 200, step_object(node, batch, self._records.names)
        found = await asyncio.to_thread(self._group, node, batch, place)
        return (404, {"problem": f"step {step} has no group {place}"}) if found is None else (200, found)

    async def _plane(self) -> Transport:
        return await connect_node_plane(self._config, OPERATOR, timeout_s=CONNECT_S, url=self._target.node_url)

    def _group(self, node: str, batch: Batch, place: int) -> dict[str, Any] | None:
        """The group's object. Runs in a thread, as the run's records may be large."""
        config = for_node(self._config, node)
        judge = judge_of(config, self._given, self._run(node), self._records.names)
        return group_object(node, batch, place, Path(config.model.path), self._trained(node), judge)

    def _run(self, node: str) -> str:
        """The run that the node belongs to; empty if it is not known."""
        return self._runs.get(node) or self._target.run

    def _trained(self, node: str) -> TrainedRecords:
        folder = self._records.folders.get(node)
        return self._steps.setdefault(node, TrainedRecords(folder if folder is not None and folder.is_dir() else None))


def _told_of_server(node_url: str, trouble: str, *, emptied: bool) -> dict[str, Any]:
    """The server's part of the state. trouble: as `server_trouble` returns. emptied: it no longer
    has the nodes' streams.
    """
    told = {"server": visible(node_url, 120), "problem": visible(trouble, 1500), "ended": None}
    return told | ({"state": "emptied" if emptied else "unstored"} if trouble else {})


def _json(value: dict[str, Any]) -> bytes:
    return visible_json(value, separators=(",", ":"), default=_unknown).encode()


def _unknown(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {json.dumps(repr(value)[:80])}")
