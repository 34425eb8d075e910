"""Stores, reads and requeues a node's dead letters: local groups whose scoring was given up, with
the cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.contracts import subjects
from shared.contracts.codec import content_id, decode
from shared.contracts.messages import RolloutGroup
from shared.contracts.wire import MessageError
from shared.transport.base import StoredMessage, Transport, TransportError

CAUSE_HEADER = "Swarm-Cause"
REQUEUED = "requeue-"
"""Prefix of a requeued group's message id, so that the server takes it as a new attempt and not as
a duplicate of the first.
"""
_PAGE = 256


def attempt_id(message: StoredMessage, group_id: str) -> str:
    """Message id for the result of one attempt at a group: the same after a crash, different after
    a requeue.
    """
    requeued_as = message.headers.get("Nats-Msg-Id", "")
    return f"{group_id}-{requeued_as}" if requeued_as.startswith(REQUEUED) else group_id


async def bury(transport: Transport, node: str, payload: bytes, cause: str, *, message_id: str) -> None:
    """Store a group that was given up. Raises what `Transport.publish` raises."""
    subject, stream = subjects.node_dead_letters(node), subjects.node_dead_letters_stream(node)
    headers = {CAUSE_HEADER: " ".join(cause.split())[:200].encode("ascii", "replace").decode()}
    await transport.publish(subject, payload, stream=stream, message_id=message_id, headers=headers)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A letter as stored in the stream. `group` is None if the payload is gone or cannot be
    decoded; `problem` says why.
    """

    seq: int
    buried_at: float
    size_bytes: int
    cause: str
    group_id: str
    group: RolloutGroup | None
    problem: str = ""

    def as_object(self) -> dict[str, object]:
        """The letter for `--json`, without the group's content."""
        return {
            "seq": self.seq,
            "buried_at": self.buried_at,
            "size_bytes": self.size_bytes,
            "cause": self.cause,
            "group_id": self.group_id,
            "draw": self.group.draw if self.group else None,
            "dataset": self.group.task.ref.dataset if self.group else None,
            "policy_version": self.group.policy_version if self.group else None,
            "problem": self.problem,
        }


async def read_letters(transport: Transport, node: str, seqs: Sequence[int] = (), *, contents: bool = True) -> list[DeadLetter]:
    """All letters of a node in order, or those at `seqs` that exist. contents: open the groups."""
    stream = subjects.node_dead_letters_stream(node)
    if seqs:
        found = [await transport.get(stream, seq) for seq in sorted(set(seqs))]
        return [await _opened(transport, message) for message in found if message is not None]
    letters: list[DeadLetter] = []
    position = 1
    while messages := await transport.read(stream, position, _PAGE):
        letters += [await _opened(transport, message) if contents else _closed(message) for message in messages]
        position = messages[-1].seq + 1
    return letters


async def requeue(transport: Transport, node: str, letter: DeadLetter) -> None:
    """Put a letter back into the queue of groups to score, then remove it. Safe to repeat after a
    crash between the two.

    Raises:
        TransportError: the server does not answer, the queue is full, or the letter's payload is
            gone.
    """
    dead, queue = subjects.node_dead_letters_stream(node), subjects.node_rollouts_stream(node)
    message = await transport.get(dead, letter.seq)
    if message is None:
        return
    payload = await transport.payload(message)
    # A separate message id: with the group's id the queue would drop it for ten minutes as a
    # duplicate of the first attempt.
    await transport.publish(
        subjects.node_rollouts(node), payload, stream=queue, message_id=f"{REQUEUED}{letter.seq}-{letter.group_id[:32]}"
    )
    await transport.delete(dead, letter.seq)


def _closed(message: StoredMessage) -> DeadLetter:
    headers = message.headers
    return DeadLetter(
        message.seq, message.stored_at, message.size_bytes, headers.get(CAUSE_HEADER, ""), headers.get("Nats-Msg-Id", ""), None
    )


async def _opened(transport: Transport, message: StoredMessage) -> DeadLetter:
    cause = message.headers.get(CAUSE_HEADER, "")
    group, problem = None, ""
    group_id = message.headers.get("Nats-Msg-Id", "")
    try:
        payload = await transport.payload(message)
        group_id = content_id(payload)
        group = decode(payload, RolloutGroup)
    except (TransportError, MessageError) as error:
        problem = str(error)
    return DeadLetter(message.seq, message.stored_at, message.size_bytes, cause, group_id, group, problem)
