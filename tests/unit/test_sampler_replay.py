"""Own replay: a batch has groups of earlier batches again, the same ones whatever happened to the
sampler.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.sampler.assembly import Assembly, BatchPlan
from services.sampler.composition import Composition
from services.sampler.memory import DUPLICATE_POSITIONS, ReplayPool, SamplerMemory, memory_limits, replayed, state_for_new_stream
from services.sampler.pool import PoolEntry, pool_entry
from services.sampler.strategies.uniform import STRATEGY as UNIFORM
from shared.config import NodeConfig
from shared.contracts.codec import decode, encode
from shared.contracts.messages import Batch, BatchItem
from shared.contracts.sampler_state import SamplerState, TrainedGroups
from tests.unit.sampler_groups import scored_group
from tests.unit.sampler_history import History, limits, position, sampler
from tests.unit.sampler_paced import World
from tests.unit.test_sampler_properties import Event, events, pools, replay, shapes, stalenesses

replays = st.integers(0, 4)
ages = st.integers(1, 4)


def histories(shape: dict[str, object], max_staleness: int, pool: int, again: int, age: int, count: int = 1) -> list[History]:
    chosen = sampler(**{**shape, "replay": again})
    return [History(chosen, limits(chosen, max_staleness, pool, pool, replay_batches=age)) for _ in range(count)]


def entry(seq: int, **changes: object) -> PoolEntry:
    return replace(pool_entry(seq, scored_group(seq)), **changes)  # type: ignore[arg-type]


def alone(replay_groups: int, replay_batches: int, local: int = 2) -> History:
    chosen = sampler(local=local, external=0, replay=replay_groups, prefetch=64)
    return History(chosen, limits(chosen, max_staleness=100, replay_batches=replay_batches))


def drawn(batch: Batch, again: bool) -> list[int]:
    return [item.scored.group.draw for item in batch.items if item.replayed == again]


def test_a_batch_has_groups_of_earlier_batches_with_an_advantage_again_and_says_so() -> None:
    history = alone(replay_groups=8, replay_batches=2)
    for draw in range(8):
        history.publish(scored_group(draw, rewards=(0.5, 0.5) if draw == 1 else (0.0, 1.0)))
    for _ in range(4):
        assert isinstance(history.step(), BatchPlan)
    assert [drawn(batch, again=False) for batch in history.batches] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    # Draw 1 has no advantage; draw 0 is too old for batch 4, the first batch of 2 and 3 is two
    # back.
    assert [drawn(batch, again=True) for batch in history.batches] == [[], [0], [0, 2, 3], [2, 3, 4, 5]]
    assert [batch.pool_replay for batch in history.batches] == [0, 1, 3, 4]
    assert [batch.state.consumed_local for batch in history.batches] == [2, 4, 6, 8]
    assert [item.staleness for item in history.batches[3].items] == [3, 3, 3, 3, 3, 3]
    assert history.batches[3].state.replayable == [TrainedGroups(batch=3, seqs=[5, 6]), TrainedGroups(batch=4, seqs=[7, 8])]


def test_nothing_waits_for_groups_to_replay_and_they_alone_make_no_batch() -> None:
    history = alone(replay_groups=4, replay_batches=10)
    for draw in range(3):
        history.publish(scored_group(draw))
    assert isinstance(history.step(), BatchPlan)
    assert not isinstance(history.step(), BatchPlan), "one new group where two are wanted"
    nothing_new = sampler(local=0, external=2, shortage="short", shortage_wait_s=0.0, replay=4)
    assert not isinstance(
        History(nothing_new, limits(nothing_new, replay_batches=10)).assembly.decide([], [], 5, None, 0.0, replayable=[entry(1)]),
        BatchPlan,
    )


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(events, shapes, stalenesses, pools, replays, ages)
def test_what_is_replayed_was_in_a_young_enough_batch_of_this_node_once_and_has_an_advantage(
    happened: list[Event], shape: dict[str, object], max_staleness: int, pool: int, again: int, age: int
) -> None:
    """Computed from the batches alone: a second account of what may be replayed."""
    (history,) = histories(shape, max_staleness, pool, again, age)
    replay(history, happened)
    first: dict[str, int] = {}
    consumed = 0
    for batch in history.batches:
        new = [item for item in batch.items if not item.replayed]
        old = [item for item in batch.items if item.replayed]
        could = {group_id for group_id, number in first.items() if number < batch.number <= number + age} if again else set()
        ids = [item.scored.group_id for item in old]
        assert len(set(ids)) == len(ids) == min(again, len(could)) and set(ids) <= could
        assert batch.pool_replay == len(could)
        assert batch.items == [*new, *old], "replayed groups come last"
        assert all(item.scored.origin == "local" and item.weight is None for item in old)
        assert all(item.staleness == batch.number - 1 - item.scored.group.policy_version for item in old)
        for item in new:
            assert item.scored.group_id not in first, "no group is new twice"
            if item.scored.origin == "local":
                consumed += 1
                if len(set(item.scored.rewards)) > 1:
                    first[item.scored.group_id] = batch.number
        assert batch.state.consumed_local == consumed


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(events, shapes, stalenesses, pools, replays, ages)
def test_replay_changes_nothing_else_in_a_batch(
    happened: list[Event], shape: dict[str, object], max_staleness: int, pool: int, again: int, age: int
) -> None:
    (with_replay,) = histories(shape, max_staleness, pool, again, age)
    (without,) = histories(shape, max_staleness, pool, 0, age)
    replay(with_replay, happened)
    replay(without, happened)
    for one, other in zip(with_replay.batches, without.batches, strict=True):
        assert [item for item in one.items if not item.replayed] == other.items
        assert replace_state(one.state) == other.state
    assert with_replay.memory.dropped_local == without.memory.dropped_local


def replace_state(state: SamplerState) -> SamplerState:
    fields = {name: getattr(state, name) for name in state.__struct_fields__}
    return SamplerState(**{**fields, "replayable": []})


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(events, shapes, stalenesses, pools, replays, ages, st.sets(st.integers(0, 119), max_size=12), st.booleans())
def test_crashes_at_any_point_replay_the_same_groups(
    happened: list[Event],
    shape: dict[str, object],
    max_staleness: int,
    pool: int,
    again: int,
    age: int,
    crashes: set[int],
    few: bool,
) -> None:
    # With the usual number these histories never purge anything; with a few the stream ends at what
    # may be replayed.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.sampler.memory.DUPLICATE_POSITIONS", 3 if few else DUPLICATE_POSITIONS)
        _crashes_change_nothing(happened, {**shape, "shortage_wait_s": 0.0}, max_staleness, pool, again, age, crashes)


def _crashes_change_nothing(
    happened: list[Event], shape: dict[str, object], max_staleness: int, pool: int, again: int, age: int, crashes: set[int]
) -> None:
    spared, struck = histories(shape, max_staleness, pool, again, age, count=2)
    replay(spared, happened)
    replay(struck, happened, lambda index: struck.crash() if index in crashes else None)
    assert [encode(batch) for batch in struck.batches] == [encode(batch) for batch in spared.batches]
    for history in (spared, struck):
        history.read()
    assert list(struck.memory.replayable) == list(spared.memory.replayable)
    assert struck.memory.dropped_local == spared.memory.dropped_local
    struck.crash()
    assert list(struck.memory.replayable) == list(spared.memory.replayable)


@pytest.mark.slow
def test_the_stream_is_kept_from_the_oldest_group_that_may_be_replayed_and_no_further_back() -> None:
    history = alone(replay_groups=2, replay_batches=3)
    filler = scored_group(-1 % 10**6, node="beta", origin="external", rewards=(0.0, 0.0))
    first_of: dict[int, int] = {}
    for number in range(1, 9):
        first_of[number] = history.last_seq + 1
        history.publish(scored_group(2 * number))
        history.publish(scored_group(2 * number + 1))
        for _ in range(DUPLICATE_POSITIONS):
            history.publish(filler)
        assert isinstance(history.step(), BatchPlan)
        history.purge()
        # The next batch, number + 1, may have what was new in number - 2 and later.
        assert min(history.stream) == first_of[max(1, number - 2)]
        state = history.batches[-1].state
        assert [each.batch for each in state.replayable] == list(range(max(1, number - 2), number + 1))
        if number == 5:
            history.crash()
    without = alone(replay_groups=0, replay_batches=3)
    for draw in range(2):
        without.publish(scored_group(draw))
    for _ in range(DUPLICATE_POSITIONS):
        without.publish(filler)
    without.step()
    assert without.memory.purgeable_seq(without.batches[-1].state) == 2


def test_a_group_that_is_gone_from_the_stream_is_as_if_it_had_never_been_there() -> None:
    entries = [entry(seq) for seq in range(1, 30)]
    for seed in range(40):
        chosen = replayed(entries, 5, seed)
        gone = chosen[seed % 5]
        left = [each for each in entries if each is not gone]
        assert set(replayed(left, 5, seed)) >= set(chosen) - {gone}
    pool = ReplayPool(10)
    pool.trained(entries, 1)
    pool.forget(3)
    assert len(pool) == 28 and not pool.holds_group(entries[2].group_id)
    pool.forget(3)
    assert [each.seqs for each in pool.state(2)] == [[seq for seq in range(1, 30) if seq != 3]]


def test_a_group_lost_while_replayable_is_counted_nowhere() -> None:
    history = alone(replay_groups=1, replay_batches=5)
    history.publish(scored_group(1))
    history.publish(scored_group(2))
    history.step()
    history.memory.lose(1)
    assert (history.memory.dropped_local, history.memory.drops.total()) == (0, 0)
    assert [each.seq for each in history.memory.replayable] == [2]
    del history.stream[1], history.stream[2]
    history.crash()
    assert (history.memory.dropped_local, len(history.memory.replayable)) == (0, 0)


def test_a_replayable_group_published_again_long_after_is_still_known() -> None:
    chosen = sampler(local=1, external=0, replay=1)
    known = SamplerMemory(limits(chosen, 50, replay_batches=5), UNIFORM.keeps)
    group = scored_group(1)
    known.observe(1, group)
    known.take(list(known.local), ())
    known.advance()
    known.observe(2 * DUPLICATE_POSITIONS, group)
    assert len(known.local) == 0 and known.drops[("local", "duplicate")] == 1


def test_groups_are_drawn_uniformly_and_without_replacement() -> None:
    entries = [entry(seq) for seq in range(1, 11)]
    taken: Counter[int] = Counter()
    pairs: Counter[tuple[int, int]] = Counter()
    draws = 6000
    for seed in range(draws):
        chosen = [each.seq for each in replayed(entries, 2, seed)]
        assert len(set(chosen)) == 2
        taken.update(chosen)
        pairs[(chosen[0], chosen[1])] += 1
    expected, expected_pair = draws * 2 / 10, draws / 45
    # Chi-squared with 9 and 44 degrees of freedom: 99.9 % lie below 27.9 and 78.7.
    assert sum((count - expected) ** 2 / expected for count in taken.values()) < 27.9
    assert len(pairs) == 45 and sum((count - expected_pair) ** 2 / expected_pair for count in pairs.values()) < 78.7
    assert replayed(random.Random(3).sample(entries, 10), 4, 7) == replayed(entries, 4, 7), "whatever order they come in"


def test_the_oldest_give_way_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.sampler.memory.MAX_REPLAYABLE", 3)
    pool = ReplayPool(10)
    pool.trained([entry(1), entry(4)], 1)
    pool.trained([entry(2), entry(3)], 2)
    assert pool.state(3) == [TrainedGroups(batch=1, seqs=[4]), TrainedGroups(batch=2, seqs=[2, 3])]


def test_batches_of_before_can_be_read_and_replay_starts_with_the_next() -> None:
    history = alone(replay_groups=0, replay_batches=5)
    for draw in range(4):
        history.publish(scored_group(draw))
    history.step()
    fields = msgpack.unpackb(encode(history.batches[0]))
    del fields["pool_replay"], fields["state"]["replayable"]
    for item in fields["items"]:
        del item["replayed"]
    old = decode(msgpack.packb(fields), Batch)
    assert old == history.batches[0]
    assert not any(item.replayed for item in old.items) and isinstance(old.items[0], BatchItem)
    switched_on = alone(replay_groups=2, replay_batches=5)
    switched_on.stream, switched_on.last_seq, switched_on.batches = history.stream, history.last_seq, [old]
    switched_on.crash()
    plan = switched_on.step()
    assert isinstance(plan, BatchPlan) and plan.replayed == ()
    assert [each.batch for each in switched_on.batches[-1].state.replayable] == [2]


def test_switched_off_or_with_fewer_batches_a_restarted_sampler_forgets_what_it_may_no_longer_replay() -> None:
    state = SamplerState(
        scored_seq=4, floor_seq=4, replayable=[TrainedGroups(batch=1, seqs=[1, 2]), TrainedGroups(batch=2, seqs=[3])]
    )
    for batches, expected in ((0, []), (1, [3]), (2, [1, 2, 3])):
        chosen = sampler(local=1, external=0, replay=2)
        known = SamplerMemory(limits(chosen, replay_batches=batches), UNIFORM.keeps, state, 3)
        for seq in range(1, 5):
            known.observe(seq, scored_group(seq))
        assert [each.seq for each in known.replayable] == expected
        assert (known.consumed_local, known.dropped_local, len(known.local)) == (0, 0, 0)
    assert state_for_new_stream(state, 4).replayable == []


def configured(**sampler: object) -> NodeConfig:
    return NodeConfig(node={"id": "alpha"}, tasks=[{"dataset": "chain_sum"}], sampler=sampler)  # type: ignore[arg-type]


def test_the_settings_reach_the_rules_and_nonsense_is_refused() -> None:
    assert memory_limits(configured(replay=4).sampler).replay_batches == 10
    assert memory_limits(configured().sampler).replay_batches == 0
    assert configured(local=0, external=4, adapt="adaptive", replay=2).sampler.replay == 2, "I may become more than 0"
    for wrong, words in (
        ({"local": 0, "adapt": "off", "replay": 1}, "no local groups to replay"),
        ({"local": 2, "external": 1, "replay": 31}, "at most 30 groups"),
        ({"local": 40_000, "external": 20_000, "replay": 6000}, "more than the 65536 groups"),
        ({"replay": -1}, "greater than or equal to 0"),
    ):
        with pytest.raises(ValueError, match=words):
            configured(**wrong)


def test_moving_i_and_j_leaves_the_number_of_replayed_groups_as_configured() -> None:
    chosen = sampler(local=4, external=0, replay=3, shortage="short", shortage_wait_s=0.0, max_staleness=9)
    old = [entry(seq) for seq in range(1, 9)]
    new = [entry(seq) for seq in range(9, 13)]
    for local in (1, 2, 4):
        shares = Composition(local=local, external=4 - local, most_local=4)
        plan = Assembly(chosen, node="alpha", seed=1).decide(new, [], 2, position(1), 1000.0, composition=shares, replayable=old)
        assert isinstance(plan, BatchPlan) and (len(plan.local), len(plan.replayed)) == (local, 3)


def test_what_stands_at_a_replayable_position_of_a_stream_made_anew_is_not_replayed() -> None:
    state = SamplerState(scored_seq=4, floor_seq=4, replayable=[TrainedGroups(batch=1, seqs=[1, 2, 3, 4])])
    chosen = sampler(local=1, external=0, replay=2)
    known = SamplerMemory(limits(chosen, replay_batches=5), UNIFORM.keeps, state, 2)
    known.observe(1, scored_group(1, failure="timeout"))
    known.observe(2, scored_group(2, node="beta", origin="external"))
    known.observe(3, scored_group(3, rewards=(0.5, 0.5)))
    known.observe(4, None)
    assert (len(known.replayable), len(known.local), known.dropped_local) == (0, 0, 0)
    assert known.state().replayable == []


@pytest.mark.parametrize("seed", range(4))
def test_with_a_paced_generator_and_a_moving_j_as_many_are_replayed_as_there_are(seed: int) -> None:
    world = World(seed=seed, replay=2, crashes=0.05, informative=0.3, fails=0.05, late=0.2)
    world.run(40)
    history = world.history
    assert history.trained == 40 and len({batch.wanted_external for batch in history.batches}) > 1
    first: dict[str, int] = {}
    for batch in history.batches:
        could = {group_id for group_id, number in first.items() if number >= batch.number - 3}
        again = {item.scored.group_id for item in batch.items if item.replayed}
        assert again <= could and len(again) == min(2, len(could))
        local = [item.scored for item in batch.items if item.scored.origin == "local" and not item.replayed]
        assert len(local) >= batch.wanted_local
        first |= {scored.group_id: batch.number for scored in local if len(set(scored.rewards)) > 1}
