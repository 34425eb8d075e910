"""Stores and reads a node's dead letters: local groups that could not be scored, with the cause."""

from __future__ import annotations

from dataclasses import dataclass

from shared.contracts import subjects
from shared.contracts.codec import content_id, decode
from shared.contracts.messages import RolloutGroup
from shared.contracts.wire import MessageError
from shared.transport.base import StoredMessage, Transport, TransportError

CAUSE_HEADER = "Swarm-Cause"
_PAGE = 256


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


async def read_letters(transport: Transport, node: str, seq: int | None = None, *, contents: bool = True) -> list[DeadLetter]:
    """All letters of a node in order, or the one at `seq` if it exists. contents: open the
    groups.
    """
    stream = subjects.node_dead_letters_stream(node)
    if seq is not None:
        found = await transport.get(stream, seq)
        return [] if found is None else [await _opened(transport, found)]
    letters: list[DeadLetter] = []
    position = 1
    while messages := await transport.read(stream, position, _PAGE):
        letters += [await _opened(transport, message) if contents else _closed(message) for message in messages]
        position = messages[-1].seq + 1
    return letters


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
