"""Records of the runs on this machine: which nodes have trained on whose groups, and the
rewards of their steps, from the trainers' `metrics.jsonl`, which has every step of a run from its
first; and answers to held-out questions before training and now, from the generators'
`samples.jsonl`. Memory is bounded, whatever the files hold.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec

from shared.config import NodeConfig
from shared.contracts.limits import MAX_REWARD_PARTS
from shared.contracts.wire import is_node_name
from shared.plain_files import open_plain, whole_lines
from shared.run_records import METRICS_FILE, SAMPLES_FILE, reward_changes
from shared.text import cut_text, visible
from swarm_cli.dashboard.recent_groups import STEPS_A_NODE, StepPoint
from swarm_cli.file_names import FileNames, file_names
from swarm_cli.observe.node_state import NodeState
from swarm_cli.observe.run_files import SetCurve, SetResult, read_sets, set_chance, thinned
from swarm_cli.observe.snapshot import SwarmState
from swarm_cli.rollouts.judge import bonus
from swarm_cli.rollouts.records import HeldOutSample, Samples, read_samples

CELLS_A_NODE = 5_000
NODES_KEPT = 64
"""How many nodes' records are read."""
DATASET_CHARACTERS = 128
ANSWERS_KEPT = 16
"""Of how many nodes the held-out answers are kept in memory."""
QUESTIONS_SENT = 32
QUESTION_CHARACTERS, ANSWER_CHARACTERS = 1500, 600
SETS_SENT = 32
SET_POINTS = 24
_BLOCK_BYTES = 2**23
_MOST_BYTES = 2**28
"""Of a longer file, only the end is read."""


def as_shown(score: float) -> float:
    """A score or reward with the three digits that other displays write. A browser that rounds for
    itself rounds 0.0625 another way, and what was rounded before a second time.
    """
    return float(f"{score:.3f}")


@dataclass(frozen=True, slots=True)
class Cell:
    """The number of groups of `sender` and `dataset` that `taker` has trained on."""

    taker: str
    sender: str
    dataset: str
    groups: int


@dataclass(frozen=True, slots=True)
class TrainedGroups:
    """The counts, the largest first. since: the first step counted, of each node of which it is not
    step 1. uncounted: the nodes whose trainers' records are not on this machine. left_out: groups
    not counted because their cells are too many.
    """

    cells: tuple[Cell, ...] = ()
    since: Mapping[str, int] = field(default_factory=dict)
    uncounted: tuple[str, ...] = ()
    left_out: int = 0

    def names(self, node: str) -> bool:
        """Check whether the node has trained on a group, or one of its groups was trained on."""
        return any(node in (cell.taker, cell.sender) for cell in self.cells)


class _Step(msgspec.Struct, frozen=True):
    """The parts of a step's line that are read."""

    step: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    time: float = 0.0
    updated: bool = False
    scorer: str | None = None
    reward_local: float | None = None
    reward_external: float | None = None
    answer_tokens: float | None = None
    cut_off_share: float | None = None
    reward_parts: dict[str, float] = {}
    trained_of: dict[str, dict[str, Annotated[int, msgspec.Meta(ge=0, le=2**31)]]] | None = None


class NodeTally:
    """One trainer's counts, by sender and dataset. Reads only the lines added since the last read;
    if the trainer has rewritten the file, because it trains some steps again, all of it.

    since: the first step counted; None if no line on record says whose groups it trained on.
    newest: the last step on record, -1 if there is none. rewards: those of the newest steps.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._begin(-1, 0)

    def _begin(self, inode: int, at: int) -> None:
        self._inode, self._read_to = inode, at
        self.newest = -1
        self.rewards: deque[StepPoint] = deque(maxlen=STEPS_A_NODE)
        self.counts: dict[tuple[str, str], int] = {}
        self.since: int | None = None
        self.left_out = 0

    def read_on(self) -> bool:
        """Read the new lines. Returns whether there is a file.

        Raises:
            OSError: it cannot be read.
        """
        try:
            descriptor = open_plain(self._file)
        except OSError:
            self._begin(-1, 0)
            return False
        with open(descriptor, "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self._read_to:
                self._begin(found.st_ino, max(0, found.st_size - _MOST_BYTES))
            for block, end in whole_lines(file, self._read_to, _BLOCK_BYTES):
                for line in block.splitlines():
                    self._take(line)
                self._read_to = end
        return True

    def _take(self, line: bytes) -> None:
        """Count one line. After a line that does not say whose groups it trained on, counting
        begins again, so that `since` holds without gaps.
        """
        try:
            step = msgspec.json.decode(line, type=_Step)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        if step.step <= self.newest:
            return
        self.newest = step.step
        length = step.answer_tokens, step.cut_off_share
        parts = dict(islice(step.reward_parts.items(), MAX_REWARD_PARTS))
        self.rewards.append(StepPoint(step.step, step.time, step.reward_local, step.reward_external, step.scorer, *length, parts))
        if step.trained_of is None:
            self.counts, self.since = {}, None
            return
        if self.since is None:
            self.since = step.step
        for sender, datasets in step.trained_of.items() if step.updated else ():
            for dataset, groups in datasets.items() if is_node_name(sender) else ():
                self._count(sender, dataset[:DATASET_CHARACTERS], groups)

    def _count(self, sender: str, dataset: str, groups: int) -> None:
        key = (sender, dataset)
        if key not in self.counts and len(self.counts) >= CELLS_A_NODE:
            self.left_out += groups
        else:
            self.counts[key] = self.counts.get(key, 0) + groups


class RunRecords:
    """The records of the nodes that are looked at, each in the run that it belongs to, as of the
    last read. trained: whose groups were trained on. names: of files. folders: those on this
    machine.
    """

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._tallies: dict[str, NodeTally] = {}
        self._answers: dict[Path, tuple[tuple[int, int, int], Samples | None, Samples | None]] = {}
        self.trained = TrainedGroups()
        self.folders: dict[str, Path] = {}
        self.names = file_names(None, config.tasks)

    def rewards(self, node: str) -> list[StepPoint]:
        """The rewards of a node's newest steps; empty if they are not on record here."""
        return list(self._tallies[node].rewards) if node in self._tallies else []

    def answers(self, node: str) -> dict[str, Any] | None:
        """The page's object about a node's held-out answers; None if none is on record here. They
        are read again only when the file has changed.
        """
        folder = self.folders.get(node)
        try:
            found = None if folder is None else (folder / SAMPLES_FILE).lstat()
        except OSError:
            found = None
        if folder is None or found is None:
            return None
        state = found.st_ino, found.st_size, found.st_mtime_ns
        known = self._answers.pop(folder, None)
        if known is None or known[0] != state:
            read = read_samples(folder)
            known = state, next((each for each in read if each.policy_version == 0), None), read[-1] if read else None
        self._answers[folder] = known
        while len(self._answers) > ANSWERS_KEPT:
            self._answers.pop(next(iter(self._answers)))
        _, base, newest = known
        return None if newest is None else answers_object(base, newest, self.names)

    def sets(self, node: str) -> list[dict[str, Any]]:
        """The page's objects about a node's evaluation sets; none if none is on record here."""
        folder = self.folders.get(node)
        return [] if folder is None else sets_object(read_sets(folder))

    def read(self, snapshot: SwarmState, run: str) -> None:
        """Read what is new. It may take a second where a run is long. run: the run that is looked
        at, "" if it is not known.
        """
        folders = {node.node: self._folder(node, run) for node in snapshot.nodes if node.statuses}
        self.count({node.node: folders[node.node] for node in snapshot.nodes if node.step > 0 and node.node in folders})
        self.folders = {node: folder for node, folder in folders.items() if folder is not None}
        run_folder = next((folder.parent for folder in self.folders.values()), None)
        self.names = file_names(run_folder, self._config.tasks)

    def count(self, folders: Mapping[str, Path | None]) -> None:
        """Count the groups that were trained on. folders: of each node that has taken steps, its
        folder in the run; None if that is not on this machine. The first `NODES_KEPT` are read.
        """
        uncounted: list[str] = []
        told: dict[str, NodeTally] = {}
        for node, folder in folders.items():
            tally = self._tally(node, folder) if folder is not None and len(told) < NODES_KEPT else None
            if tally is None or tally.since is None:
                uncounted.append(node)
            else:
                told[node] = tally
        cells = [Cell(node, *key, groups) for node, tally in told.items() for key, groups in tally.counts.items() if groups]
        self.trained = TrainedGroups(
            tuple(sorted(cells, key=lambda cell: (-cell.groups, cell.taker, cell.sender, cell.dataset))),
            {node: tally.since for node, tally in told.items() if tally.since is not None and tally.since > 1},
            tuple(uncounted),
            sum(tally.left_out for tally in told.values()),
        )

    def _tally(self, node: str, folder: Path) -> NodeTally | None:
        """The node's counts; None if no step of it is on record."""
        tally = self._tallies.pop(node, None) or NodeTally(folder / METRICS_FILE)
        try:
            if not tally.read_on():
                return None
        except OSError:
            return None
        self._tallies[node] = tally
        return tally if tally.newest >= 0 else None

    def _folder(self, node: NodeState, run: str) -> Path | None:
        """The node's folder in the run that it belongs to; None if that is not on this machine."""
        runs = self._config.node.var_dir / "runs"
        if known := node.run or run:
            return runs / known / node.node
        # Of an unknown run, only processes on this machine write into this folder.
        here = socket.gethostname()
        near = any(status.host == here for role in ("trainer", "generator") for status in node.roles(role)[:1])
        return runs / self._config.node.run / node.node if near else None


def steps_object(recorded: Sequence[StepPoint], batches: Sequence[StepPoint], first_held: int) -> list[list[Any]]:
    """The steps, oldest first, each as its number, time, mean reward of local and of foreign
    groups, whether the batch log still holds its groups, and how often the rewards had been changed
    before. Pure.

    Args:
        recorded: What the trainer has recorded: the steps that it took.
        batches: The batches that were read. The newest may wait for its step, and never have it.
        first_held: The oldest step whose batch is in the log.
    """
    made = {point.step: point for point in batches}
    told = any(point.local is not None or point.foreign is not None for point in recorded)
    newest = max(made, default=-1)
    points = recorded if told else batches
    return [
        [
            point.step,
            made[point.step].at if point.step in made else point.at,
            *(None if rate is None else as_shown(rate) for rate in (point.local, point.foreign)),
            first_held <= point.step <= newest,
            changes,
        ]
        for point, changes in zip(points, reward_changes([point.scorer for point in points]), strict=True)
    ]


def lengths_object(recorded: Sequence[StepPoint], batches: Sequence[StepPoint]) -> dict[str, Any]:
    """Lengths of local answers and each of several rewards by step. What the records lack of a step
    is taken from its batch, if it was read. Pure. `lengths`: a step's number, mean tokens, and the
    share cut off. `parts`: of each reward, steps and means since the rewards were last changed.
    """
    made = {point.step: point for point in batches}
    points = recorded or batches
    changes = reward_changes([point.scorer for point in points])
    lengths: list[list[Any]] = []
    parts: dict[str, list[list[Any]]] = {}
    for point, before in zip(points, changes, strict=True):
        read = point if point.tokens is not None else made.get(point.step, point)
        if read.tokens is not None and read.cut_off is not None:
            lengths.append([point.step, as_shown(read.tokens), as_shown(read.cut_off)])
        for name, value in read.parts.items() if before == changes[-1] else ():
            parts.setdefault(visible(name, 60), []).append([point.step, as_shown(value)])
    return {"lengths": lengths, "parts": dict(islice(parts.items(), MAX_REWARD_PARTS))}


def answers_object(base: Samples | None, newest: Samples, names: FileNames) -> dict[str, Any]:
    """The same held-out questions answered before training and now, in the order of the newest
    evaluation. An answer is its text, its reward, whether it passes and, of several rewards, the
    value of each and what it earned as a bonus alone (`judge.bonus`); None where it is not on
    record: `before` of other questions, `now` before the first step. `other_reward`: the answers
    before training were scored by another reward, which is left out.
    """
    other_reward = base is not None and None not in (base.scorer, newest.scorer) and base.scorer != newest.scorer
    first = {each.key: each for each in (base.samples if base is not None else [])}
    trained = newest.policy_version > 0
    return {
        "version": newest.policy_version,
        "other_reward": other_reward,
        "rows": [
            {
                "dataset": names.shown(each.dataset),
                "question": cut_text(each.question, QUESTION_CHARACTERS),
                "reference": None if each.reference is None else cut_text(each.reference, ANSWER_CHARACTERS),
                "before": _answer(first.get(each.key), scored=not other_reward),
                "now": _answer(each) if trained else None,
            }
            for each in newest.samples[:QUESTIONS_SENT]
        ],
    }


def sets_object(curves: Mapping[str, SetCurve]) -> list[dict[str, Any]]:
    """The results on evaluation sets. A point of a curve: version, score (avg@k, or the mean reward
    where no pass is defined), its standard error, and pass@k or None.
    """

    def point(each: SetResult) -> list[Any]:
        passed = None if each.at_k is None or each.k == 1 else as_shown(each.at_k)
        return [each.policy_version, as_shown(each.score or 0.0), as_shown(each.error), passed]

    return [
        {
            "name": visible(name, 64),
            "k": curve.newest.k,
            "questions": curve.newest.questions,
            "unknown": curve.newest.unknown,
            "by_reward": curve.newest.pass_rate is None,
            "added": curve.newest.added,
            "chance": None if (chance := set_chance(curve)) is None else as_shown(chance),
            "base": None if curve.base is None else point(curve.base),
            "curve": [point(each) for each in thinned(curve.results, SET_POINTS)],
        }
        for name, curve in list(curves.items())[:SETS_SENT]
    ]


def _answer(sample: HeldOutSample | None, *, scored: bool = True) -> list[Any] | None:
    if sample is None:
        return None
    if not scored:
        return [cut_text(sample.text, ANSWER_CHARACTERS), None, None, {}, ""]
    parts = {visible(name, 60): None if value is None else as_shown(value) for name, value in sample.parts.items()}
    reward = None if sample.reward is None else as_shown(sample.reward)
    only = bonus(sample.reward, sample.passed, sample.parts)
    return [cut_text(sample.text, ANSWER_CHARACTERS), reward, sample.passed, parts, only]
