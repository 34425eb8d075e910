"""Detects a group that repeats an earlier one: the same task with the same answers, or with an
earlier group's long answers in it (`services.verifier.prints`).

Groups of one *task* are compared: dataset, question, and seed + index, because many datasets
generate item `index` from their seed plus the index, so that two references with the same sum are
one task. Honest nodes draw tasks that nobody can predict (`shared.tasks.source`), so two of them
hardly ever draw the same one. Even so, nobody is shut out for answers that anybody might give;
otherwise an attacker who guesses a node's next task and its likely answers could silence it. A
group is a copy of another node's when it shares enough long text of its own, or when all its
answers, most of them different, are equal. One sender may send two groups of a task, but nothing
twice.

The same question under another reference is another task, in which honest nodes do meet if there
are few questions: there only distinctive text makes a copy, and nobody is blamed. A row of a file
is the same question under every seed, so its references are unlimited and free to find: there one
sender's groups are counted and compared whatever the reference. A node that trains on few rows
returns to each of them, so nobody is blamed for that either.

A group is compared with those of its task and its question, at most `_PER_TASK` and
`_PER_QUESTION`, so that its cost does not grow with what is remembered.

Pure except for the memory: one hour, at most `MAX_GROUPS` and `MAX_BYTES`; the entry that was seen
or repeated longest ago is forgotten first.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from services.verifier.prints import SUSPECT, TELLING, Fingerprint, Print, Printer, equal, evidence_of_copy, say_the_same
from shared.contracts.messages import RolloutGroup, Task
from shared.tasks.file_rows import is_file_name

__all__ = ["CopyMemory", "Likeness", "Print"]

GROUPS_OF_A_TASK = 2
"""Groups that one sender may send of a task. Normally there is one, but a node that died while
sampling draws the task again.
"""

GROUPS_OF_A_ROW = 16
"""Groups that one sender may send of a row of a file within `REMEMBERED_S`, under whatever
references; at most `GROUPS_OF_A_TASK` of them with the same answers.
"""

REMEMBERED_S = 3600.0
"""Limited, because a node that starts over repeats its task draws from the first one, and must not
count as a copy of itself for ever.
"""

MAX_GROUPS = 16_384
MAX_BYTES = 64 * 2**20
_PER_TASK = 16
_PER_QUESTION = 16
"""Number of groups with distinctive text remembered per question, under any reference."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """`kind`: whether the earlier group is local, of the same row of a file under another
    reference, or of another node. `telling`: whether the sender is to be blamed. `of`: whose group
    came first.
    """

    kind: Literal["repeated", "row", "copied"]
    telling: bool
    of: str
    same_answers: bool = False
    """Of a row: whether its groups with these answers are what is too many."""


@dataclass(slots=True, eq=False)
class _Seen:
    public_key: str
    seq: int
    stored_at_s: float
    at_s: float
    made: Print


class CopyMemory:
    """The recently accepted groups, and this node's local ones."""

    def __init__(self, salt: bytes = b"") -> None:
        """`salt` keys the hashes, so that nobody can prepare texts against them; random if
        empty.
        """
        self._printer = Printer(salt or secrets.token_bytes(16))
        self._tasks: OrderedDict[bytes, list[_Seen]] = OrderedDict()
        self._questions: dict[bytes, list[_Seen]] = {}
        self._rows: dict[tuple[bytes, str], list[_Seen]] = {}
        self._groups = 0
        self._size_bytes = 0

    def __len__(self) -> int:
        """Number of groups remembered."""
        return self._groups

    def print_of(self, group: RolloutGroup) -> Print:
        """The group's print with this memory's salt."""
        task, question = self._ids(group.task)
        says = self.fingerprint([completion.text for completion in group.completions])
        return Print(task, question, says, is_file_name(group.task.ref.dataset))

    def fingerprint(self, answers: Sequence[str]) -> Fingerprint:
        """The fingerprint of one group's answers."""
        return self._printer.fingerprint(answers)

    def look(
        self, made: Print, public_key: str, seq: int, now_s: float, stored_at_s: float = 0.0
    ) -> tuple[Likeness | None, list[str]]:
        """Which earlier group this one is a copy of, if any, and which keys have copied *it*: their
        groups were examined first but are later in the stream, however late this one is examined.

        seq, stored_at_s: position and Unix time in the swarm's stream, which only the server
        assigns; 0 for the node's local groups, which nothing precedes. If the two disagree (the
        stream was created anew), nobody is blamed.
        """
        new = _Seen(public_key, seq, stored_at_s, now_s, made)
        found, copiers = self._same_task(new)
        return found or self._same_question(new) or self._same_row(new), [] if found else copiers

    def _same_task(self, new: _Seen) -> tuple[Likeness | None, list[str]]:
        """The earlier group of the task that `new` resembles, and the keys that have copied `new`.
        All earlier groups are compared, not just up to the first match, because several keys may
        have copied this one; only a repetition by the same key settles it at once. Also forgets
        expired groups.
        """
        made, public_key, now_s = new.made, new.public_key, new.at_s
        groups = self._tasks.get(made.task)
        if groups is None:
            return None, []
        self._tasks.move_to_end(made.task)
        for seen in [seen for seen in groups if now_s - seen.at_s > REMEMBERED_S]:
            groups.remove(seen)
            self._forget(seen)
        if not groups:
            del self._tasks[made.task]
            return None, []
        copiers: list[str] = []
        first: Likeness | None = None
        for seen in groups:
            if seen.public_key == public_key:
                if say_the_same(made.says, seen.made.says):
                    return Likeness("repeated", True, public_key), []
            elif _precedes(new, seen):
                if evidence_of_copy(made.says, seen.made.says) >= TELLING:
                    copiers.append(seen.public_key)
            elif first is None:
                evidence = evidence_of_copy(seen.made.says, made.says)
                if evidence >= SUSPECT or equal(made.says, seen.made.says):
                    first = Likeness("copied", evidence >= TELLING and not _may_precede(new, seen), seen.public_key)
        own = sum(seen.public_key == public_key for seen in groups)
        if first is None and own >= GROUPS_OF_A_TASK:
            first = Likeness("repeated", False, public_key)
        return first, copiers

    def _same_question(self, new: _Seen) -> Likeness | None:
        made = new.made
        for seen in self._questions.get(made.question, ()):
            if seen.made.task == made.task or new.at_s - seen.at_s > REMEMBERED_S or _precedes(new, seen):
                continue
            if evidence_of_copy(seen.made.says, made.says) >= TELLING:
                return Likeness("copied", False, seen.public_key)
        return None

    def _same_row(self, new: _Seen) -> Likeness | None:
        sent = [seen for seen in self._rows.get(_row(new), ()) if new.at_s - seen.at_s <= REMEMBERED_S]
        alike = sum(say_the_same(new.made.says, seen.made.says) for seen in sent)
        if alike < GROUPS_OF_A_TASK and len(sent) < GROUPS_OF_A_ROW:
            return None
        return Likeness("row", False, new.public_key, same_answers=alike >= GROUPS_OF_A_TASK)

    def remember(self, made: Print, public_key: str, seq: int, now_s: float, stored_at_s: float = 0.0) -> None:
        """Remember an accepted group or a local one."""
        groups = self._tasks.setdefault(made.task, [])
        self._tasks.move_to_end(made.task)
        seen = _Seen(public_key, seq, stored_at_s, now_s, replace(made, says=made.says.to_keep()))
        groups.append(seen)
        self._groups += 1
        self._size_bytes += seen.made.says.size_bytes
        if made.says.evidence >= TELLING:
            alike = self._questions.setdefault(made.question, [])
            alike.append(seen)
            del alike[:-_PER_QUESTION]
        if made.is_row:
            sent = self._rows.setdefault(_row(seen), [])
            sent.append(seen)
            del sent[:-GROUPS_OF_A_ROW]
        if len(groups) > _PER_TASK:
            self._forget(groups.pop(0))
        while self._groups > MAX_GROUPS or self._size_bytes > MAX_BYTES:
            _, oldest = self._tasks.popitem(last=False)
            for each in oldest:
                self._forget(each)

    def _forget(self, seen: _Seen) -> None:
        self._groups -= 1
        self._size_bytes -= seen.made.says.size_bytes
        _leave(self._questions, seen.made.question, seen)
        _leave(self._rows, _row(seen), seen)

    def _ids(self, task: Task) -> tuple[bytes, bytes]:
        question = f"{task.ref.dataset}\x00{task.question}".encode("utf-8", "surrogatepass")
        item = f"{task.ref.seed + task.ref.index}\x00".encode()
        return self._printer.digest(item + question), self._printer.digest(question)


def row_limit(*, same_answers: bool) -> str:
    """What a refused group of a row of a file has exceeded, and what to do."""
    count, which = (GROUPS_OF_A_TASK, " with these answers") if same_answers else (GROUPS_OF_A_ROW, "")
    return (
        f"{count} groups of this row of a file{which} were accepted from this sender within {REMEMBERED_S / 60:.0f} minutes, and "
        "more are not taken. That is usual with a file of few rows, and no reason for a ban: more rows help"
    )


K = TypeVar("K")


def _leave(lists: dict[K, list[_Seen]], key: K, seen: _Seen) -> None:
    """Remove a group from one of these lists, and the list itself with its last group."""
    kept = lists.get(key, [])
    if seen in kept:
        kept.remove(seen)
        if not kept:
            del lists[key]


def _row(seen: _Seen) -> tuple[bytes, str]:
    return seen.made.question, seen.public_key


def _precedes(new: _Seen, seen: _Seen) -> bool:
    """Whether `new` was in the stream before `seen`. A stream that was created anew counts from 1
    again, but its clock does not.
    """
    return new.seq < seen.seq and new.stored_at_s <= seen.stored_at_s


def _may_precede(new: _Seen, seen: _Seen) -> bool:
    return new.seq < seen.seq or new.stored_at_s < seen.stored_at_s
