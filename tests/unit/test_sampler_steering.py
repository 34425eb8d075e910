"""A batch explains its draw, old batches are still memories, and a changed configuration is taken
up.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgpack
import pytest

from services.sampler.assembly import BatchPlan
from services.sampler.composition import next_composition, reconciled
from services.sampler.memory import memory_limits
from shared.config import NodeConfig
from shared.contracts.codec import decode, encode
from shared.contracts.control import SamplerPosition
from shared.contracts.messages import Batch, Places
from shared.contracts.sampler_state import OwnRecord
from tests.constants import section_with
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
    chosen = sampler(strategy="learnability")
    made = History(chosen, limits(chosen))
    for draw in range(3):
        made.publish(scored_group(draw, rewards=(0.0, 0.0, 1.0, 0.0)))
    for draw in range(6):
        made.publish(scored_group(draw, node="beta", origin="external", dataset="gcd" if draw % 2 else "chain_sum"))
    made.step()
    [batch] = made.batches
    passes, failures = 1.0 + batch.state.own.sources[0].passes, 1.0 + 3 * batch.state.own.sources[0].passes
    known = passes * failures / ((passes + failures) * (passes + failures + 1.0))  # E[p(1 - p)] of this node's policy
    weights = {"chain_sum": known, "gcd": 1 / 6}
    external = [item for item in batch.items if item.scored.origin == "external"]
    assert len(external) == 2
    for item in external:
        mean = (3 * weights["chain_sum"] + 3 * weights["gcd"]) / 6
        assert item.weight == pytest.approx(weights[item.scored.group.task.ref.dataset] / mean, rel=0.02)
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


def test_the_batch_carries_candidates_and_says_how_many_places_there_are() -> None:
    made = history("uniform", ("beta", "gamma", "delta") * 8, external=4, oversample=3.0, max_share_per_node=0.5)
    assert isinstance(made.step(), BatchPlan)
    [batch] = made.batches
    assert batch.places == Places(keep=4, node_cap=2, source_cap=4)
    nodes = Counter(item.scored.group.node for item in batch.items if item.scored.origin == "external")
    assert nodes.total() == 12 and max(nodes.values()) <= 6
    assert sum(min(count, 2) for count in nodes.values()) >= 4, "under the cap enough are left to keep"
    assert decode(encode(batch), Batch) == batch


def test_batches_and_positions_of_an_older_version_are_still_read() -> None:
    made = history("uniform", ("beta", "gamma"))
    made.step()
    fields = msgpack.unpackb(encode(made.batches[0]))
    del fields["preference"], fields["state"]["own"], fields["state"]["sharing"]
    for item in fields["items"]:
        del item["weight"]
    old = decode(msgpack.packb(fields), Batch)
    assert old.places is None and old.state.own == OwnRecord() and old.state.sharing is None
    position = msgpack.packb({"schema": 1, "batch_number": 3, "consumed_local": 6, "dropped_local": 0})
    assert decode(position, SamplerPosition).local is None


@pytest.mark.parametrize("sampler", [{"adapt": "off"}, {"adapt": "adaptive", "external": 0}])
def test_where_nothing_may_move_nothing_moves(sampler: dict[str, Any]) -> None:
    section = configured(**sampler).sampler
    assert reconciled(None, section) is None
    shares = next_composition(None, section)
    assert (shares.local, shares.external, shares.most_local) == (section.local, section.external, section.local)


def test_what_the_configuration_no_longer_asks_for_ends_and_what_it_newly_asks_for_starts() -> None:
    moving = configured(adapt="adaptive").sampler
    state = reconciled(None, moving)
    assert state is not None and reconciled(state, moving) == state
    assert reconciled(state, configured(adapt="off").sampler) is None
    smaller = configured(local=2, external=1, adapt="adaptive").sampler
    shares = next_composition(reconciled(state, smaller), smaller)
    assert (shares.local, shares.external, shares.most_local) == (2, 1, 3)


def test_pools_hold_what_the_largest_i_and_j_may_have_out() -> None:
    bounds = memory_limits(configured(local=2, external=6, max_staleness=2, adapt="adaptive").sampler)
    assert (bounds.in_flight_local, bounds.pool_local, bounds.pool_external) == (24, 1024, 1024)
    small = {"pool_local": 1, "pool_external": 1}
    bounds = memory_limits(section_with(configured(local=2, external=6, max_staleness=2, adapt="adaptive").sampler, small))
    assert (bounds.pool_local, bounds.pool_external) == (24, 6)


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        ({"strategy": "any"}, "uniform"),
        ({"adapt_informative": [0.6, 0.2]}, "adapt_informative"),
    ],
)
def test_settings_that_cannot_be_are_refused(sampler: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        configured(**sampler)
