"""What the sampler remembers of groups: which are known, used, lost or given up, after a restart
too.
"""

from __future__ import annotations

from msgspec.structs import replace

from services.sampler.memory import DUPLICATE_POSITIONS, SamplerMemory, state_for_new_stream
from services.sampler.strategies.uniform import STRATEGY as UNIFORM
from shared.contracts.sampler_state import SamplerState
from tests.unit.sampler_groups import scored_group
from tests.unit.sampler_history import History, limits, sampler


def memory(**changes: int) -> SamplerMemory:
    return SamplerMemory(limits(sampler(), **changes), UNIFORM.keeps)


def test_a_local_group_that_could_not_be_scored_gives_its_place_back() -> None:
    known = memory()
    known.observe(1, scored_group(1, failure="timeout"))
    assert (known.dropped_local, len(known.local)) == (1, 0)
    assert known.state().settled == [] and known.state().floor_seq == 1


def test_a_group_published_twice_counts_once_even_after_it_was_used() -> None:
    known = memory()
    group = scored_group(1)
    known.observe(1, group)
    known.observe(2, group)
    assert (len(known.local), known.dropped_local) == (1, 0)
    known.take(list(known.local), ())
    known.advance()
    known.observe(3, group)
    assert (len(known.local), known.dropped_local, known.drops[("local", "duplicate")]) == (0, 0, 2)


def test_a_used_group_is_still_known_after_a_restart() -> None:
    made = History(sampler(external=0, local=1), limits(sampler(external=0, local=1)))
    group = scored_group(1)
    made.publish(group)
    made.step()
    assert made.memory.state().floor_seq == 1
    made.purge()
    made.crash()
    made.publish(group)
    made.read()
    assert len(made.memory.local) == 0
    assert DUPLICATE_POSITIONS > 1000


def test_waiting_groups_are_dropped_and_counted_when_their_source_gets_another_scorer() -> None:
    one, other = "a" * 64, "b" * 64
    known = memory()
    for seq, (origin, scorer) in enumerate([("local", one), ("external", one), ("local", None), ("local", one)], 1):
        dataset = "gcd" if seq == 4 else "chain_sum"
        known.observe(seq, replace(scored_group(seq, node=f"n{seq}", origin=origin, dataset=dataset), scorer=scorer))
    assert (len(known.local), len(known.external)) == (3, 1)
    known.observe(5, replace(scored_group(5), scorer=other))
    assert [entry.seq for entry in known.local] == [3, 4, 5] and len(known.external) == 0, "what is not known, and another source's"
    assert known.drops == {("local", "other_scorer"): 1, ("external", "other_scorer"): 1} and known.dropped_local == 1
    assert known.keep_scored_by({one}) == 1 and [entry.seq for entry in known.local] == [3, 4]
    assert known.keep_scored_by({one}) == 0 and known.dropped_local == 2


def test_a_group_in_the_pool_is_known_however_long_ago_it_came() -> None:
    known = memory()
    waiting = scored_group(1, node="beta", origin="external")
    known.observe(1, waiting)
    boring = scored_group(2, node="beta", origin="external", rewards=(0.0, 0.0))
    for seq in range(2, DUPLICATE_POSITIONS + 10):
        known.observe(seq, boring)
    known.observe(DUPLICATE_POSITIONS + 10, waiting)
    assert [e.seq for e in known.external] == [1]
    assert known.drops[("external", "duplicate")] >= 1


def test_a_local_group_too_stale_for_the_next_batch_is_dropped_on_arrival_and_when_the_number_moves() -> None:
    known = memory()
    known.observe(1, scored_group(1, version=0))
    known.advance()
    assert (len(known.local), known.dropped_local) == (1, 0)
    known.advance()
    assert (len(known.local), known.dropped_local) == (0, 1)
    known.observe(2, scored_group(2, version=0))
    assert (len(known.local), known.dropped_local) == (0, 2)


def test_a_full_pool_counts_the_local_group_it_gives_up() -> None:
    known = memory(pool_local=1)
    for seq in range(1, 7):
        known.observe(seq, scored_group(seq))
    assert (len(known.local), known.dropped_local) == (4, 2)  # never smaller than what the generator may have out


def test_positions_that_vanished_unseen_give_back_at_most_what_the_generator_may_have_out() -> None:
    known = memory()
    known.skip_to(3)
    assert known.dropped_local == 2
    known.observe(1000, scored_group(1))
    assert known.dropped_local == 2 + 4
    assert known.drops[("local", "lost")] == 2 + 997


def test_positions_that_were_settled_before_they_vanished_are_not_lost() -> None:
    state = SamplerState(scored_seq=10, floor_seq=4, settled=[6, 7, 8, 9, 10], consumed_local=3, dropped_local=1)
    known = SamplerMemory(limits(sampler()), UNIFORM.keeps, state, 4)
    known.skip_to(11)
    assert (known.dropped_local, known.drops[("local", "lost")]) == (2, 1)
    assert known.cursor == 10


def test_a_payload_that_is_gone_when_it_is_needed_is_counted() -> None:
    known = memory()
    known.observe(1, scored_group(1))
    known.lose(1)
    assert (known.dropped_local, len(known.local)) == (1, 0)


def test_an_unreadable_message_gives_a_place_back_and_is_not_met_again() -> None:
    known = memory()
    known.observe(1, None)
    assert (known.dropped_local, known.state().floor_seq) == (1, 1)


def test_a_stream_made_anew_starts_from_its_beginning_with_the_counts_kept() -> None:
    old = SamplerState(scored_seq=500, floor_seq=490, settled=[495], consumed_local=80, dropped_local=3)
    assert state_for_new_stream(old, 4) == SamplerState(consumed_local=80, dropped_local=7)
