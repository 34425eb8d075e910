"""Decides which replica makes which task draw, and how far ahead of the trainer it may be: pure
functions over the shared ledger, and its copy in the node's bucket (`DrawLedger`).

A node numbers its task draws 0, 1, 2, ...; a draw's number determines its task. Replicas of the
generator claim ranges of draws from one ledger by compare-and-set, so no draw is made twice. A
range that was claimed but never finished (its replica died) is handed out again, so none is skipped
either. Therefore `next_draw` equals *accepted + running* in the admission rule.

Admission (after AReaL's staleness manager): with I local groups per step, staleness bound S and
policy version v, `(S + v + 1) * I - accepted - running` more groups may be started. Here `v * I` is
the number of local groups in all batches up to the trainer's (`consumed_local`, which is the same
number if no batch was short or filled up). Groups that were given up are added back
(`dropped_local`); otherwise the trainer would wait for them for ever.

If I moves (`sampler.adapt`), the rule uses what the existing batches actually took:
`consumed_with_moving_i`.

Example with I = 4, S = 1: at version 0 draws 0..7 may start. Batch 1 takes 0..3 (staleness 0).
While it is trained on, 4..7 wait for batch 2, which trains on version 1: staleness 1. After version
1 is published draws 8..11 may start.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from msgspec.structs import replace

from shared.cancelling import cancel_and_wait
from shared.contracts.codec import decode, encode
from shared.contracts.control import DrawLease, SamplerPosition, TaskLedger
from shared.contracts.subjects import LEDGER_KEY, node_bucket
from shared.contracts.wire import MessageError
from shared.runtime import FatalError
from shared.runtime.logs import Log
from shared.transport.base import Conflict, NotConnected, Transport, TransportError


def draws_allowed(ledger: TaskLedger, *, groups_per_step: int, max_staleness: int, consumed_local: int, dropped_local: int) -> int:
    """Count the draws that may be handed out now; never negative."""
    limit = (max_staleness + 1) * groups_per_step + consumed_local + dropped_local
    return max(0, limit - ledger.next_draw)


def consumed_with_moving_i(position: SamplerPosition, *, groups_per_step: int, version: int) -> int:
    """The value for the argument `consumed_local` of `draws_allowed` when I moves;
    `groups_per_step` is the I that the sampler announced.

    If m batches exist that took C local groups, draws up to C + (max_staleness + 1 + version - m) *
    I can be used in time: those batches are complete, and every later one for which policy
    `version` is fresh enough takes I. Neither side waits for ever: once all m have been trained on,
    (max_staleness + 1) * I >= I draws are allowed beyond what they consumed.
    """
    return position.consumed_local + (version - position.batch_number) * groups_per_step


def claim(
    ledger: TaskLedger, *, replica: str, max_count: int, allowed: int, now_s: float, lease_s: float
) -> tuple[TaskLedger, DrawLease] | None:
    """Take a range of draws: one whose lease has expired if there is any, else up to
    `min(max_count, allowed)` new ones.

    A lease expires unless it is renewed, so callers `renew` the ranges that they work on.

    Returns:
        The new ledger and the lease, or None if there is nothing to take.
    """
    for position, lease in enumerate(ledger.leases):
        if lease.expires_at <= now_s:
            taken = DrawLease(first=lease.first, count=lease.count, replica=replica, expires_at=now_s + lease_s)
            leases = [*ledger.leases[:position], taken, *ledger.leases[position + 1 :]]
            return replace(ledger, leases=leases), taken
    count = min(max_count, allowed)
    if count <= 0:
        return None
    taken = DrawLease(first=ledger.next_draw, count=count, replica=replica, expires_at=now_s + lease_s)
    return replace(ledger, next_draw=ledger.next_draw + count, leases=[*ledger.leases, taken]), taken


def release_own(ledger: TaskLedger, *, replica: str, now_s: float) -> TaskLedger:
    """At start: expire the leases that this replica held before its restart."""
    return replace(
        ledger,
        leases=[
            DrawLease(first=e.first, count=e.count, replica=e.replica, expires_at=now_s) if e.replica == replica else e
            for e in ledger.leases
        ],
    )


def renew(ledger: TaskLedger, *, replica: str, first: int, now_s: float, lease_s: float) -> TaskLedger:
    """Extend a running lease. No change if another replica has it by now."""
    return replace(
        ledger,
        leases=[
            DrawLease(first=e.first, count=e.count, replica=e.replica, expires_at=now_s + lease_s)
            if (e.replica, e.first) == (replica, first)
            else e
            for e in ledger.leases
        ],
    )


def finish(ledger: TaskLedger, *, first: int) -> TaskLedger:
    """All groups of the range that starts at `first` are stored. Safe to call twice."""
    return replace(ledger, leases=[e for e in ledger.leases if e.first != first])


def with_secret(ledger: TaskLedger, fresh: bytes) -> TaskLedger:
    """The ledger with `fresh` as its secret, unless it has one already."""
    return ledger if ledger.secret else replace(ledger, secret=fresh)


class DrawLedger:
    """Claims and finishes ranges of task draws for one generator replica. Each call raises
    FatalError if the ledger cannot be read.
    """

    def __init__(self, transport: Transport, node: str, replica: str, lease_s: float) -> None:
        self._transport = transport
        self._bucket = node_bucket(node)
        self._replica = replica
        self._lease_s = lease_s
        self.allowed = 0
        """How many more draws could be handed out when this replica last asked, before it claimed
        any.
        """

    async def release_own(self) -> None:
        """Give back the draws that this replica claimed before its restart."""
        await self._change(lambda ledger: release_own(ledger, replica=self._replica, now_s=time.time()))

    async def secret(self) -> bytes:
        """The key of this node's draws: 16 random bytes, created once for all replicas and stored
        in the ledger.
        """
        fresh = secrets.token_bytes(16)
        return (await self._change(lambda ledger: with_secret(ledger, fresh))).secret

    async def claim(
        self, max_count: int, *, groups_per_step: int, max_staleness: int, consumed_local: int, dropped_local: int
    ) -> DrawLease | None:
        """Claim the next range. None if the trainer must catch up first."""
        taken: DrawLease | None = None

        def step(ledger: TaskLedger) -> TaskLedger | None:
            nonlocal taken
            allowed = draws_allowed(
                ledger,
                groups_per_step=groups_per_step,
                max_staleness=max_staleness,
                consumed_local=consumed_local,
                dropped_local=dropped_local,
            )
            self.allowed = allowed
            claimed = claim(
                ledger, replica=self._replica, max_count=max_count, allowed=allowed, now_s=time.time(), lease_s=self._lease_s
            )
            if claimed is None:
                taken = None
                return None
            changed, taken = claimed
            return changed

        await self._change(step)
        return taken

    @asynccontextmanager
    async def renewed(self, lease: DrawLease, log: Log) -> AsyncIterator[None]:
        """Keep renewing a lease inside the block, every third of its duration."""

        async def renew() -> None:
            while True:
                await asyncio.sleep(self._lease_s / 3)
                try:
                    await self.renew(lease.first)
                except TransportError as error:
                    log.warning("lease_not_renewed", reason=str(error))

        renewing = asyncio.create_task(renew())
        try:
            yield
        finally:
            await cancel_and_wait(renewing)

    async def renew(self, first: int) -> None:
        """Keep a range that is still being worked on."""
        await self._change(
            lambda ledger: renew(ledger, replica=self._replica, first=first, now_s=time.time(), lease_s=self._lease_s)
        )

    async def finish(self, first: int) -> None:
        """Mark a range as stored."""
        await self._change(lambda ledger: finish(ledger, first=first))

    async def _change(self, step: Callable[[TaskLedger], TaskLedger | None], timeout_s: float = 30.0) -> TaskLedger:
        """Read, apply `step`, compare-and-set, and repeat after a conflict, because all replicas of
        a node write this one key. `step` may run many times and must be pure; if it returns None
        the ledger stays unchanged. The random pause keeps replicas that collided from colliding
        again.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            entry = await self._transport.kv.get(self._bucket, LEDGER_KEY)
            ledger = TaskLedger() if entry is None else self._decode(entry.value)
            changed = step(ledger)
            if changed is None or changed == ledger:
                return ledger
            try:
                revision = 0 if entry is None else entry.revision
                await self._transport.kv.update(self._bucket, LEDGER_KEY, encode(changed), last_revision=revision)
            except Conflict:
                if time.monotonic() > deadline:
                    raise NotConnected(f"ledger of task draws: lost every compare-and-set for {timeout_s:.0f} s") from None
                await asyncio.sleep(random.uniform(0.0, 0.02))
            else:
                return changed

    def _decode(self, value: bytes) -> TaskLedger:
        try:
            return decode(value, TaskLedger)
        except MessageError as error:
            raise FatalError(
                f"the ledger of task draws (key {LEDGER_KEY} of the bucket {self._bucket}) cannot be read ({error}): run all of "
                "the node's generators in the version that wrote it; if they do, the bucket is damaged: restore the NATS server's "
                "JetStream store, or start over with a new node.id"
            ) from None
