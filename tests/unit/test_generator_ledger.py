"""The ledger of task draws: admission, leases, and what a crash leaves behind."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.generator.ledger import claim, consumed_with_moving_i, draws_allowed, finish, release_own, renew, with_secret
from shared.contracts.control import SamplerPosition, TaskLedger


def test_admission_follows_the_worked_example_of_the_module() -> None:
    fresh = TaskLedger()
    rule_ = {"groups_per_step": 4, "max_staleness": 1, "dropped_local": 0}
    assert draws_allowed(fresh, consumed_local=0, **rule_) == 8
    assert draws_allowed(TaskLedger(next_draw=8), consumed_local=0, **rule_) == 0
    assert draws_allowed(TaskLedger(next_draw=8), consumed_local=4, **rule_) == 4


def test_a_dropped_group_is_given_back_so_that_nobody_waits_for_it_for_ever() -> None:
    full = TaskLedger(next_draw=4)
    on_policy = {"groups_per_step": 4, "max_staleness": 0, "consumed_local": 0}
    assert draws_allowed(full, dropped_local=0, **on_policy) == 0
    assert draws_allowed(full, dropped_local=1, **on_policy) == 1


@given(next_draw=st.integers(0, 10_000), per_step=st.integers(0, 64), staleness=st.integers(0, 16), version=st.integers(0, 100))
def test_admission_is_areals_capacity(next_draw: int, per_step: int, staleness: int, version: int) -> None:
    allowed = draws_allowed(
        TaskLedger(next_draw=next_draw),
        groups_per_step=per_step,
        max_staleness=staleness,
        consumed_local=version * per_step,
        dropped_local=0,
    )
    assert allowed == max(0, (staleness + version + 1) * per_step - next_draw)


@given(st.integers(1, 64), st.integers(0, 16), st.integers(0, 100), st.integers(0, 20), st.integers(0, 10_000), st.integers(0, 50))
def test_where_i_has_not_moved_the_rule_for_a_moving_i_is_the_same(
    per_step: int, staleness: int, version: int, ahead: int, next_draw: int, dropped: int
) -> None:
    built = version + ahead
    position = SamplerPosition(batch_number=built, consumed_local=built * per_step, dropped_local=dropped, local=per_step)
    moving = consumed_with_moving_i(position, groups_per_step=per_step, version=version)
    rule_ = {"groups_per_step": per_step, "max_staleness": staleness, "dropped_local": dropped}
    ledger = TaskLedger(next_draw=next_draw)
    assert draws_allowed(ledger, consumed_local=moving, **rule_) == draws_allowed(
        ledger, consumed_local=version * per_step, **rule_
    )


def test_after_i_has_grown_only_what_the_next_batches_can_still_use_is_admitted() -> None:
    # Batch 5 took 2 and is not trained on yet; the next one takes 6. With S = 0 nothing made by
    # version 4 could serve it.
    position = SamplerPosition(batch_number=5, consumed_local=10, dropped_local=0, local=6)
    rule_ = {"groups_per_step": 6, "dropped_local": 0}
    before = consumed_with_moving_i(position, groups_per_step=6, version=4)
    assert draws_allowed(TaskLedger(next_draw=10), max_staleness=0, consumed_local=before, **rule_) == 0
    after = consumed_with_moving_i(position, groups_per_step=6, version=5)
    assert draws_allowed(TaskLedger(next_draw=10), max_staleness=0, consumed_local=after, **rule_) == 6


def test_a_lease_that_ran_out_is_handed_out_again_before_anything_new() -> None:
    first = claim(TaskLedger(), replica="a", max_count=3, allowed=10, now_s=0.0, lease_s=5.0)
    assert first is not None
    again = claim(first[0], replica="b", max_count=3, allowed=10, now_s=5.0, lease_s=5.0)
    assert again is not None
    assert (again[1].first, again[1].count, again[1].replica) == (0, 3, "b")
    assert again[0].next_draw == 3


def test_a_renewed_lease_stays_with_its_replica() -> None:
    taken = claim(TaskLedger(), replica="a", max_count=3, allowed=3, now_s=0.0, lease_s=5.0)
    assert taken is not None
    renewed = renew(taken[0], replica="a", first=0, now_s=4.0, lease_s=5.0)
    assert claim(renewed, replica="b", max_count=3, allowed=0, now_s=6.0, lease_s=5.0) is None


def test_a_restarted_replica_gets_its_own_draws_back_at_once() -> None:
    taken = claim(TaskLedger(), replica="a", max_count=3, allowed=3, now_s=0.0, lease_s=500.0)
    assert taken is not None
    released = release_own(taken[0], replica="a", now_s=1.0)
    again = claim(released, replica="a", max_count=8, allowed=0, now_s=1.0, lease_s=500.0)
    assert again is not None
    assert list(range(again[1].first, again[1].first + again[1].count)) == [0, 1, 2]


def test_the_secret_of_the_draws_is_made_once_and_outlives_every_change() -> None:
    ledger = with_secret(TaskLedger(), b"first")
    assert with_secret(ledger, b"second") == ledger
    taken = claim(ledger, replica="a", max_count=3, allowed=3, now_s=0.0, lease_s=5.0)
    assert taken is not None
    ledger = renew(release_own(taken[0], replica="a", now_s=1.0), replica="a", first=0, now_s=1.0, lease_s=5.0)
    again = claim(ledger, replica="b", max_count=3, allowed=0, now_s=9.0, lease_s=5.0)
    assert again is not None
    assert finish(again[0], first=0).secret == b"first"


class Replicas(RuleBasedStateMachine):
    """Three replicas claim, finish, crash and let leases run out, in any order, against one
    trainer.
    """

    groups_per_step = 4
    max_staleness = 2
    lease_s = 10.0

    def __init__(self) -> None:
        super().__init__()
        self.ledger = TaskLedger()
        self.now_s = 0.0
        self.trained_version = 0
        self.held: dict[str, list[tuple[int, int]]] = {"a": [], "b": [], "c": []}
        self.made: set[int] = set()

    @rule(replica=st.sampled_from("abc"), max_count=st.integers(1, 9))
    def claim(self, replica: str, max_count: int) -> None:
        allowed = draws_allowed(
            self.ledger,
            groups_per_step=self.groups_per_step,
            max_staleness=self.max_staleness,
            consumed_local=self.trained_version * self.groups_per_step,
            dropped_local=0,
        )
        taken = claim(self.ledger, replica=replica, max_count=max_count, allowed=allowed, now_s=self.now_s, lease_s=self.lease_s)
        if taken is not None:
            self.ledger, lease = taken
            for others in self.held.values():
                others[:] = [each for each in others if each[0] != lease.first]
            self.held[replica].append((lease.first, lease.count))

    @rule(replica=st.sampled_from("abc"))
    def finish_oldest(self, replica: str) -> None:
        if self.held[replica]:
            first, count = self.held[replica].pop(0)
            made = set(range(first, first + count))
            assert not made & self.made, "a draw was made twice"
            self.made |= made
            self.ledger = finish(self.ledger, first=first)

    @rule(replica=st.sampled_from("abc"))
    def crash_and_restart(self, replica: str) -> None:
        self.held[replica] = []
        self.ledger = release_own(self.ledger, replica=replica, now_s=self.now_s)

    @rule(seconds=st.floats(0.1, 15.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        for replica, leases in self.held.items():
            for first, _ in leases:
                self.ledger = renew(self.ledger, replica=replica, first=first, now_s=self.now_s, lease_s=self.lease_s)

    @precondition(lambda self: len(self.made) >= (self.trained_version + 1) * self.groups_per_step)
    @rule()
    def train(self) -> None:
        self.trained_version += 1

    @invariant()
    def never_further_ahead_than_the_bound(self) -> None:
        assert self.ledger.next_draw <= (self.max_staleness + self.trained_version + 1) * self.groups_per_step

    @invariant()
    def every_draw_is_made_or_leased(self) -> None:
        leased = {d for lease in self.ledger.leases for d in range(lease.first, lease.first + lease.count)}
        assert leased | self.made == set(range(self.ledger.next_draw))
        assert not leased & self.made


Replicas.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_no_draw_is_lost_or_made_twice_whatever_the_replicas_do = Replicas.TestCase
