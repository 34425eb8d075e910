"""Limits on the cost of large foreign payloads: bytes in progress at once, and chunks read once.
Pure: no clock, no I/O.

A message of a few hundred bytes can claim a payload of megabytes. Two rules prevent amplification:
payloads in progress are limited for the node and for each sender, and a chunk belongs to the
message that referred to it first, so that bytes stored once are read once and not for each of a
thousand references.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from services.verifier.refusals import Refusal, Refused
from shared.contracts import subjects
from shared.transport.base import BadReference, StoredMessage
from shared.transport.reference import reference_of

NODE_BYTES = 64 * 2**20
"""Most bytes of large payloads in progress at once: being fetched, decoded or scored."""
SENDER_BYTES = 16 * 2**20
"""Most bytes of one sender's large payloads, so that at least four senders are needed to make
others' large groups wait.
"""
SMALL_BYTES = 64 * 1024
"""Smaller payloads do not count. With 64 messages in progress they are at most 4 MiB, and they must
not wait behind large ones.
"""
MAX_CHUNKS = 65_536
"""Number of chunks remembered: 2 GiB, the swarm's whole window, in chunks of 32 KiB."""


class BytesInFlight:
    """Bytes of payloads in progress, by sender."""

    def __init__(self, node_bytes: int = NODE_BYTES, sender_bytes: int = SENDER_BYTES) -> None:
        self._node_bytes = node_bytes
        self._sender_bytes = sender_bytes
        self._held: dict[str, int] = {}
        self.total = 0

    def start(self, sender: str, size_bytes: int) -> None:
        """A payload of this size is now in progress."""
        if size_bytes > SMALL_BYTES:
            self._held[sender] = self._held.get(sender, 0) + size_bytes
            self.total += size_bytes

    def end(self, sender: str, size_bytes: int) -> None:
        """A payload of this size is finished."""
        if size_bytes > SMALL_BYTES:
            self.total -= size_bytes
            self._held[sender] -= size_bytes
            if not self._held[sender]:
                del self._held[sender]

    def look(self) -> Callable[[str, int], bool]:
        """A function that tests whether a sender's payload may be started, for one pass along the
        queue in its order.

        A payload that does not fit also keeps later large ones out; otherwise smaller claims could
        overtake it for ever. A payload larger than a limit may start when nothing else is in
        progress.
        """
        somebody_waits = False

        def fits(sender: str, size_bytes: int) -> bool:
            nonlocal somebody_waits
            if size_bytes <= SMALL_BYTES:
                return True
            held = self._held.get(sender, 0)
            if somebody_waits or (held and held + size_bytes > self._sender_bytes):
                return False
            somebody_waits = self.total > 0 and self.total + size_bytes > self._node_bytes
            return not somebody_waits

        return fits


class ClaimedChunks:
    """Which message each chunk belongs to, by sender, so that one sender's references take nothing
    from another's.
    """

    def __init__(self, capacity: int = MAX_CHUNKS) -> None:
        self._capacity = capacity
        self._owner: OrderedDict[tuple[str, int], int] = OrderedDict()

    def claim(self, sender: str, seq: int, chunks: Sequence[int]) -> int | None:
        """Record that the message at `seq` refers to these chunks. Returns another of the sender's
        messages if that one referred to one of them first.
        """
        for chunk in chunks:
            owner = self._owner.get((sender, chunk), seq)
            if owner != seq:
                return owner
        for chunk in chunks:
            self._owner[sender, chunk] = seq
            self._owner.move_to_end((sender, chunk))
        while len(self._owner) > self._capacity:
            self._owner.popitem(last=False)
        return None

    def refuse(self, message: StoredMessage) -> Refused | None:
        """Refuse, before anything is fetched, an invalid reference and one to chunks that another
        message referred to.
        """
        author = subjects.rollouts_author(message.subject)
        try:
            reference = reference_of(message)
        except BadReference as error:
            return Refused(Refusal.REFERENCE, author, str(error))
        first = None if reference is None else self.claim(author or "", message.seq, reference.chunks)
        if first is None:
            return None
        return Refused(
            Refusal.REFERENCE, author, f"its chunks belong to message {first}: each payload is stored in chunks of its own"
        )
