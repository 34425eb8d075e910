"""Fits a batch into the size limit of its log: decides which groups wait for a later batch, and
which fit into none. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from services.sampler.assembly import BatchPlan
from services.sampler.pool import PoolEntry


@dataclass(frozen=True, slots=True)
class Fitted:
    """`plan` without the groups that do not fit. `too_large` lists the new groups that would not
    fit even alone.
    """

    plan: BatchPlan
    left_out: int
    too_large: tuple[PoolEntry, ...]


def fitted(plan: BatchPlan, sizes: Mapping[int, int], room_bytes: int) -> Fitted:
    """The part of a plan that fits into `room_bytes`.

    Replayed groups are left out first, because they were trained on before. Then the largest groups
    wait, foreign ones before local ones. So nobody can make a node leave out its local groups by
    sending large ones, and as many of the available groups as possible are trained on.

    Args:
        plan: As drawn.
        sizes: Encoded size of each of its groups, by position, in bytes.
        room_bytes: Largest total size of a batch's groups.
    """
    entries = (*plan.local, *plan.external)
    too_large = tuple(entry for entry in entries if sizes[entry.seq] > room_bytes)
    total = sum(sizes[entry.seq] for entry in (*entries, *plan.replayed))
    waiting: set[int] = set()
    for group in (plan.replayed, plan.external, plan.local):
        for entry in sorted(group, key=lambda entry: (-sizes[entry.seq], entry.seq)):
            if total <= room_bytes:
                break
            waiting.add(entry.seq)
            total -= sizes[entry.seq]
    smaller = replace(
        plan,
        local=tuple(entry for entry in plan.local if entry.seq not in waiting),
        external=tuple(entry for entry in plan.external if entry.seq not in waiting),
        replayed=tuple(entry for entry in plan.replayed if entry.seq not in waiting),
    )
    return Fitted(smaller, len(waiting), too_large)
