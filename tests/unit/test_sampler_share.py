"""No node gets more than its share of a batch's foreign groups, and no swarm starves because of
that.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.sampler.assembly import BatchPlan, Wait, WaitFor
from services.sampler.pool import Knowledge, PoolEntry, pool_entry
from services.sampler.strategies.base import available, node_cap
from services.sampler.strategies.uniform import STRATEGY as UNIFORM
from tests.unit.sampler_groups import scored_group
from tests.unit.sampler_history import History, limits, sampler


def entries(counts: list[int]) -> list[PoolEntry]:
    made: list[PoolEntry] = []
    for node, count in enumerate(counts):
        for _ in range(count):
            made.append(pool_entry(len(made) + 1, scored_group(len(made), node=f"n{node}", origin="external")))
    return made


def history(groups: dict[str, int], **changes: object) -> History:
    chosen = sampler(**{"external": 4, "max_share_per_node": 0.5, **changes})
    made = History(chosen, limits(chosen))
    draw = 0
    for node, count in groups.items():
        for _ in range(count):
            made.publish(scored_group(draw, node=node, origin="local" if node == "alpha" else "external"))
            draw += 1
    made.read()
    return made


def shares(plan: Wait | BatchPlan) -> Counter[str]:
    assert isinstance(plan, BatchPlan), plan
    return Counter(entry.node for entry in plan.external)


@pytest.mark.slow
@given(st.lists(st.integers(0, 12), max_size=6), st.integers(0, 12), st.floats(0.01, 1.0), st.integers())
def test_a_draw_gives_all_that_the_cap_leaves_and_never_more_of_one_node(
    counts: list[int], wanted: int, share: float, seed: int
) -> None:
    pool = entries(counts)
    nodes = sum(count > 0 for count in counts)
    cap = node_cap(wanted, share, nodes)
    chosen = UNIFORM.draw(pool, wanted, cap, random.Random(seed), Knowledge())
    assert len({entry.seq for entry in chosen}) == len(chosen) == available(pool, wanted, cap)
    assert max(Counter(entry.node for entry in chosen).values(), default=0) <= cap
    if nodes > 1 and wanted:
        # A share that is a whole number of groups but for rounding counts as that number.
        assert cap <= max(1, wanted * share + 1e-9, -(-wanted // nodes))
        assert cap * nodes >= wanted, "nodes that all have enough fill the batch"
    else:
        assert len(chosen) == min(wanted, len(pool)), "with one other node there is no cap"


@given(st.integers(0, 2**32))
def test_a_draw_that_the_cap_does_not_touch_is_uniform(seed: int) -> None:
    pool = entries([3, 3, 3])
    assert UNIFORM.draw(pool, 4, 4, random.Random(seed), Knowledge()) == random.Random(seed).sample(pool, 4)


def test_within_the_cap_every_node_and_group_is_as_likely_as_the_next() -> None:
    pool = entries([8, 2, 2, 2])
    drawn: Counter[int] = Counter()
    for seed in range(4000):
        drawn.update(entry.seq for entry in UNIFORM.draw(pool, 4, 2, random.Random(seed), Knowledge()))
    flooding, others = [drawn[seq] for seq in range(1, 9)], [drawn[seq] for seq in range(9, 15)]
    assert max(flooding) < 1.15 * min(flooding)
    assert max(others) < 1.1 * min(others)
    assert sum(flooding) <= 2 * 4000


def test_a_node_that_floods_the_pool_gets_its_share_of_a_batch_and_the_batch_says_so() -> None:
    made = history({"alpha": 2, "beta": 40, "gamma": 2})
    assert shares(made.step()) == {"beta": 2, "gamma": 2}
    assert made.batches[0].strategy == "uniform, at most 2 of a node"
    assert made.batches[0].shortage == "none"


def test_with_one_other_node_the_cap_does_not_act() -> None:
    made = history({"alpha": 2, "beta": 40})
    assert shares(made.step()) == {"beta": 4}
    assert made.batches[0].strategy == "uniform"


def test_emptying_the_pool_of_the_others_does_not_lift_the_cap_until_they_are_silent_for_long() -> None:
    made = history({"alpha": 4, "beta": 40, "gamma": 2}, shortage="short", shortage_wait_s=0.0)
    assert shares(made.step()) == {"beta": 2, "gamma": 2}
    made.trained = 1
    made.crash()
    assert shares(made.step()) == {"beta": 2}, "gamma's groups are used up, but gamma is there"
    made.trained = 2
    made.now += 601.0
    for draw in range(2):
        made.publish(scored_group(100 + draw, version=2, created_at=made.now))
    for draw in range(8):
        made.publish(scored_group(200 + draw, node="beta", origin="external", created_at=made.now))
    assert shares(made.step()) == {"beta": 4}, "gamma was not heard of for longer than groups are fresh"


@pytest.mark.parametrize(("shortage", "own"), [("wait", 2), ("short", 2), ("fill_local", 3)])
def test_what_the_cap_holds_back_is_done_without_and_not_waited_for(shortage: str, own: int) -> None:
    made = history({"alpha": 6, "beta": 40, "gamma": 0}, shortage=shortage)
    made.publish(scored_group(99, node="gamma", origin="external"))
    made.read()
    plan = made.decide()
    assert shares(plan) == {"beta": 2, "gamma": 1}
    assert isinstance(plan, BatchPlan)
    assert len(plan.local) == own
    assert plan.shortage == ("short" if shortage == "wait" else shortage)


def test_a_node_that_only_sends_groups_without_advantage_does_not_cap_the_others() -> None:
    made = history({"alpha": 2, "beta": 40})
    made.publish(scored_group(99, node="gamma", origin="external", rewards=(1.0, 1.0)))
    made.read()
    assert shares(made.decide()) == {"beta": 4}


def test_a_pool_with_too_few_groups_is_waited_for_as_without_a_cap() -> None:
    made = history({"alpha": 6, "beta": 2, "gamma": 1})
    assert made.decide() == Wait(WaitFor.EXTERNAL, 3, 4)
    made.now += 5.0
    assert shares(made.decide()) == {"beta": 2, "gamma": 1}
