"""What a node says of itself: signed by its key, and checked before anybody is shown it."""

from __future__ import annotations

import msgspec
import pytest

from shared.config import TaskSpec, scorers_id
from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.control import EvalReport, NodeRecord, TaskScore
from shared.contracts.messages import Task, TaskRef
from shared.contracts.wire import MessageError, ModelIdentity
from shared.identity.keys import SigningKey, new_seed
from shared.identity.statements import SignatureStatus, SignedStatement, check_statement, sign_statement, statement_content
from shared.tasks.held_out import held_out_id, held_out_order
from shared.tasks.prompt import text_task
from swarm_cli.observe.evaluation_log import (
    KEYS_A_NAME,
    NAMES_WITH_KEYS,
    REPORTS_A_NODE,
    SWARMS_A_NAME,
    EvaluationLog,
)
from tests.nats_server import own_plane

NOW = 1_000_000.0
KEY, OTHER = SigningKey(new_seed()), SigningKey(new_seed())
IDENTITY = ModelIdentity(name="models/base", tokenizer_hash="a" * 64)


def report(version: int = 3, node: str = "alpha", pass_rate: float = 0.5, at: float = NOW) -> EvalReport:
    score = TaskScore(n=8, pass_rate=pass_rate, mean_reward=pass_rate)
    return EvalReport(
        node=node,
        policy_version=version,
        created_at=at,
        n=8,
        pass_rate=pass_rate,
        mean_reward=pass_rate,
        per_task={"gcd": score},
        seconds=1.0,
        held_out="b" * 64,
    )


def record(key: SigningKey = KEY) -> NodeRecord:
    return NodeRecord(
        node="alpha", public_key=key.public_key, model=IDENTITY, tasks=["gcd"], policy_version=1, software="s", updated_at=NOW
    )


def signed(said: EvalReport | NodeRecord, key: SigningKey = KEY, swarm: str = "run-1") -> SignedStatement:
    return sign_statement(said, key, swarm)


def standing(payload: bytes, swarm: str | None = None) -> tuple[SignatureStatus, str]:
    heard = check_statement(payload, EvalReport, NOW, swarm)
    return heard.standing, heard.problem


def test_a_signed_statement_reads_back_as_it_was_with_its_key_and_swarm() -> None:
    heard = check_statement(encode(signed(report())), EvalReport, NOW, "run-1")
    assert (heard.said, heard.standing, heard.public_key, heard.swarm) == (
        report(),
        SignatureStatus.SIGNED,
        KEY.public_key,
        "run-1",
    )
    entry = check_statement(encode(signed(record())), NodeRecord, NOW)
    assert (entry.said, entry.standing) == (record(), SignatureStatus.SIGNED)


def test_a_statement_of_software_that_did_not_sign_is_read_and_marked() -> None:
    assert standing(encode(report())) == (SignatureStatus.UNSIGNED, "")
    assert statement_content(encode(report()), EvalReport) == statement_content(encode(signed(report())), EvalReport) == report()


@pytest.mark.parametrize(
    "change",
    [
        {"node": "beta"},
        {"policy_version": 4},
        {"created_at": NOW + 1},
        {"held_out": "c" * 64},
        {"held_out": None},
        {"pass_rate": 1.0},
        {"n": 9},
    ],
    ids=str,
)
def test_the_signature_covers_all_that_is_shown(change: dict[str, object]) -> None:
    forged = msgspec.structs.replace(signed(report()), body=encode(msgspec.structs.replace(report(), **change)))
    assert standing(encode(forged)) == (SignatureStatus.REFUSED, "the signature is not by the key that it names")


def test_a_statement_counts_in_the_swarm_and_as_the_kind_and_for_the_key_that_it_was_signed_for() -> None:
    moved = msgspec.structs.replace(signed(report()), swarm="run-2")
    assert standing(encode(moved))[0] is SignatureStatus.REFUSED, "the swarm is signed"
    assert standing(encode(signed(report())), "run-2") == (SignatureStatus.REFUSED, "it was made for another swarm")
    claimed = msgspec.structs.replace(signed(report()), public_key=OTHER.public_key)
    assert standing(encode(claimed))[0] is SignatureStatus.REFUSED
    with pytest.raises(MessageError):
        check_statement(encode(signed(record())), EvalReport, NOW)
    entry = check_statement(encode(signed(record(OTHER))), NodeRecord, NOW)
    assert (entry.standing, entry.problem) == (
        SignatureStatus.REFUSED,
        "the entry names a different key from the one that signed it",
    )


def test_a_time_in_the_future_is_refused_as_it_would_stay_the_newest_for_ever() -> None:
    assert standing(encode(signed(report(at=NOW + 299))))[0] is SignatureStatus.SIGNED
    assert standing(encode(signed(report(at=NOW + 301)))) == (SignatureStatus.REFUSED, "its time is in the future")


@pytest.mark.parametrize("payload", [b"", b"\xff", encode(record()), b"\x80"])
def test_what_is_no_statement_is_none(payload: bytes) -> None:
    with pytest.raises(MessageError):
        check_statement(payload, EvalReport, NOW)


def test_the_id_of_a_held_out_set_follows_its_tasks_and_not_their_order() -> None:
    def task(index: int, question: str = "q") -> Task:
        return text_task(TaskRef(dataset="gcd", seed=1, index=index), question, "1")

    base = held_out_id([task(1), task(2)])
    assert held_out_id([task(2), task(1)]) == base
    asked = [task(2), task(3), task(1)]
    assert [asked[place] for place in held_out_order(asked)] == [task(1), task(2), task(3)], "and so does their order on record"
    assert len({base, *map(held_out_id, ([task(1)], [task(1), task(3)], [task(1), task(2, "other")]))}) == 4


def test_the_id_of_the_scorers_follows_verifier_and_pass_and_no_weight() -> None:
    gcd = TaskSpec(dataset="gcd")
    assert scorers_id([TaskSpec(dataset="gcd", weight=3.0)]) == scorers_id([gcd])
    others = [TaskSpec(dataset="gcd", verifier="exact"), TaskSpec(dataset="gcd", pass_at=0.5), TaskSpec(dataset="lcm")]
    assert len({scorers_id([gcd]), *(scorers_id([spec]) for spec in others)}) == 4


def log_of(*payloads: bytes) -> EvaluationLog:
    log = EvaluationLog()
    for payload in payloads:
        log.take(subjects.evals("alpha"), payload, NOW)
    return log


def test_the_first_key_of_a_name_has_it_and_forgeries_push_none_of_its_reports_out() -> None:
    forged = [encode(signed(report(9, pass_rate=1.0), OTHER)) for _ in range(REPORTS_A_NODE + 1)]
    log = log_of(encode(signed(report(0, pass_rate=0.1))), *forged, encode(signed(report(1, pass_rate=0.2))))
    assert [each.pass_rate for each in log.reports("run-1")] == [0.1, 0.2]


def test_a_roster_says_whose_a_name_is_whoever_came_first() -> None:
    log = EvaluationLog(roster={"alpha": KEY.public_key})
    for said, key in ((report(9, pass_rate=1.0), OTHER), (report(1), KEY)):
        log.take(subjects.evals("alpha"), encode(signed(said, key)), NOW)
    log.take(subjects.evals("beta"), encode(signed(report(1, "beta"))), NOW)
    assert [(each.node, each.policy_version) for each in log.reports("run-1")] == [("alpha", 1)]


def test_an_unsigned_report_is_not_taken_for_the_word_of_a_node_that_signs() -> None:
    unsigned = encode(report(9, pass_rate=1.0))
    log = log_of(unsigned)
    assert [each.pass_rate for each in log.reports("run-1")] == [1.0] and log.unsigned("run-1") == {"alpha"}
    log = log_of(unsigned, encode(signed(report(1))))
    assert [each.pass_rate for each in log.reports("run-1")] == [0.5] and log.unsigned("run-1") == frozenset()


def test_what_was_said_in_an_earlier_run_under_the_same_name_is_another_swarms() -> None:
    log = log_of(encode(signed(report(90), OTHER, "run-0")), encode(signed(report(1))))
    assert [each.policy_version for each in log.reports("run-1")] == [1]
    assert [each.policy_version for each in log.reports("run-0")] == [90]


def test_a_signed_report_that_somebody_sends_again_neither_becomes_the_newest_nor_pushes_others_out() -> None:
    old, new = (encode(signed(report(version, at=NOW - 9 + version))) for version in (1, 2))
    log = log_of(old, new, *[old] * (REPORTS_A_NODE + 1))
    assert [each.policy_version for each in log.reports("run-1")] == [1, 2]


def test_the_base_policys_report_outlives_the_newer_ones() -> None:
    log = log_of(encode(signed(report(0))), *(encode(signed(report(n))) for n in range(1, REPORTS_A_NODE + 9)))
    assert [each.policy_version for each in log.reports("run-1")][:2] == [0, 9]


def test_who_signs_for_a_thousand_swarms_pushes_no_other_name_and_not_its_own_swarm_out() -> None:
    log = EvaluationLog(nodes_kept=8)
    log.take(subjects.evals("alpha"), encode(signed(report(1))), NOW)
    for made_up in range(40):
        log.take(subjects.evals("eve"), encode(signed(report(9, "eve"), OTHER, f"x-{made_up}")), NOW)
    assert [each.node for each in log.reports("run-1")] == ["alpha"]
    assert len({each.swarm for made_up in range(40) for each in log.heard(f"x-{made_up}")}) == SWARMS_A_NAME
    known = EvaluationLog(swarm="run-1")
    for swarm in ("run-0", "run-1"):
        known.take(subjects.evals("alpha"), encode(signed(report(1), KEY, swarm)), NOW)
    assert known.heard("run-0") == [] and len(known.reports("run-1")) == 1


async def test_the_swarm_that_is_looked_at_stays_whatever_others_a_stranger_signs_for_the_name() -> None:
    log = EvaluationLog()
    await log.follow(await own_plane(), "run-1")
    log.take(subjects.evals("alpha"), encode(signed(report(1))), NOW)
    for made_up in range(3 * SWARMS_A_NAME):
        log.take(subjects.evals("alpha"), encode(signed(report(9, pass_rate=1.0), OTHER, f"x-{made_up}")), NOW)
    assert [each.policy_version for each in log.reports("run-1")] == [1]


def test_a_name_keeps_its_key_when_its_reports_are_pushed_out_and_however_many_names_come_after_it() -> None:
    log = EvaluationLog(nodes_kept=2)
    log.take(subjects.evals("alpha"), encode(signed(report(1))), NOW)
    for stranger in range(2 * NAMES_WITH_KEYS + 9):
        log.take(subjects.evals(f"n{stranger}"), encode(signed(report(9, f"n{stranger}"), OTHER)), NOW)
    for made_up in range(2 * KEYS_A_NAME):
        log.take(subjects.evals("alpha"), encode(signed(report(9), OTHER, f"x-{made_up}")), NOW)
    assert log.reports("run-1") and all(each.node != "alpha" for each in log.reports("run-1")), "its report was pushed out"
    log.take(subjects.evals("alpha"), encode(signed(report(9, pass_rate=1.0), OTHER)), NOW)
    log.take(subjects.evals("alpha"), encode(signed(report(2))), NOW)
    assert [each.policy_version for each in log.reports("run-1") if each.node == "alpha"] == [2]
    assert log.key_of("run-1", "alpha") == KEY.public_key
