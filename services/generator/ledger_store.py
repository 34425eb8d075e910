"""The shared ledger in the node's key-value bucket, changed by compare-and-set."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from services.generator import ledger as rules
from shared.cancelling import cancel_and_wait
from shared.contracts.codec import decode, encode
from shared.contracts.control import DrawLease, TaskLedger
from shared.contracts.subjects import LEDGER_KEY, node_bucket
from shared.contracts.wire import MessageError
from shared.runtime import FatalError
from shared.runtime.logs import Log
from shared.transport.base import Conflict, NotConnected, Transport, TransportError


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
        await self._change(lambda ledger: rules.release_own(ledger, replica=self._replica, now_s=time.time()))

    async def secret(self) -> bytes:
        """The key of this node's draws: 16 random bytes, created once for all replicas and stored
        in the ledger.
        """
        fresh = secrets.token_bytes(16)
        return (await self._change(lambda ledger: rules.with_secret(ledger, fresh))).secret

    async def claim(
        self, max_count: int, *, groups_per_step: int, max_staleness: int, consumed_local: int, dropped_local: int
    ) -> DrawLease | None:
        """Claim the next range. None if the trainer must catch up first."""
        taken: DrawLease | None = None

        def step(ledger: TaskLedger) -> TaskLedger | None:
            nonlocal taken
            allowed = rules.draws_allowed(
                ledger,
                groups_per_step=groups_per_step,
                max_staleness=max_staleness,
                consumed_local=consumed_local,
                dropped_local=dropped_local,
            )
            self.allowed = allowed
            claimed = rules.claim(
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
            lambda ledger: rules.renew(ledger, replica=self._replica, first=first, now_s=time.time(), lease_s=self._lease_s)
        )

    async def finish(self, first: int) -> None:
        """Mark a range as stored."""
        await self._change(lambda ledger: rules.finish(ledger, first=first))

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
