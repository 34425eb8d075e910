"""The ordered checks that a foreign group must pass before any other code sees it, each with a
typed reason.

`services.verifier.checks.CHECKS` lists them in order. The cheap ones come first and are all in
`Border.examination`. They are pure except for the memory of names and group ids, take time as an
argument, and never raise, whatever a sender puts into a message. Work that grows with the payload
is only requested: the caller may run it in a thread, while the memories belong to the caller's
thread alone (`services.verifier.examiner`). Afterwards the task is derived again and its answers
scored in the sandbox (`Border.conclude`). Rewards, reference answers and metadata from the wire are
compared, never used. A refusal is blamed only on the key that made a valid signature over the
offending bytes (`services.verifier.refusals`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from services.verifier.bans import Bans
from services.verifier.border_rules import BorderRules, Problem
from services.verifier.copies import CopyMemory, Print, row_limit
from services.verifier.refusals import BLAME, Refusal, Refused
from services.verifier.replay import ReplayMemory
from services.verifier.reputation import Reputation
from services.verifier.scoring_cost import ScoringCost
from services.verifier.senders import Sender, Senders
from services.verifier.trust import Trust
from shared.contracts import subjects
from shared.contracts.codec import content_id, decode
from shared.contracts.messages import RolloutGroup, SignedRollouts, TaskRef, signed_bytes
from shared.contracts.wire import MessageError
from shared.identity import keys
from shared.rewards import unknown_of
from shared.tasks.evaluation import NO_PASS
from shared.tasks.held_out import HeldOut
from shared.tasks.sandbox import DROPPED, JobResult

__all__ = ["Border", "BorderRules", "Candidate", "Examination", "Refusal", "Refused", "without_token_ids", "without_tokens"]

T = TypeVar("T")

JUDGED_BODIES = 100_000
"""Number of refused bodies remembered with their signer, so that one sent again by somebody else is
neither scored nor blamed twice.
"""
_REASONS = {each.value: each for each in Refusal} | {"task_verifier": Refusal.TASK_NOT_ALLOWED}
"""What the sandbox says, as a reason. That this node's verifier cannot judge a task is no fault of
its sender.
"""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group that passed all cheap checks; its task is still only a claim."""

    sender: str
    public_key: str
    group_id: str
    group: RolloutGroup
    made: Print
    seq: int
    stored_at_s: float


Examination = Generator[Callable[[], Any], Any, Candidate | Refused]
"""A generator that yields pure functions and expects their results to be sent back. The functions
never raise, and their cost grows with the payload. Its return value is the verdict.
"""


class Border:
    """The checks and their memories: which key a name belongs to, which groups were seen, what each
    key's groups cost.
    """

    def __init__(
        self,
        rules: BorderRules,
        trust: Trust,
        replay: ReplayMemory,
        held_out: HeldOut,
        copies: CopyMemory | None = None,
        awaits_pass: Callable[[TaskRef], bool] = lambda _: False,
    ) -> None:
        """`awaits_pass`: whether groups of a task's source wait until a pass is defined."""
        self._rules = rules
        self._trust = trust
        self._replay = replay
        self._held_out = held_out
        self._judged = ReplayMemory(JUDGED_BODIES)
        self.bans = Bans(trust)
        self.reputation = Reputation()
        self._cost = ScoringCost()
        self._copies = copies or CopyMemory()
        self._awaits_pass = awaits_pass
        self._senders = Senders(trust, self.reputation, rules.established_after)

    def refuse_unread(self, subject: str, size_bytes: int, now_s: float) -> Refused | None:
        """The first checks, which need no payload: a ban of the name, and the size.

        Made when the message arrives in the queue; again when its turn comes, because the name may
        have been banned since; and with the payload, because the size was only a claim before.
        """
        sender = subjects.rollouts_author(subject)
        ban = self.bans.ban_for_name(sender, now_s)
        if ban is not None:
            return Refused(Refusal.BANNED, sender, ban.reason)
        if size_bytes <= self._rules.max_bytes:
            return None
        detail = f"{size_bytes} bytes, at most {self._rules.max_bytes} are looked at (verifier.max_foreign_bytes)"
        return Refused(Refusal.TOO_LARGE, sender, detail)

    def sender(self, name: str | None, now_s: float) -> Sender:
        """The share that a message counts against by its name, which is only a claim so far."""
        return self._senders.by_name(name or "", now_s)

    def signer(self, public_key: str, now_s: float) -> Sender:
        """The same, once the key is known."""
        return self._senders.by_key(public_key, now_s)

    def note_own(self, group: RolloutGroup) -> None:
        """Remember a group of this node, so that a sender who returns it counts as a copier."""
        self._copies.remember(self._copies.print_of(group), "", 0, group.created_at)

    def examine(self, subject: str, payload: bytes, now_s: float, seq: int = 0) -> Candidate | Refused:
        """Run `examination` to its end. Never raises, whatever the bytes."""
        examination, result = self.examination(subject, payload, now_s, seq), None
        while True:
            try:
                result = examination.send(result)()
            except StopIteration as done:
                verdict: Candidate | Refused = done.value
                return verdict

    def examination(self, subject: str, payload: bytes, now_s: float, seq: int = 0, stored_at_s: float = 0.0) -> Examination:
        """All checks that need neither reasoning-gym nor a worker.

        seq, stored_at_s: the message's position and Unix time in the swarm's stream, which decide
        which of two equal groups was first.
        """
        sender = subjects.rollouts_author(subject)
        refused = self.refuse_unread(subject, len(payload), now_s)
        if refused is not None:
            return refused
        opened = yield from _apart(lambda: _opened(payload, self._rules.swarm_id))
        if not isinstance(opened, _Opened):
            return Refused(opened[0], sender, opened[1])
        envelope, body_id = opened.envelope, opened.body_id
        made: Print | Problem | None = None
        group: RolloutGroup | Problem | None = None
        problem = self._key_problem(envelope.public_key, now_s)
        if problem is None:
            group = yield from _apart(lambda: _group(envelope.body, self._rules.max_completions))
            if not isinstance(group, RolloutGroup):
                problem = group
            else:
                problem = (
                    self._author_problem(sender, envelope, group, now_s)
                    or self._rules.age_problem(group, now_s)
                    or self._replay_problem(envelope.public_key, body_id)
                    or self._rules.task_problem(group)
                    or self._pass_problem(group)
                )
                if problem is None:
                    made = yield from _apart(lambda: self._print_or_problem(group))
                    problem = None if isinstance(made, Print) else made
        if problem is not None:
            refused = self._refuse(problem[0], sender, envelope.public_key, body_id, problem[1], now_s)
            return replace(refused, group_id=body_id, group=group if isinstance(group, RolloutGroup) else None)
        assert sender is not None and isinstance(group, RolloutGroup) and isinstance(made, Print)
        candidate = Candidate(sender, envelope.public_key, body_id, without_prompt(group), made, seq, stored_at_s)
        copy = self._refuse_copy(candidate, now_s)
        return candidate if copy is None else replace(copy, group_id=body_id, group=candidate.group)

    def conclude(self, candidate: Candidate, result: JobResult, now_s: float) -> Refused | None:
        """The verdict once the sandbox has derived the task again and scored the answers. None:
        accepted and remembered.

        Whatever the verdict, the group's cost is charged to its key.
        """
        if result.reason == DROPPED:
            reason, detail = self._key_problem(candidate.public_key, now_s) or (Refusal.QUARANTINED, result.detail)
            return Refused(reason, candidate.sender, detail)
        count = len(candidate.group.completions)
        accepted = result.reason is None and len(result.rewards) == count and None not in result.rewards
        if self._cost.charge(candidate.public_key, result.cpu_s, accepted=accepted, now_s=now_s):
            detail = f"the key's groups cost more than they bring; this one {result.cpu_s:.1f} s of CPU time. {result.detail}"
            return self._refuse(Refusal.SCORING_COST, candidate.sender, candidate.public_key, candidate.group_id, detail, now_s)
        if accepted:
            return self._accept(candidate, now_s)
        reason, detail = Refusal.UNKNOWN_REWARD, result.detail or f"unknown rewards: {dict(unknown_of(result.marks))}"
        if result.reason is not None:
            reason, detail = _REASONS.get(result.reason, Refusal.TASK_UNDERIVABLE), result.detail
        # On a busy machine an honest group may miss the deadline although it has used little CPU
        # time.
        part = min(1.0, result.cpu_s) if reason is Refusal.SCORING_TIMEOUT else 1.0
        return self._refuse(reason, candidate.sender, candidate.public_key, candidate.group_id, detail, now_s, part)

    def left_out(self, public_key: str, now_s: float) -> bool:
        """Whether a key is banned or in quarantine now."""
        return self._key_problem(public_key, now_s) is not None

    def _accept(self, candidate: Candidate, now_s: float) -> Refused | None:
        """The last checks. While this group was scored, an equal one or one under another name of
        its key may have been accepted.
        """
        refused = self._refuse_copy(candidate, now_s, accepting=True)
        if refused is not None:
            return refused
        if not self._trust.bind(candidate.sender, candidate.public_key, now_s):
            detail = f"{candidate.sender} became another key's name, or the key took another name, while this was scored"
            return Refused(Refusal.UNKNOWN_KEY, candidate.sender, detail)
        self._replay.remember(candidate.group_id, now_s)
        self._copies.remember(candidate.made, candidate.public_key, candidate.seq, now_s, candidate.stored_at_s)
        self.reputation.credit(candidate.public_key, candidate.sender, now_s)
        return None

    def _refuse_copy(self, candidate: Candidate, now_s: float, *, accepting: bool = False) -> Refused | None:
        key, sender = candidate.public_key, candidate.sender
        if self._replay.contains(candidate.group_id):  # the same message, stored twice
            return Refused(Refusal.REPLAYED, sender, f"group {candidate.group_id} was accepted meanwhile")
        found, copiers = self._copies.look(candidate.made, key, candidate.seq, now_s, candidate.stored_at_s)
        for copier in copiers if accepting else ():
            # Examined before its original: too late to refuse this copy, but not to count it, once.
            self._senders.copied(copier, now_s)
            self.reputation.blame(copier, "", Refusal.COPIED, now_s)
        if found is None:
            return None
        if found.kind == "repeated":
            detail = "the sender has sent this task before, with the same answers or twice"
            return self._refuse(Refusal.REPEATED, sender, key, candidate.group_id, detail, now_s)
        if found.kind == "row":
            return Refused(Refusal.REPEATED, sender, row_limit(same_answers=found.same_answers))
        detail = f"says what a group of {found.of or self._rules.node} said before"
        if not found.telling:
            return Refused(Refusal.COPIED, sender, detail)
        self._senders.copied(key, now_s)
        return self._refuse(Refusal.COPIED, sender, key, candidate.group_id, detail, now_s)

    def _refuse(
        self, reason: Refusal, sender: str | None, key: str, body_id: str, detail: str, now_s: float, part: float = 1.0
    ) -> Refused:
        """Refuse a message that `key` has signed. If the key is at fault, blame it once, weighted
        by `part`.
        """
        judged_id = _judged_id(key, body_id)
        if reason not in BLAME or self._judged.contains(judged_id):
            return Refused(reason, sender, detail)
        self._judged.remember(judged_id, now_s)
        name = sender if sender is not None and self._trust.key_of(sender) in {key, None} else ""
        quarantined_s = self.reputation.blame(key, name, reason, now_s, part)
        return Refused(reason, sender, detail, blamed=key, quarantined_s=quarantined_s)

    def _key_problem(self, public_key: str, now_s: float) -> Problem | None:
        if self.bans.unreadable:
            return Refusal.BANNED, self.bans.unreadable
        ban = self.bans.ban_for_key(public_key, now_s)
        if ban is not None:
            return Refusal.BANNED, ban.reason
        remaining_s = self.reputation.remaining_s(public_key, now_s)
        return (Refusal.QUARANTINED, f"for {remaining_s:.0f} s more") if remaining_s > 0 else None

    def _author_problem(self, sender: str | None, envelope: SignedRollouts, group: RolloutGroup, now_s: float) -> Problem | None:
        if not sender == envelope.node == group.node or sender == self._rules.node:
            return Refusal.AUTHOR, f"subject says {sender}, envelope {envelope.node}, body {group.node}"
        if not self._trust.may_use(envelope.node, envelope.public_key, now_s):
            return Refusal.UNKNOWN_KEY, f"{envelope.node} is not the one name of this key (verifier.trust)"
        return None

    def _pass_problem(self, group: RolloutGroup) -> Problem | None:
        ref = group.task.ref
        return (Refusal.NO_PASS, f"{ref.dataset}: {NO_PASS}") if self._awaits_pass(ref) else None

    def _replay_problem(self, public_key: str, group_id: str) -> Problem | None:
        seen = self._replay.contains(group_id) or self._judged.contains(_judged_id(public_key, group_id))
        return (Refusal.REPLAYED, f"group {group_id} was seen before") if seen else None

    def _print_or_problem(self, group: RolloutGroup) -> Print | Problem:
        """The group's print, or the problem of its texts or tokens. Reads nothing that changes."""
        if self._held_out.contains(group.task.question):
            return Refusal.HELD_OUT, "the question is in this node's held-out set"
        return self._rules.completions_problem(group) or self._copies.print_of(group)


@dataclass(frozen=True, slots=True)
class _Opened:
    envelope: SignedRollouts
    body_id: str


def _apart(work: Callable[[], T]) -> Generator[Callable[[], Any], Any, T]:
    """Request the result of `work` from the caller that runs the examination."""
    result: T = yield work
    return result


def _opened(payload: bytes, swarm_id: str) -> _Opened | Problem:
    try:
        envelope = decode(payload, SignedRollouts)
    except MessageError as error:
        return _decode_reason(error), error.detail
    if envelope.swarm != swarm_id:
        return Refusal.OTHER_SWARM, f"signed for nats.swarm_id {envelope.swarm!r}, and this node's is {swarm_id!r}"
    if not keys.verify(envelope.public_key, signed_bytes(envelope.swarm, envelope.body), envelope.signature):
        return Refusal.SIGNATURE, "the signature is not by the key that the message names"
    return _Opened(envelope, content_id(envelope.body))


def _group(body: bytes, max_completions: int) -> RolloutGroup | Problem:
    try:
        return with_first_completions(decode(body, RolloutGroup), max_completions)
    except MessageError as error:
        return _decode_reason(error), error.detail


def _judged_id(public_key: str, body_id: str) -> str:
    # The id includes the signer. Otherwise somebody who signs another's body with his own key could
    # have the original refused.
    return content_id(f"{public_key} {body_id}".encode())


def _decode_reason(error: MessageError) -> Refusal:
    return Refusal.SCHEMA_VERSION if error.reason == "schema_version" else Refusal.MALFORMED


def with_first_completions(group: RolloutGroup, count: int) -> RolloutGroup:
    """The group with at most its first `count` completions, so that groups of a node that samples
    more are accepted up to that number.
    """
    if len(group.completions) <= count:
        return group
    return msgspec.structs.replace(group, completions=group.completions[:count])


def without_prompt(group: RolloutGroup) -> RolloutGroup:
    """The group without its sender's prompt tokens; the trainer renders the prompt from the derived
    question.
    """
    return group if group.prompt_ids is None else msgspec.structs.replace(group, prompt_ids=None)


def without_token_ids(group: RolloutGroup) -> RolloutGroup:
    """The group as a node with another tokenizer uses it: its texts, and how likely they were under
    the sender's policy.
    """
    completions = [msgspec.structs.replace(each, token_ids=None) for each in group.completions]
    return msgspec.structs.replace(group, completions=completions, prompt_ids=None)


def without_tokens(group: RolloutGroup) -> RolloutGroup:
    """The group with its texts only."""
    completions = [msgspec.structs.replace(each, token_ids=None, behaviour_logprobs=None) for each in group.completions]
    return msgspec.structs.replace(group, completions=completions, prompt_ids=None)
