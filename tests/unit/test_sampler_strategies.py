"""Every strategy draws what it says: no more than it may, nothing twice, the same from a seed, and
with the stated chances.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from services.sampler.pool import RECENT_GROUPS, Knowledge, PassRecord, PoolEntry, pool_entry, task_source
from services.sampler.strategies import strategy_named
from services.sampler.strategies.base import available, candidates
from services.sampler.strategies.uniform import STRATEGY as UNIFORM
from shared.config import sampler_section
from shared.config.sampler_section import SamplerSection
from shared.contracts.messages import TaskRef
from shared.registry import STRATEGIES
from tests.unit.sampler_groups import scored_group

Chances = dict[frozenset[int], float]

KNOWN = Knowledge(sources={"easy": PassRecord(90.0, 100.0), "middle": PassRecord(50.0, 100.0), "hard": PassRecord(0.0, 200.0, 25)})
SOURCES = ("easy", "middle", "hard", "unseen")


def entry(
    seq: int, node: str = "n0", source: str = "unseen", std: float = 0.5, created_at: float = 1000.0, *, has_pass: bool = True
) -> PoolEntry:
    made = pool_entry(seq, scored_group(seq, node=node, origin="external"))
    return replace(made, source=source, reward_std=std, created_at=created_at, received_at=created_at, has_pass=has_pass)


POOL = [
    entry(1, "n0", "easy", 0.5, 1005.0),
    entry(2, "n0", "middle", 0.33, 1001.0),
    entry(3, "n1", "hard", 0.4, 1004.0),
    entry(4, "n0", "unseen", 0.1, 1002.0),
    entry(5, "n2", "middle", 0.25, 1003.0),
]


def test_uniform_draws_from_a_seed_what_it_always_drew() -> None:
    # Recorded before there were other strategies: published batches can be drawn again.
    pool = [pool_entry(s + 1, scored_group(s, node=f"n{s % 3 if s < 9 else 0}", origin="external")) for s in range(14)]
    recorded = {
        0: ([14, 7, 13, 1], [14, 7, 5, 9, 8]),
        1: ([3, 10, 2, 5], [3, 10, 2, 5, 12]),
        12345: ([7, 12, 1, 5], [7, 12, 5, 6, 8]),
        731442922139857421: ([5, 3, 9, 7], [5, 3, 9, 7, 2]),
    }
    for seed, (plain, capped) in recorded.items():
        assert [e.seq for e in UNIFORM.draw(pool, 4, 4, random.Random(seed), KNOWN)] == plain
        assert [e.seq for e in UNIFORM.draw(pool, 5, 2, random.Random(seed), Knowledge())] == capped


def test_the_configuration_knows_the_strategies_that_there_are() -> None:
    for name in STRATEGIES.built_in:
        assert SamplerSection(strategy=name).strategy == strategy_named(name).name == name
    with pytest.raises(ValidationError, match=r"no strategy is called 'any': there are .*, uniform.* \("):
        SamplerSection(strategy="any")
    with pytest.raises(ValidationError, match=r"no strategy is called 'unifrom': did you mean uniform\?"):
        SamplerSection(strategy="unifrom")


def test_where_no_sampler_is_installed_its_strategy_is_left_to_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the verifier's image, which has no file of a strategy."""
    monkeypatch.setattr(sampler_section, "STRATEGIES", replace(STRATEGIES, built_in={}))
    assert SamplerSection(strategy="uniform").strategy == "uniform"


pools = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(SOURCES), st.sampled_from([1e-6, 0.1, 0.5]), st.floats(0, 2000), st.booleans()),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(STRATEGIES.built_in)), pools, st.integers(0, 10), st.integers(1, 10), st.integers())
def test_a_draw_has_as_many_different_groups_as_there_may_be_and_depends_on_the_seed_alone(
    name: str, groups: list[tuple[int, str, float, float, bool]], wanted: int, cap: int, seed: int
) -> None:
    pool = [
        entry(seq, f"n{node}", source, std, at, has_pass=passes)
        for seq, (node, source, std, at, passes) in enumerate(groups, start=1)
    ]
    strategy = strategy_named(name)
    chosen = strategy.draw(pool, wanted, cap, random.Random(seed), KNOWN)
    assert len({e.seq for e in chosen}) == len(chosen) == available(pool, wanted, cap)
    assert set(chosen) <= set(pool)
    assert max(Counter(e.node for e in chosen).values(), default=0) <= cap
    assert strategy.draw(pool, wanted, cap, random.Random(seed), KNOWN) == chosen
    if strategy.weigh is not None:
        weights = strategy.weigh(pool, wanted, KNOWN)
        assert len(weights) == len(pool) and all(weight > 0.0 for weight in weights)


def one_after_the_other(weights: dict[int, float], wanted: int, cap: int) -> Chances:
    """Chances of every set of drawn positions, by going through all orders of drawing from an
    urn.
    """
    node_of = {e.seq: e.node for e in POOL}
    chances: Chances = {}

    def draw(taken: tuple[int, ...], chance: float) -> None:
        nodes = Counter(node_of[seq] for seq in taken)
        urn = {seq: w for seq, w in weights.items() if seq not in taken and nodes[node_of[seq]] < cap}
        if len(taken) == wanted or not urn:
            chances[frozenset(taken)] = chances.get(frozenset(taken), 0.0) + chance
            return
        for seq, weight in urn.items():
            draw((*taken, seq), chance * weight / sum(urn.values()))

    draw((), 1.0)
    return chances


def beta_variance_weight(passes: float, failures: float) -> float:
    """E[p(1 - p)] under Beta(1 + passes, 1 + failures) as E[p] - E[p]^2 - Var[p]."""
    a, b = 1.0 + passes, 1.0 + failures
    mean = a / (a + b)
    return mean - mean**2 - a * b / ((a + b) ** 2 * (a + b + 1.0))


SOURCE_WEIGHTS = {
    "easy": beta_variance_weight(90, 10), "middle": beta_variance_weight(50, 50),
    "hard": beta_variance_weight(0, 200), "unseen": beta_variance_weight(0, 0),
}  # fmt: skip
LAW: dict[str, Callable[[int, int], Chances]] = {
    "uniform": lambda j, cap: one_after_the_other({e.seq: 1.0 for e in POOL}, j, cap),
    "learnability": lambda j, cap: one_after_the_other({e.seq: SOURCE_WEIGHTS[e.source] for e in POOL}, j, cap),
    # Only group 3 has a success where this node's policy fails.
    "rescue": lambda j, cap: one_after_the_other({e.seq: 1.0 if e.seq == 3 else 1e-30 for e in POOL}, j, cap),
}

# 99.9 % quantiles of chi-square by degrees of freedom.
CRITICAL = {2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32, 8: 26.12, 9: 27.88}


@pytest.mark.slow
@pytest.mark.parametrize(("wanted", "cap"), [(2, 2), (3, 1), (2, 1)])
@pytest.mark.parametrize("name", sorted(LAW))
def test_a_set_is_drawn_as_often_as_the_law_says(name: str, wanted: int, cap: int) -> None:
    chances = LAW[name](wanted, cap)
    assert sum(chances.values()) == pytest.approx(1.0)
    draws = 6000
    rng = random.Random(f"{name} {wanted} {cap}")
    counts = Counter(frozenset(e.seq for e in strategy_named(name).draw(POOL, wanted, cap, rng, KNOWN)) for _ in range(draws))
    assert set(counts) <= set(chances)
    cells = [(counts[key], draws * chance) for key, chance in chances.items() if draws * chance >= 10]
    rare = (draws - sum(seen for seen, _ in cells), draws - sum(expected for _, expected in cells))
    if rare[1] >= 10:  # sets too rare for the test one by one count as one
        cells.append(rare)
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    assert statistic < CRITICAL[len(cells) - 1], (name, statistic, len(cells))


def test_learnability_follows_the_own_pass_rate_and_not_the_groups_reward() -> None:
    generous, strict = entry(1, source="middle"), entry(2, source="middle", std=0.01)
    weigh = strategy_named("learnability").weigh
    assert weigh is not None
    assert weigh([generous, strict], 1, KNOWN) == [pytest.approx(SOURCE_WEIGHTS["middle"])] * 2
    by_source = dict(zip(SOURCES, weigh([entry(s, source=name) for s, name in enumerate(SOURCES)], 1, KNOWN), strict=True))
    assert by_source["middle"] > by_source["unseen"] > by_source["easy"] > by_source["hard"] > 0.0
    assert by_source["unseen"] == pytest.approx(1 / 6)


def rescued(failed_groups: int, *, has_pass: bool = True) -> bool:
    """Return whether the one group of the source stands before a hundred others, at any seed."""
    known = Knowledge(sources={"hard": PassRecord(0.0, 200.0, failed_groups), "easy": PassRecord(90.0, 100.0)})
    pool = [*(entry(seq, source="easy") for seq in range(1, 101)), entry(101, source="hard", has_pass=has_pass)]
    drawn = [strategy_named("rescue").draw(pool, 2, 2, random.Random(seed), known) for seed in range(20)]
    assert all(len(chosen) == 2 for chosen in drawn)
    return all(chosen[0].seq == 101 for chosen in drawn)


def test_a_success_where_this_nodes_policy_fails_comes_first_and_nothing_else_does() -> None:
    assert rescued(RECENT_GROUPS)
    assert not rescued(RECENT_GROUPS - 1), "too few local groups failed to say so"
    assert not rescued(RECENT_GROUPS, has_pass=False), "a group without a success shows no way out"


def test_where_there_is_nothing_to_rescue_all_informative_groups_are_alike() -> None:
    weigh = strategy_named("rescue").weigh
    assert weigh is not None
    for known in (Knowledge(), Knowledge(sources={"easy": PassRecord(0.0, 8.0, RECENT_GROUPS - 1)})):
        assert len(set(weigh(POOL, 2, known))) == 1
    none_passes = [replace(each, has_pass=False) for each in POOL]
    assert len(set(weigh(none_passes, 2, KNOWN))) == 1


def test_a_node_that_floods_a_source_this_nodes_policy_fails_on_has_its_share_and_no_more() -> None:
    pool = [*(entry(seq, "flood", "hard") for seq in range(1, 101)), *(entry(seq, f"n{seq}", "easy") for seq in range(101, 104))]
    chosen = strategy_named("rescue").draw(pool, 4, 2, random.Random(1), KNOWN)
    assert Counter(e.node == "flood" for e in chosen) == {True: 2, False: 2}


@pytest.mark.parametrize(("pool", "expected"), [(0, 4), (4, 4), (7, 4), (10, 6), (16, 12), (100, 12)])
def test_candidates_leave_a_batchs_worth_in_the_pool(pool: int, expected: int) -> None:
    assert candidates(pool, 4, 3.0) == expected


def test_a_source_is_a_dataset_under_one_configuration() -> None:
    plain = TaskRef(dataset="gcd", seed=1, index=2)
    assert task_source(plain) == "gcd" == task_source(TaskRef(dataset="gcd", seed=9, index=9))
    harder = task_source(TaskRef(dataset="gcd", config='{"max_value":99}', seed=1, index=2))
    assert harder.startswith("gcd#") and harder != task_source(TaskRef(dataset="gcd", config='{"max_value":9}', seed=1, index=2))
