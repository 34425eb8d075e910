"""`swarm answer`: people answer the questions of a node's sources. What they write goes the way of
a generator's groups: the node's verifier scores it, signs it and shares it.

Nothing is held while a person thinks but a lease on the question's draw, and there is a connection
only while something is read or written: who leaves in the middle leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from services.generator.ledger import DrawLedger
from shared.config import NodeConfig
from shared.config.load import CONFIG_FILE_VARIABLE
from shared.contracts import subjects
from shared.contracts.codec import content_id, decode, encode
from shared.contracts.control import DrawLease, ServiceStatus
from shared.contracts.messages import ROLLOUT_ID_HEADER, Completion, RolloutGroup, Sampling, ScoredGroup, Task, rollout_id_of
from shared.contracts.status_figures import is_alive
from shared.contracts.wire import ModelIdentity
from shared.text import error_text, visible
from shared.transport.base import NoStream, NotConnected, StreamFull, Transport, TransportError
from swarm_cli.chosen_config import ConfigOption, NodeUrlOption, for_node, load_chosen
from swarm_cli.console import count, indented, note, say
from swarm_cli.errors import CommandError
from swarm_cli.runs import read_note, started_with
from swarm_cli.target import default_target, on_node_plane, run_here

PERSON = ModelIdentity(name="a person", tokenizer_hash="0" * 64)
"""Nobody's tokenizer, so that every receiver encodes the text with its own."""
LEASE_S = 86_400.0
"""A person who leaves without a word keeps a question from others for so long."""
SCORED_S, RETRY_S = 30.0, 3.0
AWAY_S = 300.0
"""Answers wait for a server that is away for so long."""
_STATUSES_READ, _NO_LIMIT, _AHEAD = 8, 2**60, 64
T = TypeVar("T")


def answer(
    questions: Annotated[int, typer.Option(min=0, help="End after this many; 0: until Ctrl-D.")] = 0,
    node: Annotated[str, typer.Option("--node", help="The node that shares the answers.  [default: the configuration's]")] = "",
    node_url: NodeUrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Answer the questions of a node's sources yourself. Your answers are scored, signed and shared
    as a group like any other. The node has no trainer: `swarm up --nodes 1 --roles verifier`.

    Give several answers to a question, at least one right and one wrong: a policy learns from the
    difference.
    """
    from shared.tasks import TaskError, TaskSource, held_out_of
    from shared.tasks.specs import checked_config

    chosen = for_node(config_of_run(config, node_url), node)
    try:
        chosen = checked_config(chosen)
        held_out = held_out_of(chosen.tasks, tasks=chosen.eval.tasks, sets=chosen.eval.sets, draw=chosen.eval.draw)
    except TaskError as error:
        raise CommandError(str(error)) from None
    desk = AnswerDesk(chosen, node_url)
    desk.check()
    source = TaskSource(chosen.tasks, node=chosen.node.id, seed=chosen.node.seed, secret=desk.secret())
    note(
        "An answer ends with an empty line, a question with an empty answer. Ctrl-D shares the answers that have ended, and leaves."
    )
    done, left = 0, False
    with _signals_interrupt():
        while not left and (not questions or done < questions):
            lease, texts = None, list[str]()
            try:
                lease = desk.claim()
                if (task := next(source.candidates(lease.first, held_out), None)) is not None:
                    say(f"\n{indented(task.text)}")
                    left = _read_answers(texts)
                if task is not None and texts:
                    shared, words = desk.share(lease, task, texts)
                    say(words)
                    done += shared
                elif left:
                    desk.give_back()
                else:
                    desk.finish(lease)
            except BaseException as error:
                if lease is not None and texts and lease.first not in desk.stored:
                    note(f"not shared; {desk.keep(lease, texts)}")
                with suppress(CommandError, TransportError):  # without the server the lease ends by itself
                    desk.give_back()
                if isinstance(error, TaskError):
                    raise CommandError(str(error)) from None
                if not isinstance(error, KeyboardInterrupt):
                    raise
                left = True
    note(f"{'left; ' if left else ''}{count(done, 'question')} answered")


def config_of_run(config: Path | None, node_url: str) -> NodeConfig:
    """The configuration that the nodes of the run on this machine were started with, else the
    chosen one. Raises CommandError if another file was named: its questions are not the node's.
    """
    chosen = load_chosen(config, NodeConfig)
    folder = chosen.node.var_dir / "runs" / run_here(chosen.node.var_dir, default_target(chosen, node_url))
    known, run_note = started_with(folder), read_note(folder)
    if known is None or run_note is None:
        return chosen
    if run_note.started_in and Path(run_note.started_in).resolve() != Path.cwd():
        start = f"cd {shlex.quote(run_note.started_in)}"
        raise CommandError(f"the paths of run {folder.name}'s configuration count from another folder: `{start}` first")
    named = config or os.environ.get(CONFIG_FILE_VARIABLE)
    if named and Path(named).resolve() != known.resolve():
        raise CommandError(
            f"run {folder.name} was started with {known}, whose questions its nodes score, and {named} is another "
            f"configuration: give --config {shlex.quote(str(known))}"
        )
    return load_chosen(known, NodeConfig)


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """A closed terminal or `kill` leaves as Ctrl-C does, inside the block."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, interrupt) for each in (signal.SIGHUP, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _read_answers(texts: list[str]) -> bool:
    """Add the answers to one question. True: the person leaves."""
    from shared.tasks.answers import MAX_ANSWER_CHARS

    for number in range(1, 1 + _AHEAD):
        note(f"answer {number}:")
        lines: list[str] = []
        while line := sys.stdin.readline():
            if not line.strip():
                break
            lines.append(line.rstrip("\n"))
        else:
            if lines:
                note("left out: the answer that no empty line ended")
            return True
        text = "\n".join(lines).encode(errors="replace").decode()
        if not text:
            return False
        if len(text) > MAX_ANSWER_CHARS:
            note(f"left out: longer than {MAX_ANSWER_CHARS:,} characters")
            continue
        texts.append(text)
    return False


class AnswerDesk:
    """Hands out a node's questions and takes in answers to them."""

    def __init__(self, config: NodeConfig, node_url: str) -> None:
        self._config = config
        self._node = config.node.id
        self._target = default_target(config, node_url)
        # Not the process's number: in containers everybody's may be 1.
        self._replica = f"person-{secrets.token_hex(8)}"
        self.stored: set[int] = set()
        """Draws whose answers the server has."""

    def check(self) -> None:
        """Raises CommandError unless the node's verifier runs, and its trainer does not: a trainer
        would wait for groups with tokens.
        """
        bucket, stem = subjects.node_bucket(self._node), f"{subjects.STATUS_PREFIX}verifier"
        try:
            entries, _ = self._on_plane(lambda plane: plane.kv.newest(bucket, _STATUSES_READ, stem), acts=False)
        except NoStream:
            entries = ()
        alive = [status for entry in entries if is_alive(status := decode(entry.value, ServiceStatus), time.time())]
        start = f"swarm up --nodes 1 --name {self._node} --roles verifier"
        if not alive:
            raise CommandError(
                f"no verifier of {self._node} answers at {self._target.node_url}: start one with `{start}`, or name --node"
            )
        if not alive[0].roles or "trainer" in alive[0].roles:
            raise CommandError(
                f"{self._node} trains a policy, and its trainer takes no local group without tokens: answer for another node that "
                "shares with it: `swarm up --nodes 1 --name people --roles verifier`, with --nats-url for a running server"
            )

    def secret(self) -> bytes:
        """The key of the node's draws."""
        return b"" if self._config.node.seed else self._on_plane(lambda plane: self._ledger(plane).secret())

    def claim(self) -> DrawLease:
        """Take the next question's draw."""

        async def claim(plane: Transport) -> DrawLease | None:
            bounds = {"groups_per_step": _AHEAD, "max_staleness": 0, "consumed_local": _NO_LIMIT, "dropped_local": 0}
            return await self._ledger(plane).claim(1, **bounds)

        if (lease := self._on_plane(claim)) is None:
            raise CommandError(f"{self._node} gives out no further questions")
        return lease

    def give_back(self) -> None:
        """Release the draw of a question that was not answered."""
        self._on_plane(lambda plane: self._ledger(plane).release_own())

    def finish(self, lease: DrawLease) -> None:
        """Pass over a question."""
        self._on_plane(lambda plane: self._ledger(plane).finish(lease.first))

    def keep(self, lease: DrawLease, texts: Sequence[str]) -> str:
        """Write answers that could not be shared to a file. Returns where they are, in words."""
        written = "".join(f"{text}\n\n" for text in texts)
        try:
            self._kept_file(lease).parent.mkdir(parents=True, exist_ok=True)
            self._kept_file(lease).write_text(written)
        except OSError as error:
            return f"what you wrote ({error_text(error)}):\n{written}"
        return f"what you wrote is in {self._kept_file(lease)}"

    def _kept_file(self, lease: DrawLease) -> Path:
        return self._config.node.var_dir / "answers" / f"{self._node}-{lease.first}-{self._replica}.txt"

    def share(self, lease: DrawLease, task: Task, texts: list[str]) -> tuple[bool, str]:
        """Store the answers as a group, and wait for their rewards. Returns whether they were
        stored, and what they earned, in words. While the server is away or the queue full, this
        waits for `AWAY_S` at most, with the answers in a file.
        """
        group = RolloutGroup(
            node=self._node,
            created_at=time.time(),
            draw=lease.first,
            task=task,
            completions=[Completion(text=text, finish_reason="stop", token_count=max(1, len(text.split()))) for text in texts],
            model=PERSON,
            policy_version=0,
            sampling=Sampling(),
        )
        payload = encode(group)
        group_id = content_id(payload)
        first = 0

        async def store(plane: Transport) -> bool:
            """False: somebody else's answers to the question are there."""
            nonlocal first
            if lease.first not in self.stored:
                first = first or (await plane.stream_state(subjects.node_scored_stream(self._node))).last_seq + 1
                stream, rollout_id = subjects.node_rollouts_stream(self._node), rollout_id_of(group_id)
                ack = await plane.publish(
                    subjects.node_rollouts(self._node),
                    payload,
                    stream=stream,
                    message_id=f"draw-{group.draw}",
                    headers={ROLLOUT_ID_HEADER: rollout_id},
                )
                # A duplicate may be this group's, if an acknowledgement was lost.
                there = await plane.get(stream, ack.seq) if ack.duplicate else None
                if there is not None and there.headers.get(ROLLOUT_ID_HEADER) != rollout_id:
                    return False
                if there is None and ack.duplicate and await self._scored(plane, first, group_id) is None:
                    return False
                self.stored.add(lease.first)
            await self._ledger(plane).finish(lease.first)
            return True

        began_s, told = time.monotonic(), False
        while True:
            try:
                is_stored = self._on_plane(store)
                break
            except (NotConnected, StreamFull) as error:
                if time.monotonic() - began_s > AWAY_S:
                    raise
                if not told:
                    note(f"{error}\nnot shared yet; {self.keep(lease, texts)}; trying for {AWAY_S / 60:.0f} minutes, Ctrl-C leaves")
                told = True
                time.sleep(RETRY_S)
        if not is_stored:
            return False, f"not shared: somebody else has answered this question meanwhile; {self.keep(lease, texts)}"
        self._kept_file(lease).unlink(missing_ok=True)
        with suppress(NotConnected):
            if (scored := self._on_plane(lambda plane: self._scored(plane, first, group_id))) is not None:
                return True, earned(scored, len(texts))
        return True, f"stored, and not scored within {SCORED_S:.0f} s: see the verifier's log; nothing is lost"

    async def _scored(self, plane: Transport, position: int, group_id: str) -> ScoredGroup | None:
        """The scored group, at or after a position of its stream; None if it does not come."""
        stream, give_up_at = subjects.node_scored_stream(self._node), time.monotonic() + SCORED_S
        while time.monotonic() < give_up_at:
            for message in await plane.read(stream, position, _AHEAD):
                position = message.seq + 1
                scored = decode(await plane.payload(message), ScoredGroup)
                if scored.group_id == group_id:
                    return scored
            await asyncio.sleep(0.2)
        return None

    def _ledger(self, plane: Transport) -> DrawLedger:
        return DrawLedger(plane, self._node, self._replica, LEASE_S)

    def _on_plane(self, work: Callable[[Transport], Awaitable[T]], *, acts: bool = True) -> T:
        return on_node_plane(self._config, self._target, "generator", work, acts=acts)


def earned(scored: ScoredGroup, answers: int) -> str:
    """Say what answers earned, and what a policy can learn from them."""
    if scored.failure:
        return f"not shared: {visible(scored.failure, 300)}"
    passed: Sequence[bool | None] = scored.passed or [None] * len(scored.rewards)
    words = {True: ", right", False: ", wrong", None: ""}
    each = "; ".join(f"{reward:g}{words[passes]}" for reward, passes in zip(scored.rewards, passed, strict=True))
    left = f" ({count(answers - len(scored.rewards), 'answer')} without a reward left out)" if answers > len(scored.rewards) else ""
    hint = "" if len({*scored.rewards}) > 1 else "; all alike, so a policy learns nothing from them: add a wrong or a right answer"
    return f"rewards: {each}{left}{hint}"
