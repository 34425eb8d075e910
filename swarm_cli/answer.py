"""`swarm answer`: people answer the questions of a node's sources. What they write goes the way of
a generator's groups: the node's verifier scores it, signs it and shares it.

Nothing is held while a person thinks but a lease on the question's draw, and there is a connection
only while something is read or written: who leaves in the middle leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Annotated, TypeVar

import typer

from services.generator.ledger import DrawLedger
from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.codec import content_id, decode, encode
from shared.contracts.control import DrawLease, ServiceStatus
from shared.contracts.messages import ROLLOUT_ID_HEADER, Completion, RolloutGroup, Sampling, ScoredGroup, Task, rollout_id_of
from shared.contracts.status_figures import is_alive
from shared.contracts.wire import ModelIdentity
from shared.runtime.planes import connect_node_plane
from shared.tasks import TaskError, TaskSource, held_out_of
from shared.tasks.answers import MAX_ANSWER_CHARS
from shared.tasks.specs import checked_config
from shared.text import visible
from shared.transport.base import NoStream, Transport
from swarm_cli.chosen_config import ConfigOption, NodeUrlOption, for_node, load_chosen
from swarm_cli.console import count, indented, note, say
from swarm_cli.errors import CommandError
from swarm_cli.server_diagnosis import naming_silent_server
from swarm_cli.target import check_listening, default_target

PERSON = ModelIdentity(name="a person", tokenizer_hash="0" * 64)
"""Nobody's tokenizer, so that every receiver encodes the text with its own."""
LEASE_S = 86_400.0
"""A person who leaves without a word keeps a question from others for so long."""
TIMEOUT_S, SCORED_S = 5.0, 30.0
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
    chosen = for_node(load_chosen(config, NodeConfig), node)
    try:
        chosen = checked_config(chosen)
        held_out = held_out_of(chosen.tasks, tasks=chosen.eval.tasks, sets=chosen.eval.sets, draw=chosen.eval.draw)
    except TaskError as error:
        raise CommandError(str(error)) from None
    desk = AnswerDesk(chosen, node_url)
    desk.check()
    source = TaskSource(chosen.tasks, node=chosen.node.id, seed=chosen.node.seed, secret=desk.secret())
    note("An answer ends with an empty line. An empty answer leads to the next question, Ctrl-D to the end.")
    done = 0
    while not questions or done < questions:
        lease = desk.claim()
        try:
            task = next(source.candidates(lease.first, held_out), None)
            say() if task is None else say(f"\n{indented(task.text)}")
            texts = list(_answers()) if task is not None else []
        except (EOFError, KeyboardInterrupt):
            desk.give_back()
            note(f"left; {count(done, 'question')} answered")
            return
        except TaskError as error:
            raise CommandError(str(error)) from None
        if task is not None and texts:
            say(desk.share(lease, task, texts))
            done += 1
        else:
            desk.finish(lease)
    note(f"{count(done, 'question')} answered")


def _answers() -> Iterator[str]:
    """The answers to one question. Raises EOFError: the person leaves."""
    for number in range(1, 1 + _AHEAD):
        note(f"answer {number}:")
        lines: list[str] = []
        while line := sys.stdin.readline():
            if not line.strip():
                break
            lines.append(line.rstrip("\n"))
        else:
            raise EOFError
        text = "\n".join(lines).encode(errors="replace").decode()
        if not text:
            return
        if len(text) > MAX_ANSWER_CHARS:
            note(f"left out: longer than {MAX_ANSWER_CHARS:,} characters")
            continue
        yield text


class AnswerDesk:
    """Hands out a node's questions and takes in answers to them."""

    def __init__(self, config: NodeConfig, node_url: str) -> None:
        self._config = config
        self._node = config.node.id
        self._target = default_target(config, node_url)
        self._replica = f"person-{os.getpid()}"

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

    def share(self, lease: DrawLease, task: Task, texts: list[str]) -> str:
        """Store the answers as a group, and wait for their rewards. Returns what they earned, in
        words.
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

        async def share(plane: Transport) -> ScoredGroup | None:
            scored_stream = subjects.node_scored_stream(self._node)
            position = (await plane.stream_state(scored_stream)).last_seq + 1
            await plane.publish(
                subjects.node_rollouts(self._node),
                payload,
                stream=subjects.node_rollouts_stream(self._node),
                message_id=f"draw-{group.draw}",
                headers={ROLLOUT_ID_HEADER: rollout_id_of(group_id)},
            )
            await self._ledger(plane).finish(lease.first)
            give_up_at = time.monotonic() + SCORED_S
            while time.monotonic() < give_up_at:
                for message in await plane.read(scored_stream, position, _AHEAD):
                    position = message.seq + 1
                    scored = decode(await plane.payload(message), ScoredGroup)
                    if scored.group_id == group_id:
                        return scored
                await asyncio.sleep(0.2)
            return None

        scored = self._on_plane(share)
        if scored is None:
            return f"stored, and not scored within {SCORED_S:.0f} s: see the verifier's log; nothing is lost"
        return earned(scored, len(texts))

    def _ledger(self, plane: Transport) -> DrawLedger:
        return DrawLedger(plane, self._node, self._replica, LEASE_S)

    def _on_plane(self, work: Callable[[Transport], Awaitable[T]], *, acts: bool = True) -> T:
        config, target = self._config, self._target

        async def run() -> T:
            plane = await connect_node_plane(config, "generator", timeout_s=TIMEOUT_S, url=target.node_url)
            try:
                return await work(plane)
            finally:
                await plane.close()

        with naming_silent_server(config.node.var_dir, target.node_url):
            check_listening(config.node.var_dir, target, acts=acts)
            return asyncio.run(run())


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
