"""Who is blamed for what, how that leads to quarantine, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.verifier.border import Border, Candidate, Refusal, Refused
from services.verifier.reputation import FIRST_S, HALF_LIFE_S, LIMIT, LONGEST_S, MAX_KEYS, PAROLE, Reputation
from services.verifier.sharing import sign
from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.messages import SIGNATURE_DOMAIN, SignedRollouts, signed_bytes
from tests.unit.test_border import (
    HELD,
    KEY,
    NOW_S,
    OTHER_KEY,
    SUBJECT,
    border,
    completions,
    group,
    result,
    signed,
    taken_in,
    task,
    with_body,
)

BLAMED = [reason for reason in Refusal if reason.blame]

MESSAGE = sign(group(), KEY)


def tell(gate: Border, subject: str, payload: bytes, now_s: float = NOW_S) -> Refused:
    verdict = gate.examine(subject, payload, now_s)
    assert isinstance(verdict, Refused)
    return verdict


def replayed(gate: Border) -> Refused:
    first = gate.examine(SUBJECT, signed(group()), NOW_S)
    assert isinstance(first, Candidate)
    assert gate.conclude(first, result(), NOW_S) is None
    again = [tell(gate, SUBJECT, signed(group())) for _ in range(20)]
    assert {each.reason for each in again} == {Refusal.REPLAYED}
    return again[-1]


@pytest.mark.parametrize(
    "attack",
    [
        lambda gate: tell(gate, SUBJECT, b"x" * 100_001),
        lambda gate: tell(gate, SUBJECT, b"garbage"),
        lambda gate: tell(gate, SUBJECT, encode(msgspec.structs.replace(MESSAGE, signature=b"\x01" * 64))),
        lambda gate: tell(gate, SUBJECT, encode(msgspec.structs.replace(MESSAGE, body=b"\xc1"))),
        lambda gate: tell(gate, SUBJECT, encode(msgspec.structs.replace(MESSAGE, node="gamma"))),
        lambda gate: tell(gate, subjects.rollouts("gamma"), encode(MESSAGE)),
        lambda gate: tell(gate, subjects.rollouts("alpha"), encode(MESSAGE)),
        lambda gate: tell(gate, SUBJECT, encode(MESSAGE), NOW_S + 4000),
        replayed,
    ],
    ids=["size", "envelope", "signature", "body", "envelope-name", "other-subject", "our-subject", "kept-for-later", "replay"],
)
def test_what_anybody_can_do_with_a_message_is_blamed_on_nobody(attack: Callable[[Border], Refused], tmp_path: Path) -> None:
    gate = border(tmp_path)
    for _ in range(1 if attack is replayed else 20):
        refused = attack(gate)
        assert (refused.blamed, refused.quarantined_s) == (None, 0.0), refused
    assert gate.reputation.worst(10, NOW_S) == []
    assert isinstance(gate.examine(SUBJECT, signed(group(draw=99)), NOW_S), Candidate), "the true node is not harmed"


@pytest.mark.parametrize(
    ("reason", "payload"),
    [
        (Refusal.MALFORMED, with_body(b"\xc1")),
        (Refusal.MALFORMED, signed(group(completions=completions(token_ids=b"\xff" * 8)))),
        (Refusal.MALFORMED, signed(group(completions=completions(token_count=3)))),
    ],
)
def test_what_a_key_has_signed_is_blamed_on_the_key_and_once(reason: Refusal, payload: bytes, tmp_path: Path) -> None:
    gate = border(tmp_path)
    first, second = tell(gate, SUBJECT, payload), tell(gate, SUBJECT, payload)
    assert (first.reason, first.blamed) == (reason, KEY.public_key)
    assert second.blamed is None, "sent again by whoever read it"
    (standing,) = gate.reputation.worst(10, NOW_S)
    assert (standing.public_key, standing.name, standing.refused) == (KEY.public_key, "beta", {reason.value: 1})


def test_a_thief_of_a_name_gets_nothing_by_it(tmp_path: Path) -> None:
    gate = border(tmp_path)
    taken_in(gate, SUBJECT, signed(group(draw=1)))
    refused = tell(gate, SUBJECT, signed(group(), OTHER_KEY))
    assert (refused.reason, refused.blamed) == (Refusal.UNKNOWN_KEY, None), "two honest nodes may have one name"
    assert isinstance(gate.examine(SUBJECT, signed(group()), NOW_S), Candidate), "the same body under the true key still passes"
    assert gate.reputation.worst(5, NOW_S) == []


def test_an_honest_node_is_not_blamed_for_what_it_cannot_know_nor_for_its_clock(tmp_path: Path) -> None:
    gate = border(tmp_path)
    for payload in (
        signed(group(task=task(dataset="lcm"))),
        signed(group(task=HELD)),
        signed(group(created_at=NOW_S + 61)),
        signed(group(completions=completions(token_count=0, token_ids=None, behaviour_logprobs=None))),
    ):
        assert tell(gate, SUBJECT, payload).blamed is None


def test_bodies_that_no_honest_node_sends_lead_to_quarantine_and_the_way_back_is_open(tmp_path: Path) -> None:
    gate = border(tmp_path)
    bad = [tell(gate, SUBJECT, with_body(b"\xc1" + bytes([number]))) for number in range(7)]
    assert [each.quarantined_s for each in bad] == [0.0] * 6 + [FIRST_S]
    assert tell(gate, SUBJECT, signed(group())).reason is Refusal.QUARANTINED
    assert gate.reputation.quarantined(NOW_S) == 1
    under_another_name = tell(gate, subjects.rollouts("delta"), signed(group(node="delta")))
    assert under_another_name.reason is Refusal.QUARANTINED, "the key is left out, whatever it calls itself"
    back = gate.examine(SUBJECT, signed(group()), NOW_S + FIRST_S + 1)
    assert isinstance(back, Candidate)
    assert gate.conclude(back, result(), NOW_S + FIRST_S + 1) is None
    later_s = NOW_S + FIRST_S + 2
    again = [tell(gate, SUBJECT, with_body(b"\xc1x" + bytes([number])), later_s) for number in range(5)]
    assert [each.quarantined_s for each in again] == [0.0] * 4 + [2 * FIRST_S], "on parole fewer are enough, and the term is longer"


def test_a_quarantined_body_is_not_decoded(tmp_path: Path) -> None:
    gate = border(tmp_path)
    gate.reputation.blame(KEY.public_key, "beta", Refusal.SCORING_COST, NOW_S)
    assert tell(gate, SUBJECT, with_body(b"\xc1")).reason is Refusal.QUARANTINED


@given(st.lists(st.sampled_from([reason for reason in BLAMED if reason.blame <= 0.5]), max_size=300))
def test_light_offences_alone_never_lead_to_quarantine(reasons: list[Refusal]) -> None:
    reputation = Reputation()
    assert not any(reputation.blame("UK", "beta", reason, 0.0) for reason in reasons)
    assert reputation.suspicion("UK", 0.0) <= LIMIT


@given(st.lists(st.tuples(st.sampled_from([None, *BLAMED]), st.floats(0, 500)), max_size=120))
def test_suspicion_is_bounded_falls_with_time_and_is_small_after_quarantine(happened: list[tuple[Refusal | None, float]]) -> None:
    reputation, now_s = Reputation(), 0.0
    for reason, pause_s in happened:
        now_s += pause_s
        if reason is None:
            before = reputation.suspicion("UK", now_s)
            reputation.credit("UK", "beta", now_s)
            assert reputation.suspicion("UK", now_s) <= before
        elif reputation.blame("UK", "beta", reason, now_s):
            assert reputation.suspicion("UK", now_s) <= PAROLE
            assert FIRST_S - 1e-6 <= reputation.remaining_s("UK", now_s) <= LONGEST_S
        suspicion = reputation.suspicion("UK", now_s)
        assert 0.0 <= suspicion <= LIMIT
        assert reputation.suspicion("UK", now_s + HALF_LIFE_S) == pytest.approx(suspicion / 2)


def test_mostly_good_groups_keep_a_key_in_and_half_bad_ones_do_not() -> None:
    mostly, half = Reputation(), Reputation()
    for number in range(400):
        if number % 5 == 0:
            assert not mostly.blame("UK", "beta", Refusal.MALFORMED, float(number))
        else:
            mostly.credit("UK", "beta", float(number))
    lengths = []
    for number in range(400):
        if number % 5 < 3:
            lengths.append(half.blame("UK", "beta", Refusal.MALFORMED, 0.0))
        else:
            half.credit("UK", "beta", 0.0)
    assert any(lengths)


def test_the_worst_come_first_the_good_never_and_memory_is_bounded() -> None:
    reputation = Reputation()
    for number in range(MAX_KEYS + 5):
        reputation.blame(f"U{number}", "many", Refusal.REPEATED, 0.0)
    reputation.credit("good", "good", 0.0)
    reputation.blame("hangs", "hangs", Refusal.SCORING_COST, 0.0)
    reputation.blame("lies", "lies", Refusal.MALFORMED, 0.0)
    assert [each.public_key for each in reputation.worst(2, 0.0)] == ["hangs", "lies"]
    assert len(reputation.worst(10**6, 0.0)) < MAX_KEYS


def test_quarantine_doubles_up_to_an_hour_and_starts_anew_after_a_quiet_one() -> None:
    reputation, now_s, terms = Reputation(), 0.0, []
    for _ in range(8):
        terms.append(reputation.blame("UK", "beta", Refusal.SCORING_COST, now_s))
        assert reputation.remaining_s("UK", now_s + 10.0) == terms[-1] - 10.0
        assert (reputation.remaining_s("another", now_s), reputation.quarantined(now_s)) == (0.0, 1)
        now_s += terms[-1]
    assert terms == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    assert (reputation.remaining_s("UK", now_s), reputation.quarantined(now_s)) == (0.0, 0)
    assert reputation.blame("UK", "beta", Refusal.SCORING_COST, now_s + LONGEST_S) == FIRST_S
    assert reputation.remaining_s("UK", 0.0) <= FIRST_S, "a clock set back keeps nobody out for longer than his term"


def test_an_envelope_for_another_domain_is_a_forgery(tmp_path: Path) -> None:
    body = encode(group())
    for signed_for in (body, b"swarm-rollouts-v1\x00" + body, SIGNATURE_DOMAIN + body, signed_bytes("another", body)):
        signature = KEY.sign(signed_for)
        forged = SignedRollouts(swarm=MESSAGE.swarm, node="beta", public_key=KEY.public_key, signature=signature, body=body)
        assert tell(border(tmp_path), SUBJECT, encode(forged)).reason is Refusal.SIGNATURE


def test_an_accepted_group_speaks_for_its_key(tmp_path: Path) -> None:
    gate = border(tmp_path)
    assert tell(gate, SUBJECT, with_body(b"\xc1")).blamed == KEY.public_key
    before = gate.reputation.suspicion(KEY.public_key, NOW_S)
    candidate = gate.examine(SUBJECT, signed(group()), NOW_S)
    assert isinstance(candidate, Candidate)
    assert gate.conclude(candidate, result(), NOW_S) is None
    (standing,) = gate.reputation.worst(1, NOW_S)
    assert standing.accepted == 1
    assert 0 < standing.suspicion < before
