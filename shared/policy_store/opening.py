"""Opens a policy store from a URI."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from shared.policy_store.base import PolicyStore, PolicyStoreError, StorePlace
from shared.registry import POLICY_STORES
from shared.transport.base import Transport


def open_policy_store(uri: str, transport: Transport | None, node: str, **place: Any) -> PolicyStore:
    """The store at `uri`, selected by its scheme.

    Args:
        uri: `file:///folder`, `nats://` for a stream of the node plane that `transport` is
            connected to, or a URI with the scheme of a `swarm.policy_stores` entry point.
        transport: The node plane; may be None for `file://`.
        node: The node whose policies these are.
        place: The other fields of `StorePlace`.

    Raises:
        PolicyStoreError: the uri names no store, or the store cannot be imported.
    """
    remedy = "set policy_store.uri to file:///folder or nats://"
    scheme = urlsplit(uri).scheme
    if not scheme:
        raise PolicyStoreError(f"policy store {uri!r} has no scheme: {remedy}")
    try:
        store: PolicyStore = POLICY_STORES.load(scheme)(StorePlace(uri=uri, node=node, transport=transport, **place))
    except ValueError as error:
        raise PolicyStoreError(f"policy store {uri!r}: {error}: {remedy}") from error
    return store
