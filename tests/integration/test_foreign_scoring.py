"""Foreign groups in the real sandbox: what a sender can cost is bounded, blamed by cost, and never
paid by this node's own work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.cancelling import cancel_and_wait
from shared.config import TaskSpec
from shared.contracts.messages import TaskRef
from shared.registry import VERIFIERS
from shared.rewards import Mark
from shared.tasks.derive import derive_task
from shared.tasks.sandbox import DROPPED, JobResult, ScorerPool, ScoringJob
from tests.integration.installed_verifier import DONE, OBEYS, install

OWN = [TaskRef(dataset="chain_sum", seed=3, index=index) for index in range(40)]
GCD = [TaskRef(dataset="gcd", seed=3, index=index) for index in range(40)]
SPECS = [TaskSpec(dataset="gcd", verifier="obeys"), TaskSpec(dataset="chain_sum")]
HANG = "burn 600"
SLOW_TO_JUDGE = {
    "rubiks_cube": "R999 " * 50,
    "propositional_logic": "P" + " → (P" * 160 + ")" * 160,
    "intermediate_integration": "(sin(x)+cos(x)+tan(x)+exp(x)+log(x))**30*(sinh(x)+atan(x)+sqrt(x))**20",
}
DEADLINE_S = 180.0
"""Of waits that are to end; nothing here is measured by it."""


@pytest.fixture(autouse=True)
def obedient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install(tmp_path, monkeypatch, "obeys", OBEYS)
    yield
    VERIFIERS.look_again()


def pool(foreign_group_s: float = 60.0, foreign_workers: int = 1) -> ScorerPool:
    return ScorerPool(
        workers=1,
        answer_timeout_s=60.0,
        memory_mb=2048,
        tasks=SPECS,
        foreign_workers=foreign_workers,
        foreign_group_s=foreign_group_s,
    )


def foreign(sender: str, answers: list[str], number: int = 0) -> ScoringJob:
    return ScoringJob(ref=GCD[number], texts=answers, expected=derive_task(GCD[number]), sender=sender)


def honest(number: int) -> ScoringJob:
    return foreign("Uhonest", [str(derive_task(GCD[number]).answer), "no"], number)


async def judged(scorers: ScorerPool, job: ScoringJob) -> JobResult:
    (result,) = await asyncio.wait_for(scorers.run([job]), DEADLINE_S)
    return result


async def local_groups(scorers: ScorerPool, rounds: int) -> float:
    """Seconds for this node's own work."""
    started = time.monotonic()
    for _ in range(rounds):
        jobs = [ScoringJob(ref=ref, texts=["1", "2"], expected=derive_task(ref), urgent=True) for ref in OWN]
        assert all(result.reason is None for result in await asyncio.wait_for(scorers.run(jobs), DEADLINE_S))
    return time.monotonic() - started


async def test_64_answers_under_the_limit_end_at_the_groups_deadline_and_hold_up_no_group_of_this_nodes_own() -> None:
    async with pool(foreign_group_s=5.0) as scorers:
        # Of 1 s of CPU time: on a busy machine an answer is charged with more than it burns.
        slow = [asyncio.create_task(judged(scorers, foreign("Uslow", ["burn 0.6"] * 64))) for _ in range(4)]
        await asyncio.sleep(0.5)
        # All of this is done before the first of the slow groups, which used to hold both workers
        # for a minute each.
        await local_groups(scorers, 3)
        assert not any(task.done() for task in slow[1:])
        result = await slow[0]
        assert result.reason == "scoring_timeout"
        assert "the group's deadline" in result.detail
        assert 0.1 < result.cpu_s < 10.0
        await cancel_and_wait(*slow[1:])


async def test_hanging_groups_of_one_sender_let_an_honest_one_through_between_any_two() -> None:
    async with pool(foreign_group_s=4.0) as scorers:
        hanging = [asyncio.create_task(judged(scorers, foreign("Uhangs", [HANG] * 8))) for _ in range(12)]
        await asyncio.sleep(0.5)
        results = await asyncio.gather(*(judged(scorers, honest(number)) for number in range(30)))
        assert all(result.rewards == [1.0, 0.0] for result in results)
        # One was in work when the honest groups came; in turn by number of groups they would have
        # waited for all twelve.
        assert sum(task.done() for task in hanging) <= 6
        await cancel_and_wait(*hanging)


async def test_an_answer_that_hangs_or_dies_makes_its_groups_rewards_unknown_and_is_counted_at_its_cost() -> None:
    """It does not leave the group, as in a local one: a sender could choose what vanishes."""
    async with pool() as scorers:
        right = str(derive_task(GCD[0]).answer)
        well = await judged(scorers, foreign("Ubeta", [right, "burn 0.01"]))
        assert (well.reason, well.rewards) == (None, [1.0, DONE])
        result = await judged(scorers, foreign("Ubeta", [right, HANG, right, "burn 0.01"]))
        assert (result.reason, result.rewards, {*result.marks}) == (None, [None] * 4, {Mark.TIMEOUT})
        assert (result.timeouts, result.deaths) == (1, 0)
        # The kernel's timer counts whole ticks in which the process was seen, so that on a busy
        # machine it ends one that has had less than its second.
        assert 0.5 < result.cpu_s < 5.0
        died = await judged(scorers, foreign("Ubeta", [right, "die"]))
        assert (died.reason, died.rewards, died.marks, died.deaths) == (None, [None] * 2, [Mark.KILLED] * 2, 1)
        given_up = await judged(scorers, foreign("Ubeta", [HANG] * 5))
        assert given_up.timeouts == 1 and given_up.cpu_s < 3.0, "the first one ends it"
        assert (await judged(scorers, honest(1))).rewards == [1.0, 0.0]
        assert scorers.replaced == 0, "a process that hangs is one of many, and costs no import of Python's"


async def test_a_config_that_takes_seconds_to_derive_is_given_up_after_one_second_of_cpu_time() -> None:
    ref = TaskRef(dataset="chain_sum", config='{"max_digits":1300000,"min_digits":1300000}', seed=1, index=0)
    async with pool() as scorers:
        result = await judged(scorers, ScoringJob(ref=ref, texts=["1"], sender="Udigits"))
        assert result.reason in {"scoring_timeout", "task_underivable", "task_config"}
        assert result.cpu_s < 3.0
        assert (await judged(scorers, honest(1))).rewards == [1.0, 0.0]


async def test_what_a_dropped_sender_has_waiting_and_in_work_ends_at_once() -> None:
    async with pool() as scorers:
        working = [asyncio.create_task(judged(scorers, foreign("Ubad", [HANG] * 3))) for _ in range(5)]
        await asyncio.sleep(0.5)
        assert scorers.foreign_senders() == ["Ubad"]
        assert scorers.drop("Ubad") == 5
        results = await asyncio.wait_for(asyncio.gather(*working), DEADLINE_S)
        assert {result.reason for result in results} == {DROPPED}
        # The process at work was given up with its group: nobody waits for the three seconds of CPU
        # time that it would have taken.
        after = await judged(scorers, honest(0))
        assert after.rewards == [1.0, 0.0]


async def test_senders_are_served_by_what_they_cost_and_not_by_how_many_groups_they_send() -> None:
    async with pool(foreign_workers=2) as scorers:
        jobs = [foreign("Umany", ["burn 0.05"], number) for number in range(30)]
        many = [asyncio.create_task(judged(scorers, job)) for job in jobs]
        await asyncio.sleep(0)
        one = await judged(scorers, honest(0))
        assert one.rewards == [1.0, 0.0]
        assert not all(task.done() for task in many)
        await asyncio.gather(*many)


async def test_short_answers_that_are_slow_to_judge_cost_seconds_at_most_whatever_their_scorer() -> None:
    async with pool() as scorers:
        for dataset, answer in SLOW_TO_JUDGE.items():
            ref = TaskRef(dataset=dataset, seed=1, index=0)
            result = await judged(scorers, ScoringJob(ref=ref, texts=[answer] * 8, sender="Ushort"))
            assert result.reason in {None, "scoring_timeout"}, dataset
            assert result.cpu_s < 12.0, dataset
            assert all(reward < 1.0 for reward in result.rewards), dataset
            assert (await judged(scorers, honest(1))).rewards == [1.0, 0.0], dataset
