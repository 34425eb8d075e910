"""From a URI to a policy store."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from shared.policy_store.base import PolicyStore, PolicyStoreError
from shared.policy_store.chain import ChainStore
from shared.policy_store.jetstream import JetStreamStore
from shared.policy_store.volume import VolumeStore
from shared.transport.base import Transport

_NATS_ANCHOR_EVERY = 16
"""By default. A reader that joins fetches 15 deltas at most."""


def open_policy_store(
    uri: str,
    transport: Transport | None,
    node: str,
    *,
    replicas: int = 1,
    create: bool = True,
    scratch: Path | None = None,
    anchor_every: int = 0,
) -> PolicyStore:
    """The store at `uri`.

    Args:
        uri: `file:///folder`, or `nats://` for a stream of the node plane that `transport` is connected to.
        transport: The node plane; may be None for `file://`.
        node: The node whose policies these are.
        replicas: Copies of the stream, for `nats://`.
        create: Whether this process may make that stream (`nats.create_streams`).
        scratch: A folder of the writer's own; None for a reader, or a writer of full copies alone.
        anchor_every: Policies from one full copy to the next (`policy_store.anchor_every`).

    Raises:
        PolicyStoreError: the uri names no store.
    """
    remedy = "set policy_store.uri to file:///folder or nats://"
    parts = urlsplit(uri)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise PolicyStoreError(f"policy store {uri}: a file uri has three slashes and an absolute path: {remedy}")
        return ChainStore(VolumeStore(Path(unquote(parts.path)), node), node, scratch, anchor_every or 1)
    if parts.scheme == "nats":
        if parts.netloc or parts.path.strip("/"):
            raise PolicyStoreError(f"policy store {uri}: policies go through nats.node_url, no server is named here: {remedy}")
        if transport is None:
            raise PolicyStoreError(f"policy store {uri}: not connected to the node plane: {remedy}")
        store = JetStreamStore(transport, node, replicas, create=create)
        return ChainStore(store, node, scratch, anchor_every or _NATS_ANCHOR_EVERY)
    raise PolicyStoreError(f"policy store {uri!r}: unknown scheme: {remedy}")
