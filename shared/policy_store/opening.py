"""Opens a policy store from a URI."""

from __future__ import annotations

from typing import Any

from shared.policy_store.base import PolicyStore, PolicyStoreError, StorePlace
from shared.registry import POLICY_STORES, policy_store_name, telling
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

        with telling(unopened, PolicyStoreError, ValueError):
            store: Any = make(given)
    except ValueError as error:
        raise PolicyStoreError(f"policy store {uri!r}: {error}: {remedy}") from error
    if not isinstance(store, PolicyStore):
        raise PolicyStoreError(
            f"{POLICY_STORES.described(name)} made a {type(store).__name__}: its entry point must be a function that returns a "
            f"PolicyStore, with all its methods: correct that, or {remedy}"
        )
    return store
