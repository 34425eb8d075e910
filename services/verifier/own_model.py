"""What the verifier knows about this node's policy, learned from local groups so that it need not
load a model.
"""

from __future__ import annotations

from shared.contracts.messages import ModelIdentity, RolloutGroup


class OwnModel:
    """Name and tokenizer of the policy that made the newest local group; None before the first
    one.
    """

    def __init__(self) -> None:
        self.identity: ModelIdentity | None = None
        self.policy_version = 0

    def learn(self, group: RolloutGroup) -> None:
        """Learn from a local group."""
        self.identity = group.model
        self.policy_version = max(self.policy_version, group.policy_version)

    def same_tokenizer(self, group: RolloutGroup) -> bool:
        """Whether the token ids of a foreign group have the same meaning here."""
        return self.identity is not None and self.identity.tokenizer_hash == group.model.tokenizer_hash
