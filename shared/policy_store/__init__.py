"""How policies get from the trainer to the generators: content-addressed weight files on a shared
volume or in JetStream.

What a policy is, and when there is a new one, is decided elsewhere; nothing here imports torch.
"""

from shared.policy_store.base import PolicyDamagedError, PolicyStore, PolicyStoreError, StoredPolicy
from shared.policy_store.opening import open_policy_store

__all__ = ["PolicyDamagedError", "PolicyStore", "PolicyStoreError", "StoredPolicy", "open_policy_store"]
