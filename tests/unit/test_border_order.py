"""The list of the border's checks is what the border does: everything wrong at first, and one thing
put right at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from monitoring.border_doc import PAGE, with_checks
from services.verifier.border import Border, Candidate
from services.verifier.refusals import CHECKS, Refusal, Refused, Stage
from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.messages import SignedRollouts, signed_bytes
from shared.contracts.senders import Ban, BanList
from shared.contracts.wire import DEFAULT_SWARM_ID
from shared.tasks.sandbox import DROPPED, JobResult
from tests.unit.test_border import HELD, KEY, NOW_S, THIRD_KEY, border, completions, group, signed, taken_in, task


def test_the_page_shows_the_checks_as_they_are() -> None:
    assert PAGE.read_text() == with_checks(PAGE.read_text()), "run `python -m monitoring.border_doc`"


def test_every_reason_has_a_check() -> None:
    assert {check.refusal for check in CHECKS} == set(Refusal)


def test_stages_come_in_their_order() -> None:
    stages = list(Stage)
    places = [stages.index(check.stage) for check in CHECKS]
    assert places == sorted(places) and set(places) == set(range(len(stages)))


class Message:
    """What is sent, with everything wrong that can be wrong at once; a name out of `mended` is
    right again.
    """

    def __init__(self) -> None:
        self.mended: set[str] = set()

    def wrong(self, what: str) -> bool:
        return what not in self.mended

    def body(self) -> bytes:
        if self.wrong("body"):
            return b"\xc1"
        held = self.wrong("held")
        made = group(
            node="gamma" if self.wrong("author") else "beta",
            created_at=NOW_S - 5000 if self.wrong("old") else NOW_S + 500 if self.wrong("future") else NOW_S - 5,
            task=HELD if held else group(9).task,
            completions=completions(text="x" * 101 if self.wrong("long") else "4", token_count=9 if self.wrong("tokens") else 2),
        )
        if self.wrong("task"):
            return encode(msgspec.structs.replace(made, task=task(dataset="lcm")))
        return encode(made)

    def payload(self) -> bytes:
        if self.wrong("envelope"):
            return b"x" * (100_001 if self.wrong("size") else 10)
        body, swarm = self.body(), "another" if self.wrong("swarm") else DEFAULT_SWARM_ID
        key = THIRD_KEY if self.wrong("name") else KEY
        signature = key.sign(signed_bytes(swarm, body if not self.wrong("signature") else body + b"!"))
        return encode(SignedRollouts(swarm=swarm, node="beta", public_key=key.public_key, signature=signature, body=body))


@pytest.fixture
def gate(tmp_path: Path) -> Border:
    made = border(tmp_path)
    taken_in(made, subjects.rollouts("beta"), signed(group(100)))  # beta is KEY's
    return made


def test_the_border_looks_at_these_things_in_this_order(gate: Border) -> None:
    message, found = Message(), []
    banned = {"name": True, "key": True}

    def bans() -> None:
        senders = {"name": "beta", "key": THIRD_KEY.public_key}
        gate.bans.replace(BanList(bans=[Ban(sender=sender) for what, sender in senders.items() if banned[what]]))

    def lift(what: str) -> Callable[[], None]:
        return lambda: banned.__setitem__(what, False)

    def mend(what: str) -> Callable[[], None]:
        return lambda: message.mended.add(what)

    steps = [
        (Refusal.BANNED, lift("name")),
        (Refusal.TOO_LARGE, mend("size")),
        (Refusal.MALFORMED, mend("envelope")),
        (Refusal.OTHER_SWARM, mend("swarm")),
        (Refusal.SIGNATURE, mend("signature")),
        (Refusal.BANNED, lift("key")),
        (Refusal.MALFORMED, mend("body")),
        (Refusal.AUTHOR, mend("author")),
        (Refusal.UNKNOWN_KEY, mend("name")),
        (Refusal.TOO_OLD, mend("old")),
        (Refusal.FROM_FUTURE, mend("future")),
        (Refusal.TASK_NOT_ALLOWED, mend("task")),
        (Refusal.HELD_OUT, mend("held")),
        (Refusal.LENGTHS, mend("long")),
        (Refusal.MALFORMED, mend("tokens")),
    ]
    for expected, put_right in steps:
        bans()
        verdict = gate.examine(subjects.rollouts("beta"), message.payload(), NOW_S)
        assert isinstance(verdict, Refused), f"{expected} was to be found"
        assert verdict.reason is expected
        found.append(verdict.reason)
        put_right()
    assert isinstance(gate.examine(subjects.rollouts("beta"), message.payload(), NOW_S), Candidate)
    # What was found follows the list: each after the one before.
    rest = iter(CHECKS)
    assert all(any(check.refusal is reason for check in rest) for reason in found)


def scored(candidate: Candidate) -> JobResult:
    return JobResult([0.5] * len(candidate.group.completions), None, None, "", 0, 0.1)


def candidate(gate: Border, payload: bytes, seq: int, node: str = "beta") -> Candidate:
    examined = gate.examine(subjects.rollouts(node), payload, NOW_S, seq)
    assert isinstance(examined, Candidate), examined
    return examined


def test_what_is_found_while_a_group_is_scored_is_on_the_list_too(gate: Border) -> None:
    waiting = {check.refusal: check for check in CHECKS if check.stage in (Stage.SANDBOX, Stage.ACCEPTANCE)}

    def told(refused: Refused | None, reason: Refusal, *, blamed: bool) -> None:
        assert refused is not None and refused.reason is reason and reason in waiting
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

    first = candidate(gate, signed(group(5)), 7)
    gate.bans.replace(BanList(bans=[Ban(sender=KEY.public_key)]))
    told(gate.conclude(first, JobResult([], None, DROPPED, "dropped", 0, 0.1), NOW_S), Refusal.BANNED, blamed=False)
