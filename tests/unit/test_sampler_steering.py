"""A batch explains its draw, old batches are still memories, and a changed configuration is taken
up.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgpack
import pytest

from services.sampler.assembly import BatchPlan
from services.sampler.settings import limits_of, steering_rules_of
from services.sampler.steering import SteeringRules, in_force, reconciled
from shared.config import NodeConfig
from shared.config.sampler_section import SamplerSection
from shared.contracts.codec import decode, encode
from shared.contracts.control import SamplerPosition
from shared.contracts.messages import Batch, Preference
from shared.contracts.sampler_state import OwnRecord, SteeringState
from tests.unit.sampler_groups import scored_group
from tests.unit.sampler_history import History, limits, sampler


def configured(**sampler: Any) -> NodeConfig:
    return NodeConfig(tasks=[{"dataset": "gcd"}], sampler=sampler)  # type: ignore[arg-type]


def history(strategy: str, nodes: tuple[str, ...], **changes: Any) -> History:
    chosen = sampler(strategy=strategy, **changes)
    made = History(chosen, limits(chosen))
    for draw in range(3):
        made.publish(scored_group(draw, rewards=(0.0, 0.0, 1.0, 0.0)))
    for draw, node in enumerate(nodes):
        rewards = (0.0, 1.0) if draw % 2 else (0.0, 0.0, 0.0, 1.0)
        made.publish(scored_group(draw, node=node, origin="external", rewards=rewards))
    return made


def test_a_weighted_draw_can_be_explained_from_the_batch() -> None:
    made = history("spread", ("beta", "gamma", "beta", "gamma", "delta", "delta"))
    made.step()
    [batch] = made.batches
    stds = {True: 0.5, False: 0.1875**0.5}  # of (0, 1) and of (0, 0, 0, 1)
    mean = (3 * stds[True] + 3 * stds[False]) / 6
    external = [item for item in batch.items if item.scored.origin == "external"]
    assert len(external) == 2
    for item in external:
        assert item.weight == pytest.approx(stds[len(item.scored.rewards) == 2] / mean)
    assert [item.weight for item in batch.items if item.scored.origin == "local"] == [None, None]
    [record] = batch.state.own.sources
    assert (record.source, batch.state.own.groups, batch.state.own.informative) == ("chain_sum", 3, 3)
    assert record.passes / record.completions == pytest.approx(0.25, abs=0.01)


def test_what_this_nodes_policy_fails_on_is_known_after_a_crash_and_in_a_batch_of_an_older_version() -> None:
    def failing(crash_after: int | None) -> History:
        chosen = sampler(strategy="rescue", external=1)
        made = History(chosen, limits(chosen))
        for draw in range(12):
            # The first half fails with partial credit, which is no pass; then one passes, and four
            # more fail.
            made.publish(scored_group(draw, rewards=(0.0, 1.0) if draw == 5 else (0.0, 0.5), version=draw // 2))
            made.publish(scored_group(draw, node="beta", origin="external"))
            if draw % 2:
                made.step()
                made.trained = len(made.batches)
            if draw == crash_after:
                made.crash()
        return made

    whole = failing(None)
    streaks = [batch.state.own.sources[0].failed_groups for batch in whole.batches]
    assert streaks == [2, 4, 0, 2, 4, 6]
    for crash_after in (3, 4, 8):
        assert [encode(batch) for batch in failing(crash_after).batches] == [encode(batch) for batch in whole.batches]
    fields = msgpack.unpackb(encode(whole.batches[1]))
    del fields["state"]["own"]["sources"][0]["failed_groups"]
    assert decode(msgpack.packb(fields), Batch).state.own.sources[0].failed_groups == 0


@pytest.mark.parametrize("name", ["likelihood_near", "likelihood_far"])
def test_where_likelihood_decides_the_batch_carries_candidates_and_says_what_to_keep(name: str) -> None:
    made = history(name, ("beta", "gamma", "delta") * 8, external=4, oversample=3.0, max_share_per_node=0.5)
    plan = made.step()
    assert isinstance(plan, BatchPlan)
    [batch] = made.batches
    assert batch.preference == Preference(keep=4, by=name.removeprefix("likelihood_"), node_cap=2)  # type: ignore[arg-type]
    nodes = Counter(item.scored.group.node for item in batch.items if item.scored.origin == "external")
    assert nodes.total() == 12 and max(nodes.values()) <= 6
    assert sum(min(count, 2) for count in nodes.values()) >= 4, "under the cap enough are left to keep"
    assert decode(encode(batch), Batch) == batch


def test_batches_and_positions_of_an_older_version_are_still_read() -> None:
    made = history("uniform", ("beta", "gamma"))
    made.step()
    fields = msgpack.unpackb(encode(made.batches[0]))
    del fields["preference"], fields["state"]["own"], fields["state"]["steering"]
    for item in fields["items"]:
        del item["weight"]
    old = decode(msgpack.packb(fields), Batch)
    assert old.preference is None and old.state.own == OwnRecord() and old.state.steering == SteeringState()
    position = msgpack.packb({"schema": 1, "batch_number": 3, "consumed_local": 6, "dropped_local": 0})
    assert decode(position, SamplerPosition).local is None


@pytest.mark.parametrize("sampler", [{"adapt": "off"}, {"adapt": "adaptive", "external": 0}])
def test_where_nothing_may_move_nothing_moves(sampler: dict[str, Any]) -> None:
    config = configured(**sampler)
    steering = steering_rules_of(config)
    state = reconciled(steering, SteeringState(), 1)
    assert state == SteeringState()
    force, section = in_force(steering, state), config.sampler
    assert (force.local, force.external, force.most_local) == (section.local, section.external, section.local)
    assert force.strategy.name == force.explained == section.strategy


def test_what_the_configuration_no_longer_asks_for_ends_and_what_it_newly_asks_for_starts() -> None:
    moving = steering_rules_of(configured(strategy="bandit", adapt="adaptive"))
    state = reconciled(moving, SteeringState(), 1)
    assert state.bandit is not None and state.sharing is not None
    assert reconciled(moving, state, 9) == state
    assert reconciled(steering_rules_of(configured(strategy="spread", adapt="off")), state, 9) == SteeringState()
    narrower = steering_rules_of(configured(strategy="bandit", bandit_arms=["spread"]))
    assert in_force(narrower, reconciled(narrower, state, 9)).explained == "bandit: spread"
    smaller = steering_rules_of(configured(local=2, external=1, adapt="adaptive"))
    force = in_force(smaller, reconciled(smaller, state, 9))
    assert (force.local, force.external, force.most_local) == (2, 1, 3)


def test_pools_hold_what_the_largest_i_and_j_may_have_out() -> None:
    bounds = limits_of(configured(local=2, external=6, max_staleness=2, pool_local=1, pool_external=1, adapt="adaptive"))
    assert (bounds.in_flight_local, bounds.pool_local, bounds.pool_external) == (24, 24, 6)


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        ({"strategy": "best"}, "uniform"),
        ({"bandit_arms": ["uniform", "bandit"]}, "bandit_arms"),
        ({"bandit_arms": ["spread", "spread"]}, "twice"),
        ({"adapt_informative": [0.6, 0.2]}, "adapt_informative"),
    ],
)
def test_settings_that_cannot_be_are_refused(sampler: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        configured(**sampler)


def test_combinations_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="eval.tasks"):
        NodeConfig(tasks=[{"dataset": "gcd"}], sampler={"strategy": "bandit"}, eval={"tasks": 0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no strategy is called 'best'"):
        SteeringRules(SamplerSection().model_copy(update={"strategy": "bandit", "bandit_arms": ["best"]}))
