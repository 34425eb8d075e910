"""Handle refused foreign messages: count them, record them, log them in detail, and tell the
operator about those that he can do something about.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import msgspec

from services.verifier.border import Candidate, Refusal, Refused
from services.verifier.figures import Figures
from shared.atomic_files import remove_abandoned_drafts, replace_text
from shared.contracts.messages import RolloutGroup, claimed_rollout_id, rollout_id_of
from shared.run_records import RefusedExcerpt, RefusedGroup, read_jsonl, refused_file, refused_files
from shared.runtime.logs import Log
from shared.runtime.writes import Writes
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
                time=round(time.time(), 3),
                reason=reason,
                detail=detail,
                sender=sender,
                id=group_id,
                claimed_id=claimed or "",
                swarm_seq=message.seq,
                stored_at=round(message.stored_at, 3),
                group=None if group is None else excerpt_of(group),
            ),
            known=self._known(sender),
        )
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


TOLD_AFTER = 8
MAX_SENDERS = 1024


class OtherTasks:
    """Counts groups with refused tasks, by sender, for senders that have sent nothing else: the two
    nodes are configured differently, or have other versions of a package.
    """

    def __init__(self) -> None:
        self._refused: OrderedDict[str, int] = OrderedDict()

    def refused(self, sender: str) -> bool:
        """Count a group whose task is not accepted. True, once per sender, when it should be
        reported.
        """
        count = self._refused.pop(sender, 0) + 1
        self._refused[sender] = count
        if len(self._refused) > MAX_SENDERS:
            self._refused.popitem(last=False)
        return count == TOLD_AFTER

    def accepted(self, sender: str) -> None:
        self._refused.pop(sender, None)

    def count(self) -> int:
        return sum(count >= TOLD_AFTER for count in self._refused.values())


KNOWN_SENDERS = 64
STRANGERS = 32
OF_A_SENDER = 24
"""Refusals kept per sender: at most (64 + 32) * 24 in total, each under 3 KB."""

QUESTION_BYTES = 400
ANSWERS = 4
ANSWER_BYTES = 300
DETAIL_BYTES = 400


def excerpt_of(group: RolloutGroup) -> RefusedExcerpt:
    """A bounded part of a decoded group: its task, and how it begins."""
    ref = group.task.ref
    return RefusedExcerpt(
        dataset=ref.dataset,
        seed=ref.seed,
        index=ref.index,
        draw=group.draw,
        policy_version=group.policy_version,
        created_at=group.created_at,
        question=_cut(group.task.text, QUESTION_BYTES),
        completions=len(group.completions),
        answers=[_cut(completion.text, ANSWER_BYTES) for completion in group.completions[:ANSWERS]],
    )


class RefusedMemory:
    """The last refusals, bounded and divided among senders, so that nobody's flood pushes out what
    is known of others. A sender's own entries are dropped first, starting with its most frequent
    reason. Names that belong to a key and names that anybody may claim have separate places.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, list[RefusedGroup]] = OrderedDict()
        self._strangers: OrderedDict[str, list[RefusedGroup]] = OrderedDict()

    def note(self, refused: RefusedGroup, *, known: bool) -> None:
        """Remember a refusal. known: whether its sender's name belongs to a key."""
        mine, others, most = (self._known, self._strangers, KNOWN_SENDERS) if known else (self._strangers, self._known, STRANGERS)
        # When a name gets a key, its earlier entries move with it.
        kept = mine.pop(refused.sender, None) or others.pop(refused.sender, None) or []
        kept.append(msgspec.structs.replace(refused, detail=_cut(refused.detail, DETAIL_BYTES)))
        if len(kept) > OF_A_SENDER:
            del kept[_gives_way(kept)]
        mine[refused.sender] = kept
        if len(mine) > most:
            mine.popitem(last=False)

    def all(self) -> list[tuple[RefusedGroup, bool]]:
        """All refusals, oldest first, each with whether its sender's name has a key."""
        pools = ((self._known, True), (self._strangers, False))
        found = [(each, known) for senders, known in pools for kept in senders.values() for each in kept]
        return sorted(found, key=lambda pair: pair[0].time)


def _cut(text: str, size_bytes: int) -> str:
    """The beginning of `text` that takes at most `size_bytes` as JSON, in which a character may
    take twelve bytes.
    """
    cut = text[:size_bytes]
    while len(json.dumps(cut)) > size_bytes + 2:
        cut = cut[: len(cut) // 2]
    return cut


def _gives_way(kept: list[RefusedGroup]) -> int:
    """The entry to drop: the oldest one of the most frequent reason."""
    counts = Counter(each.reason for each in kept)
    most = max(counts.values())
    return next(place for place, each in enumerate(kept) if counts[each.reason] == most)


WRITE_PERIOD_S = 5.0
FILES_KEPT = 8
"""Files of former replicas that are kept."""


class RefusedRecord:
    """Writes the last refusals of one replica to `refused-<replica>.jsonl` in the run's folder, for
    `swarm rollouts --refused`: a snapshot, written in a thread at most every `WRITE_PERIOD_S`, so
    however many messages are refused, it neither grows nor slows the border.
    """

    def __init__(self, run_dir: Path, replica: str, writes: Writes) -> None:
        """Continues with what this replica wrote before a restart."""
        self._run_dir, self._file, self._writes = run_dir, refused_file(run_dir, replica), writes
        self._memory = RefusedMemory()
        self._changed = False
        with self._trying():
            for line in read_jsonl(self._file):
                self._take_back(line)
            for path in refused_files(run_dir)[FILES_KEPT:]:
                path.unlink(missing_ok=True)
            remove_abandoned_drafts(run_dir)

    def note(self, refused: RefusedGroup, *, known: bool) -> None:
        self._memory.note(refused, known=known)
        self._changed = True

    async def run(self) -> None:
        try:
            while True:
                await asyncio.sleep(WRITE_PERIOD_S)
                await self.write()
        finally:
            if self._changed:
                self._write(self._memory.all())

    async def write(self) -> None:
        if self._changed:
            self._changed = False
            await asyncio.to_thread(self._write, self._memory.all())

    def _write(self, kept: list[tuple[RefusedGroup, bool]]) -> None:
        with self._trying():
            lines = (json.dumps({**msgspec.to_builtins(each), "known": known}, separators=(",", ":")) for each, known in kept)
            replace_text(self._file, "".join(f"{line}\n" for line in lines))
        self._changed = self._changed or self._writes.failing("refusals")

    def _trying(self) -> AbstractContextManager[None]:
        return self._writes.trying("refusals", f"free space at {self._run_dir}; groups are checked as ever, tried again")

    def _take_back(self, line: dict[str, Any]) -> None:
        """Read a line from before a restart; invalid lines are skipped."""
        with suppress(msgspec.ValidationError):
            self._memory.note(msgspec.convert(line, RefusedGroup), known=line.get("known") is True)
