"""The sampler's promises over random histories: arrivals of every kind, steps of the trainer, time,
purges and crashes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.contracts.codec import encode
from shared.contracts.messages import ScoredGroup
from tests.unit.sampler_groups import scored_group
from tests.unit.sampler_history import History, limits, sampler

Event = tuple[str, int]

KINDS = {
    "local": 12, "dull": 2, "failed": 1, "external": 8, "boring": 2, "again": 2,
    "build": 10, "trained": 8, "later": 2, "much_later": 1, "purge": 1,
}  # fmt: skip


def _random_events(seed: int, length: int) -> list[Event]:
    rng = random.Random(seed)
    kinds = rng.choices(list(KINDS), list(KINDS.values()), k=length)
    return [(kind, rng.randrange(4)) for kind in kinds]


# Drawn from a seed rather than as lists: hypothesis' own lists are too short and even to get a
# trainer through many steps.
events = st.builds(_random_events, st.integers(0, 2**32), st.integers(0, 120))
shapes = st.fixed_dictionaries(
    {
        "local": st.integers(0, 3),
        "external": st.integers(0, 3),
        "shortage": st.sampled_from(["wait", "fill_local", "short"]),
        "shortage_wait_s": st.sampled_from([0.0, 5.0]),
        "prefetch": st.integers(1, 3),
        "max_share_per_node": st.sampled_from([0.3, 0.5, 1.0]),
    }
).filter(lambda shape: shape["local"] + shape["external"] > 0)
stalenesses = st.integers(0, 2)
pools = st.integers(1, 6)


def replay(history: History, happened: list[Event], after_each: Callable[[int], None] = lambda index: None) -> None:
    published: list[ScoredGroup] = []
    for index, (kind, amount) in enumerate(happened):
        if kind in ("local", "dull", "failed"):
            version = max(0, history.trained - amount)
            failure = "timeout" if kind == "failed" else None
            rewards = (0.5, 0.5) if kind == "dull" else (0.0, 1.0)
            published.append(scored_group(index, version=version, rewards=rewards, created_at=history.now, failure=failure))
            history.publish(published[-1])
        elif kind in ("external", "boring"):
            rewards = (0.5, 0.5) if kind == "boring" else (0.0, 1.0)
            published.append(
                scored_group(index, node=f"n{amount}", origin="external", rewards=rewards, created_at=history.now, version=900)
            )
            history.publish(published[-1])
        elif kind == "again" and published:
            history.publish(published[-1 - amount % len(published)])
        elif kind == "build":
            history.step()
        elif kind == "trained":
            history.trained = min(history.trained + 1, len(history.batches))
        elif kind == "later":
            history.now += amount
        elif kind == "much_later":
            history.now += 200.0 * amount
        elif kind == "purge":
            history.purge()
        after_each(index)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(events, shapes, stalenesses, pools)
def test_no_batch_is_too_large_no_group_is_used_twice_and_staleness_is_bounded(
    happened: list[Event], shape: dict[str, object], max_staleness: int, pool: int
) -> None:
    chosen = sampler(**shape)
    history = History(chosen, limits(chosen, max_staleness, pool, pool))
    replay(history, happened)
    used = Counter(item.scored.group_id for batch in history.batches for item in batch.items)
    assert not used or max(used.values()) == 1
    for index, batch in enumerate(history.batches):
        assert batch.number == index + 1
        assert 1 <= len(batch.items) <= chosen.local + chosen.external
        origins = [item.scored.origin for item in batch.items]
        assert origins == sorted(origins, key="local external".index)
        assert origins.count("external") <= chosen.external
        assert origins.count("local") <= chosen.local or batch.shortage == "fill_local"
        assert origins.count("local") >= chosen.local
        for item in batch.items:
            if item.scored.origin == "local":
                assert item.staleness == batch.number - 1 - item.scored.group.policy_version
                assert item.staleness <= max_staleness
            else:
                assert item.staleness is None
                assert item.age_s <= chosen.max_external_age_s
                assert len(set(item.scored.rewards)) > 1


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(events, shapes, stalenesses, pools)
def test_every_local_group_is_waiting_consumed_or_counted_as_dropped(
    happened: list[Event], shape: dict[str, object], max_staleness: int, pool: int
) -> None:
    chosen = sampler(**shape)
    history = History(chosen, limits(chosen, max_staleness, pool, pool))
    made: set[str] = set()

    def count(index: int) -> None:
        made.update(scored.group_id for scored in history.stream.values() if scored.origin == "local")
        history.read()
        memory = history.memory
        assert len(made) == len(memory.local) + memory.consumed_local + memory.dropped_local

    replay(history, happened, count)
    assert history.memory.consumed_local == sum(item.scored.origin == "local" for batch in history.batches for item in batch.items)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(events, shapes, stalenesses, pools, st.sets(st.integers(0, 119), max_size=12))
def test_crashes_at_any_point_change_no_batch(
    happened: list[Event], shape: dict[str, object], max_staleness: int, pool: int, crashes: set[int]
) -> None:
    # No shortage wait: how long a sampler has waited is the one thing it forgets, and that changes
    # when, not what.
    chosen = sampler(**{**shape, "shortage_wait_s": 0.0})
    spared = History(chosen, limits(chosen, max_staleness, pool, pool))
    struck = History(chosen, limits(chosen, max_staleness, pool, pool))
    replay(spared, happened)
    replay(struck, happened, lambda index: struck.crash() if index in crashes else None)
    assert [encode(batch) for batch in struck.batches] == [encode(batch) for batch in spared.batches]
    for history in (spared, struck):
        history.read()
    assert list(struck.memory.local) == list(spared.memory.local)
    assert list(struck.memory.external) == list(spared.memory.external)
    assert struck.memory.dropped_local == spared.memory.dropped_local


@settings(max_examples=60, deadline=None)
@given(events, shapes, stalenesses)
def test_the_same_inputs_give_the_same_encoded_batches(happened: list[Event], shape: dict[str, object], max_staleness: int) -> None:
    chosen = sampler(**shape)
    first, second = (History(chosen, limits(chosen, max_staleness)) for _ in range(2))
    replay(first, happened)
    replay(second, happened)
    assert [encode(batch) for batch in first.batches] == [encode(batch) for batch in second.batches]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.integers(0, 4),
    st.sampled_from(["fill_local", "short"]),
    st.integers(0, 3),
    st.integers(1, 3),
    st.floats(0, 0.5),
    st.floats(0, 0.6),
)
def test_a_paced_generator_and_the_sampler_never_wait_for_each_other_for_ever(
    seed: int, own: int, others: int, shortage: str, max_staleness: int, prefetch: int, failing: float, late: float
) -> None:
    """Admission as in the generator: it may claim (max_staleness + version + 1) * I + dropped
    draws. Groups fail, and overtake.
    """
    rng = random.Random(seed)
    chosen = sampler(local=own, external=others, shortage=shortage, prefetch=prefetch)
    history = History(chosen, limits(chosen, max_staleness, pool_local=1, pool_external=1))
    claimed, in_flight, steps_wanted = 0, [], 12
    for _ in range(4000):
        if history.trained >= steps_wanted:
            break
        admitted = (max_staleness + history.trained + 1) * own + history.memory.dropped_local
        if claimed < admitted:
            in_flight.append((claimed, history.trained))
            claimed += 1
        elif in_flight and rng.random() >= late:
            draw, version = in_flight.pop(rng.randrange(len(in_flight)))
            failure = "timeout" if rng.random() < failing else None
            history.publish(scored_group(draw, version=version, failure=failure, created_at=history.now))
        elif rng.random() < 0.05:
            history.publish(scored_group(history.last_seq, node="beta", origin="external", created_at=history.now))
        history.step()
        if history.trained < len(history.batches) and rng.random() < 0.3:
            history.trained += 1
        history.now += 1.0
        if rng.random() < 0.02:
            history.crash()
    assert history.trained >= steps_wanted
