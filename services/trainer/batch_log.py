"""Reads the batch log: batches in order, each trained on once relative to the checkpoints. Also
decides what to do when one is missing.
"""

from __future__ import annotations

import shlex
from collections import deque

from services.trainer.checkpoint import CheckpointStore, PolicyVersion
from shared.contracts.codec import decode
from shared.contracts.limits import NODE_LIMITS
from shared.contracts.messages import Batch
from shared.contracts.subjects import node_batches_stream
from shared.contracts.wire import MessageError
from shared.runtime import FatalError
from shared.transport.base import StreamState, Transport

KEPT_TO_READ = 50
KEPT_TO_READ_BYTES = 64 * 2**20
"""The newest batches trained on, and their size, that are kept for people: to look at a group after
the step that trained on it, although no checkpoint needs them.
"""


class BatchLog:
    """Reads the batch after a position. `read_to` is the stream sequence up to which it was read.
    It counts the batches and bytes read since `saved`, because the log keeps only so many, and must
    not discard those that no checkpoint contains.
    """

    def __init__(self, transport: Transport, node: str) -> None:
        self._transport = transport
        self._stream = node_batches_stream(node)
        self.read_to = 0
        self._unsaved_msgs = self._unsaved_bytes = 0
        self._read: deque[tuple[int, int]] = deque(maxlen=KEPT_TO_READ)

    @property
    def wants_checkpoint(self) -> bool:
        """Say whether so much was read since the last checkpoint that the log may soon discard some
        of it.
        """
        return self._unsaved_msgs >= NODE_LIMITS.unsaved_max_msgs or self._unsaved_bytes >= NODE_LIMITS.unsaved_max_bytes

    def saved(self) -> None:
        self._unsaved_msgs = self._unsaved_bytes = 0

    async def check(self, position: PolicyVersion, kept: CheckpointStore) -> None:
        """Check that training can continue after `position`. kept: the run's checkpoints.

        Raises:
            FatalError: the batches after it are gone.
        """
        self.read_to = position.stream_seq
        state = await self._transport.stream_state(self._stream)
        if state.last_seq < position.stream_seq:
            raise _shorter(self._stream, state, position, kept)
        if state.messages == 0 and state.last_seq > position.stream_seq:
            raise _gone(self._stream, position, "nothing is left of it")

    async def after(self, position: PolicyVersion) -> tuple[Batch, int] | None:
        """The batch after `position` and its place in the stream; None if it does not exist yet.

        Raises:
            FatalError: the log continues with a later batch, or with one that cannot be decoded.
            TransportError: the server cannot be reached, or part of the batch is missing.
        """
        while True:
            messages = await self._transport.read(self._stream, self.read_to + 1, 1)
            if not messages:
                return None
            message = messages[0]
            payload = await self._transport.payload(message)
            batch = self._decode(payload, message.seq)
            if batch.number > position.batch_number + 1:
                raise _gone(self._stream, position, f"the log continues with batch {batch.number}")
            self.read_to = message.seq
            if batch.number == position.batch_number + 1:
                self._unsaved_msgs += 1
                self._unsaved_bytes += len(payload)
                self._read.append((message.seq, len(payload)))
                return batch, message.seq

    async def made_before(self, position: PolicyVersion, time_s: float) -> int:
        """The newest batch after `position` that was made before `time_s`, or the one at
        `position`. Later ones are of the sampler that goes on now.
        """
        for seq in range((await self._transport.stream_state(self._stream)).last_seq, position.stream_seq, -1):
            for message in await self._transport.read(self._stream, seq, 1):
                batch = self._decode(await self._transport.payload(message), seq)
                if batch.created_at < time_s:
                    return max(batch.number, position.batch_number)
        return position.batch_number

    async def forget(self, up_to_seq: int) -> None:
        """Purge batches that neither a checkpoint nor a reader needs, but never the newest one,
        which contains the sampler's memory. A trainer that is started again keeps for readers only
        what it has read since.
        """
        state = await self._transport.stream_state(self._stream)
        last_unneeded = min(up_to_seq, state.last_seq - 1, self._kept_from() - 1)
        if state.messages and last_unneeded >= state.first_seq:
            await self._transport.purge(self._stream, last_unneeded)

    def _kept_from(self) -> int:
        """The position of the oldest batch kept for readers, or the next one if there is none."""
        kept_from, size = self.read_to + 1, 0
        for seq, payload_bytes in reversed(self._read):
            size += payload_bytes
            if size > KEPT_TO_READ_BYTES:
                break
            kept_from = seq
        return kept_from

    def _decode(self, payload: bytes, seq: int) -> Batch:
        try:
            return decode(payload, Batch)
        except MessageError as error:
            raise FatalError(
                f"message {seq} of {self._stream} is not a batch that this version can read ({error}): run the same version of "
                "trainer and sampler; if they are the same, the stream is damaged: restore the NATS server's JetStream store"
            ) from None


def _shorter(stream: str, state: StreamState, position: PolicyVersion, kept: CheckpointStore) -> FatalError:
    """The stream ends before the checkpoint. A restored one continues after each checkpoint whose
    next batch it has, or will get next; the sampler's memory is in the newest batch.
    """
    found = (
        f"the batch log {stream} ends at {state.last_seq}, but the checkpoint of step {position.batch_number} "
        f"contains it up to {position.stream_seq}"
    )
    if state.last_seq == 0:
        return FatalError(
            f"{found}: the stream was created anew. Restore the NATS server's JetStream store, or choose another node.id and "
            "node.run to start from the base policy"
        )
    oldest = state.first_seq - 1 if state.messages else state.last_seq
    positions = kept.positions()
    usable = [step for step, at in positions.items() if oldest <= at.stream_seq <= state.last_seq]
    if not usable:
        return FatalError(
            f"{found}: the stream was restored from a backup older than that, or created anew, and no checkpoint in "
            f"{kept.folder.absolute()} fits it (that needs one at {oldest} to {state.last_seq}). Put back the checkpoints folder "
            "from the time of the backup, restore a newer backup of the NATS server's JetStream store, or choose another node.id "
            "and node.run to start from the base policy"
        )
    newer = " ".join(shlex.quote(str(kept.path(step).absolute())) for step in kept.steps() if step > max(usable))
    aside = shlex.quote(f"{kept.folder.absolute()}-newer")
    return FatalError(
        f"{found}: the stream was restored from a backup older than that. Move the newer checkpoints away: "
        f"`mkdir -p {aside} && mv {newer} {aside}`. Training then continues after step {max(usable)}; "
        "or restore a newer backup of the NATS server's JetStream store"
    )


def _gone(stream: str, position: PolicyVersion, found: str) -> FatalError:
    done = f"the newest usable checkpoint is of step {position.batch_number}" if position.batch_number else "there is no checkpoint"
    return FatalError(
        f"batch {position.batch_number + 1} is missing from the log {stream}: {found}, and {done}. Restore the run's checkpoints "
        "folder or the NATS server's JetStream store; or start afresh with a new node.id or an empty JetStream store"
    )
