"""The border: the ordered checks that a foreign group must pass before any other code sees it.

Each check stands here once, with the reason of its refusal and the words of `docs/security.md`
(`refuses`, `check`); `CHECKS` lists them in order. The cheap ones come first and are all in
`Border.examination`. They are pure except for the memory of names and group ids, take time as an
argument, and never raise, whatever a sender puts into a message. Work that grows with the payload
is only requested: `services.verifier.foreign_groups.Examiner` runs it in a thread, while the
memories belong to the event loop's thread alone. Afterwards the task is derived again and its
answers scored in the sandbox (`Border.conclude`). Rewards, reference answers and metadata from the
wire are compared, never used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from msgspec import UNSET

from services.verifier.border_rules import BorderRules
from services.verifier.checks import Offence, Stage, refuses
from services.verifier.copies import CopyMemory, GroupPrint, ReplayMemory, row_limit
from services.verifier.episodes import Unpacking, turns_problem, with_first_completions, without_prompt
from services.verifier.reputation import Reputation, ScoringCost, Senders, TaskDifferences
from services.verifier.trust import Bans, Trust
from shared.contracts import subjects
from shared.contracts.codec import MAX_LOGPROB, content_id, decode_foreign, unpacked
from shared.contracts.messages import Completion, RolloutGroup, ScoredGroup, SignedRollouts, TaskRef, signed_bytes
from shared.contracts.wire import MessageError
from shared.environment_files import EnvironmentSpec
from shared.identity import keys
from shared.rewards import unknown_of
from shared.tasks.derive import from_package, package_of
from shared.tasks.evaluation import NO_PASS
from shared.tasks.file_rows import find_rows, is_file_name
from shared.tasks.held_out import HeldOut
from shared.tasks.sandbox import DROPPED, JobResult


class Refusal(Offence):
    """Why a foreign message was refused. The values are the only labels of the metric; a number
    beside one is how much it counts against the key that signed. The others are blamed on nobody.

    Only a body under a valid signature can be blamed on anyone, and only on the key, never on a
    name:

    * Before the signature is checked, anyone could have sent it: too large, chunks missing or
      belonging to another message, unreadable envelope, forged signature.
    * Envelope and subject are not signed: any node can store another's message under a third one's
      subject (`author`), send it again (`replayed`, `too_old`) or to another swarm (`other_swarm`).
      A bad body counts once, however often it is sent.
    * What another version, package, configuration or clock explains is blamed on nobody. Such a
      message uses its sender's turns, and a key whose tasks come out otherwise here is not derived
      again for a while (`services.verifier.reputation.TaskDifferences`).
    * A copy is blamed only if it is the later one and no coincidence (`services.verifier.copies`).
    * Weights up to a half never cause quarantine by themselves (`services.verifier.reputation`).
      Messages that no version of the software sends weigh 1.
    """

    TOO_LARGE = "too_large"
    BLOB_MISSING = "blob_missing"
    REFERENCE = "reference"
    FLOOD = "flood"
    """More than this node can examine, from a sender that has not earned a whole share here."""
    SURPLUS = "surplus"
    """The same from a sender that has earned one, because a fast honest node makes more than others
    can examine; and from any sender if the message was in the stream before this node started to
    read.
    """
    MALFORMED = "malformed", 1.0
    SCHEMA_VERSION = "schema_version"
    OUT_OF_RANGE = "out_of_range"
    OTHER_SWARM = "other_swarm"
    SIGNATURE = "signature"
    BANNED = "banned"
    QUARANTINED = "quarantined"
    AUTHOR = "author"
    UNKNOWN_KEY = "unknown_key"
    TOO_OLD = "too_old"
    FROM_FUTURE = "from_future"
    REPLAYED = "replayed"
    TASK_NOT_ALLOWED = "task_not_allowed"
    NO_PASS = "no_pass"
    """No pass is defined for its source, so a near miss could not be told from a right answer."""
    HELD_OUT = "held_out"
    LENGTHS = "lengths"
    TASK_UNDERIVABLE = "task_underivable"
    TASK_MISMATCH = "task_mismatch"
    SCORING_TIMEOUT = "scoring_timeout", 1.0
    """Weighs as much as it cost (`Border.conclude`)."""
    SCORING_COST = "scoring_cost", 1.0, True
    """A judgement on many groups (`services.verifier.reputation.ScoringCost`)."""
    UNKNOWN_REWARD = "unknown_reward"
    """An answer's reward is unknown here: this node's scorer failed. The whole group is refused. If
    such answers left it, a sender could fill a copy with answers that vanish after the checks.
    """
    TURNS = "turns", 1.0
    """No policy that met the source's environment can have said these turns."""
    REPEATED = "repeated", 0.25
    COPIED = "copied", 0.25


Problem = tuple[Refusal, str]
"""The reason why a message is refused, and what exactly was found."""

UNEXAMINED = (Refusal.FLOOD, Refusal.SURPLUS)
"""Refusals of messages that were never looked at, so they say nothing about what is in them."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A refused message.

    `sender` is the node in the subject, or None if there is none; it is a claim, to be used only
    for counting. `blamed` is the key that signed the message, if it can be blamed for the reason;
    `quarantined_s` is how long that key is quarantined because of it. `group_id` is the id of bytes
    under a valid signature, else ""; `group` is what was decoded of them before the check that
    failed. `costly`: the answers were looked at, which takes up to a few milliseconds and is
    charged to whoever sent them; all that comes before takes less than one.
    """

    reason: Refusal
    sender: str | None
    detail: str
    blamed: str | None = None
    quarantined_s: float = 0.0
    costly: bool = False
    group_id: str = ""
    group: RolloutGroup | None = None


refuses(  # by `services.verifier.foreign_groups.ForeignPipeline`, which reads the payload
    Stage.PAYLOAD,
    (Refusal.REFERENCE, "the payload is not its own, or has another hash"),
    (Refusal.BLOB_MISSING, "chunks of its payload are gone"),
)

T = TypeVar("T")
Find = Callable[["Border", "Claim"], "Problem | None"]
_IN_TURN: dict[Stage, list[Find]] = {Stage.BODY: [], Stage.CONTENT: []}


def check(stage: Stage, *checks: tuple[Refusal, str]) -> Callable[[Find], Find]:
    """List a check as `refuses` does, and run it in this stage after those above it. A check of
    the body may read the border's memories. One of the content may take long, so it runs in a
    thread: it reads nothing that changes.
    """

    def listed(find: Find) -> Find:
        _IN_TURN[stage].append(find)
        return refuses(stage, *checks)(find)

    return listed


JUDGED_BODIES = 100_000
"""Number of refused bodies remembered with their key, so that one that is sent again, by whomever,
costs no more than its hash and is not blamed twice.
"""
_DIFFERENCES = (Refusal.TASK_UNDERIVABLE, Refusal.TASK_MISMATCH, Refusal.TASK_NOT_ALLOWED)
_MAY_PASS_LATER = {Refusal.BANNED, Refusal.QUARANTINED, Refusal.AUTHOR}
"""Refusals that say nothing about the body: a ban ends, and the subject and the envelope's name are
not signed, so that anyone can store a group in the wrong place.
"""
_AGAIN = "the key's last three groups of this dataset failed this check below"
_A_ROW, _SHORT = "for a row of a file", "if the answers are too short to tell"
_SEEN = "group {} was seen before"
_REASONS = {each.value: each for each in Refusal} | {"task_verifier": Refusal.TASK_NOT_ALLOWED}
"""What the decoder or the sandbox says, as a reason. That this node's verifier cannot judge a task
is no fault of its sender.
"""


@dataclass(frozen=True, slots=True)
class Claim:
    """A decoded group under a valid signature, as checks see it; `sender` is by its subject."""

    sender: str | None
    envelope: SignedRollouts
    group: RolloutGroup
    now_s: float


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
        self.copies = copies or CopyMemory()
        self._differences = TaskDifferences[Refusal]()
        self._awaits_pass = awaits_pass
        self.senders = Senders(trust, self.reputation, rules.established_after)

    @refuses(
        Stage.UNREAD,
        (Refusal.SCHEMA_VERSION, "its subject is of another schema version"),
        (Refusal.BANNED, "the name on the subject is banned here (`swarm ban`)"),
        (Refusal.TOO_LARGE, "it is longer than 8 MiB"),
        # The next two are by `services.verifier.fair_queue.beyond_budget`.
        (Refusal.FLOOD, "more messages wait than the budget covers, and its new sender sends more than one sender may"),
        (Refusal.SURPLUS, "more messages wait than the budget covers, for any other reason"),
    )
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

    def note_own(self, group: RolloutGroup) -> None:
        """Remember a group of this node, so that a sender who returns it counts as a copier."""
        self.copies.remember(self.copies.fingerprint_of(group), "", 0, group.created_at)

    def learn(self, scored: ScoredGroup, made: GroupPrint, now_s: float) -> None:
        """Remember a group that another of the node's verifiers has scored or accepted, or that
        this one had before it started.
        """
        key, now_s = scored.public_key, min(now_s, scored.scored_at)
        self._count_copiers(self.copies.look(made, key, scored.swarm_seq, now_s, scored.swarm_stored_at)[1], now_s)
        self.copies.remember(made, key, scored.swarm_seq, now_s, scored.swarm_stored_at)
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
        opened = yield from _apart(lambda: self._opened(payload))
        if isinstance(opened[0], Refusal):
            return Refused(opened[0], sender, opened[1])
        envelope, body_id = opened
        if self._was_seen(envelope.public_key, body_id):
            return Refused(Refusal.REPLAYED, sender, _SEEN.format(body_id))
        if not (yield from _apart(lambda: _is_signed(envelope))):
            return Refused(Refusal.SIGNATURE, sender, "the signature is not by the key that the message names")
        work = partial if envelope.encoding == "none" else Unpacking
        group: RolloutGroup | None = None
        made: GroupPrint | None = None
        costly = False
        problem = self.key_problem(envelope.public_key, now_s)
        if problem is None:
            group, problem = yield from _apart(work(self._decoded, envelope))
        if group is not None:
            claim = Claim(sender, envelope, group, now_s)
            problem = self._first_problem(Stage.BODY, claim)
            if problem is None:
                found = yield from _apart(work(self._content, claim))
                made, problem = (found, None) if isinstance(found, GroupPrint) else (None, found)
                costly = True
        if problem is not None and self._was_seen(envelope.public_key, body_id):  # while these same bytes were looked at
            problem = Refusal.REPLAYED, _SEEN.format(body_id)
        if problem is not None:
            refused = self._refuse(problem[0], sender, envelope.public_key, body_id, problem[1], now_s)
            return replace(refused, group_id=body_id, group=group, costly=costly)
        assert sender is not None and group is not None and made is not None
        candidate = Candidate(sender, envelope.public_key, body_id, without_prompt(group), made, seq, stored_at_s)
        copy = self._refuse_copy(candidate, now_s)
        return candidate if copy is None else replace(copy, group_id=body_id, group=candidate.group, costly=True)

    @refuses(
        Stage.ENVELOPE,
        (Refusal.SCHEMA_VERSION, "its schema version is another"),
        (Refusal.MALFORMED, "it is not an envelope"),
        (Refusal.OUT_OF_RANGE, "a value is outside what this version takes, such as an encoding"),
        (Refusal.OTHER_SWARM, "it is signed for another swarm (`nats.swarm_id`)"),
    )
    def _opened(self, payload: bytes) -> tuple[SignedRollouts, str] | Problem:
        try:
            envelope = decode_foreign(payload, SignedRollouts)
        except MessageError as error:
            return _REASONS[error.reason], error.detail
        if envelope.swarm != self._rules.swarm_id:
            return Refusal.OTHER_SWARM, f"signed for nats.swarm_id {envelope.swarm!r}, and this node's is {self._rules.swarm_id!r}"
        return envelope, content_id(envelope.body)

    @refuses(
        Stage.ENVELOPE,
        (Refusal.REPLAYED, "its body was accepted or judged before"),
        (Refusal.SIGNATURE, "the signature is not from the key that it names"),
    )
    def _was_seen(self, public_key: str, body_id: str) -> bool:
        return self._replay.contains(body_id) or self._judged.contains(_judged_id(public_key, body_id))

    @refuses(Stage.KEY, (Refusal.BANNED, "the key is banned here"), (Refusal.QUARANTINED, "the key is in quarantine"))
    def key_problem(self, public_key: str, now_s: float) -> Problem | None:
        if self.bans.unreadable:
            return Refusal.BANNED, self.bans.unreadable
        ban = self.bans.ban_for_key(public_key, now_s)
        if ban is not None:
            return Refusal.BANNED, ban.reason
        remaining_s = self.reputation.remaining_s(public_key, now_s)
        return (Refusal.QUARANTINED, f"for {remaining_s:.0f} s more") if remaining_s > 0 else None

    @refuses(
        Stage.BODY,
        (Refusal.TOO_LARGE, "it unpacks to more than 8 MiB"),
        (Refusal.SCHEMA_VERSION, "the body's schema version is not supported"),
        (Refusal.MALFORMED, "no rollout group, a field named twice, nested deeper than 16 levels, or more than 16,384 values"),
        (Refusal.OUT_OF_RANGE, "a value is outside what this version takes, such as a kind of prompt part"),
    )
    def _decoded(self, envelope: SignedRollouts) -> tuple[RolloutGroup, None] | tuple[None, Problem]:
        try:
            body = unpacked(envelope.body, envelope.encoding, self._rules.max_bytes)
            return with_first_completions(decode_foreign(body, RolloutGroup), self._rules.max_completions), None
        except MessageError as error:
            return None, (_REASONS[error.reason], error.detail)

    def _first_problem(self, stage: Stage, claim: Claim) -> Problem | None:
        return next((problem for find in _IN_TURN[stage] if (problem := find(self, claim)) is not None), None)

    @check(
        Stage.BODY,
        (Refusal.AUTHOR, "subject, envelope and body name different nodes, or this one"),
        (Refusal.UNKNOWN_KEY, "the key may not use that name (`verifier.trust`)"),
    )
    def _author_problem(self, claim: Claim) -> Problem | None:
        sender, envelope, group = claim.sender, claim.envelope, claim.group
        if not sender == envelope.node == group.node or sender == self._rules.node:
            return Refusal.AUTHOR, f"subject says {sender}, envelope {envelope.node}, body {group.node}"
        if not self._trust.may_use(envelope.node, envelope.public_key, claim.now_s):
            return Refusal.UNKNOWN_KEY, f"{envelope.node} is not the one name of this key (verifier.trust)"
        return None

    @check(
        Stage.BODY,
        (Refusal.TOO_OLD, "it is older than half an hour, and than `sampler.max_external_age_s`"),
        (Refusal.FROM_FUTURE, "its creation time is more than 60 s in the future"),
    )
    def _age_problem(self, claim: Claim) -> Problem | None:
        age_s = claim.now_s - claim.group.created_at
        if age_s > self._rules.max_age_s:
            return Refusal.TOO_OLD, f"{age_s:.0f} s old, at most {self._rules.max_age_s:.0f}"
        if age_s < -self._rules.max_clock_skew_s:
            return Refusal.FROM_FUTURE, f"made {-age_s:.0f} s in the future; one of the two clocks is wrong"
        return None

    @check(
        Stage.BODY,
        (Refusal.TASK_NOT_ALLOWED, "`verifier.accept` leaves it out, or its package or environment has another version here"),
    )
    def _task_problem(self, claim: Claim) -> Problem | None:
        """This node must mean the same task by the reference: its package, version, environment."""
        rules, ref = self._rules, claim.group.task.ref
        if (why_local := rules.local_only.get(ref.dataset)) is not None:
            return Refusal.TASK_NOT_ALLOWED, f"{ref.dataset} is local only: {why_local.words}"
        own_dataset = any(ref.dataset == dataset for dataset, _ in rules.own_tasks)
        allowed = (
            (rules.accept == "any" and (own_dataset or not _needs_an_entry(ref.dataset)))
            or (rules.accept == "dataset" and own_dataset)
            or (ref.dataset, ref.config) in rules.own_tasks
        )
        if not allowed:
            why = f"verifier.accept: {rules.accept}{', but it needs a [[tasks]] entry' if rules.accept == 'any' else ''}"
            return Refusal.TASK_NOT_ALLOWED, f"{ref.dataset} {ref.config[:100]} is not taken in ({why})"
        package, version = package_of(ref.dataset)
        if (ref.package, ref.version) != (package, version):
            here = f"has {package} {version}" if ref.package == package else f"has no package {ref.package!r} for it"
            return Refusal.TASK_NOT_ALLOWED, f"{ref.dataset} is made with {ref.package} {ref.version}, and this node {here}"
        turns = rules.turns_for(ref)
        if (turns.id if turns else UNSET) != claim.group.environment:
            theirs = "no environment" if claim.group.environment is UNSET else "another environment, or another version of it,"
            return (
                Refusal.TASK_NOT_ALLOWED,
                f"{ref.dataset} was answered with {theirs} and this node's is {turns.title if turns else 'none'}",
            )
        return None

    @check(Stage.BODY, (Refusal.NO_PASS, "no pass is defined for its task's source (`pass_at`)"))
    def _pass_problem(self, claim: Claim) -> Problem | None:
        ref = claim.group.task.ref
        return (Refusal.NO_PASS, f"{ref.dataset}: {NO_PASS}") if self._awaits_pass(ref) else None

    @check(Stage.BODY, (Refusal.TASK_UNDERIVABLE, _AGAIN), (Refusal.TASK_MISMATCH, _AGAIN))
    def _difference(self, claim: Claim) -> Problem | None:
        return self._differences.problem(claim.envelope.public_key, claim.group.task.ref.dataset, claim.now_s)

    @check(Stage.CONTENT, (Refusal.HELD_OUT, "its task is in this node's held-out set"))
    def _held_out_problem(self, claim: Claim) -> Problem | None:
        held_out = self._held_out.contains(claim.group.task)
        return (Refusal.HELD_OUT, "the task is in this node's held-out set") if held_out else None

    @check(
        Stage.CONTENT,
        (Refusal.LENGTHS, "a completion has over twice `generator.max_new_tokens`, or over 16,384 characters and 8 for each"),
        (Refusal.OUT_OF_RANGE, "a completion has several turns, and its source no environment"),
        (Refusal.MALFORMED, "a completion's tokens or logprobs cannot belong to its text"),
    )
    def _completions_problem(self, claim: Claim) -> Problem | None:
        """Of the first completion with a problem, else of the prompt."""
        rules, group = self._rules, claim.group
        for completion in group.completions:
            problem = completion_problem(completion, rules.max_answer_chars, rules.max_tokens, rules.turns_for(group.task.ref))
            if problem is not None:
                return problem
        return token_ids_problem(group.prompt_ids or b"")

    @refuses(
        Stage.CONTENT,
        (Refusal.REPEATED, "the key has sent this task before, with the same answers or twice", _A_ROW),
        (Refusal.COPIED, "it repeats an earlier group of another node", _SHORT),
    )
    def _content(self, claim: Claim) -> GroupPrint | Problem:
        """The checks of the content, and the print with which `_refuse_copy` looks for copies."""
        return self._first_problem(Stage.CONTENT, claim) or self.copies.fingerprint_of(claim.group)

    @refuses(
        Stage.SANDBOX,
        (Refusal.BANNED, "the key was banned meanwhile"),
        (Refusal.QUARANTINED, "the key came into quarantine meanwhile"),
        (Refusal.SCORING_COST, "the key's groups cost more than they are worth"),
        (Refusal.TASK_UNDERIVABLE, "its task cannot be derived here"),
        (Refusal.TASK_MISMATCH, "the derived task's prompt, key, answer or metadata differs from the group's"),
        (Refusal.TASK_NOT_ALLOWED, "this node's verifier cannot judge its task"),
        (Refusal.SCORING_TIMEOUT, "it was not judged within its limits"),
        (Refusal.UNKNOWN_REWARD, "the reward of one of its answers is unknown"),
        (Refusal.TURNS, "an answer goes on after its episode has ended, stops before, or has more turns than `max_turns`"),
    )
    def conclude(self, candidate: Candidate, result: JobResult, now_s: float) -> Refused | None:
        """The verdict once the sandbox has derived the task again and scored the answers. None:
        accepted and remembered.

        Whatever the verdict, the group's cost is charged to its key.
        """
        if result.reason == DROPPED:
            reason, detail = self.key_problem(candidate.public_key, now_s) or (Refusal.QUARANTINED, result.detail)
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

    @refuses(
        Stage.ACCEPTANCE,
        (Refusal.REPLAYED, "the same message was accepted meanwhile"),
        (Refusal.REPEATED, "a group of the key's with this task was accepted meanwhile", _A_ROW),
        (Refusal.COPIED, "another node's group with these answers was accepted meanwhile", _SHORT),
        (Refusal.UNKNOWN_KEY, "another key got its name meanwhile"),
    )
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
        self.copies.remember(candidate.made, candidate.public_key, candidate.seq, now_s, candidate.stored_at_s)
        self.reputation.credit(candidate.public_key, candidate.sender, now_s)
        self._differences.accepted(candidate.public_key, candidate.group.task.ref.dataset)
        return None

    def _refuse_copy(self, candidate: Candidate, now_s: float, *, accepting: bool = False) -> Refused | None:
        key, sender = candidate.public_key, candidate.sender
        if self._replay.contains(candidate.group_id):  # the same message, stored twice
            return Refused(Refusal.REPLAYED, sender, f"group {candidate.group_id} was accepted meanwhile")
        found, copiers = self.copies.look(candidate.made, key, candidate.seq, now_s, candidate.stored_at_s)
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
            self.senders.copied(key, now_s)
        return self._refuse(Refusal.COPIED, sender, key, candidate.group_id, detail, now_s, float(found.telling))

    def _count_copiers(self, copiers: list[str], now_s: float) -> None:
        """Copies that were examined before their original: too late to refuse, but not to count,
        once.
        """
        for copier in copiers:
            self.senders.copied(copier, now_s)
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
        if not reason.blame or not part or known:
            return Refused(reason, sender, detail)
        name = sender if sender is not None and self._trust.key_of(sender) in {key, None} else ""
        quarantined_s = self.reputation.blame(key, name, reason, now_s, part)
        return Refused(reason, sender, detail, blamed=key, quarantined_s=quarantined_s)


def _apart(work: Callable[[], T]) -> Generator[Callable[[], Any], Any, T]:
    """Request the result of `work` from the caller that runs the examination."""
    result: T = yield work
    return result


def _is_signed(envelope: SignedRollouts) -> bool:
    return keys.verify(envelope.public_key, signed_bytes(envelope.swarm, envelope.body, envelope.encoding), envelope.signature)


def _judged_id(public_key: str, body_id: str) -> str:
    # The id includes the signer. Otherwise somebody who signs another's body with his own key could
    # have the original refused.
    return content_id(f"{public_key} {body_id}".encode())


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
