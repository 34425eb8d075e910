"""Newcomers' part of a batch: bounded while others are there, everything while they are not."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from services.sampler.assembly import Assembly, BatchPlan, draw_with_newcomers
from services.sampler.pool import Knowledge, PoolEntry, pool_entry
from services.sampler.strategies import strategy_named
from services.sampler.strategies.base import available, node_cap
from services.trainer.selection.likelihood import filled_places
from shared.config.sampler_section import SamplerSection
from shared.contracts.control import TrainerPosition
from shared.registry import STRATEGIES
from tests.unit.sampler_groups import scored_group


def entry(seq: int, share: str, established: bool) -> PoolEntry:
    scored = scored_group(seq, node=f"n{seq}", origin="external")
    return pool_entry(seq, msgspec.structs.replace(scored, account=share, established=established))


@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60),
    st.integers(1, 12),
    st.floats(0.05, 1.0),
    st.sampled_from(sorted(STRATEGIES.built_in)),
    st.integers(0, 2**32),
)
def test_as_many_are_drawn_as_without_the_rule_and_newcomers_have_their_part_or_what_is_left(
    pool: list[tuple[int, bool]], wanted: int, part: float, strategy: str, seed: int
) -> None:
    entries = [entry(seq, f"U{who}", established) for seq, (who, established) in enumerate(pool, 1)]
    cap = node_cap(wanted, 0.5, len({each.node for each in entries}))
    draw = lambda rng: draw_with_newcomers(strategy_named(strategy), entries, wanted, cap, part, rng, Knowledge())  # noqa: E731
    chosen = draw(random.Random(seed))
    assert chosen == draw(random.Random(seed)), "the same batch in every run"
    assert len({each.seq for each in chosen}) == len(chosen) == available(entries, wanted, cap)
    assert all(sum(other.node == each.node for other in chosen) <= cap for each in chosen)
    known = {each.node for each in entries if each.established}
    left_over = wanted - available([each for each in entries if each.node in known], wanted, cap)
    newcomers = [each for each in chosen if each.node not in known]
    assert len(newcomers) <= max(1, int(wanted * part + 1e-9), left_over)


def plan(entries: list[PoolEntry], strategy: str = "uniform") -> BatchPlan:
    settings = SamplerSection(
        local=0,
        external=8,
        shortage="short",
        shortage_wait_s=0.0,
        max_external_age_s=1e6,
        strategy=strategy,
        max_share_per_node=0.5,
    )
    position = TrainerPosition(policy_version=0, consumed_local=0)
    decided = Assembly(settings, node="alpha", seed=0).decide([], entries, 1, position, 1000.0)
    assert isinstance(decided, BatchPlan)
    return decided


def placed(entries: list[PoolEntry]) -> list[PoolEntry]:
    """The entries that the trainer trains on if all can be."""
    made = plan(entries)
    assert made.places is not None
    candidates = {
        each.group_id: msgspec.structs.replace(scored_group(each.seq, origin="external"), group_id=each.group_id, account=each.node)
        for each in made.external
    }
    kept = {scored.group_id for scored in filled_places(list(candidates.values()), made.places)}
    return [each for each in made.external if each.group_id in kept]


def test_a_thousand_new_keys_get_a_quarter_of_the_batch_and_a_swarm_of_newcomers_all_of_it() -> None:
    crowd = [entry(seq, f"U{seq}", False) for seq in range(1, 1001)]
    old = [entry(1000 + seq, f"OLD{seq % 3}", True) for seq in range(1, 13)]
    taken = placed(crowd + old)
    assert (len(taken), sum(not each.established for each in taken)) == (8, 2)
    assert len(placed(crowd)) == 8
    few = placed(crowd + old[:1])
    assert len(few) == 8 and sum(each.established for each in few) <= 1, "what the established cannot fill is newcomers'"


def test_many_nodes_of_one_share_have_one_nodes_part() -> None:
    copiers = [entry(seq, "~copiers", False) for seq in range(1, 101)]
    others = [entry(100 + seq, f"U{seq % 4}", False) for seq in range(1, 13)]
    taken = placed(copiers + others)
    assert len(taken) == 8
    assert sum(each.node == "~copiers" for each in taken) <= 4


def test_a_newcomer_that_has_become_established_takes_its_earlier_groups_along() -> None:
    became = [entry(seq, "UNEW", seq > 10) for seq in range(1, 21)]
    others = [entry(20 + seq, f"U{seq % 3}", True) for seq in range(1, 13)]
    assert len(placed(became + others)) == 8
