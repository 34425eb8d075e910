"""Groups that steps leave out, and who is told: the log, of each reason once, with a remedy; and
the node's verifiers, of absurd foreign text. How many there are is in the metrics.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from services.trainer.selection.group_tokens import GROUP_BUDGET, SENDER_BUDGET
from shared.contracts.codec import encode
from shared.contracts.senders import MAX_FINDINGS, AbsurdText, TrainerFindings
from shared.contracts.subjects import FINDINGS_KEY, node_bucket
from shared.transport.base import Transport

_FORMAT = "compare the tokenizer's and the generator's model (model.path, model.revision)"
REMEDIES = {
    "unscored": "see the verifier's log for why it gave no rewards",
    "empty": "one now and then needs none: such a group has no tokens to train on; often: raise generator.max_new_tokens",
    "too_long": "raise model.max_length, or lower generator.max_new_tokens",
    "malformed_tokens": _FORMAT,
    "unknown_token": _FORMAT,
    "text_alone": "use an engine that returns token ids; a server of text alone can generate but not be trained from",
    "control_text": "nothing: foreign text that contains the model's control tokens is not trained on",
    "changed_question": "correct the model's chat template, which cannot write such questions, or not as they are",
    "absurd": "nothing: a few answers of other nodes are always too unlikely under this node's policy, and many for a while if "
    "a node was stopped or is behind (docs/security.md)",
    "truncated": "raise generator.max_new_tokens, or set trainer.drop_truncated = false",
    "negative": "nothing: no answer of these groups has an advantage of 0 or more, and the others are left out (trainer.foreign)",
    GROUP_BUDGET: "nothing: one group may cost only so much of a step (trainer.constants.foreign_cost_factor)",
    SENDER_BUDGET: "nothing: a sender's groups may cost only so much of a step (trainer.constants.foreign_cost_factor)",
}


def remedies(skipped: Mapping[str, int]) -> dict[str, str]:
    """The remedy for each reason in `skipped`."""
    return {reason: REMEDIES[reason] for reason in skipped if reason in REMEDIES}


# The verifiers decide what counts against whom (`services.verifier.reputation`). Only text
# that is absurd under the policy is reported. Whether a group's gradient opposes the trend of
# held-out results is not measured: that takes a gradient of the held-out set, which costs as much
# as a step; one group's gradient is noise by comparison; and a group that is right where the policy
# is wrong, which is the purpose of foreign groups, opposes it too.


def absurd_text(batch: int, absurd_of: Mapping[str, int], trained_of: Mapping[str, int]) -> list[AbsurdText]:
    """One finding for each node in `absurd_of` (absurd answers by node); `trained_of` counts its
    answers that were trained on.

    Answers that were left out for another reason, or without a place, are ignored. Those that were
    not checked count as good.
    """
    return [
        AbsurdText(batch=batch, sender=node, absurd=count, answers=count + trained_of.get(node, 0))
        for node, count in sorted(absurd_of.items())
        if count > 0
    ]


class Findings:
    """The newest findings; they are written when there are new ones."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._found: deque[AbsurdText] = deque(maxlen=MAX_FINDINGS)
        self._untold = False

    def note(self, batch: int, absurd_of: Mapping[str, int], trained_of: Mapping[str, int]) -> None:
        """Record the findings of batch `batch`; see `absurd_text`."""
        found = absurd_text(batch, absurd_of, trained_of)
        self._found.extend(found)
        self._untold = self._untold or bool(found)

    async def tell(self, plane: Transport, now_s: float) -> None:
        """Write the findings if there are new ones.

        Raises:
            TransportError: the node plane does not answer; the next call writes them.
        """
        if not self._untold:
            return
        message = TrainerFindings(node=self._node, updated_at=now_s, found=list(self._found))
        await plane.kv.put(node_bucket(self._node), FINDINGS_KEY, encode(message))
        self._untold = False
