"""The ordered checks that a foreign group must pass before any other code sees it, each with a
typed reason.

`services.verifier.refusals.CHECKS` lists them in order. The cheap ones come first and are all in
`Border.examination`. They are pure except for the memory of names and group ids, take time as an
argument, and never raise, whatever a sender puts into a message. Work that grows with the payload
is only requested: `Examiner` runs it in a thread, while the memories belong to the event loop's
thread alone. Afterwards the task is derived again and its answers scored in the sandbox
(`Border.conclude`). Rewards, reference answers and metadata from the wire are compared, never used.
A refusal is blamed only on the key that made a valid signature over the offending bytes
(`services.verifier.refusals`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET

from services.verifier.copies import CopyMemory, GroupPrint, ReplayMemory, row_limit
from services.verifier.episodes import turns_problem
from services.verifier.refusals import BLAME, Problem, Refusal, Refused
from services.verifier.reputation import Reputation, ScoringCost, Sender, Senders, TaskDifferences
from services.verifier.trust import Bans, Trust
from shared.config.verifier_config import VerifierConfig
from shared.contracts import subjects
from shared.contracts.codec import MAX_LOGPROB, MAX_TOKENS, content_id, decode_foreign, unpacked
from shared.contracts.messages import Completion, RolloutGroup, ScoredGroup, SignedRollouts, TaskRef, signed_bytes
from shared.contracts.wire import DEFAULT_SWARM_ID, MessageError, ModelIdentity
from shared.environment_files import EnvironmentSpec
from shared.identity import keys
from shared.rewards import LocalOnly, unknown_of
from shared.tasks.derive import from_package, package_of
from shared.tasks.evaluation import NO_PASS
from shared.tasks.file_rows import find_rows, is_file_name
from shared.tasks.held_out import HeldOut
from shared.tasks.sandbox import DROPPED, JobResult
from shared.tasks.verifiers import VerifierChoice

T = TypeVar("T")

JUDGED_BODIES = 100_000
"""Number of refused bodies remembered with their key, so that one that is sent again, by whomever,
costs no more than its hash and is not blamed twice.
"""
_DIFFERENCES = (Refusal.TASK_UNDERIVABLE, Refusal.TASK_MISMATCH, Refusal.TASK_NOT_ALLOWED)
_MAY_PASS_LATER = {Refusal.BANNED, Refusal.QUARANTINED, Refusal.AUTHOR}
"""Refusals that say nothing about the body: a ban ends, and the subject and the envelope's name are
not signed, so that anyone can store a group in the wrong place.
"""
_SEEN = "group {} was seen before"
_REASONS = {each.value: each for each in Refusal} | {"task_verifier": Refusal.TASK_NOT_ALLOWED}
"""What the decoder or the sandbox says, as a reason. That this node's verifier cannot judge a task
is no fault of its sender.
"""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group that passed all cheap checks; its task is still only a claim."""

    sender: str
    public_key: str
    group_id: str
    group: RolloutGroup
    made: GroupPrint
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
        self._differences = TaskDifferences()
        self._awaits_pass = awaits_pass
        self._senders = Senders(trust, self.reputation, rules.established_after)

    def refuse_unread(self, subject: str, size_bytes: int, now_s: float) -> Refused | None:
        """The first checks, which need no payload: the version, a ban of the name, and the size.

        Made when the message arrives in the queue; again when its turn comes, because the name may
        have been banned since; and with the payload, because the size was only a claim before.
        """
        if subjects.is_of_another_version(subject):
            return Refused(Refusal.SCHEMA_VERSION, None, "its subject is of another version: update the older node")
        sender = subjects.rollouts_author(subject)
        ban = self.bans.ban_for_name(sender, now_s)
        if ban is not None:
            return Refused(Refusal.BANNED, sender, ban.reason)
        if size_bytes <= self._rules.max_bytes:
            return None
        detail = f"{size_bytes} bytes, at most {self._rules.max_bytes} are looked at"
        return Refused(Refusal.TOO_LARGE, sender, detail)

    def sender(self, name: str | None, now_s: float) -> Sender:
        """The share that a message counts against by its name, which is only a claim so far."""
        return self._senders.by_name(name or "", now_s)

    def signer(self, public_key: str, now_s: float) -> Sender:
        """The same, once the key is known."""
        return self._senders.by_key(public_key, now_s)

    def note_own(self, group: RolloutGroup) -> None:
        """Remember a group of this node, so that a sender who returns it counts as a copier."""
        self._copies.remember(self._copies.fingerprint_of(group), "", 0, group.created_at)

    def fingerprint_of(self, group: RolloutGroup) -> GroupPrint:
        """The group's print. Reads nothing that changes, so it may be computed in a thread."""
        return self._copies.fingerprint_of(group)

    def learn(self, scored: ScoredGroup, made: GroupPrint, now_s: float) -> None:
        """Remember a group that another of the node's verifiers has scored or accepted, or that
        this one had before it started.
        """
        key, now_s = scored.public_key, min(now_s, scored.scored_at)
        self._count_copiers(self._copies.look(made, key, scored.swarm_seq, now_s, scored.swarm_stored_at)[1], now_s)
        self._copies.remember(made, key, scored.swarm_seq, now_s, scored.swarm_stored_at)
        if key:
            self._replay.remember(scored.group_id, now_s)
            self._trust.bind(scored.group.node, key, now_s)

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
        if self._was_seen(envelope.public_key, body_id):
            return Refused(Refusal.REPLAYED, sender, _SEEN.format(body_id))
        if not (yield from _apart(lambda: _is_signed(envelope))):
            return Refused(Refusal.SIGNATURE, sender, "the signature is not by the key that the message names")
        made: GroupPrint | Problem | None = None
        group: RolloutGroup | Problem | None = None
        problem = self._key_problem(envelope.public_key, now_s)
        if problem is None:
            group = yield from _apart(lambda: _group(envelope, self._rules))
            if not isinstance(group, RolloutGroup):
                problem = group
            else:
                problem = (
                    self._author_problem(sender, envelope, group, now_s)
                    or self._rules.age_problem(group, now_s)
                    or self._rules.task_problem(group)
                    or self._pass_problem(group)
                    or self._differences.problem(envelope.public_key, group.task.ref.dataset, now_s)
                )
                if problem is None:
                    made = yield from _apart(lambda: self._fingerprint_or_problem(group))
                    problem = None if isinstance(made, GroupPrint) else made
        if problem is not None and self._was_seen(envelope.public_key, body_id):  # while these same bytes were looked at
            problem = Refusal.REPLAYED, _SEEN.format(body_id)
        if problem is not None:
            refused = self._refuse(problem[0], sender, envelope.public_key, body_id, problem[1], now_s)
            known = group if isinstance(group, RolloutGroup) else None
            return replace(refused, group_id=body_id, group=known, costly=made is not None)
        assert sender is not None and isinstance(group, RolloutGroup) and isinstance(made, GroupPrint)
        candidate = Candidate(sender, envelope.public_key, body_id, without_prompt(group), made, seq, stored_at_s)
        copy = self._refuse_copy(candidate, now_s)
        return candidate if copy is None else replace(copy, group_id=body_id, group=candidate.group, costly=True)

    def conclude(self, candidate: Candidate, result: JobResult, now_s: float) -> Refused | None:
        """The verdict once the sandbox has derived the task again and scored the answers. None:
        accepted and remembered.

        Whatever the verdict, the group's cost is charged to its key.
        """
        if result.reason == DROPPED:
            reason, detail = self._key_problem(candidate.public_key, now_s) or (Refusal.QUARANTINED, result.detail)
            return Refused(reason, candidate.sender, detail)
        count = len(candidate.group.completions)
        known = result.reason is None and len(result.rewards) == count and None not in result.rewards
        forged = turns_problem(candidate.group, result, self._rules.turns_for(candidate.group.task.ref)) if known else ""
        accepted = known and not forged
        if self._cost.charge(candidate.public_key, result.cpu_s, accepted=accepted, now_s=now_s):
            detail = f"the key's groups cost more than they bring; this one {result.cpu_s:.1f} s of CPU time. {result.detail}"
            return self._refuse(Refusal.SCORING_COST, candidate.sender, candidate.public_key, candidate.group_id, detail, now_s)
        if accepted:
            return self._accept(candidate, now_s)
        reason, detail = Refusal.UNKNOWN_REWARD, result.detail or f"unknown rewards: {dict(unknown_of(result.marks))}"
        if forged:
            reason, detail = Refusal.TURNS, forged
        elif result.reason is not None:
            reason, detail = _REASONS.get(result.reason, Refusal.TASK_UNDERIVABLE), result.detail
        if reason in _DIFFERENCES:
            # Another version explains it: nobody is blamed, and these bytes are not derived again.
            self._judged.remember(_judged_id(candidate.public_key, candidate.group_id), now_s)
            self._differences.refused(candidate.public_key, candidate.group.task.ref.dataset, (reason, detail), now_s)
            return Refused(reason, candidate.sender, detail)
        # On a busy machine an honest group may miss the deadline although it has used little CPU
        # time.
        part = min(1.0, result.cpu_s) if reason is Refusal.SCORING_TIMEOUT else 1.0
        return self._refuse(reason, candidate.sender, candidate.public_key, candidate.group_id, detail, now_s, part)

    def left_out(self, public_key: str, now_s: float) -> bool:
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
        self._differences.accepted(candidate.public_key, candidate.group.task.ref.dataset)
        return None

    def _refuse_copy(self, candidate: Candidate, now_s: float, *, accepting: bool = False) -> Refused | None:
        key, sender = candidate.public_key, candidate.sender
        if self._replay.contains(candidate.group_id):  # the same message, stored twice
            return Refused(Refusal.REPLAYED, sender, f"group {candidate.group_id} was accepted meanwhile")
        found, copiers = self._copies.look(candidate.made, key, candidate.seq, now_s, candidate.stored_at_s)
        if accepting:
            self._count_copiers(copiers, now_s)
        if found is None:
            return None
        if found.kind == "repeated":
            detail = "the sender has sent this task before, with the same answers or twice"
            return self._refuse(Refusal.REPEATED, sender, key, candidate.group_id, detail, now_s)
        if found.kind == "row":
            return self._refuse(
                Refusal.REPEATED, sender, key, candidate.group_id, row_limit(same_answers=found.same_answers), now_s, 0.0
            )
        detail = f"says what a group of {found.of or self._rules.node} said before"
        if found.telling:
            self._senders.copied(key, now_s)
        return self._refuse(Refusal.COPIED, sender, key, candidate.group_id, detail, now_s, float(found.telling))

    def _count_copiers(self, copiers: list[str], now_s: float) -> None:
        """Copies that were examined before their original: too late to refuse, but not to count,
        once.
        """
        for copier in copiers:
            self._senders.copied(copier, now_s)
            self.reputation.blame(copier, "", Refusal.COPIED, now_s)

    def _refuse(
        self, reason: Refusal, sender: str | None, key: str, body_id: str, detail: str, now_s: float, part: float = 1.0
    ) -> Refused:
        """Refuse a message that `key` has signed, and remember its body. If the key is at fault,
        blame it once, weighted by `part`.
        """
        judged_id = _judged_id(key, body_id)
        known = self._judged.contains(judged_id)
        if reason not in _MAY_PASS_LATER:
            self._judged.remember(judged_id, now_s)
        if reason not in BLAME or not part or known:
            return Refused(reason, sender, detail)
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

    def _was_seen(self, public_key: str, body_id: str) -> bool:
        return self._replay.contains(body_id) or self._judged.contains(_judged_id(public_key, body_id))

    def _pass_problem(self, group: RolloutGroup) -> Problem | None:
        ref = group.task.ref
        return (Refusal.NO_PASS, f"{ref.dataset}: {NO_PASS}") if self._awaits_pass(ref) else None

    def _fingerprint_or_problem(self, group: RolloutGroup) -> GroupPrint | Problem:
        """The group's print, or the problem of its texts or tokens. Reads nothing that changes."""
        if self._held_out.contains(group.task):
            return Refusal.HELD_OUT, "the task is in this node's held-out set"
        return self._rules.completions_problem(group) or self._copies.fingerprint_of(group)


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
        envelope = decode_foreign(payload, SignedRollouts)
    except MessageError as error:
        return _REASONS[error.reason], error.detail
    if envelope.swarm != swarm_id:
        return Refusal.OTHER_SWARM, f"signed for nats.swarm_id {envelope.swarm!r}, and this node's is {swarm_id!r}"
    return _Opened(envelope, content_id(envelope.body))


def _is_signed(envelope: SignedRollouts) -> bool:
    return keys.verify(envelope.public_key, signed_bytes(envelope.swarm, envelope.body, envelope.encoding), envelope.signature)


def _group(envelope: SignedRollouts, rules: BorderRules) -> RolloutGroup | Problem:
    try:
        body = unpacked(envelope.body, envelope.encoding, rules.max_bytes)
        return with_first_completions(decode_foreign(body, RolloutGroup), rules.max_completions)
    except MessageError as error:
        return _REASONS[error.reason], error.detail


def _judged_id(public_key: str, body_id: str) -> str:
    # The id includes the signer. Otherwise somebody who signs another's body with his own key could
    # have the original refused.
    return content_id(f"{public_key} {body_id}".encode())


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


AT_ONCE_BYTES = 8 * 1024


class Examiner:
    """Drives `Border.examination` without blocking local groups: payloads that may take longer than
    a millisecond are processed in a thread.

    There is one thread, so that all strangers together use at most one processor. The border's
    memories are changed only in the event loop; later checks see what changed there while the
    thread was working.
    """

    def __init__(self, border: Border) -> None:
        self._border = border
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="examiner")

    async def examine(self, subject: str, payload: bytes, now_s: float, seq: int, stored_at_s: float) -> Candidate | Refused:
        """All checks before scoring; arguments as in `Border.examination`. Small messages are
        examined here at once.
        """
        examination, result = self._border.examination(subject, payload, now_s, seq, stored_at_s), None
        while True:
            try:
                work = examination.send(result)
            except StopIteration as done:
                verdict: Candidate | Refused = done.value
                return verdict
            result = work() if len(payload) <= AT_ONCE_BYTES else await self._apart(work)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _apart(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


Accept = Literal["same", "dataset", "any"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BorderRules:
    """The fixed part of a node's acceptance rules; the names are those of `[verifier]`."""

    node: str
    accept: Accept
    own_tasks: Collection[tuple[str, str]]
    """(dataset, canonical config) of the node's own task sources."""
    max_age_s: float
    max_clock_skew_s: float
    max_bytes: int
    max_completions: int
    max_answer_chars: int
    max_tokens: int = MAX_TOKENS
    established_after: int = 32
    swarm_id: str = DEFAULT_SWARM_ID
    """`nats.swarm_id`; groups signed for another swarm are refused."""
    local_only: Mapping[str, LocalOnly] = field(default_factory=lambda: VerifierChoice().local_only)
    """Datasets of which no foreign group is taken, and why."""
    turns_for: Callable[[TaskRef], EnvironmentSpec | None] = VerifierChoice().turns_for
    """What the policy's turns meet in a task."""

    @classmethod
    def of(cls, config: VerifierConfig, accept: Accept) -> BorderRules:
        """The rules of a node. accept: `verifier.accepted_tasks`, or the value that replaces `auto`
        if there is no roster but all members are known.
        """
        verifier, choice = config.verifier, VerifierChoice(config.tasks)
        return cls(
            node=config.node.id,
            swarm_id=config.nats.swarm_id,
            accept=accept,
            own_tasks=frozenset((spec.dataset, spec.canonical_config) for spec in config.tasks),
            max_age_s=config.max_foreign_age_s,
            max_clock_skew_s=verifier.max_clock_skew_s,
            max_bytes=verifier.max_foreign_bytes,
            max_completions=config.max_foreign_completions,
            max_answer_chars=config.max_answer_chars,
            max_tokens=config.max_foreign_tokens,
            local_only=choice.local_only,
            turns_for=choice.turns_for,
            established_after=verifier.newcomer_groups,
        )

    def age_problem(self, group: RolloutGroup, now_s: float) -> Problem | None:
        age_s = now_s - group.created_at
        if age_s > self.max_age_s:
            return Refusal.TOO_OLD, f"{age_s:.0f} s old, at most {self.max_age_s:.0f}"
        if age_s < -self.max_clock_skew_s:
            return Refusal.FROM_FUTURE, f"made {-age_s:.0f} s in the future; one of the two clocks is wrong"
        return None

    def task_problem(self, group: RolloutGroup) -> Problem | None:
        ref = group.task.ref
        if (why_local := self.local_only.get(ref.dataset)) is not None:
            return Refusal.TASK_NOT_ALLOWED, f"{ref.dataset} is local only: {why_local.words}"
        own_dataset = any(ref.dataset == dataset for dataset, _ in self.own_tasks)
        allowed = (
            (self.accept == "any" and (own_dataset or not _needs_an_entry(ref.dataset)))
            or (self.accept == "dataset" and own_dataset)
            or (ref.dataset, ref.config) in self.own_tasks
        )
        if not allowed:
            why = f"verifier.accept: {self.accept}{', but it needs a [[tasks]] entry' if self.accept == 'any' else ''}"
            return Refusal.TASK_NOT_ALLOWED, f"{ref.dataset} {ref.config[:100]} is not taken in ({why})"
        package, version = package_of(ref.dataset)
        if (ref.package, ref.version) != (package, version):
            here = f"has {package} {version}" if ref.package == package else f"has no package {ref.package!r} for it"
            return Refusal.TASK_NOT_ALLOWED, f"{ref.dataset} is made with {ref.package} {ref.version}, and this node {here}"
        turns = self.turns_for(ref)
        if (turns.id if turns else UNSET) != group.environment:
            theirs = "no environment" if group.environment is UNSET else "another environment, or another version of it,"
            return (
                Refusal.TASK_NOT_ALLOWED,
                f"{ref.dataset} was answered with {theirs} and this node's is {turns.title if turns else 'none'}",
            )
        return None

    def completions_problem(self, group: RolloutGroup) -> Problem | None:
        """Describe what is wrong with its texts and tokens, if anything: of the first completion
        with a problem, else of the prompt.
        """
        for completion in group.completions:
            problem = completion_problem(completion, self.max_answer_chars, self.max_tokens, self.turns_for(group.task.ref))
            if problem is not None:
                return problem
        return token_ids_problem(group.prompt_ids or b"")


def _needs_an_entry(dataset: str) -> bool:
    """Return whether only a node that names this dataset in `[[tasks]]` can judge it, because it
    then has the file, or has imported the package. No sender makes a process import another
    package.
    """
    return (is_file_name(dataset) and find_rows(dataset) is None) or from_package(dataset)


def token_ids_problem(packed: bytes) -> tuple[Refusal, str] | None:
    """Why packed token ids are refused, or None. They are checked as an array, because a list of a
    million numbers takes as long as a hundred groups.
    """
    if len(packed) % 4:
        return Refusal.MALFORMED, f"token ids of {len(packed)} bytes, not a multiple of 4"
    if (np.frombuffer(packed, "<i4") < 0).any():
        return Refusal.MALFORMED, "negative token id"
    return None


def completion_problem(
    completion: Completion, max_chars: int, max_tokens: int, turns: EnvironmentSpec | None = None
) -> tuple[Refusal, str] | None:
    """Why the completion is refused, or None. Whether the ids match the text is checked by the
    trainer, which has the tokenizer. turns: what the policy's turns met.

    A sampled token's logprob is finite and not above 0; generators refuse samples with others.
    """
    if len(completion.text) > max_chars:
        return Refusal.LENGTHS, f"a text of {len(completion.text)} characters"
    if completion.token_count > max_tokens:
        return Refusal.LENGTHS, f"an answer of {completion.token_count} tokens, at most {max_tokens}"
    if completion.token_count == 0 and completion.text:
        return Refusal.LENGTHS, "a text of no tokens"
    if turns is None and len(completion.turn_tokens or b"") > 4:
        return Refusal.OUT_OF_RANGE, "a completion of several turns"
    for packed in (completion.token_ids, completion.behaviour_logprobs):
        if packed is not None and len(packed) != 4 * completion.token_count:
            return Refusal.MALFORMED, "token_ids, behaviour_logprobs and token_count disagree"
    if completion.behaviour_logprobs is not None and completion.token_ids is None:
        return Refusal.MALFORMED, "behaviour logprobs of tokens that are not there"
    problem = token_ids_problem(completion.token_ids or b"")
    if problem is not None:
        return problem
    logprobs = np.frombuffer(completion.behaviour_logprobs or b"", "<f4")
    if not np.isfinite(logprobs).all():
        return Refusal.MALFORMED, "a log-probability is not finite"
    if logprobs.size and float(logprobs.max()) > MAX_LOGPROB:
        return Refusal.MALFORMED, "a log-probability is positive"
    return None


class LocalModel:
    """Name and tokenizer of the policy that made the newest local group; None before the first
    one.
    """

    def __init__(self) -> None:
        self.identity: ModelIdentity | None = None
        self.policy_version = 0

    def learn(self, group: RolloutGroup) -> None:
        self.identity = group.model
        self.policy_version = max(self.policy_version, group.policy_version)

    def same_tokenizer(self, group: RolloutGroup) -> bool:
        """Return whether the token ids of a foreign group have the same meaning here."""
        return self.identity is not None and self.identity.tokenizer_hash == group.model.tokenizer_hash
