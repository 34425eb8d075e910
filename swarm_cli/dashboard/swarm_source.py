"""The swarm's data for the page: one look every few seconds, and a step or a group when somebody
opens it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shared.config import NodeConfig
from shared.contracts.messages import Batch
from shared.contracts.wire import is_node_name
from shared.identity.permissions import OPERATOR
from shared.runtime.planes import connect_node_plane
from shared.text import visible, visible_json
from shared.transport.base import NotConnected, Transport, TransportError
from swarm_cli.chosen_config import for_node
from swarm_cli.dashboard.away import name_logs
from swarm_cli.dashboard.batch_follower import BatchFollower
from swarm_cli.dashboard.end_told import end_object, gone
from swarm_cli.dashboard.group_page import group_object, how_to_trace, step_object
from swarm_cli.dashboard.leaderboard import curves_by_task, thinned
from swarm_cli.dashboard.recorded_scores import NO_SETS
from swarm_cli.dashboard.run_records import RunRecords
from swarm_cli.dashboard.steps import steps_object
from swarm_cli.dashboard.swarm_state import recent_object, swarm_object
from swarm_cli.errors import CommandError
from swarm_cli.looking.following import Following
from swarm_cli.observe.evaluation_log import EvaluationLog, configured_swarm, roster_of
from swarm_cli.observe.snapshot import SwarmSnapshot, ended_snapshot, take_snapshot
from swarm_cli.observe.start_again import server_trouble
from swarm_cli.rollouts.batches import BatchReader
from swarm_cli.rollouts.judged_by import judge_of
from swarm_cli.rollouts.records import TrainedRecords, record_folder
from swarm_cli.silent_server import silent_server

CONNECT_S = 3.0
LOOK_S = 15.0
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
NOT_READ_YET = {"problem": "the swarm has not been read yet: try again in a moment"}


class SwarmSource:
    """The result of the last look, ready to be sent, and answers about details. One event loop owns
    it; `answer` may be called from any thread.
    """

    def __init__(self, config: NodeConfig, following: Following, given: Path | None = None) -> None:
        """given: the file of --config."""
        self._config = config
        self._given = given
        self._following = following
        self._loop: asyncio.AbstractEventLoop | None = None
        self._forget()

    def _forget(self) -> None:
        """Forget everything, because another run is looked at now."""
        config, server = self._config, self._following.target.node_url
        self._scores = EvaluationLog(TASKS_KEPT, LOGS_KEPT, roster_of(config), configured_swarm(config))
        self._batches = BatchFollower()
        self._records = RunRecords(config)
        self._steps: dict[str, TrainedRecords] = {}
        self._nodes: frozenset[str] = frozenset()
        self._swarm: str | None = None
        self._state: dict[str, Any] = {"state": "waiting", "at": time.time(), "server": server, "problem": "", "ended": None}
        self._heard_at: float | None = None
        self._seen: SwarmSnapshot | None = None
        self._over = False
        self._server = ""

    async def look(self) -> SwarmSnapshot | None:
        """Look at the swarm. None if no server answers; the state is then `waiting`, `lost` or
        `ended`.
        """
        self._loop = asyncio.get_running_loop()
        if self._following.moved():
            self._forget()
        target = self._following.target
        try:
            async with asyncio.timeout(LOOK_S):
                snapshot = await take_snapshot(
                    self._config,
                    target.node_url,
                    target.swarm_url,
                    [],
                    timeout_s=CONNECT_S,
                    evaluations=self._scores,
                    most=NODES_LOOKED_AT,
                )
        except (NotConnected, TimeoutError) as error:
            await self._read_last()
            self._away(error, await asyncio.to_thread(silent_server, self._config.node.var_dir, target.node_url))
            return None
        if target.ended is not None:
            snapshot = ended_snapshot(snapshot)
        self._swarm, self._heard_at, self._seen = snapshot.swarm, snapshot.at, snapshot
        self._over = target.ended is not None
        await asyncio.to_thread(self._records.read, snapshot, target)
        self._server = await asyncio.to_thread(server_trouble, snapshot.here, snapshot.at, self._config.node.var_dir, target)
        self._show(snapshot)
        with suppress(NotConnected, TimeoutError):  # the next look reports it if the server is gone
            async with asyncio.timeout(BATCHES_S):
                await self._read_batches(snapshot)
        self._show(snapshot)
        return snapshot

    async def _read_last(self) -> None:
        """Once the run has ended, read its files again: its processes wrote the last lines after
        the last look.
        """
        if self._over or self._seen is None or self._following.end is None:
            return
        await asyncio.to_thread(self._records.read, self._seen, self._following.target)
        self._over = True
        self._show(ended_snapshot(self._seen))

    def _last_steps(self) -> dict[str, int]:
        """The last step of each node on record here, if the run has ended; else nothing."""
        return self._records.taken if self._over else {}

    def _show(self, snapshot: SwarmSnapshot) -> None:
        """Make the first view of `snapshot`, so that no request waits for it."""
        self._nodes = frozenset(node.node for node in snapshot.nodes if node.statuses or node.in_directory)
        state = swarm_object(
            snapshot,
            self._scores.heard(snapshot.swarm),
            self._batches.recent,
            self._records.trained,
            self._records.scores,
            self._last_steps() if self._over else None,
            self._records.names,
        )
        name_logs(state, snapshot.here, self._config.node.var_dir, self._following.target)
        told = _told_of_server(self._following.target.node_url, self._server)
        if self._following.target.ended is not None:
            told |= {"state": "ended", "ended": self._ended(copied=True)}
        self._state = state | told

    def _ended(self, *, copied: bool) -> dict[str, Any] | None:
        return end_object(self._following, self._config.node.var_dir, seen=self._heard_at is not None, copied=copied)

    async def _read_batches(self, snapshot: SwarmSnapshot) -> None:
        plane = await self._plane()
        try:
            await self._batches.follow(plane, [node.node for node in snapshot.nodes if node.statuses])
        finally:
            await plane.close()

    def _away(self, error: Exception, hangs: str) -> None:
        """Record that no server answers. What was seen last stays. hangs: as of `silent_server`."""
        instead, ended = self._following.instead, None if hangs else self._ended(copied=False)
        # The server of a run that has ended is not missing: it ended with the run.
        silent = "" if ended is not None else str(error) or f"it took longer than {LOOK_S:.0f} s to answer"
        problem = visible(hangs or instead or silent, 1000)
        state = "ended" if ended is not None else "waiting" if self._heard_at is None else "lost"
        server = visible(self._following.target.node_url, 120)
        self._state = self._state | {"state": state, "problem": problem, "server": server, "ended": ended}

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
            status, found = self._node(node, asked.get("key", ""))
            return status, _json(found)
        numbers = [asked.get(name, "0") for name in ("step", "place")]
        if not all(number.isascii() and number.isdigit() and len(number) < 16 for number in numbers):
            return 400, _json({"problem": "step and place are whole numbers"})
        step, place = map(int, numbers)
        status, found = self._in_loop(node, step, place if path == "/group.json" else None)
        return status, _json(found)

    def _node(self, node: str, key: str) -> Answer:
        """A node's page. One of whom nothing was ever heard is not found, not an empty page."""
        heard = self._scores.heard(self._swarm)
        if node not in self._nodes and all(each.said.node != node for each in heard) and not self._named(node):
            if self._heard_at is None:
                return 503, NOT_READ_YET
            return 404, {"problem": f"no node {node}: no process, directory entry, score or group of that name has been seen here"}
        curves = curves_by_task(heard, node, key, self._records.scores.get(node, NO_SETS), ended=self._over)
        groups = self._batches.recent.recent(GROUPS_SENT, node, self._last_steps())
        return 200, {
            "node": node,
            "curves": {self._records.names.shown(dataset): thinned(curve, CURVE_POINTS) for dataset, curve in curves.items()},
            "groups": [recent_object(group, self._records.names) for group in groups],
            "steps": steps_object(self._records.rewards(node), self._batches.recent.steps(node), self._batches.first_held(node)),
        }

    def _named(self, node: str) -> bool:
        """Whether a batch or a trainer's record names the node."""
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
                plane = await self._plane()
                try:
                    batch = await BatchReader(plane, node).batch_at(step)
                finally:
                    await plane.close()
        except NotConnected as error:
            return 404, {"problem": visible(gone(self._following) or str(error), 400)}
        except CommandError as error:
            # What the log no longer holds is followed by what its trainer recorded.
            traced = await asyncio.to_thread(lambda: how_to_trace(self._trained(node), step, place, self._following.target.run))
            return 404, {"problem": visible(f"{error}{traced}", 600)}
        except TransportError as error:
            return 404, {"problem": visible(str(error), 400)}
        if place is None:
            never = batch.number > self._last_steps().get(node, batch.number)
            return 200, step_object(node, batch, self._records.names, never=never)
        found = await asyncio.to_thread(self._group, node, batch, place)
        return (404, {"problem": f"step {step} has no group {place}"}) if found is None else (200, found)

    async def _plane(self) -> Transport:
        return await connect_node_plane(self._config, OPERATOR, timeout_s=CONNECT_S, url=self._following.target.node_url)

    def _group(self, node: str, batch: Batch, place: int) -> dict[str, Any] | None:
        """The group's object. Runs in a thread, as the run's records may be large."""
        config, run = for_node(self._config, node), self._following.target.run
        judge = judge_of(config, self._given, run, self._records.names)
        return group_object(node, batch, place, Path(config.model.path), self._trained(node), judge, ended=self._over)

    def _trained(self, node: str) -> TrainedRecords:
        config, run = for_node(self._config, node), self._following.target.run
        here = run and (config.node.var_dir / "runs" / run / node).is_dir()
        return self._steps.setdefault(node, TrainedRecords(record_folder(config, run if here else "")))


def _told_of_server(node_url: str, trouble: str) -> dict[str, Any]:
    """What the state says of the server. trouble: as `server_trouble` returns."""
    told = {"server": visible(node_url, 120), "problem": visible(trouble, 1500), "ended": None}
    return told | ({"state": "unstored"} if trouble else {})


def _json(value: dict[str, Any]) -> bytes:
    return visible_json(value, separators=(",", ":"), default=_unknown).encode()


def _unknown(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {json.dumps(repr(value)[:80])}")
