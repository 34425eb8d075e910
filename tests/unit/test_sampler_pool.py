"""The pool of groups: what it keeps when it is full, and how groups are drawn from it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from services.sampler.pool import Knowledge, Pool, PoolEntry, pool_entry
from services.sampler.strategies import strategy_named
from services.sampler.strategies.base import local_order
from services.sampler.strategies.uniform import STRATEGY as UNIFORM
from tests.unit.sampler_groups import scored_group


def entry(seq: int, **settings: object) -> PoolEntry:
    return pool_entry(seq, scored_group(seq, **settings))  # type: ignore[arg-type]


def test_an_entry_says_what_the_group_is_without_holding_it() -> None:
    made = entry(7, node="beta", origin="external", version=3, rewards=(0.0, 0.5, 1.0, 0.5), created_at=50.0)
    assert (made.seq, made.node, made.origin, made.dataset, made.draw) == (7, "beta", "external", "chain_sum", 7)
    assert (made.policy_version, made.mean_reward, made.informative) == (3, 0.5, True)
    assert (made.completions, made.token_count) == (4, 8)


def test_a_group_is_informative_only_if_its_rewards_differ() -> None:
    assert not entry(1, rewards=(0.3, 0.3, 0.3)).informative
    assert not entry(1, rewards=(1.0,)).informative
    assert entry(1, rewards=(0.3, 0.3, 0.31)).informative


def test_a_group_is_never_younger_than_its_arrival() -> None:
    liar = PoolEntry(**{**{f: getattr(entry(1), f) for f in PoolEntry.__slots__}, "created_at": 2000.0, "received_at": 1000.0})
    assert liar.age_s(1500.0) == 500.0
    assert liar.age_s(900.0) == 0.0


def test_staleness_counts_from_the_policy_that_the_batch_updates() -> None:
    assert entry(1, version=4).staleness(5) == 0
    assert entry(1, version=4).staleness(7) == 2


def test_a_full_pool_gives_up_what_came_first() -> None:
    pool = Pool(2)
    assert pool.add(entry(1)) is None
    assert pool.add(entry(2)) is None
    evicted = pool.add(entry(3))
    assert evicted is not None
    assert evicted.seq == 1
    assert [e.seq for e in pool] == [2, 3]
    assert not pool.holds_group(evicted.group_id)


def of(seq: int, node: str, *, established: bool = True, **times: float) -> PoolEntry:
    return replace(entry(seq, node=node, origin="external"), established=established, **times)


def test_who_fills_a_pool_displaces_itself() -> None:
    pool = Pool(6)
    for seq, node in enumerate(["quiet", "loud", "quiet", "loud", "loud", "loud", "loud", "loud", "loud"]):
        pool.add(of(seq, node))
    assert [(e.seq, e.node) for e in pool] == [(0, "quiet"), (2, "quiet"), (5, "loud"), (6, "loud"), (7, "loud"), (8, "loud")]


def test_newcomers_however_many_displace_nobody_who_is_established_beyond_their_part() -> None:
    pool = Pool(8, newcomer_share=0.25)
    for seq in range(8):
        pool.add(of(seq, f"known-{seq % 4}"))
    for seq in range(8, 400):
        pool.add(of(seq, f"new-{seq}", established=False))
    assert [e.established for e in pool] == [True] * 6 + [False] * 2
    assert [e.seq for e in pool][-2:] == [398, 399], "of newcomers with one group each the oldest goes"


def test_newcomers_use_the_room_that_nobody_else_wants_and_give_it_back() -> None:
    pool = Pool(8, newcomer_share=0.25)
    for seq in range(20):
        pool.add(of(seq, "new", established=False))
    assert len(pool) == 8
    for seq in range(20, 40):
        pool.add(of(seq, "known"))
    assert sorted(e.node for e in pool) == ["known"] * 6 + ["new"] * 2


def test_how_long_a_group_waited_is_no_claim_of_its_author() -> None:
    liar = of(1, "liar", created_at=100.0, received_at=1000.0)
    assert (liar.age_s(1010.0), liar.waited_s(1010.0)) == (910.0, 10.0)
    assert liar.waited_s(900.0) == 0.0


def test_a_pool_holds_a_group_once() -> None:
    pool = Pool(4)
    first = entry(1)
    pool.add(first)
    twin = PoolEntry(**{**{f: getattr(first, f) for f in PoolEntry.__slots__}, "seq": 2})
    with pytest.raises(ValueError, match="in the pool already"):
        pool.add(twin)


def test_uniform_draws_without_replacement_and_every_group_alike() -> None:
    entries = [entry(seq) for seq in range(10)]
    counts = dict.fromkeys(range(10), 0)
    rng = random.Random(1)
    for _ in range(2000):
        drawn = UNIFORM.draw(entries, 3, 3, rng, Knowledge())
        assert len({e.seq for e in drawn}) == 3
        for chosen in drawn:
            counts[chosen.seq] += 1
    # 600 expected each, standard deviation 20.5
    assert all(500 < count < 700 for count in counts.values())


def test_uniform_gives_all_there_is_when_there_is_too_little() -> None:
    assert sorted(e.seq for e in UNIFORM.draw([entry(1), entry(2)], 5, 5, random.Random(0), Knowledge())) == [1, 2]


def test_uniform_refuses_groups_without_advantage() -> None:
    assert UNIFORM.keeps(entry(1))
    assert not UNIFORM.keeps(entry(1, rewards=(1.0, 1.0)))


def test_local_groups_go_oldest_policy_first_then_by_draw_however_they_arrived() -> None:
    arrived = [
        replace(entry(seq, version=version), draw=draw)
        for seq, version, draw in [(4, 1, 5), (3, 0, 8), (9, 0, 2), (1, 1, 6), (2, 0, 8)]
    ]
    assert [e.seq for e in sorted(arrived, key=local_order)] == [9, 2, 3, 4, 1]


def test_an_unknown_strategy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no strategy is called 'any': there are .*uniform"):
        strategy_named("any")
