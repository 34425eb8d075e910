"""What is known of keys outlives restarts, is common to replicas, takes in what the trainer finds;
broken state harms nobody.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.selection.left_out import Findings, absurd_text
from services.verifier.border import Refusal
from services.verifier.reputation import FIRST_S, MAX_EVENTS, MAX_KEYS, LaterOffence, Reputation, Senders
from services.verifier.sender_watch import SharedReputation
from services.verifier.trust import KnownKeys
from shared.contracts import subjects
from shared.contracts.codec import decode, encode
from shared.contracts.senders import MAX_FINDINGS, MAX_REPUTATIONS, AbsurdText, ReputationState, TrainerFindings
from shared.contracts.subjects import FINDINGS_KEY, REPUTATION_KEY
from shared.transport.base import Transport
from tests.nats_server import own_plane

BLAMED = [reason for reason in Refusal if reason.blame]

NOW_S = 1_800_000_000.0
BUCKET = subjects.node_bucket("alpha")
LOG = structlog.get_logger()


class Replica:
    """One verifier's part in the common reputation."""

    def __init__(self, plane: Transport, folder: Path) -> None:
        self.known = Reputation()
        self.trust = KnownKeys(folder / "known.txt", ("alpha", "UALPHA"))
        self.shared = SharedReputation("alpha", plane, self.known, self.trust, LOG)
        self.senders = Senders(self.trust, self.known, 8)


def on_a_plane(test: Callable[[Transport], Awaitable[None]]) -> None:
    async def run() -> None:
        plane = await own_plane()
        await plane.kv.ensure(BUCKET)
        try:
            await test(plane)
        finally:
            await plane.close()

    asyncio.run(run())


def test_quarantine_and_earned_shares_survive_a_restart(tmp_path: Path) -> None:
    async def test(plane: Transport) -> None:
        first = Replica(plane, tmp_path)
        await first.shared.exchange(NOW_S)
        for _ in range(8):
            first.known.credit("UGOOD", "beta", NOW_S)
        first.known.blame("UBAD", "mallory", Refusal.SCORING_COST, NOW_S)
        await first.shared.exchange(NOW_S + 1)
        restarted = Replica(plane, tmp_path)
        assert restarted.known.remaining_s("UBAD", NOW_S + 2) == 0
        await restarted.shared.exchange(NOW_S + 2)
        assert restarted.known.remaining_s("UBAD", NOW_S + 2) == FIRST_S - 2
        assert restarted.senders.by_key("UGOOD", NOW_S).established
        assert restarted.known.blame("UBAD", "mallory", Refusal.SCORING_COST, NOW_S + FIRST_S) == 2 * FIRST_S

    on_a_plane(test)


def test_what_replicas_see_adds_up_and_counts_once(tmp_path: Path) -> None:
    async def test(plane: Transport) -> None:
        one, two = Replica(plane, tmp_path), Replica(plane, tmp_path)
        for number in range(20):
            one.known.credit("UK", "beta", NOW_S + number)
            two.known.credit("UK", "beta", NOW_S + number)
            if number % 3 == 0:
                await one.shared.exchange(NOW_S + number)
            if number % 4 == 0:
                await two.shared.exchange(NOW_S + number)
        for each in (one, two, one):
            await each.shared.exchange(NOW_S + 30)
        assert (one.known.accepted("UK"), two.known.accepted("UK")) == (40, 40)
        two.known.blame("UBAD", "mallory", Refusal.SCORING_COST, NOW_S + 31)
        await two.shared.exchange(NOW_S + 31)
        await one.shared.exchange(NOW_S + 31)
        assert one.known.remaining_s("UBAD", NOW_S + 31) == FIRST_S, "out at one replica, out at all"

    on_a_plane(test)


class Interrupted:
    """A plane on which another replica writes between a read and the write after it, as often as it
    is told.
    """

    def __init__(self, plane: Transport, others: Callable[[], Awaitable[None]]) -> None:
        self.kv = self
        self._plane = plane
        self._others = others

    async def get(self, bucket: str, key: str):  # type: ignore[no-untyped-def]
        return await self._plane.kv.get(bucket, key)

    async def update(self, bucket: str, key: str, value: bytes, *, last_revision: int) -> int:
        await self._others()
        return await self._plane.kv.update(bucket, key, value, last_revision=last_revision)


def test_a_write_that_another_replica_came_before_loses_nothing_and_counts_nothing_twice(tmp_path: Path) -> None:
    async def test(plane: Transport) -> None:
        two = Replica(plane, tmp_path)

        async def others() -> None:
            two.known.credit("UK", "beta", NOW_S)
            await two.shared.exchange(NOW_S)

        one = Replica(Interrupted(plane, others), tmp_path)  # type: ignore[arg-type]
        for _ in range(3):
            one.known.credit("UK", "beta", NOW_S)
            await one.shared.exchange(NOW_S)
        calm = SharedReputation("alpha", plane, one.known, one.trust, LOG)
        await calm.exchange(NOW_S)
        await two.shared.exchange(NOW_S)
        assert one.known.accepted("UK") == two.known.accepted("UK") == 6

    on_a_plane(test)


@pytest.mark.parametrize("broken", [b"", b"\xc1", b"x" * 5000, encode(TrainerFindings(node="alpha", updated_at=0.0, found=[]))])
def test_state_that_cannot_be_read_is_made_anew_and_findings_that_cannot_are_passed_over(broken: bytes, tmp_path: Path) -> None:
    async def test(plane: Transport) -> None:
        await plane.kv.put(BUCKET, REPUTATION_KEY, broken)
        await plane.kv.put(BUCKET, FINDINGS_KEY, encode(ReputationState()) if broken else b"")
        replica = Replica(plane, tmp_path)
        replica.known.credit("UK", "beta", NOW_S)
        await replica.shared.exchange(NOW_S)
        entry = await plane.kv.get(BUCKET, REPUTATION_KEY)
        assert entry is not None
        assert [each.public_key for each in decode(entry.value, ReputationState).keys] == ["UK"]

    on_a_plane(test)


def test_the_common_state_is_bounded_and_keeps_the_worst_and_the_best(tmp_path: Path) -> None:
    async def test(plane: Transport) -> None:
        replica = Replica(plane, tmp_path)
        for number in range(3 * MAX_REPUTATIONS):
            replica.known.blame(f"U{number}", "many", Refusal.REPEATED, NOW_S)
        replica.known.blame("UBAD", "mallory", Refusal.SCORING_COST, NOW_S)
        for _ in range(2):
            replica.known.credit("UGOOD", "beta", NOW_S)
        await replica.shared.exchange(NOW_S)
        entry = await plane.kv.get(BUCKET, REPUTATION_KEY)
        assert entry is not None
        kept = {each.public_key for each in decode(entry.value, ReputationState).keys}
        assert len(kept) <= MAX_REPUTATIONS
        assert len(entry.value) < 512 * 1024, "well below what a message may have"
        assert {"UBAD", "UGOOD"} <= kept
        assert replica.known.suspicion("U0", NOW_S) > 0, "this process knows them all"

    on_a_plane(test)


def test_of_ten_thousand_names_only_offenders_are_weighed_against_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    known, weighed = Reputation(), list[str]()
    for number in range(MAX_KEYS - 1):
        known.credit(f"U{number}", "many", NOW_S)
    known.blame("UBAD", "mallory", Refusal.REPEATED, NOW_S)
    suspicion = known.suspicion
    monkeypatch.setattr(known, "suspicion", lambda key, now_s: weighed.append(key) or suspicion(key, now_s))
    assert "UBAD" in {each.public_key for each in known.records(NOW_S)}
    assert weighed == ["UBAD"]


def test_what_the_trainer_finds_costs_the_sender_its_share_in_proportion_once_and_never_its_place(tmp_path: Path) -> None:
    async def test(plane: Transport) -> None:
        replica, findings = Replica(plane, tmp_path), Findings("alpha")
        replica.trust.bind("gamma", "UGAMMA", NOW_S)
        replica.trust.bind("beta", "UBETA", NOW_S)
        for number in range(1, 200):
            for key, name in (("UGAMMA", "gamma"), ("UBETA", "beta")):
                replica.known.credit(key, name, NOW_S)
            findings.note(number, {"gamma": 2, "beta": 0} if number != 7 else {"beta": 1}, {"beta": 1})
            await findings.tell(plane, NOW_S)
            await replica.shared.exchange(NOW_S)
            assert replica.known.remaining_s("UGAMMA", NOW_S) == 0.0
        suspicion = replica.known.suspicion("UGAMMA", NOW_S)
        assert 0.1 < suspicion <= LaterOffence.ABSURD.blame
        assert not replica.senders.by_key("UGAMMA", NOW_S).established
        assert replica.senders.by_key("UBETA", NOW_S).established
        for _ in range(5):
            await replica.shared.exchange(NOW_S)
        restarted = Replica(plane, tmp_path)
        await restarted.shared.exchange(NOW_S)
        assert restarted.known.suspicion("UGAMMA", NOW_S) == pytest.approx(suspicion, rel=1e-4), "each finding counts once"
        entry = await plane.kv.get(BUCKET, FINDINGS_KEY)
        assert entry is not None
        assert len(decode(entry.value, TrainerFindings).found) <= MAX_FINDINGS

    on_a_plane(test)


def test_a_finding_says_how_many_of_the_answers_that_were_looked_at_were_absurd() -> None:
    assert absurd_text(3, {"gamma": 9, "beta": 0, "alpha": 1}, {"gamma": 3, "delta": 5}) == [
        AbsurdText(batch=3, sender="alpha", absurd=1, answers=1),
        AbsurdText(batch=3, sender="gamma", absurd=9, answers=12),
    ]
    assert absurd_text(3, {}, {"beta": 2}) == []


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from([None, LaterOffence.ABSURD, *BLAMED]),
            st.booleans(),
        ),
        max_size=80,
    ),
    st.integers(0, 2**32),
)
def test_any_order_of_events_and_exchanges_gives_all_replicas_one_count(
    tmp_path_factory: pytest.TempPathFactory, happened: list[tuple[int, Refusal | None, bool]], seed: int
) -> None:
    folder, rng = tmp_path_factory.mktemp("shared"), random.Random(seed)

    async def test(plane: Transport) -> None:
        replicas = [Replica(plane, folder) for _ in range(3)]
        for number, (key, offence, exchanged) in enumerate(happened):
            each = rng.choice(replicas)
            if offence is None:
                each.known.credit(f"U{key}", "n", NOW_S + number)
            else:
                each.known.blame(f"U{key}", "n", offence, NOW_S + number)
            if exchanged:
                await each.shared.exchange(NOW_S + number)
        for each in replicas * 2:
            await each.shared.exchange(NOW_S + len(happened))
        for key in range(4):
            expected = sum(which == key and offence is None for which, offence, _ in happened)
            assert {each.known.accepted(f"U{key}") for each in replicas} == {expected}
            refused = sum(which == key and offence is not None for which, offence, _ in happened)
            for each in replicas:
                worst = {s.public_key: sum(s.refused.values()) for s in each.known.worst(10, NOW_S + 100)}
                assert worst.get(f"U{key}", 0) == refused

    on_a_plane(test)


def test_events_kept_for_the_common_state_are_bounded() -> None:
    reputation = Reputation()
    for number in range(MAX_EVENTS + 5):
        reputation.credit(f"U{number % 7}", "n", NOW_S)
    taken = reputation.take_events()
    assert len(taken) == MAX_EVENTS
    reputation.credit("ULATER", "n", NOW_S)
    reputation.keep_events(taken)
    kept = reputation.take_events()
    assert len(kept) == MAX_EVENTS
    assert kept[-1].public_key == "ULATER"
    assert msgspec.structs.asdict(ReputationState())["findings_batch"] == 0
