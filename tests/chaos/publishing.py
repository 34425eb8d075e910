"""A publisher under load that remembers what was acknowledged, and the check that all of it is
there once.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from shared.transport.base import StreamSpec, Transport, TransportError

SUBJECT = "chaos.load"


def load_stream(replicas: int = 1) -> StreamSpec:
    """Where the load goes."""
    return StreamSpec(name="CHAOS_LOAD", subjects=(SUBJECT,), duplicate_window_s=600.0, replicas=replicas)


class Load:
    """Publishes numbered messages one after the other, each until it is acknowledged, as the
    generator does.
    """

    def __init__(self, transport: Transport, name: str, size_bytes: int = 2000) -> None:
        self._transport = transport
        self._name = name
        self._padding = b"." * size_bytes
        self._running = True
        self.acknowledged: list[str] = []
        self.at: list[float] = []
        self.errors = Counter[str]()

    async def run(self) -> None:
        """Publish until `stop`."""
        number = 0
        while self._running:
            message_id = f"{self._name}-{number}"
            try:
                payload = message_id.encode() + self._padding
                await self._transport.publish(SUBJECT, payload, stream="CHAOS_LOAD", message_id=message_id, timeout_s=2.0)
            except TransportError as error:
                self.errors[type(error).__name__] += 1
                await asyncio.sleep(0.05)
            else:
                self.acknowledged.append(message_id)
                self.at.append(time.monotonic())
                number += 1
                await asyncio.sleep(0)

    def stop(self) -> None:
        """End after the message under way."""
        self._running = False

    def longest_pause_s(self) -> float:
        """Longest time between two acknowledgements."""
        return max((later - earlier for earlier, later in zip(self.at, self.at[1:], strict=False)), default=0.0)


async def stored_ids(transport: Transport) -> Counter[str]:
    """Every message id in the stream and how often it is there."""
    found: Counter[str] = Counter()
    last_seq = (await transport.stream_state("CHAOS_LOAD")).last_seq
    seq = 1
    while seq <= last_seq:
        messages = await transport.read("CHAOS_LOAD", seq, 1000)
        assert messages, f"the stream says it goes to {last_seq} and gives nothing at {seq}"
        for message in messages:
            assert message.inline is not None
            found[message.inline.rstrip(b".").decode()] += 1
        seq = messages[-1].seq + 1
    return found


def lost_and_duplicated(acknowledged: list[str], stored: Counter[str]) -> tuple[int, int]:
    """Count acknowledged messages that are lost, and messages that are there more than once."""
    return sum(stored[each] == 0 for each in acknowledged), sum(count - 1 for count in stored.values())
