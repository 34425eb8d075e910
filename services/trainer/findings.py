"""Reports the trainer's findings about foreign text to this node's verifiers: how many of a
sender's answers in a batch were absurd.

It only reports; the verifiers decide what counts against whom
(`services.verifier.reputation`). Only text that is absurd under the policy is reported.
Whether a group's gradient opposes the trend of held-out results is not measured: that takes a
gradient of the held-out set, which costs as much as a step; one group's gradient is noise by
comparison; and a group that is right where the policy is wrong, which is the purpose of foreign
groups, opposes it too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from shared.contracts.codec import encode
from shared.contracts.senders import FINDINGS_KEY, MAX_FINDINGS, AbsurdText, TrainerFindings
from shared.contracts.subjects import node_bucket
from shared.transport.base import Transport


def absurd_text(batch: int, absurd_of: Mapping[str, int], trained_of: Mapping[str, int]) -> list[AbsurdText]:
    """One finding for each node in `absurd_of` (absurd answers by node); `trained_of` counts its
    answers that were trained on.

    Answers that were left out for another reason, or as candidates, are ignored. Those that were
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
