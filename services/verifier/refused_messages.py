"""Handles refused foreign messages: counts them, records them, logs them in detail, and tells the
operator about those that he can do something about.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from services.verifier.border import Candidate
from services.verifier.figures import Figures
from services.verifier.other_tasks import TOLD_AFTER, OtherTasks
from services.verifier.refusals import Refusal, Refused
from services.verifier.refused_memory import RefusedGroup, excerpt_of
from services.verifier.refused_record import RefusedRecord
from shared.contracts.rollout_id import claimed_rollout_id, rollout_id_of
from shared.runtime import spans
from shared.runtime.logs import Log
from shared.transport.base import StoredMessage

TOLD_OF = 64
"""Number of senders of another swarm that the log names, once each."""
_OTHER_VERSION = "install the same version of the package that makes this dataset's tasks on both nodes"
_OTHER_TASKS = {
    Refusal.TASK_NOT_ALLOWED: "configure the same [[tasks]] on both nodes, or set verifier.accept (see swarm config show --all)",
    Refusal.TASK_MISMATCH: _OTHER_VERSION,
    Refusal.TASK_UNDERIVABLE: _OTHER_VERSION,
}
"""What makes the two nodes' tasks equal, by the reason of the refusal."""


class RefusedMessages:
    """The refused messages of one verifier replica."""

    def __init__(self, figures: Figures, log: Log, started_at: float, record: RefusedRecord, known: Callable[[str], bool]) -> None:
        """`started_at`: Unix time; messages that were in the stream before need no remedy. `known`:
        whether a name belongs to a key.
        """
        self._figures = figures
        self._log = log
        self._record = record
        self._known = known
        self._started_at = started_at
        self._other_tasks = OtherTasks()
        self._told_of: set[str | None] = set()

    def accepted(self, sender: str) -> None:
        """Record that a group of this sender was accepted."""
        self._other_tasks.accepted(sender)

    def refuse(self, refused: Refused, message: StoredMessage, candidate: Candidate | None = None) -> None:
        """Count a refusal. `candidate` is given if the checks before scoring were passed. If the
        bytes have no valid id, the log names the id that the header claims.
        """
        self._figures.border.refused(refused)
        reason, detail = refused.reason.value, refused.detail[:300]
        group_id = candidate.group_id if candidate is not None else refused.group_id
        claimed = None if group_id else claimed_rollout_id(message.headers)
        named = {"rollout_id": rollout_id_of(group_id)} if group_id else {"claimed_rollout_id": claimed}
        group = candidate.group if candidate is not None else refused.group
        sender = refused.sender or ""
        self._record.note(
            RefusedGroup(
                time=time.time(),
                reason=reason,
                detail=detail,
                sender=sender,
                group_id=group_id,
                claimed_id=claimed or "",
                swarm_seq=message.seq,
                stored_at=message.stored_at,
                excerpt=None if group is None else excerpt_of(group),
            ),
            known=self._known(sender),
        )
        if group_id:
            spans.emit(group_id, spans.BORDER, sender=sender, outcome="refused", reason=reason)
        self._log.debug(
            "foreign_group_refused", reason=reason, sender=refused.sender, detail=detail, swarm_seq=message.seq, **named
        )
        if refused.reason in _OTHER_TASKS and self._other_tasks.refused(sender):
            remedy = _OTHER_TASKS[refused.reason]
            self._log.warning("sender_has_other_tasks", sender=refused.sender, groups=TOLD_AFTER, detail=detail, remedy=remedy)
        self._figures.border.other_tasks(self._other_tasks.count())
        if refused.reason is Refusal.OTHER_SWARM and message.stored_at >= self._started_at:
            self._tell_of_another_swarm(refused)
        if refused.quarantined_s:
            self._log.warning(
                "sender_quarantined",
                sender=refused.sender,
                public_key=refused.blamed,
                reason=reason,
                detail=detail,
                seconds=refused.quarantined_s,
                remedy="it is admitted again automatically; `swarm ban` shuts it out",
            )

    def _tell_of_another_swarm(self, refused: Refused) -> None:
        """Log it once for each sender that is active now."""
        if refused.sender not in self._told_of and len(self._told_of) < TOLD_OF:
            self._told_of.add(refused.sender)
            remedy = "set the same nats.swarm_id on both nodes if they are to learn from each other"
            self._log.warning("group_of_another_swarm", sender=refused.sender, detail=refused.detail, remedy=remedy)
