"""A lease in a node's bucket, taken and renewed by compare-and-set.

The rules, when a newcomer may take it and how long its holder may write, are plain state: time is
an argument, in seconds of the caller's clock, and clocks of two machines are never compared.

The lease is the fence of its process's node plane (`Transport.fenced`): every write first checks
it. That leaves a gap between the check and the write, in which a machine may be suspended for an
hour. For the keys that only this process writes, the server closes the gap: each is written by
compare-and-set, and a process that takes over a lease rewrites these keys with their present
values, so that a late write of the former holder fails.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Literal

from msgspec import structs

from shared.contracts.codec import decode, encode
from shared.contracts.control import LeaseRecord
from shared.contracts.wire import MessageError
from shared.transport.base import Conflict, KeyValue, NotConnected

_ATTEMPTS, _PAUSE_S = 10, 0.02
_WRITTEN_BY_OTHERS = "another process keeps writing it without the lease: end every process that is not a service of this version"
Verdict = Literal["take", "wait", "held"]

_HOLDERS_PART = 0.9
"""The part of a lease during which its holder writes. It is below 1, so that it stops before a
newcomer can take over even if the two clocks run at different speeds.
"""
_GAP_PART, _GAP_S = 0.2, 1.0
"""Two looks further apart than this part of a lease, or this long, do not prove that the holder was
silent in between.
"""


class Newcomer:
    """Decides, from repeated looks at a lease, whether a newcomer may take it.

    It may take a lease that was not renewed for the lease's time while the server answered
    throughout. A holder cannot renew while the server is unreachable, and must not lose its name
    for that.
    """

    def __init__(self) -> None:
        self._revision: int | None = None
        self._since_s = self._last_s = 0.0
        self.wait_s = 0.0
        """Seconds from the last look until it may take the lease, if nobody renews it."""

    def look(self, *, free: bool, revision: int, now_s: float, lease_s: float) -> Verdict:
        """Judge the lease as read at `now_s`.

        Args:
            free: nobody has it, its holder gave it up, or its holder is known to be dead.
            revision: the entry's, which grows with each renewal; 0: there is no entry.
            lease_s: the lease's time; the longer of the holder's and the newcomer's.
        """
        if free:
            return "take"
        if self._revision is not None and revision > self._revision:
            return "held"
        if self._revision is None or now_s - self._last_s > max(_GAP_S, _GAP_PART * lease_s):
            self._revision, self._since_s = revision, now_s
        self._last_s = now_s
        self.wait_s = max(0.0, lease_s - (now_s - self._since_s))
        return "take" if now_s - self._since_s >= lease_s else "wait"


class Term:
    """Time for which a holder may write without asking the server. It counts from the moment when a
    renewal was sent, which is before any newcomer could have seen it.
    """

    def __init__(self, lease_s: float) -> None:
        self._term_s = _HOLDERS_PART * lease_s
        self._until_s = float("-inf")

    def renewed(self, sent_s: float) -> None:
        self._until_s = max(self._until_s, sent_s + self._term_s)

    def holds(self, now_s: float) -> bool:
        return now_s < self._until_s


class LeaseLost(NotConnected):
    """Another process has taken this one's lease, so this one must write nothing more. Services
    treat it like an unreachable server, and the runtime ends the process.
    """


def since_boot_s() -> float:
    """Seconds since boot, including time suspended, which `time.monotonic` on Linux leaves out."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """One process's lease: taken with `look`, then renewed, then released. After `claim_keys` it is
    a `Fence`.

    lost: set when another process has taken it over; `loss` is then the message about it.
    """

    def __init__(
        self,
        kv: KeyValue,
        bucket: str,
        key: str,
        record: LeaseRecord,
        *,
        clock: Callable[[], float] = since_boot_s,
    ) -> None:
        self.kv, self.bucket, self._key, self._record = kv, bucket, key, record
        self.lease_s, self._clock = record.lease_s, clock
        self._newcomer, self._term = Newcomer(), Term(record.lease_s)
        self._revision = 0
        self._renewing = asyncio.Lock()
        self._revisions: dict[str, int] = {}
        self._writing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.lost = asyncio.Event()
        self.loss = ""
        self._held_back = ""
        self.seen: LeaseRecord | None = None
        """The holder when the lease was last read."""

    @property
    def wait_s(self) -> float:
        """Seconds from the last look until this process may take the lease, if nobody renews it."""
        return self._newcomer.wait_s

    async def look(self) -> Verdict:
        """Read the lease, and take it if the rules allow that. Raises TransportError."""
        entry = await self.kv.get(self.bucket, self._key)
        found = self.seen = _record(entry.value) if entry is not None else None
        revision = entry.revision if entry is not None else 0
        free = entry is None or (found is not None and self._may_follow(found))
        sent_s, lease_s = self._clock(), max(self.lease_s, found.lease_s if found is not None else 0.0)
        verdict = self._newcomer.look(free=free, revision=revision, now_s=sent_s, lease_s=lease_s)
        if verdict == "take":
            try:
                self._revision = await self.kv.update(self.bucket, self._key, encode(self._record), last_revision=revision)
            except Conflict:
                self._newcomer = Newcomer()
                return "wait"
            self._term.renewed(sent_s)
        return verdict

    def _may_follow(self, found: LeaseRecord) -> bool:
        """Check whether the record can belong to no other running process: it was released, or this
        process wrote it in an attempt that was not answered, or its writer held the lock file that
        this process holds now and is therefore dead.
        """
        mine = self._record
        return found.released or found.holder == mine.holder or (bool(found.place) and found.place == mine.place)

    def hold_back(self, why: str) -> None:
        """Let nothing be written for now, although the lease is this process's; "": write again."""
        self._held_back = why

    async def writable(self) -> None:
        """Return when this process may write: at once while its term runs, else after a renewal.

        Raises:
            LeaseLost: another process has the lease.
            NotConnected: it cannot be renewed now.
        """
        if self.lost.is_set():
            raise LeaseLost(self.loss)
        if self._held_back:
            raise NotConnected(self._held_back)
        if not self._term.holds(self._clock()):
            await self.renew()

    async def claim_keys(self, keys: Iterable[str]) -> None:
        """Make `keys` of the node's bucket this process's own, once the lease is taken: an earlier
        holder's writes to them fail from now on. A key that was never written stays absent. Raises
        TransportError.
        """
        self._revisions = {key: await self._rewrite(key) for key in keys}

    async def _rewrite(self, key: str) -> int:
        """The key's revision after its newest value was written again. A conflict means that the
        value came from a server that lags behind the others; it is then read again.
        """
        for _ in range(_ATTEMPTS):
            entry = await self.kv.get(self.bucket, key)
            if entry is None:
                return 0
            try:
                return await self.kv.update(self.bucket, key, entry.value, last_revision=entry.revision)
            except Conflict:
                await self.renew()
                await asyncio.sleep(_PAUSE_S)
        raise NotConnected(f"bucket {self.bucket}, key {key}: {_WRITTEN_BY_OTHERS}")

    def owns(self, bucket: str, key: str) -> bool:
        return bucket == self.bucket and key in self._revisions

    async def put(self, key: str, value: bytes) -> int:
        """Write a key of its own, if nobody else has written it since. Raises what `writable`
        raises.
        """
        await self.writable()
        async with self._writing[key]:
            for _ in range(_ATTEMPTS):
                try:
                    revision = await self.kv.update(self.bucket, key, value, last_revision=self._revisions[key])
                except Conflict:
                    # Read the key before renewing the lease: a process that takes the lease over
                    # after the read rewrites the key, and the update with the revision read here
                    # fails.
                    await asyncio.sleep(_PAUSE_S)
                    entry = await self.kv.get(self.bucket, key)
                    await self.renew()
                    self._revisions[key] = entry.revision if entry is not None else 0
                else:
                    self._revisions[key] = revision
                    return revision
        raise NotConnected(f"bucket {self.bucket}, key {key}: {_WRITTEN_BY_OTHERS}")

    async def renew(self) -> None:
        """Renew at the server, which also shows whether the lease is still this process's. Raises
        what `writable` raises.
        """
        if self._held_back:
            raise NotConnected(self._held_back)
        async with self._renewing:
            for _ in range(3):
                sent_s = self._clock()
                try:
                    self._revision = await self._write(self._record)
                except Conflict:
                    await self._look_again()
                else:
                    self._term.renewed(sent_s)
                    return
        raise NotConnected(f"{self._key} in {self.bucket}: the lease could not be renewed: trying again")

    async def release(self) -> None:
        """Release the lease for the next process. Raises TransportError."""
        async with self._renewing:
            if not self.lost.is_set():
                await self._write(structs.replace(self._record, released=True))

    async def _write(self, record: LeaseRecord) -> int:
        return await self.kv.update(self.bucket, self._key, encode(record), last_revision=self._revision)

    async def _look_again(self) -> None:
        """Find out why the entry differs from the last write known: an attempt that was not
        answered did succeed, the bucket was created again, or another process has written.
        """
        entry = await self.kv.get(self.bucket, self._key)
        found = _record(entry.value) if entry is not None else None
        if entry is not None and (found is None or found.holder != self._record.holder):
            self.loss = _lost(self._key, self.bucket, found, self.lease_s)
            self.lost.set()
            raise LeaseLost(self.loss)
        self._revision = entry.revision if entry is not None else 0


def _record(value: bytes) -> LeaseRecord | None:
    """None if it is not a record of this version; the lease then still counts as held."""
    try:
        return decode(value, LeaseRecord)
    except MessageError:
        return None


def described(record: LeaseRecord | None) -> str:
    """A description of the holder for messages."""
    return "an unknown process" if record is None else f"process {record.pid} on {record.host} (run {record.run})"


def _lost(key: str, bucket: str, by: LeaseRecord | None, lease_s: float) -> str:
    return (
        f"{described(by)} has taken over {key} of {bucket}: this process was suspended or cut off from NATS and did not renew it "
        f"for {lease_s:g} s. It stops and writes nothing more. Keep the other, or end it and start this one again"
    )
