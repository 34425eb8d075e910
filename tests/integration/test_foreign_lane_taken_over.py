"""A judged process that foreign text has taken over writes, closes and waits as it likes: the lane
goes on, its sender pays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.config import TaskSpec
from shared.contracts.messages import TaskRef
from shared.registry import VERIFIERS
from shared.tasks.derive import derive_task
from shared.tasks.sandbox import JobResult, ScorerPool, ScoringJob
from shared.tasks.sandbox.child import Child
from tests.integration.installed_verifier import install

REF = TaskRef(dataset="gcd", seed=3, index=0)
TASK = derive_task(REF)
GROUP_S = 3.0
DEADLINE_S = 300.0
"""Of waits that are to end; nothing here is measured by it."""

TAKEN_OVER = """
import os, signal, time
import msgpack


def pipes():
    for descriptor in range(3, 1024):
        try:
            os.fstat(descriptor)
        except OSError:
            continue
        yield descriptor


def disarm():
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, signal.SIG_IGN)


def write(message):
    for descriptor in pipes():
        rest = message
        while rest:
            rest = rest[os.write(descriptor, rest):]


def leave(message):
    write(message)
    os._exit(0)


def close_and_sleep():
    disarm()
    for descriptor in list(pipes()):
        os.close(descriptor)
    time.sleep(600)


def sleep():
    disarm()
    time.sleep(600)


ACTIONS = {
    "string for a task": lambda: leave(msgpack.packb([None, "", "z"])),
    "numbers for a task": lambda: leave(msgpack.packb([None, "", [1, 2, 3]])),
    "task unasked for": lambda: leave(msgpack.packb([None, "", [], [], [[["user", [["text", "q"]]]], "a", "{}", "0" * 64]])),
    "lists for a reason": lambda: leave(msgpack.packb([["x"], {"a": 1}, None])),
    "list for a detail": lambda: leave(msgpack.packb(["task_index", ["d"] * 10, None])),
    "a parent's reason": lambda: leave(msgpack.packb(["dropped", "", None])),
    "unknown reason": lambda: leave(msgpack.packb(["ok\\x1b[2J", "", None])),
    "long detail": lambda: leave(msgpack.packb(["task_index", "d" * 60_000, None])),
    "no message": lambda: leave(b"\\xc1\\xc1"),
    "half a message": lambda: leave(msgpack.packb([None, "", None])[:-1]),
    "two messages": lambda: leave(2 * msgpack.packb([None, "", None])),
    "short list": lambda: leave(msgpack.packb([1])),
    "deep list": lambda: leave(b"\\x91" * 60_000),
    "number": lambda: leave(b"\\x01"),
    "long list": lambda: leave(b"\\xdd" + (40_000_000).to_bytes(4, "big") + b"\\x01" * 40_000_000),
    "closes and sleeps": close_and_sleep,
    "writes and sleeps": lambda: (write(b"\\x93"), sleep()),
    "sleeps": sleep,
}


def taken_over(item):
    def score(answer):
        if answer in ACTIONS:
            ACTIONS[answer]()
        return 1.0 if answer == str(item.task.answer) else 0.0
    return score
"""

LIES = [
    "string for a task",
    "numbers for a task",
    "task unasked for",
    "lists for a reason",
    "list for a detail",
    "a parent's reason",
    "unknown reason",
    "long detail",
    "no message",
    "half a message",
    "two messages",
    "short list",
    "deep list",
    "number",
    "long list",
]
SLEEPERS = [pytest.param("sleeps", marks=pytest.mark.long), "writes and sleeps"]


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install(tmp_path, monkeypatch, "taken_over", TAKEN_OVER)
    yield
    VERIFIERS.look_again()


def pool(foreign_group_s: float) -> ScorerPool:
    return ScorerPool(
        workers=1,
        answer_timeout_s=60.0,
        memory_mb=2048,
        tasks=[TaskSpec(dataset="gcd", verifier="taken_over")],
        foreign_workers=1,
        foreign_group_s=foreign_group_s,
    )


async def judged(scorers: ScorerPool, answers: list[str], sender: str | None = "Uevil") -> JobResult:
    job = ScoringJob(ref=REF, texts=answers, expected=TASK, sender=sender)
    (result,) = await asyncio.wait_for(scorers.run([job]), DEADLINE_S)
    return result


async def serves_honest_groups(scorers: ScorerPool) -> None:
    result = await judged(scorers, [str(TASK.answer), "no"], "Uhonest")
    assert (result.reason, result.rewards) == (None, [1.0, 0.0]), result


async def test_a_forged_reply_ends_its_group_at_full_blame_and_neither_forker_nor_lane() -> None:
    async with pool(foreign_group_s=60.0) as scorers:
        for lie in LIES:
            result = await judged(scorers, ["no", lie])
            assert (result.reason, result.rewards, result.task) == ("scoring_timeout", [], None), lie
            assert "taken over" in result.detail
            assert result.detail.isprintable()
            assert 1.0 <= result.cpu_s < 60.0, lie
            await serves_honest_groups(scorers)
        assert scorers.replaced == 0


async def test_a_process_that_closes_its_pipe_and_sleeps_is_ended_then_and_not_waited_for() -> None:
    async with pool(foreign_group_s=60.0) as scorers:
        result = await judged(scorers, ["closes and sleeps"])
        assert result.reason == "scoring_timeout"
        assert "closed its pipe" in result.detail
        assert result.cpu_s >= 1.0
        # Ended long before the deadline of its group.
        assert result.seconds < 45.0
        await serves_honest_groups(scorers)
        assert scorers.replaced == 0


@pytest.mark.parametrize("sleeper", SLEEPERS)
async def test_a_process_that_disarms_its_timer_and_sleeps_is_ended_at_the_deadline_and_is_not_free(sleeper: str) -> None:
    async with pool(foreign_group_s=GROUP_S) as scorers:
        result = await judged(scorers, [sleeper])
        assert result.reason == "scoring_timeout"
        assert "the group's deadline" in result.detail
        assert result.cpu_s >= 0.02 * GROUP_S
        assert scorers.replaced == 0
    async with pool(foreign_group_s=60.0) as scorers:
        await serves_honest_groups(scorers)


async def test_a_forker_that_answers_nonsense_is_replaced_and_the_lane_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    nonsense = iter([["not seven fields"], [None, "", "z", None, 0.0, 0, 0], [None, "", [0.5], None, 0.0, 0, 0]])
    reply = Child.reply

    async def instead(child: Child, timeout_s: float) -> list[object]:
        true = await reply(child, timeout_s)
        return next(nonsense, true)

    monkeypatch.setattr(Child, "reply", instead)
    async with pool(foreign_group_s=60.0) as scorers:
        result = await judged(scorers, ["no", "no"])
        assert result.reason == "scoring_timeout"
        assert result.cpu_s > 0.0, "the time for which it held two processes"
        # The third answer has one reward for two answers; the group is judged again by the next
        # process.
        await serves_honest_groups(scorers)
        assert scorers.replaced == 3


async def test_a_runner_of_the_lane_that_fails_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pool(foreign_group_s=60.0) as scorers:
        failures = [RuntimeError("a mistake of ours")]
        settle = scorers._foreign._line.settle

        def fail_once(sender: str, seconds: float, *, established: bool) -> None:
            settle(sender, seconds, established=established)
            if failures:
                raise failures.pop()

        monkeypatch.setattr(scorers._foreign._line, "settle", fail_once)
        await serves_honest_groups(scorers)
        await serves_honest_groups(scorers)
        assert scorers.replaced == 1


async def test_an_own_worker_that_answers_nonsense_is_replaced_and_its_jobs_are_done_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nonsense = iter([[["x", {"a": 1}]], [[[0.5], None]]])
    results = Child.results

    async def instead(child: Child) -> object:
        true = await results(child)
        return next(nonsense, true)

    monkeypatch.setattr(Child, "results", instead)
    async with pool(foreign_group_s=60.0) as scorers:
        result = await judged(scorers, [str(TASK.answer), "no"], None)
        assert (result.reason, result.rewards) == (None, [1.0, 0.0])
        assert scorers.replaced == 2
