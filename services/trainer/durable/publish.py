"""Publishes a new policy to the generators: first a file, then an entry in the policy store, then
the pointer to it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

from msgspec import structs

from services.trainer.state import TrainedPosition
from shared.contracts.codec import decode, encode
from shared.contracts.control import PolicyPointer, PolicyRefusal
from shared.contracts.subjects import POLICY_KEY, POLICY_REFUSED_KEY, node_bucket
from shared.contracts.wire import MessageError
from shared.policy_store import PolicyStore, StoredPolicy
from shared.transport.base import Transport

ANSWERS = 3
"""How often one version is published again. Without this limit a generator that cannot see the
store at all would cause it to be sent for ever.
"""

Decision = Literal["publish", "confirm", "hold", "step_back"]


def publication(version: int, pointer_version: int | None, *, log_exhausted: bool) -> Decision:
    """What to do with the policy of `version` if the pointer names `pointer_version` (None: the
    base policy).

    While a resumed trainer replays its log, older policies stay unpublished (`hold`); when it
    reaches the published version, it confirms that its bytes are the same (`confirm`). If the log
    ends before that version, batches were lost, and the generators must return to the policy that
    is trained (`step_back`).
    """
    if pointer_version is None:
        return "publish" if version > 0 else "hold"
    if version > pointer_version:
        return "publish"
    if version == pointer_version:
        return "confirm"
    return "step_back" if log_exhausted else "hold"


class Publisher:
    """Publishes policies of one node and remembers which one is published."""

    def __init__(self, store: PolicyStore, transport: Transport, *, node: str, staging: Path, keep: int) -> None:
        self._store = store
        self._transport = transport
        self._bucket = node_bucket(node)
        self._staging = staging
        self._keep = keep
        self._pruned_at: int | None = None
        self._unannounced: tuple[int, StoredPolicy] | None = None
        """A version that is stored but whose pointer could not be written; the next attempt does
        not store it again.
        """
        self._answered: bytes | None = None
        """The refusal handled last."""
        self._begun: list[int] = []
        """The published version, once for each time that it was published again."""
        self.pointer: PolicyPointer | None = None
        self.sent_bytes = 0
        self.sent_kind: Literal["full", "delta"] = "full"
        """Kind and size in bytes of the newest publication."""

    async def read_pointer(self) -> None:
        """Read which policy is published. None if the pointer is damaged or in an earlier format;
        the trainer then publishes its own again.

        Raises:
            MessageError: the pointer is of a later schema version.
        """
        entry = await self._transport.kv.get(self._bucket, POLICY_KEY)
        try:
            self.pointer = decode(entry.value, PolicyPointer) if entry is not None else None
        except MessageError as error:
            if error.reason == "schema_version":
                raise
            self.pointer = None

    async def publish(self, write: Callable[[Path], Awaitable[None]], position: TrainedPosition) -> bool:
        """Publish the policy that `write` writes into a file. Returns whether the pointer changed.

        Raises:
            OSError: disk full.
            TransportError: server unreachable.
            PolicyStoreError: the store refuses.

        On any error the old policy stays published.
        """
        version = position.batch_number
        if self._unannounced is not None and self._unannounced[0] == version:
            stored = self._unannounced[1]
        else:
            stored = await self._put(write, version)
            self._unannounced = version, stored
        pointer = PolicyPointer(
            version=version,
            sha256=stored.sha256,
            size_bytes=stored.size_bytes,
            uri=stored.uri,
            consumed_local=position.consumed_local,
            created_at=time.time(),
            anchor=stored.anchor,
            deltas=list(stored.deltas),
        )
        self.sent_bytes, self.sent_kind = stored.sent_bytes, "delta" if stored.deltas else "full"
        old = self.pointer
        if old is None or structs.replace(old, created_at=0.0) != structs.replace(pointer, created_at=0.0):
            await self._transport.kv.put(self._bucket, POLICY_KEY, encode(pointer))
            self.pointer = pointer
        self._unannounced = None
        return self.pointer is pointer

    async def refused(self, position: TrainedPosition) -> PolicyRefusal | None:
        """A generator's refusal of the published policy or of one that it is built from; None: no
        new refusal.

        Raises:
            TransportError: the server is unreachable.
            MessageError: the key's value is not a refusal.
        """
        if self.pointer is None or self.pointer.version != position.batch_number:
            return None
        entry = await self._transport.kv.get(self._bucket, POLICY_REFUSED_KEY)
        if entry is None or entry.value == self._answered:
            return None
        refusal = decode(entry.value, PolicyRefusal)
        self._answered = entry.value
        if (refusal.version, refusal.sha256) not in _made_of(self.pointer) or self._begun.count(self.pointer.version) >= ANSWERS:
            return None
        return refusal

    def begin_again(self) -> None:
        """Make the next publication a full copy, even if this version is already published."""
        assert self.pointer is not None
        self._begun = [version for version in self._begun if version == self.pointer.version] + [self.pointer.version]
        self._unannounced = None
        self._store.begin_again()

    async def _put(self, write: Callable[[Path], Awaitable[None]], version: int) -> StoredPolicy:
        self._staging.mkdir(parents=True, exist_ok=True)
        file = self._staging / f"{version}.safetensors"
        try:
            await write(file)
            return await self._store.publish(file, version)
        finally:
            file.unlink(missing_ok=True)

    async def prune(self) -> None:
        """Delete all policies from the store except the newest `keep` and those that the pointer
        needs. Does nothing if the pointer belongs to another process: a store on a volume knows
        no lease, and what that process has published since would be deleted as unknown to this one.
        """
        if self.pointer is None or self.pointer.version == self._pruned_at:
            return
        entry = await self._transport.kv.get(self._bucket, POLICY_KEY)
        if entry is None or entry.value != encode(self.pointer):
            return
        newest = self.pointer.version
        needed = {delta.file.version for delta in self.pointer.deltas}
        if self.pointer.anchor is not None:
            needed.add(self.pointer.anchor.version)
        if self._unannounced is not None:
            needed.add(self._unannounced[0])
        await self._store.prune(needed | set(range(max(0, newest - self._keep + 1), newest + 1)))
        self._pruned_at = newest


def _made_of(pointer: PolicyPointer) -> set[tuple[int, str]]:
    """Version and sha256 of the policy and of every earlier one that its deltas pass through."""
    steps = {(delta.file.version, delta.makes) for delta in pointer.deltas}
    first = {(pointer.anchor.version, pointer.anchor.sha256)} if pointer.anchor is not None else set()
    return {(pointer.version, pointer.sha256)} | steps | first
