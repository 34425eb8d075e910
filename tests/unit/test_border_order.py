"""The list of the border's checks is what the border does: everything is wrong at first, and one
thing after the other is put right, in the order of the list.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import msgpack
import msgspec
import pytest
import zstandard

from monitoring.border_doc import PAGE, with_checks
from services.verifier import border as border_module
from services.verifier.border import Border, Candidate, Refusal, Refused
from services.verifier.border_rules import BorderRules
from services.verifier.checks import CHECKS, Stage
from services.verifier.copies import CopyMemory, ReplayMemory
from services.verifier.fair_queue import ClaimedChunks, beyond_budget
from services.verifier.reputation import AGAIN_S, GRACE_S, TRIES
from services.verifier.trust import KnownKeys
from shared.config import TaskSpec
from shared.contracts import subjects
from shared.contracts.codec import content_id, encode, pack_ids, pack_logprobs
from shared.contracts.messages import RolloutGroup, ScoredGroup, signed_bytes
from shared.contracts.senders import Ban, BanList
from shared.contracts.wire import DEFAULT_SWARM_ID, SWARM_SCHEMA_VERSION
from shared.environment_files import TOOLS, EnvironmentSpec
from shared.tasks.derive import derive_task, task_ref
from shared.tasks.held_out import HeldOut
from shared.tasks.sandbox import DROPPED, JobResult, ScorerPool, ScoringJob
from shared.transport.base import StoredMessage
from tests.unit.test_border import HELD, KEY, NOW_S, THIRD_KEY, border, completions, group, signed, taken_in

MAX_BYTES = 100_000
Place = tuple[Stage, Refusal]


def places(*stages: Stage) -> list[Place]:
    """The places of the checks in these stages, in the order of the list."""
    return [(check.stage, check.refusal) for check in CHECKS if check.stage in stages]


def test_the_page_shows_the_checks_as_they_are() -> None:
    assert PAGE.read_text() == with_checks(PAGE.read_text()), "run `python -m monitoring.border_doc`"


def test_every_reason_has_a_check_and_no_stage_has_two_of_the_same_reason() -> None:
    assert {check.refusal for check in CHECKS} == set(Refusal)
    assert len(set(places(*Stage))) == len(CHECKS)


def test_every_reason_that_the_verifier_names_exists() -> None:
    files = Path(border_module.__file__).parent.glob("*.py")
    named = {name for file in files for name in re.findall(r"\bRefusal\.([A-Z_]+)", file.read_text())}
    assert named == set(Refusal.__members__)


def test_every_reason_is_in_a_test() -> None:
    """Of a check that is not among the faults of `World`, in one of its own."""
    tests = "".join(file.read_text() for file in Path(__file__).parents[1].rglob("test_*.py"))
    assert [each for each in Refusal if f"Refusal.{each.name}" not in tests and f'"{each.value}"' not in tests] == []


def test_stages_come_in_their_order() -> None:
    stages = list(Stage)
    order = [stages.index(check.stage) for check in CHECKS]
    assert order == sorted(order) and set(order) == set(range(len(stages)))


class World:
    """A border, and a sender whose messages have every fault that is in `wrong`. The sender is
    delta under THIRD_KEY; the name beta is KEY's.
    """

    def __init__(self, folder: Path) -> None:
        self.wrong: set[Place] = set()
        self.faults: set[Place] = set()
        """All that it can make wrong, once a faultless message was examined."""
        self.now_s = NOW_S
        self._replay = ReplayMemory(1000)
        rules = BorderRules(
            node="alpha",
            accept="dataset",
            own_tasks={("gcd", "{}")},
            max_age_s=1800,
            max_clock_skew_s=60,
            max_bytes=MAX_BYTES,
            max_completions=4,
            max_answer_chars=100,
            max_tokens=32,
        )
        trust = KnownKeys(folder / "names", ("alpha", "UA"))
        awaits_pass = lambda _: self.has(Stage.BODY, Refusal.NO_PASS)  # noqa: E731
        self.border = Border(rules, trust, self._replay, HeldOut([HELD]), CopyMemory(), awaits_pass)
        self._sent = 100

    def has(self, stage: Stage, refusal: Refusal) -> bool:
        self.faults.add((stage, refusal))
        return (stage, refusal) in self.wrong

    def examine(self) -> Candidate | Refused:
        """The verdict on a message with all faults that are left."""
        self._sent += 1
        name = "beta" if self.has(Stage.BODY, Refusal.UNKNOWN_KEY) else "delta"
        version = 9 if self.has(Stage.UNREAD, Refusal.SCHEMA_VERSION) else SWARM_SCHEMA_VERSION
        return self.border.examine(f"swarm.rollouts.v{version}.{name}", self._payload(name), self.now_s, seq=self._sent)

    def accept(self, made: RolloutGroup, key: str) -> None:
        """What another of the node's verifiers accepted."""
        whole = ScoredGroup(
            group_id=content_id(encode(made)),
            origin="external",
            group=made,
            rewards=[0.5] * len(made.completions),
            scored_by="alpha",
            score_seconds=0.1,
            scored_at=self.now_s,
            public_key=key,
            swarm_seq=1,
        )
        self.border.learn(whole, self.border.copies.fingerprint_of(made), self.now_s)

    def ban(self, *senders: str) -> None:
        self.border.bans.replace(BanList(bans=[Ban(sender=sender) for sender in senders]))

    def quarantine(self) -> None:
        assert self.border.reputation.blame(THIRD_KEY.public_key, "", Refusal.SCORING_COST, self.now_s)

    def wait_for_its_end(self) -> None:
        self.now_s += self.border.reputation.remaining_s(THIRD_KEY.public_key, self.now_s) + 1

    def differ(self, reason: str, times: int) -> None:
        """A number of faultless groups whose tasks come out otherwise."""
        left, self.wrong = self.wrong, set()
        for _ in range(times):
            candidate = self.examine()
            assert isinstance(candidate, Candidate), candidate
            self.border.conclude(candidate, result(reason), self.now_s)
        self.wrong = left

    def _payload(self, name: str) -> bytes:
        padding = b"x" * (MAX_BYTES if self.has(Stage.UNREAD, Refusal.TOO_LARGE) else 0)
        if self.has(Stage.ENVELOPE, Refusal.SCHEMA_VERSION) or self.has(Stage.ENVELOPE, Refusal.MALFORMED):
            return packed(self.has(Stage.ENVELOPE, Refusal.SCHEMA_VERSION), padding=padding)
        body, encoding = self._body(name), "none"
        if self.has(Stage.BODY, Refusal.TOO_LARGE):
            body, encoding = zstandard.compress(body), "zstd"
        if self.has(Stage.ENVELOPE, Refusal.REPLAYED):
            self._replay.remember(content_id(body), self.now_s)
        swarm = "another" if self.has(Stage.ENVELOPE, Refusal.OTHER_SWARM) else DEFAULT_SWARM_ID
        signed = signed_bytes(swarm, body, encoding)  # type: ignore[arg-type]
        signature = THIRD_KEY.sign(signed + b"!" if self.has(Stage.ENVELOPE, Refusal.SIGNATURE) else signed)
        return packed(
            swarm=swarm,
            node=name,
            public_key=THIRD_KEY.public_key,
            signature=signature,
            encoding="lz4" if self.has(Stage.ENVELOPE, Refusal.OUT_OF_RANGE) else encoding,
            body=body,
        )

    def _body(self, name: str) -> bytes:
        padding = b"x" * (MAX_BYTES if self.has(Stage.BODY, Refusal.TOO_LARGE) else 0)
        if self.has(Stage.BODY, Refusal.SCHEMA_VERSION) or self.has(Stage.BODY, Refusal.MALFORMED):
            return packed(self.has(Stage.BODY, Refusal.SCHEMA_VERSION), padding=padding, draw=self._sent)
        whole = msgspec.to_builtins(self._group(name), builtin_types=(bytes,))
        if self.has(Stage.BODY, Refusal.OUT_OF_RANGE):
            whole["task"]["prompt"][0]["parts"][0]["kind"] = "image"
        return packed(**whole)

    def _group(self, name: str) -> RolloutGroup:
        old, future = self.has(Stage.BODY, Refusal.TOO_OLD), self.has(Stage.BODY, Refusal.FROM_FUTURE)
        is_copy = self.has(Stage.CONTENT, Refusal.REPEATED) or self.has(Stage.CONTENT, Refusal.COPIED)
        made = REPEATED if self.has(Stage.CONTENT, Refusal.REPEATED) else COPIED if is_copy else group(self._sent)
        texts = ["x" * 101] * 2 if self.has(Stage.CONTENT, Refusal.LENGTHS) else ANSWERS if is_copy else ["4", "5"]
        several = self.has(Stage.CONTENT, Refusal.OUT_OF_RANGE)
        logprob = 0.5 if self.has(Stage.CONTENT, Refusal.MALFORMED) else -0.5
        asked = HELD if self.has(Stage.CONTENT, Refusal.HELD_OUT) else made.task
        if self.has(Stage.BODY, Refusal.TASK_NOT_ALLOWED):
            asked = msgspec.structs.replace(asked, ref=msgspec.structs.replace(asked.ref, dataset="lcm"))
        return group(
            node="gamma" if self.has(Stage.BODY, Refusal.AUTHOR) else name,
            draw=self._sent,
            created_at=self.now_s + (-5000 if old else 500 if future else -5),
            task=asked,
            completions=[
                msgspec.structs.replace(
                    made.completions[0],
                    text=text,
                    behaviour_logprobs=pack_logprobs([logprob, -1.0]),
                    turn_tokens=pack_ids([1, 2]) if several else None,
                    turn_chars=pack_ids([0, len(text)]) if several else None,
                )
                for text in texts
            ],
        )


ANSWERS = (
    "four, because both are even, four divides eight, and nothing larger divides the smaller of them",
    "I would say that it is two, as one sees by halving each of these numbers once and then no further",
)
REPEATED, COPIED = (group(draw, completions=[completions(text=text)[0] for text in ANSWERS]) for draw in (1, 2))
"""Groups that others have sent before; the first also by the sender."""


def packed(other_version: bool = False, **fields: object) -> bytes:
    """A message of these fields under its schema version."""
    made: bytes = msgpack.packb({"schema": SWARM_SCHEMA_VERSION + other_version, **fields})
    return made


def result(reason: str | None = None, cpu_s: float = 0.0) -> JobResult:
    return JobResult([1.0, 0.0] if reason is None else [], None, reason, "", 0, 0.1, cpu_s=cpu_s)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_message_with_every_fault_is_refused_for_one_after_the_other_in_this_order(world: World) -> None:
    assert isinstance(world.examine(), Candidate)
    asked_elsewhere = [(Stage.UNREAD, Refusal.FLOOD), (Stage.UNREAD, Refusal.SURPLUS)]
    assert places(Stage.UNREAD)[-2:] == asked_elsewhere, "the queue takes what was not refused before"
    world.accept(group(0), KEY.public_key)
    for made, key in ((REPEATED, THIRD_KEY), (REPEATED, KEY), (COPIED, KEY)):
        node = "delta" if key is THIRD_KEY else "beta"
        world.accept(msgspec.structs.replace(made, node=node), key.public_key)
    world.differ("task_index", TRIES)
    world.quarantine()
    world.ban("beta", THIRD_KEY.public_key)
    mended = {
        (Stage.UNREAD, Refusal.BANNED): lambda: world.ban(THIRD_KEY.public_key),
        (Stage.KEY, Refusal.BANNED): world.ban,
        (Stage.KEY, Refusal.QUARANTINED): world.wait_for_its_end,
        (Stage.BODY, Refusal.TASK_UNDERIVABLE): lambda: wait_and_differ("task_mismatch"),
        (Stage.BODY, Refusal.TASK_MISMATCH): lambda: wait_and_differ(None),
    }

    def wait_and_differ(reason: str | None) -> None:
        world.now_s += AGAIN_S + 1
        world.differ(reason, 1)  # type: ignore[arg-type]

    listed = places(Stage.UNREAD, Stage.ENVELOPE, Stage.KEY, Stage.BODY, Stage.CONTENT)
    world.wrong = world.faults | mended.keys()
    assert len(world.wrong) > 25 and world.wrong < set(listed)
    for stage, refusal in (place for place in listed if place in world.wrong.copy()):
        verdict = world.examine()
        assert isinstance(verdict, Refused) and verdict.reason is refusal, f"{stage}: {refusal} was to be found: {verdict}"
        world.wrong.discard((stage, refusal))
        mended.get((stage, refusal), lambda: None)()
    assert isinstance(world.examine(), Candidate)


def test_a_flood_is_told_before_any_other_surplus_and_a_reference_is_read_before_its_chunks() -> None:
    """Of these, the message has one at most: the first is asked first."""
    assert [beyond_budget(earned, exceeds=True) for earned in (0.0, 1.0)] == [each for _, each in places(Stage.UNREAD)[-2:]]
    message = StoredMessage("S", 1, subjects.rollouts("delta"), 10, NOW_S, None, {"Swarm-Blob": "nonsense"})
    refused = ClaimedChunks().refuse(message)
    assert refused is not None and [refused.reason, Refusal.BLOB_MISSING] == [each for _, each in places(Stage.PAYLOAD)]


async def judged(pool: ScorerPool, wrong: set[Place]) -> JobResult:
    """What the sandbox says of a group whose task has these faults: this node's scorer of lcm does
    not exist.
    """
    derived = derive_task(task_ref(dataset="lcm", seed=1, index=0))
    expected = HELD if (Stage.SANDBOX, Refusal.TASK_MISMATCH) in wrong else derived
    if (Stage.SANDBOX, Refusal.TASK_NOT_ALLOWED) not in wrong:
        expected = derived = derive_task(task_ref(dataset="gcd", seed=1, index=0))
    ref = derived.ref
    if (Stage.SANDBOX, Refusal.TASK_UNDERIVABLE) in wrong:
        ref = msgspec.structs.replace(ref, dataset="nonsense")
    expected = msgspec.structs.replace(expected, ref=ref)
    return (await pool.run([ScoringJob(ref=ref, texts=["4", "5"], expected=expected, sender="UB", size_bytes=9)]))[0]


@pytest.mark.slow
def test_a_group_with_every_fault_is_given_up_in_the_sandbox_for_one_after_the_other_in_this_order(world: World) -> None:
    listed = places(Stage.SANDBOX)
    candidate = world.examine()
    assert isinstance(candidate, Candidate)
    turns = EnvironmentSpec(tools=(TOOLS["calculator"],), verifier="exact")
    world.border._rules = replace(world.border._rules, turns_for=lambda _: turns)
    world.ban(THIRD_KEY.public_key)
    world.quarantine()
    wrong = set(listed)

    def said_of(found: JobResult) -> JobResult:
        if {(Stage.SANDBOX, Refusal.BANNED), (Stage.SANDBOX, Refusal.QUARANTINED)} & wrong:
            found = result(DROPPED)
        elif found.reason is None and (Stage.SANDBOX, Refusal.SCORING_TIMEOUT) in wrong:
            found = result("scoring_timeout")
        elif found.reason is None and (Stage.SANDBOX, Refusal.UNKNOWN_REWARD) in wrong:
            found = JobResult([None, None], None, None, "", 0, 0.1)
        elif found.reason is None:
            found = JobResult([1.0, 0.0], None, None, "", 0, 0.1, said=[["go on"], ["go on"]])
        return msgspec.structs.replace(found, cpu_s=GRACE_S + 1 if (Stage.SANDBOX, Refusal.SCORING_COST) in wrong else 0.0)

    async def refuse_all() -> None:
        tasks = [TaskSpec(dataset="gcd"), TaskSpec(dataset="lcm", verifier="absent")]
        async with ScorerPool(workers=1, answer_timeout_s=20.0, memory_mb=4096, tasks=tasks, foreign_workers=1) as pool:
            for stage, refusal in listed:
                refused = world.border.conclude(candidate, said_of(await judged(pool, wrong)), world.now_s)
                assert refused is not None and refused.reason is refusal, f"{stage}: {refusal} was to be found: {refused}"
                wrong.discard((stage, refusal))
                if refusal is Refusal.BANNED:
                    world.ban()
                elif refusal is Refusal.QUARANTINED:
                    world.wait_for_its_end()

    asyncio.run(asyncio.wait_for(refuse_all(), 120))


def test_a_scored_group_with_every_fault_is_refused_for_one_after_the_other_in_this_order(world: World) -> None:
    def examined(**changes: object) -> Candidate:
        world.wrong = {(Stage.CONTENT, Refusal.COPIED)} if changes else {(Stage.CONTENT, Refusal.REPEATED)}
        candidate = world.examine()
        assert isinstance(candidate, Candidate)
        return candidate

    repeated = [examined(), examined()]
    copied = examined(of="beta")
    world.wrong = set()
    renamed = world.examine()
    assert isinstance(renamed, Candidate)
    # Meanwhile the sender's key was accepted under another name, and beta sent the same answers.
    world.accept(msgspec.structs.replace(repeated[0].group, node="gamma"), THIRD_KEY.public_key)
    for candidate in (*repeated, copied):
        world.accept(msgspec.structs.replace(candidate.group, node="beta", draw=1), KEY.public_key)
    world.accept(repeated[0].group, THIRD_KEY.public_key)
    reasons = [world.border.conclude(each, result(), world.now_s) for each in (*repeated, copied, renamed)]
    assert [each and each.reason for each in reasons] == [refusal for _, refusal in places(Stage.ACCEPTANCE)]


def scored(candidate: Candidate) -> JobResult:
    return JobResult([0.5] * len(candidate.group.completions), None, None, "", 0, 0.1)


def candidate(gate: Border, payload: bytes, seq: int, node: str = "beta") -> Candidate:
    examined = gate.examine(subjects.rollouts(node), payload, NOW_S, seq)
    assert isinstance(examined, Candidate), examined
    return examined


def test_who_is_blamed_for_what_is_found_while_a_group_is_scored_is_on_the_list_too(tmp_path: Path) -> None:
    gate = border(tmp_path)
    taken_in(gate, subjects.rollouts("beta"), signed(group(100)))
    waiting = {check.refusal: check for check in CHECKS if check.stage is Stage.ACCEPTANCE}

    def told(refused: Refused | None, reason: Refusal, *, blamed: bool) -> None:
        assert refused is not None and refused.reason is reason
        assert (refused.blamed is not None) is blamed
        assert waiting[reason].blamed.startswith("the key" if blamed or waiting[reason].spares else "nobody")

    payload = signed(group(2))
    first, again = candidate(gate, payload, 1), candidate(gate, payload, 2)
    assert gate.conclude(first, scored(first), NOW_S) is None
    told(gate.conclude(again, scored(again), NOW_S), Refusal.REPLAYED, blamed=False)

    first, again = candidate(gate, signed(group(3)), 3), candidate(gate, signed(group(3, created_at=NOW_S - 4)), 4)
    assert gate.conclude(first, scored(first), NOW_S) is None
    told(gate.conclude(again, scored(again), NOW_S), Refusal.REPEATED, blamed=True)

    first = candidate(gate, signed(group(4)), 5)
    copy = candidate(gate, signed(group(4, node="gamma"), THIRD_KEY), 6, "gamma")
    assert gate.conclude(first, scored(first), NOW_S) is None
    told(gate.conclude(copy, scored(copy), NOW_S), Refusal.COPIED, blamed=False)
