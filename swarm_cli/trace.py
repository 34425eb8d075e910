"""`swarm trace`: follows one group through the nodes' streams, the swarm's stream and the records
in a run's folder: where it went, when, and how it was used.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path as Files
from typing import Annotated, Any, TypeVar

import typer

from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.codec import content_id, decode, decode_foreign, encode
from shared.contracts.messages import RolloutGroup, ScoredGroup, SignedRollouts, claimed_rollout_id, rollout_id_of, signed_bytes
from shared.contracts.wire import MessageError
from shared.identity.keys import verify
from shared.roles import OPERATOR
from shared.run_records import BATCHES_FILE
from shared.runtime.planes import connect_node_plane, connect_swarm_plane
from shared.text import visible, visible_json
from shared.transport.base import AccessDenied, Ends, StoredMessage, StreamState, Transport, TransportError
from swarm_cli.chosen_config import ConfigOption, NodeUrlOption, SwarmUrlOption, for_node, load_chosen
from swarm_cli.console import note, say
from swarm_cli.errors import CommandError
from swarm_cli.file_names import UNNAMED, FileNames
from swarm_cli.observe.snapshot import ended_run, nodes_here, run_of
from swarm_cli.rollouts.command import CONNECT_TIMEOUT_S, RunOption
from swarm_cli.rollouts.records import (
    BatchReader,
    RecordedBatches,
    Refusal,
    TrainedRecords,
    TrainingOutcome,
    clock,
    names_in_run,
    read_refusals,
    record_folder,
)
from swarm_cli.rollouts.shown import left_words, why
from swarm_cli.target import Target, check_listening, looking_at

SHORTEST_ID = 6
_ID = re.compile(rf"[0-9a-f]{{{SHORTEST_ID},64}}")


def trace(
    rollout_id: Annotated[
        str, typer.Argument(metavar="GROUP", help="The group's id or its beginning, from a log or from `swarm rollouts`.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    run: RunOption = "",
    node_url: NodeUrlOption = "",
    swarm_url: SwarmUrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Follow one group: when it was generated, scored and shared, which nodes took it in or refused
    it, in which batch it is, and how the trainer used it. Searches all nodes on the server, the
    swarm's stream, and the records in the run's folder, and says what is no longer known."""
    prefix = rollout_id.strip().lower()
    if not _ID.fullmatch(prefix):
        raise CommandError(f"{rollout_id[:80]!r} is not a group's id: give {SHORTEST_ID} to 64 of its digits (0-9, a-f)")
    node_config = load_chosen(config, NodeConfig)
    with looking_at(node_config, run, node_url, swarm_url, only_here=False) as target:
        if target.ended is not None:
            note(target.ended.sentence(target.run, time.time()))
        check_listening(node_config.node.var_dir, target)
        path = asyncio.run(_find(node_config, prefix, run, target))
    if not path.stations:
        raise CommandError(
            f"no trace of a group {prefix}: not in the streams of the nodes on this server (--node-url), not in the swarm's "
            "(--swarm-url), not in the records of the newest run here (--run); all three only keep the recent past"
        )
    if len(path.makers) > 1 or _several(path, prefix):
        raise CommandError(f"several groups' ids begin with {prefix}: give more digits: {', '.join(sorted(path.ids)[:8])}")
    if as_json:
        say(visible_json(path.as_object()))
        return
    _show(path)


def _several(path: Path, prefix: str) -> bool:
    """Check whether several ids match. Records name a group without its maker, so `makers` can miss
    it.
    """
    return len([group_id for group_id in path.ids if group_id.startswith(prefix)]) > 1


async def _find(config: NodeConfig, prefix: str, run: str, target: Target) -> Path:
    """The group's path: of a run that has ended from its records, else also from the streams."""
    search = Search(config, prefix, run or target.run, names_in_run(config, run))
    if target.ended is not None:
        nodes = [node.node for node in ended_run(config.node.var_dir / "runs" / run, target.ended).nodes]
        for node in nodes:
            await search.recorded(config.node.var_dir / "runs" / run / node, node)
        say_what_is_missing(search.path, nodes, search.windows)
        return search.path
    plane = await connect_node_plane(config, OPERATOR, timeout_s=CONNECT_TIMEOUT_S, url=target.node_url)
    try:
        nodes = sorted(await nodes_here(plane))
        await _with_swarm(search, config, plane, nodes, target.swarm_url)
    finally:
        await plane.close()
    say_what_is_missing(search.path, nodes, search.windows)
    return search.path


async def _with_swarm(search: Search, config: NodeConfig, plane: Transport, nodes: list[str], url: str | None) -> None:
    """Search the swarm's stream too, if its server answers."""
    swarm = None
    if url is not None:
        try:
            swarm = await connect_swarm_plane(config, OPERATOR, timeout_s=CONNECT_TIMEOUT_S, url=url)
        except TransportError as error:
            note(f"the swarm's stream was not searched: {error}")
    try:
        await search.everywhere(plane, nodes, swarm)
    finally:
        if swarm is not None:
            await swarm.close()


def _show(path: Path) -> None:
    makers = ", ".join(f"{maker.node}, draw {maker.draw}" for maker in path.makers) or "not known"
    say(visible(f"group {', '.join(sorted(path.ids))}, of {makers}"))
    stations = sorted(path.stations)
    say(visible(f"first seen {time.strftime('%Y-%m-%d', time.localtime(stations[0].time))}; each time is by its writer's clock"))
    widest = max(len(each.node) for each in stations)
    for each in stations:
        say(visible(f"  {clock(each.time)}  {each.node:{widest}}  {each.what:10}  {each.detail}"))
    if path.unknown:
        say("not known:")
    for sentence in path.unknown:
        say(visible(f"  {sentence}"))


# The search, in the nodes' streams, the swarm's stream and the records in a run's folder.


@dataclass(frozen=True, slots=True, order=True)
class Station:
    """Something that happened to the group. time: Unix time, by the writer's clock."""

    time: float
    node: str
    what: str
    detail: str


@dataclass(frozen=True, slots=True)
class Maker:
    """The node that made the group, and the number of its draw, which is unique on the node."""

    node: str
    draw: int


@dataclass(slots=True)
class Path:
    """All that was found about one group. ids: its content ids; if token ids are not shared, the
    shared bytes have a different id. unknown: sentences about what is not known.
    """

    ids: set[str] = field(default_factory=set)
    makers: set[Maker] = field(default_factory=set)
    stations: set[Station] = field(default_factory=set)
    unknown: list[str] = field(default_factory=list)

    def add(self, time_s: float, node: str, what: str, detail: str = "") -> None:
        """Add an event; an event that is found twice is kept once."""
        self.stations.add(Station(time_s, node, what, detail))

    def at(self, what: str, node: str | None = None) -> list[Station]:
        """The stations of one kind, of one node or of all."""
        return sorted(each for each in self.stations if each.what == what and node in (None, each.node))

    def as_object(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "ids": sorted(self.ids),
            "makers": [{"node": maker.node, "draw": maker.draw} for maker in sorted(self.makers, key=lambda each: each.node)],
            "path": [
                {"time": each.time, "node": each.node, "what": each.what, "detail": each.detail} for each in sorted(self.stations)
            ],
            "unknown": self.unknown,
        }


GENERATED, SCORED, SHARED, TAKEN, REFUSED, BATCHED, TRAINED = (
    "generated",
    "scored",
    "shared",
    "taken in",
    "refused",
    "in a batch",
    "trainer",
)


def trained_detail(fate: TrainingOutcome) -> str:
    """Describe a step's use of the group, and the advantages of its answers."""
    group = fate.group
    if group is None:
        return fate.sentence()
    used = [f"#{answer.place} {answer.advantage:+.3g}" for answer in group.answers if answer.advantage and not answer.left_out]
    pushed = f"; advantages {', '.join(used[:16])}{' ...' if len(used) > 16 else ''}" if used else ""
    left_out = [f"#{answer.place} {answer.left_out}" for answer in group.answers if answer.left_out]
    if left_out:
        pushed += f"; left out {', '.join(left_out[:16])}{' ...' if len(left_out) > 16 else ''}"
    return fate.sentence() + pushed


def say_what_is_missing(path: Path, nodes: Iterable[str], windows: dict[str, str]) -> None:
    """Add to `path.unknown` a sentence for each usual part of the path that left no trace. nodes:
    those whose streams were searched. windows: a sentence by node, and under "" for the swarm's
    stream, about how far back the search went.
    """
    here = set(nodes)
    for maker in path.makers:
        if maker.node not in here:
            path.unknown.append(f"what {maker.node} did with it: its streams are not on this server (--node-url)")
        elif not path.at(SCORED, maker.node):
            path.unknown.append(f"when {maker.node} scored it: {windows.get(maker.node, 'its stream of scored groups is empty')}")
    if not path.at(SHARED):
        swarm = windows.get("", "the swarm's stream was not searched (--swarm-url)")
        path.unknown.append(f"whether and when it was shared: {swarm}")
    makers = {maker.node for maker in path.makers}
    for node in sorted(here - makers):
        if not path.at(TAKEN, node) and not path.at(REFUSED, node):
            held = windows.get(node, "its stream of scored groups is empty")
            path.unknown.append(f"whether {node} ever received it: neither taken in nor among the refusals on record; {held}")
    for node in sorted(here):
        held_by = path.at(SCORED, node) + path.at(TAKEN, node)
        if held_by and not path.at(BATCHED, node) and not path.at(TRAINED, node):
            path.unknown.append(
                f"whether {node} trains on it: it is in no batch that is kept; it may be waiting, dropped, or in an older batch"
            )
        if path.at(BATCHED, node) and not path.at(TRAINED, node):
            path.unknown.append(f"how the trainer of {node} used it: not on record here (--run), or not trained on yet")


MESSAGES_READ = 4096
"""How many of the newest messages of a stream of groups are read."""
BYTES_READ = 256 * 2**20
_AT_ONCE = 64
_LARGEST_FETCHED = 64 * 2**20
M = TypeVar("M", RolloutGroup, ScoredGroup)


class Search:
    """One search, by the beginning of an id."""

    def __init__(self, config: NodeConfig, prefix: str, run: str, names: FileNames = UNNAMED) -> None:
        self._config, self._prefix, self._run = config, prefix, run
        self._names = names
        self._other_ids: set[str] = set()
        self.path = Path()
        self.windows: dict[str, str] = {}

    async def everywhere(self, node_plane: Transport, nodes: Sequence[str], swarm_plane: Transport | None) -> None:
        """Search all these nodes and the swarm's stream; again if the group turned out to have a
        second id (`verifier.share_tokens`).
        """
        while True:
            known = set(self._other_ids), set(self.path.makers)
            for node in nodes:
                await self.node(node_plane, node)
            if swarm_plane is not None:
                await self.swarm(swarm_plane)
            if known == (self._other_ids, self.path.makers) or len(self.path.makers) > 1:
                return

    def matches(self, group_id: str) -> bool:
        """Check whether this is an id of the group."""
        return group_id in self._other_ids or (bool(group_id) and group_id.startswith(self._prefix))

    async def node(self, plane: Transport, node: str) -> None:
        """Search one node's streams and records."""
        await self._unscored(plane, node)
        await self._scored(plane, node)
        await self._batches(BatchReader(plane, node), node)
        run = await run_of(plane, node) or self._run
        try:
            self._records(record_folder(for_node(self._config, node), run), node)
        except CommandError:
            return

    async def recorded(self, folder: Files, node: str) -> None:
        """Search the records of a node whose run has ended. folder: the node's in the run."""
        known = set(self._other_ids)
        await self._batches(RecordedBatches(folder, node), node)
        self._records(folder, node)
        self.windows[node] = f"the run has ended, and its records hold only what was trained on ({BATCHES_FILE})"
        self.windows[""] = "the run has ended, and its records do not say"
        if known != self._other_ids:
            await self.recorded(folder, node)

    async def swarm(self, plane: Transport) -> None:
        """Search the swarm's stream for the group with a valid signature. Headers are only claims,
        so at most `BYTES_READ` are fetched because of them.
        """
        left_bytes = BYTES_READ
        async for message in self._newest(plane, subjects.SWARM_ROLLOUTS, ""):
            if not self._named(message) or message.size_bytes > min(left_bytes, _LARGEST_FETCHED):
                continue
            left_bytes -= message.size_bytes
            try:
                signed = decode_foreign(await plane.payload(message), SignedRollouts)
                group_id = content_id(signed.body)
                group = decode_foreign(signed.body, RolloutGroup)
            except (MessageError, TransportError):
                continue
            genuine = verify(signed.public_key, signed_bytes(signed.swarm, signed.body), signed.signature)
            if self.matches(group_id) and genuine and subjects.rollouts_author(message.subject) == group.node:
                self._is(group_id, group)
                self.path.add(message.stored_at, group.node, SHARED, f"message {message.seq} of the swarm's stream")

    async def _unscored(self, plane: Transport, node: str) -> None:
        """Search the groups that wait for the verifier."""
        async for message in self._newest(plane, subjects.node_rollouts_stream(node), None):
            if self._named(message):
                group = await _read(plane, message, RolloutGroup)
                if group is not None:
                    payload = await plane.payload(message)
                    if self.matches(content_id(payload)):
                        self._is(content_id(payload), group)

    async def _scored(self, plane: Transport, node: str) -> None:
        async for message in self._newest(plane, subjects.node_scored_stream(node), node):
            # Its maker may have it under another id, but with the same draw.
            scored = await _read(plane, message, ScoredGroup) if self._named(message) or self._made_by(node) else None
            if scored is None or not (self.matches(scored.group_id) or self._made(scored)):
                continue
            self._was_scored(scored, node)

    def _was_scored(self, scored: ScoredGroup, node: str) -> None:
        self._is(scored.group_id, scored.group)
        if scored.origin == "local":
            from services.verifier.border import without_tokens  # of this command's half second, half

            self._other_ids |= {scored.group_id, content_id(encode(without_tokens(scored.group)))}
        rewards = ", ".join(f"{reward:.3g}" for reward in scored.rewards[:16])
        outcome = (
            f"rewards {rewards}{' ...' if len(scored.rewards) > 16 else ''}" if scored.rewards else f"failed: {scored.failure}"
        )
        outcome = "; ".join(filter(None, (outcome, left_words(scored))))
        what = SCORED if scored.origin == "local" else TAKEN
        self.path.add(scored.scored_at, node, what, f"{outcome} (in {scored.score_seconds:.3f} s)")

    async def _batches(self, reader: BatchReader | RecordedBatches, node: str) -> None:
        try:
            last = await reader.last_seq()
        except CommandError:
            return
        async for batch in reader.back_from(last):
            for item in batch.items:
                if self.matches(item.scored.group_id):
                    self._was_scored(item.scored, node)
                    self.path.add(batch.created_at, node, BATCHED, f"step {batch.number}: {why(batch, item)}")

    def _records(self, folder: Files | None, node: str) -> None:
        """Search the node's folder in a run."""
        records = TrainedRecords(folder)
        for step in (step for name in {self._prefix, *self._other_ids} for step in records.naming(name)):
            for group in step.groups:
                if self.matches(group.id):
                    self.path.ids.add(group.id)
                    self.path.add(step.time, node, TRAINED, trained_detail(TrainingOutcome(step, group)))
        for refusal in read_refusals(folder):
            if self.matches(refusal.id):
                self._was_refused(node, refusal)

    def _was_refused(self, node: str, refusal: Refusal) -> None:
        self.path.ids.add(refusal.id)
        if refusal.group is not None:
            self.path.makers.add(Maker(refusal.sender, refusal.group.draw))
            # The same words as in `_is`, so that an event found in both places is kept once.
            of = refusal.group
            dataset = self._names.shown(of.dataset)
            detail = f"{dataset} seed {of.seed} index {of.index}, policy version {of.policy_version}, draw {of.draw}"
            self.path.add(of.created_at, refusal.sender, GENERATED, detail)
        cause = f"{refusal.reason}: {refusal.detail}" if refusal.detail else refusal.reason
        self.path.add(refusal.time, node, REFUSED, cause)

    def _is(self, group_id: str, group: RolloutGroup) -> None:
        """Record a copy of the group: its id, its maker and when it was made."""
        ref = group.task.ref
        self.path.ids.add(group_id)
        self.path.makers.add(Maker(group.node, group.draw))
        dataset = self._names.shown(ref.dataset)
        detail = f"{dataset} seed {ref.seed} index {ref.index}, policy version {group.policy_version}, draw {group.draw}"
        self.path.add(group.created_at, group.node, GENERATED, detail)

    def _named(self, message: StoredMessage) -> bool:
        """Check whether the header names the group; it holds the first 16 digits of the id."""
        claimed = claimed_rollout_id(message.headers)
        if claimed is None:
            return False
        others = {rollout_id_of(group_id) for group_id in self._other_ids}
        return claimed in others or claimed.startswith(self._prefix) or rollout_id_of(self._prefix) == claimed

    def _made_by(self, node: str) -> bool:
        return any(maker.node == node for maker in self.path.makers)

    def _made(self, scored: ScoredGroup) -> bool:
        return scored.origin == "local" and Maker(scored.group.node, scored.group.draw) in self.path.makers

    async def _newest(self, plane: Transport, stream: str, window_of: str | None) -> AsyncIterator[StoredMessage]:
        """The newest messages of a stream of groups; `windows` notes how far back they go."""
        try:
            state, usual_bytes = await _ends(plane, stream)
        except TransportError:
            return
        if not state.messages:
            return
        most = min(MESSAGES_READ, max(1, BYTES_READ // usual_bytes))
        seq = max(state.first_seq, state.last_seq - most + 1)
        first = True
        while seq <= state.last_seq:
            messages = await plane.read(stream, seq, _AT_ONCE)
            if not messages:
                return
            if first and window_of is not None:
                self.windows[window_of] = _window(window_of, messages[0].stored_at)
            first, seq = False, messages[-1].seq + 1
            for message in messages:
                yield message


async def _ends(plane: Transport, stream: str) -> tuple[StreamState | Ends, int]:
    """Where the stream begins and ends, and the usual size of a message. Who may not ask the server
    takes the larger of the oldest's and the newest's.
    """
    try:
        state = await plane.stream_state(stream)
        return state, max(1, (state.size_bytes or 0) // max(1, state.messages))
    except AccessDenied:
        ends = await plane.ends(stream)
        return ends, max([1, *(message.size_bytes for message in (ends.first, ends.last) if message is not None)])


def _window(node: str, since_s: float) -> str:
    whose = f"{node}'s stream of scored groups" if node else "the swarm's stream"
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since_s))
    return f"it is not in {whose}, which was searched back to {at}"


async def _read(plane: Transport, message: StoredMessage, kind: type[M]) -> M | None:
    try:
        return decode(await plane.payload(message), kind)
    except (MessageError, TransportError):
        return None
