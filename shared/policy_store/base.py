"""The interface of a policy store, and its errors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from shared.contracts.control import PolicyDelta, PolicyFile, PolicyPointer
from shared.transport.base import Transport


class PolicyStoreError(Exception):
    """A policy could not be stored or may not be used; the message names the version, the cause and
    the remedy.
    """


class PolicyDamagedError(PolicyStoreError):
    """A policy is gone or not the bytes that were announced: no waiting helps, it must be published
    again.
    """


class StoredPolicy(NamedTuple):
    """Where a policy was stored, as it goes into a `PolicyPointer`."""

    sha256: str
    size_bytes: int
    uri: str
    anchor: PolicyFile | None = None
    deltas: tuple[PolicyDelta, ...] = ()

    @property
    def sent_bytes(self) -> int:
        """What readers that have the policy before must fetch."""
        return self.deltas[-1].file.size_bytes if self.deltas else self.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlace:
    """What a policy store is told.

    uri: `policy_store.uri`. node: the node whose policies these are. transport: its node plane;
    None where there is none. replicas: copies of a stream. create: whether this process may make
    streams (`nats.create_streams`). scratch: a folder of the writer's own; None for a reader, or a
    writer of full copies alone. anchor_every: policies from one full copy to the next
    (`policy_store.anchor_every`); 0 for the store's choice.
    """

    uri: str
    node: str
    transport: Transport | None = None
    replicas: int = 1
    create: bool = True
    scratch: Path | None = None
    anchor_every: int = 0


class PolicyStore(Protocol):
    """Weight files by version and content. One writer (the trainer), any number of readers."""

    async def publish(self, weights_file: Path, version: int) -> StoredPolicy:
        """Take over `weights_file`, which may be gone afterwards.

        When this returns, any reader can fetch the policy; a failure leaves nothing visible.

        Raises:
            PolicyStoreError: the file cannot be read, or the store cannot take it (disk full,
                server away).
        """
        ...

    def begin_again(self) -> None:
        """What is published next needs nothing of what was published before: a reader could not
        fetch that.
        """
        ...

    async def fetch(self, pointer: PolicyPointer | PolicyFile, into: Path) -> Path:
        """A local file with exactly the bytes that `pointer` names: size and sha256 are checked
        before this returns.

        Args:
            pointer: What the trainer announced.
            into: Folder of the caller's own for a download; a store on a volume returns the file in
                place.

        Raises:
            PolicyStoreError: gone, truncated or different. The caller keeps its old policy and
                tries again with the newest pointer.
        """
        ...

    async def prune(self, keep: Collection[int]) -> None:
        """Forget every version that is not in `keep`. What a kept version needs is never
        touched.
        """
        ...


def policy_label(node: str, version: int) -> str:
    """How errors name a policy: `policy alpha@41`."""
    return f"policy {node}@{version}"


def wrong_size(label: str, where: str, expected: int, got: int) -> PolicyDamagedError:
    """The error for a file of another size."""
    return PolicyDamagedError(
        f"{label}: truncated or overwritten: expected {expected} bytes, {where} has {got}: not loaded; "
        "the trainer is asked to publish it again"
    )


def wrong_hash(label: str, where: str, expected: str, got: str) -> PolicyDamagedError:
    """The error for other bytes than were announced."""
    return PolicyDamagedError(
        f"{label}: sha256 mismatch (expected {expected[:12]}.., got {got[:12]}.. in {where}): not loaded; "
        "the trainer is asked to publish it again"
    )
