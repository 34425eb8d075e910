"""The interface of a policy store, and its errors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from shared.contracts.control import PolicyDelta, PolicyFile, PolicyPointer
from shared.registry import POLICY_STORES, plugin_errors, policy_store_name
from shared.transport.base import Transport


class PolicyStoreError(Exception):
    """A policy could not be stored or must not be used. The message names the version, the cause
    and the remedy.
    """


class PolicyDamagedError(PolicyStoreError):
    """A policy is missing or its bytes are not the announced ones. Waiting does not help; it must
    be published again.
    """


class StoredPolicy(NamedTuple):
    """Where a policy was stored, as written into a `PolicyPointer`."""

    sha256: str
    size_bytes: int
    uri: str
    anchor: PolicyFile | None = None
    deltas: tuple[PolicyDelta, ...] = ()

    @property
    def sent_bytes(self) -> int:
        """Number of bytes that a reader which has the previous policy must fetch."""
        return self.deltas[-1].file.size_bytes if self.deltas else self.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlace:
    """Arguments with which a policy store is opened.

    uri: `policy_store.uri`. node: the node whose policies these are. transport: its node plane;
    None if there is none. replicas: copies of a stream. create: whether this process may create
    streams (`nats.create_streams`). scratch: a folder of the writer's own; None for a reader, or
    for a writer of full copies only. anchor_every: number of policies from one full copy to the
    next; 0: the store's default.
    """

    uri: str
    node: str
    transport: Transport | None = None
    replicas: int = 1
    create: bool = True
    scratch: Path | None = None
    anchor_every: int = 0


@runtime_checkable
class PolicyStore(Protocol):
    """Weight files by version and content, with one writer (the trainer) and any number of
    readers.
    """

    async def publish(self, weights_file: Path, version: int) -> StoredPolicy:
        """Store `weights_file`, which the store may move.

        When this returns, any reader can fetch the policy. A failure leaves nothing visible.

        Raises:
            PolicyStoreError: the file cannot be read, or the store cannot take it (disk full,
                server unreachable).
        """
        ...

    def begin_again(self) -> None:
        """Make the next policy independent of all earlier ones, because a reader could not fetch
        those.
        """
        ...

    async def fetch(self, pointer: PolicyPointer | PolicyFile, into: Path) -> Path:
        """A local file with exactly the bytes that `pointer` names. Size and sha256 are checked
        before this returns.

        Args:
            pointer: The trainer's announcement.
            into: A folder of the caller's own for downloads. A store on a volume returns the file
                in place.

        Raises:
            PolicyStoreError: missing, truncated or different. The caller should keep its old policy
                and try again with the newest pointer.
        """
        ...

    async def prune(self, keep: Collection[int]) -> None:
        """Delete every version that is not in `keep`, but never what a kept version needs."""
        ...


def policy_label(node: str, version: int) -> str:
    """Name a policy for errors: `policy alpha@41`."""
    return f"policy {node}@{version}"


def wrong_size(label: str, where: str, expected: int, got: int) -> PolicyDamagedError:
    """The error for a file of the wrong size."""
    return PolicyDamagedError(
        f"{label}: truncated or overwritten: expected {expected} bytes, {where} has {got}: not loaded; "
        "the trainer is asked to publish it again"
    )


def wrong_hash(label: str, where: str, expected: str, got: str) -> PolicyDamagedError:
    """The error for bytes that are not the announced ones."""
    return PolicyDamagedError(
        f"{label}: sha256 mismatch (expected {expected[:12]}.., got {got[:12]}.. in {where}): not loaded; "
        "the trainer is asked to publish it again"
    )


# Opens a policy store from a URI.


def open_policy_store(uri: str, transport: Transport | None, node: str, **place: Any) -> PolicyStore:
    """The store at `uri`, selected by its scheme.

    Args:
        uri: `file:///folder`, `nats://` for a stream of the node plane that `transport` is
            connected to, or a URI with the scheme of a `swarm.policy_stores` entry point.
        transport: The node plane; may be None for `file://`.
        node: The node whose policies these are.
        place: The other fields of `StorePlace`.

    Raises:
        PolicyStoreError: the uri names no store, or the store cannot be imported or opened, or what
            its entry point returns is not a `PolicyStore`.
    """
    remedy = "set policy_store.uri to file:///folder or nats://"
    given = StorePlace(uri=uri, node=node, transport=transport, **place)
    try:
        name = policy_store_name(uri)
        make = POLICY_STORES.load_function(name)

        def unopened(why: str) -> PolicyStoreError:
            return PolicyStoreError(
                f"{POLICY_STORES.described(name)} cannot be opened: {why}: correct its entry point, or {remedy}"
            )

        with plugin_errors(unopened, PolicyStoreError, ValueError):
            store: Any = make(given)
    except ValueError as error:
        raise PolicyStoreError(f"policy store {uri!r}: {error}: {remedy}") from error
    if not isinstance(store, PolicyStore):
        raise PolicyStoreError(
            f"{POLICY_STORES.described(name)} made a {type(store).__name__}: its entry point must be a function that returns a "
            f"PolicyStore, with all its methods: correct that, or {remedy}"
        )
    return store
