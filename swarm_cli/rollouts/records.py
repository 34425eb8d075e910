"""Records of single groups: a node's batches (of a running node from its batch log, without a
consumer, so that reading them does not affect the services; of an ended run from the trainer's
record), their use by its trainer, its verifier's refusals, and some held-out answers. The files are
bounded (`shared.run_records`); an incomplete or unknown line is skipped.
"""

from __future__ import annotations

import stat
import time
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from shared.config import NodeConfig
from shared.contracts.codec import decode
from shared.contracts.messages import Batch, BatchItem, ScoredGroup, claimed_rollout_id
from shared.contracts.subjects import node_batches_stream, node_scored_stream
from shared.contracts.wire import MessageError
from shared.plain_files import NO_FILE, open_plain, read_plain_end, whole_lines
from shared.run_records import (
    BATCHES_FILE,
    BATCHES_MAX_BYTES,
    METRICS_FILE,
    SAMPLES_FILE,
    TRAINED_FILE,
    TRAINED_MAX_BYTES,
    older,
    refused_files,
    unreadable,
)
from shared.transport.base import StreamState, Transport, TransportError
from swarm_cli.errors import CommandError
from swarm_cli.file_names import FileNames, file_names
from swarm_cli.observe.snapshot import no_records
from swarm_cli.runs import running_runs
from swarm_cli.target import find_run

T = TypeVar("T")
_MOST_BYTES = 2 * TRAINED_MAX_BYTES


class TrainedAnswer(msgspec.Struct, frozen=True):
    """A step's use of one answer (`services.trainer.records`)."""

    place: int
    advantage: float | None = None
    tokens: int | None = None
    kept: int | None = None
    weight: float | None = None
    clipped: float | None = None
    truncated: int | None = None
    ratio: float | None = None
    left_out: str | None = None
    token_ratio: list[float | None] | None = None
    token_weight: list[float | None] | None = None


class TrainedGroup(msgspec.Struct, frozen=True):
    """A step's use of one group of its batch."""

    id: str
    origin: str
    sender: str
    fate: str
    factor: float | None = None
    bounded: float | None = None
    answers: list[TrainedAnswer] = []

    def answer(self, place: int) -> TrainedAnswer | None:
        """The answer at this place in the group."""
        return next((answer for answer in self.answers if answer.place == place), None)


class TrainedStep(msgspec.Struct, frozen=True):
    """One line of `trained.jsonl`."""

    step: int
    time: float
    updated: bool
    updates: int
    groups: list[TrainedGroup]
    groups_not_written: int = 0

    def group(self, group_id: str) -> TrainedGroup | None:
        """The step's use of a group; None if the group was not in its batch."""
        return next((group for group in self.groups if group.id == group_id), None)


class HeldOutSample(msgspec.Struct, frozen=True):
    """One held-out answer."""

    dataset: str
    seed: int
    index: int
    question: str
    reference: str | None
    text: str
    characters: int
    reward: float | None
    tokens: int
    finish_reason: str
    passed: bool | None = None
    parts: dict[str, float | None] = {}
    """Of several rewards, the own value of each; None where it does not apply."""

    @property
    def key(self) -> tuple[str, int, int]:
        """Text, seed and index, by which a question is known: the name of a file's rows changes
        with the columns that its reward gets.
        """
        return self.question, self.seed, self.index


class Samples(msgspec.Struct, frozen=True):
    """One line of `samples.jsonl`: some answers of one evaluation. scorer: as in `EvalReport`."""

    policy_version: int
    time: float
    samples: list[HeldOutSample]
    scorer: str | None = None


def record_folder(config: NodeConfig, run: str) -> Path | None:
    """The node's folder in a run; by default in the only running run that has the node, else in the
    newest with records of it; None if this machine has none.

    Raises:
        CommandError: the named run is not on this machine, or the node has no folder in it.
    """
    node, var_dir = config.node.id, config.node.var_dir
    if run:
        folder = find_run(run, var_dir) / node
        if not folder.is_dir():
            raise no_records(folder.parent, [node])
        return folder
    here = [each / node for each in running_runs(var_dir) if (each / node).is_dir()]
    if len(here) == 1:
        return here[0]
    runs = var_dir / "runs"
    folders = [each / node for each in runs.iterdir()] if runs.is_dir() else []
    written = {folder: max((path.stat().st_mtime for path in _records(folder)), default=0.0) for folder in folders}
    newest = max(written, key=lambda folder: written[folder], default=None)
    return newest if newest is not None and written[newest] else None


def names_in_run(config: NodeConfig, run: str) -> FileNames:
    """The names of files in the run, by default in the newest with records of the node. As a name
    belongs to its rows, a wrong run gives no wrong one.
    """
    runs, newest = config.node.var_dir / "runs", None if run else record_folder(config, "")
    folder = next((each for each in (runs / run, Path(run)) if each.is_dir()), None) if run else newest and newest.parent
    return file_names(folder, config.tasks)


class TrainedRecords:
    """`trained.jsonl` of a folder, by step; if a step is in it twice, the later line counts. Reads
    only the lines added since the last read.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._lines: dict[int, bytes] = {}
        self._read_bytes = 0
        self._inode = -1

    def for_step(self, step: int) -> TrainedStep | None:
        """The trainer's record of a step; None if there is none or it is no longer kept."""
        self._read_on()
        line = self._lines.get(step)
        return None if line is None else decoded(line, TrainedStep)

    @property
    def newest(self) -> int | None:
        """The last step on record, as of the last read."""
        return max(self._lines, default=None)

    @property
    def begun(self) -> bool:
        """True if a trainer runs in the folder that has recorded no step: it makes the file of its
        steps at its start.
        """
        try:
            return self.folder is not None and not (self.folder / METRICS_FILE).stat().st_size
        except OSError:
            return False

    def _read_on(self) -> None:
        """Read the new lines; of a file longer than any trainer's, only the last. Another inode
        means that the file was rotated: then the older file, which holds what was read before, is
        read first.
        """
        if self.folder is None:
            return
        path = self.folder / TRAINED_FILE
        try:
            found = path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISREG(found.st_mode):
            return
        if found.st_ino != self._inode:
            self._lines, self._read_bytes, self._inode = {}, 0, found.st_ino
            for line in lines_of(older(path)):
                self._take(line)
        with open(open_plain(path), "rb") as file:
            start = max(self._read_bytes, found.st_size - _MOST_BYTES)
            for whole, end in whole_lines(file, start, TRAINED_MAX_BYTES):
                self._read_bytes = end
                for line in whole.splitlines():
                    self._take(line)

    def _take(self, line: bytes) -> None:
        """Keep a line by its step, which comes first in it (`services.trainer.records`), so that
        the line need not be decoded.
        """
        head, _, rest = line.partition(b",")
        name, _, number = head.partition(b":")
        if name == b'{"step"' and number.isdigit() and rest.endswith(b"]}"):
            self._lines[int(number)] = line


def read_samples(folder: Path | None) -> list[Samples]:
    """Held-out answers by policy version; if a version was evaluated again, the later
    line counts.
    """
    if folder is None:
        return []
    path = folder / SAMPLES_FILE
    by_version: dict[int, Samples] = {}
    for line in (*lines_of(older(path)), *lines_of(path)):
        samples = decoded(line, Samples)
        if samples is not None:
            by_version[samples.policy_version] = samples
    return [by_version[version] for version in sorted(by_version)]


def _records(folder: Path) -> Iterator[Path]:
    for path in (folder / TRAINED_FILE, folder / SAMPLES_FILE, *refused_files(folder)):
        if path.is_file():
            yield path


def lines_of(path: Path) -> list[bytes]:
    """The lines of a record, as far as one look reads back; none if there is no file."""
    try:
        return read_plain_end(path, _MOST_BYTES)[0].splitlines()
    except OSError as error:
        if error.errno in NO_FILE:
            return []
        raise


def decoded(line: bytes, kind: type[T]) -> T | None:
    """Read a line; None if it is incomplete or unknown."""
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


BATCHES_READ = 200
"""How many batches one look goes back at most, because a batch can be megabytes."""


@dataclass(frozen=True, slots=True)
class BatchedGroup:
    """A group and the batch that it is part of; batch n is trained at step n."""

    batch: Batch
    item: BatchItem


class RecordedBatches:
    """The batches of an ended run that its trainer has recorded (`batches.jsonl`). A position is a
    step. Of a step that was trained twice, the later line counts.
    """

    def __init__(self, folder: Path | None, node: str) -> None:
        """folder: the node's in the run; None: this machine has none."""
        self._node = node
        self._places: dict[int, tuple[Path, int, int]] = {}
        self._files = () if folder is None else (older(folder / BATCHES_FILE), folder / BATCHES_FILE)
        for file in self._files:
            self._index(file)

    @property
    def steps(self) -> list[int]:
        """The steps on record, in order."""
        return sorted(self._places)

    @property
    def unreadable(self) -> str:
        """The number of lines on record that are no batch, in words; empty if all are."""
        return "; ".join(filter(None, map(unreadable, self._files)))

    async def last_seq(self) -> int:
        """The last step on record; 0 if there is none."""
        return max(self._places, default=0)

    async def back_from(self, last_seq: int) -> AsyncIterator[Batch]:
        """The batches up to a step, newest first, at most `BATCHES_READ`."""
        for step in sorted((step for step in self._places if step <= last_seq), reverse=True)[:BATCHES_READ]:
            if (batch := self._read(step)) is not None:
                yield batch

    async def batch_at(self, step: int) -> Batch:
        """The batch of one step.

        Raises:
            CommandError: it is not on record.
        """
        if (batch := self._read(step)) is not None:
            return batch
        steps = self.steps
        there = f"{BATCHES_FILE} holds steps {steps[0]} to {steps[-1]}" if steps else f"it has no {BATCHES_FILE} here"
        raise CommandError(f"the records of {self._node} do not hold step {step}: {there}")

    def _index(self, path: Path) -> None:
        try:
            descriptor = open_plain(path)
        except OSError:
            return
        with open(descriptor, "rb") as file:
            for block, end in whole_lines(file, 0, BATCHES_MAX_BYTES):
                at = end - len(block)
                for line in block.splitlines(keepends=True):
                    name, _, number = line.partition(b",")[0].partition(b":")
                    if name == b'{"step"' and number.isdigit() and len(number) < 16:
                        self._places[int(number)] = path, at, len(line)
                    at += len(line)

    def _read(self, step: int) -> Batch | None:
        if step not in self._places:
            return None
        path, at, size = self._places[step]
        try:
            with open(open_plain(path), "rb") as file:
                file.seek(at)
                return msgspec.json.decode(file.read(size), type=_BatchLine).batch
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None


class _BatchLine(msgspec.Struct, frozen=True):
    step: int
    batch: Batch


class BatchReader:
    """The batches that a node's log still holds: the newest, and those that may follow a kept
    checkpoint.
    """

    def __init__(self, transport: Transport, node: str) -> None:
        self._transport = transport
        self._node = node
        self._stream = node_batches_stream(node)

    async def last_seq(self) -> int:
        """Sequence number of the log's last message."""
        return (await self._state()).last_seq

    async def back_from(self, last_seq: int) -> AsyncIterator[Batch]:
        """The batches up to a position in the log, newest first, at most `BATCHES_READ`."""
        state = await self._state()
        oldest = max(state.first_seq, last_seq - BATCHES_READ + 1)
        for seq in range(last_seq, oldest - 1, -1) if state.messages else ():
            found = await self._at_or_after(seq)
            if found is not None and found[0] == seq:
                yield found[1]

    async def after(self, seq: int) -> AsyncIterator[tuple[int, Batch]]:
        """The batches after a position in the log, each with its position, until the log ends."""
        while (found := await self._at_or_after(seq + 1)) is not None:
            yield found
            seq = found[0]

    async def batch_at(self, step: int) -> Batch:
        """The batch of one step.

        Raises:
            CommandError: the log does not hold it, either no longer or not yet.
        """
        state = await self._state()
        low, high = state.first_seq, state.last_seq
        # Numbers grow along the log, except that a batch may be in it twice.
        while state.messages and low <= high:
            middle = (low + high) // 2
            found = await self._at_or_after(middle)
            if found is None or found[1].number > step:
                high = middle - 1
            elif found[1].number < step:
                low = found[0] + 1
            else:
                return found[1]
        raise CommandError(f"the batch log of {self._node} does not hold step {step}: {await self._held()}")

    async def _state(self) -> StreamState:
        try:
            return await self._transport.stream_state(self._stream)
        except TransportError as error:
            if "stream not found" not in str(error):
                raise
            raise CommandError(
                f"this server has no batch log of {self._node}: check the name (`swarm status` shows a server's nodes) and the "
                "server (--node-url)"
            ) from None

    async def _held(self) -> str:
        state = await self._state()
        first = await self._at_or_after(state.first_seq) if state.messages else None
        last = await self._at_or_after(state.last_seq) if state.messages else None
        if first is None or last is None:
            return "it is empty; check that the node is running and that this is its server (--node-url)"
        return f"it holds steps {first[1].number} to {last[1].number} (older ones are removed once no checkpoint needs them)"

    async def _at_or_after(self, seq: int) -> tuple[int, Batch] | None:
        messages = await self._transport.read(self._stream, seq, 1)
        if not messages:
            return None
        payload = await self._transport.payload(messages[0])
        try:
            return messages[0].seq, decode(payload, Batch)
        except MessageError as error:
            raise CommandError(
                f"message {messages[0].seq} of {self._stream} is not a batch that this version can read ({error}): "
                "use the version of swarm that the node runs"
            ) from None


SCORED_READ, SCORED_BYTES_READ = 4096, 256 * 2**20
_AT_ONCE = 64


async def scored_groups(plane: Transport, node: str, group: str, draws: Collection[tuple[str, int]] = ()) -> list[ScoredGroup]:
    """The groups in a node's stream of scored groups whose id begins with `group`, of its newest
    `SCORED_READ` messages, or as many as have `SCORED_BYTES_READ`. The header of a message has the
    first digits of the id, so that the others need not be decoded.

    draws: groups of these nodes and draws are found too, whatever their id, for which all are
    decoded.
    """
    stream, found = node_scored_stream(node), list[ScoredGroup]()
    try:
        state = await plane.stream_state(stream)
        usual_bytes = max(1, (state.size_bytes or 0) // max(1, state.messages))
        seq = max(state.first_seq, state.last_seq - min(SCORED_READ, SCORED_BYTES_READ // usual_bytes) + 1)
        while seq <= state.last_seq and (messages := await plane.read(stream, seq, _AT_ONCE)):
            seq = messages[-1].seq + 1
            for message in messages:
                claimed = claimed_rollout_id(message.headers) or "-"
                if draws or claimed.startswith(group) or group.startswith(claimed):
                    with suppress(MessageError):  # of another version
                        found.append(decode(await plane.payload(message), ScoredGroup))
    except TransportError:
        pass  # the node has no such stream
    return [each for each in found if each.group_id.startswith(group) or draw_of(each) in draws]


def draw_of(scored: ScoredGroup) -> tuple[str, int]:
    """The group's node and draw, which it has on every node. Its id is that of the bytes that a
    node was sent.
    """
    return scored.group.node, scored.group.draw


_FATES = {
    "no_advantage": "without effect: its answers all earn the same, so none is better than another (or its weight is 0)",
    "spare": "not needed: candidates that were drawn before it filled the batch's places",
    "mastered": "not trained on: this node's policy gives its rewarded answers already",
    "repetition": "not trained on: it says the same again and again, far more than local answers do",
    "too_long": "not trained on: too long for the model, or longer than foreign answers may be",
    "control_text": "not trained on: its text would become control tokens",
    "changed_question": "not trained on: the model's chat template changes its question",
    "malformed_tokens": "not trained on: its token ids or logprobs are not valid",
    "unscored": "not trained on: it could not be scored",
    "truncated": "not trained on: all answers were cut at the length limit (trainer.drop_truncated)",
    "negative": "not trained on: no answer has an advantage of 0 or more (trainer.foreign)",
    "absurd": "not trained on: all its answers are too unlikely under this node's policy (trainer.foreign)",
    "empty": "not trained on: it has no tokens",
    "text_alone": "not trained on: its engine gave text without token ids",
    "unknown_token": "not trained on: the model has no such token",
    "group_budget": "not trained on: it costs more than one foreign group may (trainer.foreign)",
    "sender_budget": "not trained on: its sender's groups cost more than one sender's may (trainer.foreign)",
}


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """The record of one group in one step; `step` and `group` are None if there is none. yet: True
    if the records have not reached that step yet.
    """

    step: TrainedStep | None
    group: TrainedGroup | None
    yet: bool = False

    @property
    def trained(self) -> bool:
        """True if a step has trained on the group."""
        return self.group is not None and self.group.fate == "trained"

    def sentence(self) -> str:
        """Describe the use of the group."""
        if self.yet:
            return "not trained on yet"
        if self.step is None or self.group is None:
            return "not on record here (--run): trained on another machine, or longer ago than records are kept"
        group, step = self.group, self.step
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(step.time))
        if group.fate != "trained":
            return f"{_FATES.get(group.fate, f'not trained on: {group.fate}')} (step {step.step}, {at})"
        text = f"trained on in step {step.step}, {at}"
        if group.factor is not None and group.factor != 1.0:
            text += f"; its loss was multiplied by {group.factor:.3g}"
        if group.bounded is not None:
            text += f", because its gradient was too large and was scaled by {group.bounded:.3g}"
        return text if step.updated else f"{text}; but the step changed no weights"


def training_outcome(records: TrainedRecords, step: int, group_id: str) -> TrainingOutcome:
    """Find the record of a group of a step's batch. A step with that number in another run had
    other groups, and says nothing about this one.
    """
    found = records.for_step(step)
    newest = records.newest
    beyond = found is None and (records.begun if newest is None else step > newest)
    group = found.group(group_id) if found is not None else None
    return TrainingOutcome(found, group, yet=beyond)


def clock(time_s: float) -> str:
    """A Unix time as hours, minutes and seconds, in this machine's time zone."""
    return time.strftime("%H:%M:%S", time.localtime(time_s)) + f".{int(time_s % 1 * 1000):03d}"
