"""A log that takes less than a batch: the sampler goes on with smaller ones, on a real server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.sampler.assembly import Assembly, BatchPlan, fitted
from services.sampler.pool import pool_entry
from shared.contracts.codec import encode
from shared.contracts.control import TrainerPosition
from shared.contracts.limits import NODE_LIMITS
from shared.contracts.streams import node_streams
from shared.contracts.subjects import node_batches_stream
from tests.integration.sampler_node import a_node, configured
from tests.unit.sampler_groups import scored_group

LIMIT_BYTES = 50_000


async def small_log(node: object, limit_bytes: int) -> None:
    (spec,) = (each for each in node_streams(node.id) if each.name == node_batches_stream(node.id))  # type: ignore[attr-defined]
    await node.transport.ensure_stream(replace(spec, max_msg_bytes=limit_bytes))  # type: ignore[attr-defined]


@pytest.mark.parametrize("tell_limit", [True, False], ids=["checked before it is sent", "refused by the server"])
async def test_a_batch_that_the_log_does_not_take_is_made_smaller_and_the_sampler_lives(
    nats_url: str, tell_limit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of 2 x 10 kB: two of four fit. The largest of others wait before the node's own."""
    async with a_node(nats_url, max_staleness=8) as node:
        await small_log(node, LIMIT_BYTES)
        if not tell_limit:

            async def unknown(stream: str) -> object:
                return type("Bounds", (), {"max_msg_bytes": -1, "work_queue": False, "read_at": 0.0})()

            monkeypatch.setattr(node.transport._bounds, "of", unknown)  # type: ignore[attr-defined]
        node.start()
        await node.publish(0, 1, text_chars=10_000)
        await node.publish_external(2, text_chars=10_000)
        await node.publish_external(3, text_chars=50)
        [first] = await node.batches(1)
        drawn = [item.scored.group.draw for item in first.items]
        assert {0, 1} & set(drawn) and 2 not in drawn
        if tell_limit:
            assert drawn == [0, 1, 3], "no smaller than it must be"
        await node.train_to(1)
        await node.publish(4, 5, text_chars=50)
        await node.publish_external(6, text_chars=50)
        second = (await node.batches(2))[1]
        assert second.number == 2
        await node.stop()


async def test_batches_are_small_enough_for_the_log_to_hold_those_that_no_checkpoint_does(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream takes 768 MiB in one message and a gigabyte in all."""
    limits = replace(NODE_LIMITS, batches_max_bytes=4 * LIMIT_BYTES)
    monkeypatch.setattr("services.sampler.service.NODE_LIMITS", limits)
    async with a_node(nats_url, max_staleness=8) as node:
        node.start()
        await node.publish(0, 1, text_chars=10_000)
        await node.publish_external(2, text_chars=10_000)
        await node.publish_external(3, text_chars=50)
        [first] = await node.batches(1)
        assert len(encode(first)) <= limits.batch_bytes(1) == LIMIT_BYTES
        assert [item.scored.group.draw for item in first.items] == [0, 1, 3]
        await node.stop()


async def test_a_group_that_fits_into_no_batch_is_given_up_and_its_place_returned(nats_url: str) -> None:
    async with a_node(nats_url) as node:
        await small_log(node, LIMIT_BYTES)
        node.start()
        await node.publish(0, text_chars=100_000)
        await node.publish(1, 2, text_chars=50)
        await node.publish_external(3, text_chars=100_000)
        await node.publish_external(4, 5, text_chars=50)
        [batch] = await node.batches(1)
        assert sorted(item.scored.group.draw for item in batch.items) == [1, 2, 4, 5]
        assert batch.state.dropped_local == 1
        await node.stop()


async def test_replayed_groups_are_the_first_to_be_left_out_of_a_batch_that_is_too_large(nats_url: str) -> None:
    async with a_node(nats_url, external=0, max_staleness=8, replay=2) as node:
        await small_log(node, LIMIT_BYTES)
        node.start()
        await node.publish(0, 1, text_chars=10_000)
        await node.batches(1)
        await node.train_to(1)
        await node.publish(2, 3, text_chars=10_000)
        second = (await node.batches(2))[1]
        assert [item.scored.group.draw for item in second.items] == [2, 3] and second.pool_replay == 2
        await node.train_to(2)
        await node.publish(4, 5, text_chars=50)
        third = (await node.batches(3))[2]
        assert [item.scored.group.draw for item in third.items if not item.replayed] == [4, 5]
        assert sum(item.replayed for item in third.items) == 2, "there is room again"
        assert third.state.dropped_local == 0
        await node.stop()


def a_plan(local: list[int], external: list[int], again: Sequence[int] = ()) -> tuple[BatchPlan, dict[int, int]]:
    """A plan over groups of these sizes, and the sizes by position."""
    count = len(local)
    entries = [pool_entry(seq + 1, scored_group(seq)) for seq in range(count)]
    others = [pool_entry(count + seq + 1, scored_group(seq, node="beta", origin="external")) for seq in range(len(external))]
    first = 1 + count + len(external)
    old = [pool_entry(first + seq, scored_group(1000 + seq)) for seq in range(len(again))]
    config = configured("alpha", local=len(local), external=len(external), replay=len(again))
    plan = Assembly(config.sampler, node="alpha", seed=0).decide(
        entries, others, 1, TrainerPosition(policy_version=0, consumed_local=0), 1000.0, replayable=old
    )
    assert isinstance(plan, BatchPlan)
    return plan, dict(enumerate((*local, *external, *again), start=1))


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=6),
    st.lists(st.integers(1, 1000), min_size=1, max_size=6),
    st.lists(st.integers(1, 1000), max_size=6),
    st.integers(1, 4000),
)
def test_what_fits_is_bounded_keeps_local_groups_first_and_gives_up_only_what_never_fits(
    local: list[int], external: list[int], again: list[int], room_bytes: int
) -> None:
    plan, sizes = a_plan(local, external, again)
    fits = fitted(plan, sizes, room_bytes)
    kept = (*fits.plan.local, *fits.plan.external, *fits.plan.replayed)
    assert sum(sizes[entry.seq] for entry in kept) <= room_bytes
    assert {entry.seq for entry in fits.too_large} == {
        entry.seq for entry in (*plan.local, *plan.external) if sizes[entry.seq] > room_bytes
    }
    assert len(kept) + fits.left_out == len(plan.local) + len(plan.external) + len(plan.replayed)
    if len(fits.plan.external) < len(plan.external):
        assert not fits.plan.replayed
    if len(fits.plan.local) < len(plan.local):
        assert not fits.plan.external
    if not fits.too_large:
        assert fits.plan.local or fits.plan.external, "a batch is never empty"
