"""The sandbox with real worker processes: hangs, deaths, order, isolation."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from shared.config.task_sections import TaskSpec
from shared.contracts.messages import TaskRef
from shared.rewards import Mark
from shared.tasks.derive import derive_task
from shared.tasks.sandbox import SandboxError, ScorerPool, ScoringJob
from tests.integration.installed_verifier import HANG, HANG_ASLEEP, HANGS, install
from tests.scorer_processes import scorers_of_this_process

GCD = [TaskRef(dataset="gcd", seed=3, index=index) for index in range(20)]
INTEGRAL = TaskRef(dataset="simple_integration", seed=1, index=0)
TOO_LARGE = '{"max_num_vertices":1000000000,"min_num_vertices":1000000000}'
"""Fills the memory in one go."""
SPECS = [TaskSpec(dataset="gcd"), TaskSpec(dataset="simple_integration", verifier="hangs")]


@pytest.fixture(autouse=True)
def hanging_scorer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "hangs", HANGS)


def pool(**settings: float) -> ScorerPool:
    return ScorerPool(workers=1, answer_timeout_s=settings.get("answer_timeout_s", 2.0), memory_mb=2048, tasks=SPECS)


def jobs_on_gcd() -> list[ScoringJob]:
    return [ScoringJob(ref=ref, texts=[str(derive_task(ref).answer), "no"], expected=derive_task(ref)) for ref in GCD]


async def test_a_hanging_answer_costs_only_itself() -> None:
    async with pool() as scorers:
        right = str(derive_task(INTEGRAL).answer)
        started = time.monotonic()
        hanging = ScoringJob(ref=INTEGRAL, texts=[right, HANG, right], expected=derive_task(INTEGRAL))
        results = await scorers.run([*jobs_on_gcd()[:10], hanging, *jobs_on_gcd()[10:]])
        assert time.monotonic() - started < 20
        assert results[10].rewards == [1.0, None, 1.0]
        assert results[10].marks == [Mark.UNSAID, Mark.TIMEOUT, Mark.UNSAID]
        assert results[10].timeouts == 1
        assert scorers.replaced == 1
        for result in results[:10] + results[11:]:
            assert result.rewards == [1.0, 0.0]
            assert result.timeouts == 0


async def test_results_are_in_the_order_of_the_jobs_whatever_the_batches() -> None:
    async with ScorerPool(workers=2, answer_timeout_s=20.0, memory_mb=2048, tasks=SPECS) as scorers:
        refs = [TaskRef(dataset="gcd", seed=3, index=n % 500) for n in range(1500)]
        truth = {ref: derive_task(ref) for ref in refs[:500]}
        jobs = [
            ScoringJob(ref=ref, texts=[str(truth[ref].answer)], want_task=True, urgent=number % 3 == 0)
            for number, ref in enumerate(refs)
        ]
        results = await scorers.run(jobs)
        assert [result.task for result in results] == [truth[ref] for ref in refs]
        assert all(result.rewards == [1.0] for result in results)
        assert scorers.replaced == 0


async def test_a_killed_worker_is_replaced_and_its_jobs_run_again() -> None:
    async with pool(answer_timeout_s=30.0) as scorers:
        working = asyncio.create_task(scorers.run([ScoringJob(ref=INTEGRAL, texts=[HANG_ASLEEP]), *jobs_on_gcd()]))
        await asyncio.sleep(1.0)
        (pid,) = scorers_of_this_process()
        os.kill(pid, signal.SIGKILL)
        results = await working
        assert [result.rewards for result in results[1:]] == [[1.0, 0.0]] * len(GCD)


async def test_a_worker_holds_no_environment_and_is_limited() -> None:
    os.environ["A_SECRET_OF_THE_TEST"] = "credential"
    async with pool() as scorers:
        await scorers.run(jobs_on_gcd()[:1])
        (pid,) = scorers_of_this_process()
        environment, modules, limits = (proc(pid, name) for name in ("environ", "maps", "limits"))
        assert "A_SECRET_OF_THE_TEST" not in environment
        assert "HOME=" not in environment
        assert "torch" not in modules
        assert f"Max address space         {2048 * 2**20}" in limits
        assert "Max file size             0 " in limits


async def test_a_derivation_from_outside_is_right_or_says_why_not() -> None:
    async with pool() as scorers:
        (derived,) = await scorers.run([ScoringJob(ref=GCD[0], want_task=True)])
        assert derived.task == derive_task(GCD[0])
        for ref, reason in (
            (TaskRef(dataset="nothing_like_this", seed=1, index=0), "task_dataset"),
            (TaskRef(dataset="gcd", seed=1, index=2**31 - 1), "task_index"),
            (TaskRef(dataset="gcd", config='{"min_numbers":-1}', seed=1, index=0), "task_config"),
            (TaskRef(dataset="graph_color", config=TOO_LARGE, seed=1, index=0), None),
        ):
            (failed,) = await scorers.run([ScoringJob(ref=ref, want_task=True)])
            assert failed.task is None
            assert failed.reason is not None
            assert reason is None or failed.reason == reason
        wrong = ScoringJob(ref=GCD[0], texts=["1"], expected=derive_task(GCD[1]))
        (result,) = await scorers.run([wrong])
        assert (result.rewards, result.reason) == ([], "task_mismatch")


async def test_after_closing_nothing_waits_for_ever() -> None:
    scorers = pool(answer_timeout_s=30.0)
    await scorers.start()
    waiting = asyncio.create_task(scorers.run([ScoringJob(ref=INTEGRAL, texts=[HANG_ASLEEP]), *jobs_on_gcd()]))
    await asyncio.sleep(0.5)
    await scorers.close()
    with pytest.raises(SandboxError):
        await waiting
    with pytest.raises(SandboxError):
        await scorers.run(jobs_on_gcd())


async def test_no_process_is_left_by_a_pool_that_is_closed_before_its_workers_ever_ran() -> None:
    before = scorers_of_this_process()
    scorers = ScorerPool(workers=2, answer_timeout_s=30.0, memory_mb=2048, tasks=SPECS, foreign_workers=1)
    await scorers.start()
    assert len(scorers_of_this_process()) == len(before) + 3
    # Nothing is awaited in between: the tasks that would end the processes are cancelled before
    # their first step.
    await scorers.close()
    assert scorers_of_this_process() == before


async def test_no_process_is_left_by_a_start_that_is_given_up() -> None:
    before = scorers_of_this_process()
    scorers = ScorerPool(workers=3, answer_timeout_s=30.0, memory_mb=2048, tasks=SPECS, foreign_workers=1)
    starting = asyncio.create_task(scorers.start())
    while len(scorers_of_this_process()) < len(before) + 4:  # noqa: ASYNC110 - a process's start has no event
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert scorers_of_this_process() == before


def proc(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()
