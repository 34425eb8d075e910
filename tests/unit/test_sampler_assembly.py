"""When a batch is built, of which groups, and how long it waits for other nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import structlog

from services.sampler.assembly import BatchPlan, Wait, WaitFor, batch_seed, groups_wanted
from services.sampler.composition import Composition
from services.sampler.pool import Knowledge
from services.sampler.reports import NodeProcesses, WaitingReport
from shared.contracts.control import PolicyPointer, ServiceStatus
from tests.unit.sampler_groups import scored_group
from tests.unit.sampler_history import History, limits, position, sampler


def history(local: int = 0, external: int = 0, **changes: object) -> History:
    chosen = sampler(**changes)
    made = History(chosen, limits(chosen))
    for draw in range(local):
        made.publish(scored_group(draw))
    for draw in range(external):
        made.publish(scored_group(draw, node="beta", origin="external"))
    made.read()
    return made


def test_a_full_batch_holds_i_local_groups_then_j_external_ones() -> None:
    plan = history(local=3, external=4).decide()
    assert isinstance(plan, BatchPlan)
    assert [e.draw for e in plan.local] == [0, 1]
    assert len({e.draw for e in plan.external}) == 2
    assert (plan.number, plan.shortage, plan.pool_local, plan.pool_external) == (1, "none", 3, 4)


def test_too_few_local_groups_are_waited_for() -> None:
    assert history(local=1, external=4).decide() == Wait(WaitFor.LOCAL, 1, 2)


def test_a_batch_is_not_built_further_ahead_of_the_trainer_than_prefetch_says() -> None:
    made = history(local=12, external=12)
    assert isinstance(made.step(), BatchPlan)
    assert made.step() == Wait(WaitFor.TRAINER, 0, 1)
    made.trained = 1
    assert isinstance(made.step(), BatchPlan)


def test_a_trainer_that_has_finished_gets_no_more_batches() -> None:
    made = history(local=4, external=4)
    decision = made.assembly.decide(made.memory.local, made.memory.external, 1, position(0, finished=True), 1000.0)
    assert isinstance(decision, Wait)
    assert decision.reason is WaitFor.TRAINER


@pytest.mark.parametrize(
    ("shortage", "local_groups", "foreign_groups"), [("wait", None, None), ("short", 2, 1), ("fill_local", 3, 1)]
)
def test_the_shortage_policy_decides_once_the_wait_is_over(
    shortage: str, local_groups: int | None, foreign_groups: int | None
) -> None:
    made = history(local=5, external=1, shortage=shortage)
    assert made.decide() == Wait(WaitFor.EXTERNAL, 1, 2)
    made.now += 4.9
    assert made.decide() == Wait(WaitFor.EXTERNAL, 1, 2)
    made.now += 0.1
    plan = made.decide()
    if local_groups is None:
        assert plan == Wait(WaitFor.EXTERNAL, 1, 2)
        return
    assert isinstance(plan, BatchPlan)
    assert (len(plan.local), len(plan.external), plan.shortage) == (local_groups, foreign_groups, shortage)


def test_fill_local_goes_on_with_i_groups_when_the_generator_is_paced_to_no_more() -> None:
    made = history(local=2, external=0)
    assert isinstance(made.decide(), Wait)
    made.now += 5
    plan = made.decide()
    assert isinstance(plan, BatchPlan)
    assert (len(plan.local), len(plan.external)) == (2, 0)


def test_a_swarm_that_has_gone_silent_is_waited_for_once_not_at_every_step() -> None:
    made = history(local=6, external=0)
    made.decide()
    made.now += 5
    assert isinstance(made.step(), BatchPlan)
    made.trained = 1
    assert isinstance(made.step(), BatchPlan)


def test_after_a_pool_that_was_full_again_the_wait_starts_anew() -> None:
    made = history(local=4, external=0)
    made.decide()
    made.now += 5
    for draw in (7, 8):
        made.publish(scored_group(draw, node="beta", origin="external"))
    plan = made.step()
    assert isinstance(plan, BatchPlan)
    assert len(plan.external) == 2
    made.trained = 1
    assert made.step() == Wait(WaitFor.EXTERNAL, 0, 2)


@pytest.mark.parametrize("shortage", ["wait", "short", "fill_local"])
def test_without_any_group_no_batch_is_made(shortage: str) -> None:
    made = history(shortage=shortage)
    made.settings = made.assembly.settings = sampler(local=0, shortage=shortage)
    made.decide()
    made.now += 100
    assert made.decide() == Wait(WaitFor.EXTERNAL, 0, 2)


def test_i_zero_trains_on_foreign_groups_alone() -> None:
    made = history(external=2)
    made.settings = made.assembly.settings = sampler(local=0)
    plan = made.decide()
    assert isinstance(plan, BatchPlan)
    assert (plan.local, len(plan.external), plan.shortage) == ((), 2, "none")


def test_a_node_alone_never_waits_for_others() -> None:
    made = history(local=2)
    made.settings = made.assembly.settings = sampler(external=0, shortage="wait")
    plan = made.decide()
    assert isinstance(plan, BatchPlan)
    assert (len(plan.local), plan.external, plan.shortage) == (2, (), "none")


def test_foreign_groups_that_grew_too_old_are_not_used_and_leave_with_the_batch() -> None:
    made = history(local=2, external=2, shortage="short", shortage_wait_s=0.0)
    made.now = 1000.0 + 601.0
    plan = made.step()
    assert isinstance(plan, BatchPlan)
    assert (plan.external, len(plan.aged), plan.shortage) == ((), 2, "short")
    assert len(made.memory.external) == 0
    assert made.memory.drops[("external", "aged")] == 2


def test_a_clock_that_was_set_back_does_not_lengthen_the_wait() -> None:
    made = history(local=2)
    made.decide()
    made.now -= 10_000
    made.decide()
    made.now += 5
    assert isinstance(made.decide(), BatchPlan)


def test_every_node_and_batch_has_a_seed_of_its_own() -> None:
    seeds = {batch_seed(seed, node, number) for seed in (0, 1) for node in ("alpha", "beta") for number in range(1, 50)}
    assert len(seeds) == 2 * 2 * 49
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert batch_seed(0, "alpha", 1) == 731442922139857421


NOW = 1_000_000.0


def process(role: str, state: str = "working", *, age_s: float = 1.0, **figures: float) -> ServiceStatus:
    return ServiceStatus(
        node="alpha",
        role=role,  # type: ignore[arg-type]
        replica="r1",
        pid=1,
        host="here",
        state=state,
        started_at=NOW - 2000,
        updated_at=NOW - age_s,
        figures=figures,
    )


def pointer(version: int, age_s: float) -> PolicyPointer:
    return PolicyPointer(version=version, sha256="0" * 64, size_bytes=1, uri="file:///p", consumed_local=0, created_at=NOW - age_s)


WELL = (process("generator", "generating"), process("verifier", "verifying"), process("trainer", "training"))


def a_report(*statuses: ServiceStatus, policy: PolicyPointer | None = None) -> WaitingReport:
    async def look() -> NodeProcesses:
        return NodeProcesses(statuses, policy, NOW)

    return WaitingReport(structlog.get_logger(), look)


async def told(waiting: WaitingReport, since_s: int, until_s: int, reason: WaitFor = WaitFor.LOCAL) -> list[tuple[str, str, str]]:
    """The level, event and cause or finding of each message within these seconds."""
    with structlog.testing.capture_logs() as logs:
        for second in range(since_s, until_s):
            await waiting.waits(Wait(reason, 0, 2), 1, float(second))
    return [(each["log_level"], each["event"], each.get("because") or each.get("found", "")) for each in logs]


async def levels(waiting: WaitingReport, since_s: int, until_s: int, reason: WaitFor = WaitFor.LOCAL) -> set[tuple[str, str]]:
    return {(level, event) for level, event, _ in await told(waiting, since_s, until_s, reason)}


async def test_a_wait_for_the_first_batch_is_a_warning_only_after_ten_minutes_and_if_something_is_wrong() -> None:
    waiting = a_report()
    waiting.begin(0.0)
    starting = await told(waiting, 0, 300)
    waiting.begin(300.0)  # the server was away, and the logs were read again
    starting += await told(waiting, 300, 600)
    assert len(starting) == 8 and {each[:2] for each in starting} == {("info", "no_batch_yet")}
    assert await levels(waiting, 600, 800) == {("warning", "no_batch")}, "nobody has answered"
    slow = a_report(process("generator", "evaluating the base policy: 3 of 18 answers"), process("verifier"))
    slow.begin(0.0)
    assert await levels(slow, 0, 3000) == {("info", "no_batch_yet")}, "an evaluation may take long"
    assert await levels(slow, 3000, 3200, WaitFor.EXTERNAL) == {("warning", "no_batch")}, "told in the end"


@pytest.mark.parametrize(
    ("statuses", "policy", "reason", "says"),
    [
        (WELL, None, WaitFor.LOCAL, "generator: generating; verifier: verifying"),
        (WELL, None, WaitFor.TRAINER, "trainer: training"),
        (
            (process("generator", "generating", policy_version=1.0, worked_at=NOW - 200, work_every_s=20.0), *WELL[1:]),
            pointer(2, 180.0),
            WaitFor.LOCAL,
            "generator: loading policy version 2, published 180 s ago; verifier: verifying",
        ),
        ((WELL[0], process("verifier", "verifying", worked_at=NOW - 900)), None, WaitFor.LOCAL, "generator: generating; verifier"),
        (
            (process("trainer", "training", worked_at=NOW - 500, work_every_s=400.0),),
            None,
            WaitFor.TRAINER,
            "trainer: training",
        ),
    ],
    ids=["all at work", "a step", "a slow policy swap", "a verifier without work", "a slow step"],
)
async def test_processes_that_are_at_work_are_named_with_their_work_and_not_doubted(
    statuses: tuple[ServiceStatus, ...], policy: PolicyPointer | None, reason: WaitFor, says: str
) -> None:
    waiting = a_report(*statuses, policy=policy)
    waiting.built(0.0)
    [(level, event, words)] = await told(waiting, 0, 62, reason)
    assert (level, event) == ("info", "no_batch_yet")
    assert says in words


@pytest.mark.parametrize(
    ("statuses", "policy", "reason", "finds"),
    [
        (WELL[:1], None, WaitFor.LOCAL, "no word from the verifier"),
        ((process("generator", age_s=90.0), WELL[1]), None, WaitFor.LOCAL, "the generator last answered 90 s ago"),
        ((WELL[0], process("verifier", "stopped", age_s=70.0)), None, WaitFor.LOCAL, "the verifier ended 70 s ago"),
        (
            (process("generator", worked_at=NOW - 1, work_every_s=5.0), process("verifier", worked_at=NOW - 300, work_every_s=5.0)),
            None,
            WaitFor.LOCAL,
            "the verifier answers (working) but its last work was 300 s ago",
        ),
        (
            (process("generator", policy_version=1.0, worked_at=NOW - 800, work_every_s=20.0), WELL[1]),
            pointer(2, 780.0),
            WaitFor.LOCAL,
            "the generator answers (working) but its last work was 800 s ago",
        ),
        (
            (process("trainer", "training", worked_at=NOW - 500, work_every_s=20.0),),
            None,
            WaitFor.TRAINER,
            "the trainer answers (training) but its last work was 500 s ago",
        ),
    ],
    ids=["never seen", "silent", "ended", "a verifier that hangs", "a swap without end", "a step without end"],
)
async def test_a_process_is_blamed_for_a_wait_only_with_what_was_found(
    statuses: tuple[ServiceStatus, ...], policy: PolicyPointer | None, reason: WaitFor, finds: str
) -> None:
    waiting = a_report(*statuses, policy=policy)
    waiting.built(0.0)
    assert await told(waiting, 0, 62, reason) == [("warning", "no_batch", finds)]


def test_what_is_wanted_is_two_batches_of_draws_less_what_the_pool_has_in_steps_of_j() -> None:
    made = history(external=5)

    def wanted(j: int, after_s: float = 0.0, **changes: float) -> int:
        settings, shares = sampler(**changes), Composition(local=2, external=j, most_local=2)
        return groups_wanted(made.memory.external, shares, settings, made.now + after_s, Knowledge())

    assert [wanted(j) for j in (0, 2, 3, 4, 6)] == [0, 0, 3, 4, 12]
    assert wanted(6, oversample=3.0) == 36
    assert wanted(2, after_s=301.0, max_external_age_s=600.0) == 4, "what is soon too old does not count"


def test_a_pool_full_of_what_is_mastered_asks_for_no_more_until_a_batch_has_taken_it_away() -> None:
    def wanted(groups: int) -> int:
        made = history(external=groups)
        settings, shares = sampler(), Composition(local=2, external=2, most_local=2)
        known = cast("Knowledge", SimpleNamespace(pass_record=lambda _: SimpleNamespace(mastered=True)))
        return groups_wanted(made.memory.external, shares, settings, made.now, known)

    assert [wanted(groups) for groups in (0, 7, 8, 50)] == [4, 4, 0, 0]


async def test_a_wait_for_others_within_what_batches_have_taken_is_no_warning() -> None:
    waiting = a_report()
    waiting.begin(0.0)
    for built in (500.0, 700.0, 900.0, 1100.0):
        waiting.built(built)
    assert await levels(waiting, 1100, 1490, WaitFor.EXTERNAL) == {("info", "no_batch_yet")}, "the last took 200 s"
    assert await levels(waiting, 1500, 1600, WaitFor.EXTERNAL) == {("warning", "no_batch")}
    waiting.built(20_000.0)
    assert await levels(waiting, 20_000, 20_390, WaitFor.EXTERNAL) == {("info", "no_batch_yet")}
    assert await levels(waiting, 20_400, 20_500, WaitFor.EXTERNAL) == {("warning", "no_batch")}, "one outage is not usual"


def test_where_j_may_rise_one_group_more_is_wanted_than_two_batches_draw() -> None:
    made, settings = history(), sampler(adapt="adaptive", external=6)

    def wanted(j: int) -> int:
        shares = Composition(local=8 - j, external=j, most_local=8)
        return groups_wanted(made.memory.external, shares, settings, made.now, Knowledge())

    assert [wanted(j) for j in (0, 1, 3, 6)] == [1, 3, 9, 12]
