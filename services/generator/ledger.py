"""Decides which replica makes which task draw, and how far ahead of the trainer it may be: pure
functions over the shared ledger.

A node numbers its task draws 0, 1, 2, ...; a draw's number determines its task. Replicas of the
generator claim ranges of draws from one ledger by compare-and-set, so no draw is made twice. A
range that was claimed but never finished (its replica died) is handed out again, so none is skipped
either. Therefore `next_draw` equals *accepted + running* in the admission rule.

Admission (after AReaL's staleness manager): with I local groups per step, staleness bound S and
policy version v, `(S + v + 1) * I - accepted - running` more groups may be started. Here `v * I` is
the number of local groups in all batches up to the trainer's (`consumed_local`, which is the same
number if no batch was short or filled up). Groups that were given up are added back
(`dropped_local`); otherwise the trainer would wait for them for ever.

If I moves (`sampler.adapt`), the rule uses what the existing batches actually took:
`consumed_with_moving_i`.

Example with I = 4, S = 1: at version 0 draws 0..7 may start. Batch 1 takes 0..3 (staleness 0).
While it is trained on, 4..7 wait for batch 2, which trains on version 1: staleness 1. After version
1 is published draws 8..11 may start.
"""

from __future__ import annotations

from msgspec.structs import replace

from shared.contracts.control import DrawLease, SamplerPosition, TaskLedger


def draws_allowed(ledger: TaskLedger, *, groups_per_step: int, max_staleness: int, consumed_local: int, dropped_local: int) -> int:
    """Count the draws that may be handed out now; never negative."""
    limit = (max_staleness + 1) * groups_per_step + consumed_local + dropped_local
    return max(0, limit - ledger.next_draw)


def consumed_with_moving_i(position: SamplerPosition, *, groups_per_step: int, version: int) -> int:
    """The value for the argument `consumed_local` of `draws_allowed` when I moves;
    `groups_per_step` is the I that the sampler announced.

    If m batches exist that took C local groups, draws up to C + (max_staleness + 1 + version - m) *
    I can be used in time: those batches are complete, and every later one for which policy
    `version` is fresh enough takes I. Neither side waits for ever: once all m have been trained on,
    (max_staleness + 1) * I >= I draws are allowed beyond what they consumed.
    """
    return position.consumed_local + (version - position.batch_number) * groups_per_step


def claim(
    ledger: TaskLedger, *, replica: str, max_count: int, allowed: int, now_s: float, lease_s: float
) -> tuple[TaskLedger, DrawLease] | None:
    """Take a range of draws: one whose lease has expired if there is any, else up to
    `min(max_count, allowed)` new ones.

    A lease expires unless it is renewed, so callers `renew` the ranges that they work on.

    Returns:
        The new ledger and the lease, or None if there is nothing to take.
    """
    for position, lease in enumerate(ledger.leases):
        if lease.expires_at <= now_s:
            taken = DrawLease(first=lease.first, count=lease.count, replica=replica, expires_at=now_s + lease_s)
            leases = [*ledger.leases[:position], taken, *ledger.leases[position + 1 :]]
            return replace(ledger, leases=leases), taken
    count = min(max_count, allowed)
    if count <= 0:
        return None
    taken = DrawLease(first=ledger.next_draw, count=count, replica=replica, expires_at=now_s + lease_s)
    return replace(ledger, next_draw=ledger.next_draw + count, leases=[*ledger.leases, taken]), taken


def release_own(ledger: TaskLedger, *, replica: str, now_s: float) -> TaskLedger:
    """At start: expire the leases that this replica held before its restart."""
    return replace(
        ledger,
        leases=[
            DrawLease(first=e.first, count=e.count, replica=e.replica, expires_at=now_s) if e.replica == replica else e
            for e in ledger.leases
        ],
    )


def renew(ledger: TaskLedger, *, replica: str, first: int, now_s: float, lease_s: float) -> TaskLedger:
    """Extend a running lease. No change if another replica has it by now."""
    return replace(
        ledger,
        leases=[
            DrawLease(first=e.first, count=e.count, replica=e.replica, expires_at=now_s + lease_s)
            if (e.replica, e.first) == (replica, first)
            else e
            for e in ledger.leases
        ],
    )


def finish(ledger: TaskLedger, *, first: int) -> TaskLedger:
    """All groups of the range that starts at `first` are stored. Safe to call twice."""
    return replace(ledger, leases=[e for e in ledger.leases if e.first != first])


def with_secret(ledger: TaskLedger, fresh: bytes) -> TaskLedger:
    """The ledger with `fresh` as its secret, unless it has one already."""
    return ledger if ledger.secret else replace(ledger, secret=fresh)
