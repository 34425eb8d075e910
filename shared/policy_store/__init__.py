"""Transfers policies from the trainer to the generators as content-addressed weight files, on a
shared volume or in JetStream.

Which policy is published, and when, is decided elsewhere; nothing here imports torch.
"""

from shared.policy_store.base import PolicyDamagedError, PolicyStore, PolicyStoreError, StoredPolicy, open_policy_store

__all__ = ["PolicyDamagedError", "PolicyStore", "PolicyStoreError", "StoredPolicy", "open_policy_store"]
