"""Turns a plan into the `Batch` message that fits the log, and into the input of the controller of
J.

The log's limit on a message is learned from the first batch that the log refuses. From then on the
largest groups of a plan wait for a later batch, and a group that fits into no batch is dropped.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from services.sampler.assembly import BatchPlan
from services.sampler.memory import SamplerMemory
from services.sampler.pool import PoolEntry
from services.sampler.share_controller import Taken
from shared.contracts.codec import encode
from shared.contracts.messages import Batch, BatchItem, ScoredGroup
from shared.contracts.rollout_id import rollout_id_of
from shared.contracts.sampler_state import SamplerState
from shared.runtime.logs import Log
from shared.transport.base import TooLarge

_LONGEST_S = 1e9
"""The limit of `Seconds`; a batch that no reader can decode would stop the node."""


def compose(plan: BatchPlan, payloads: Mapping[int, ScoredGroup], state: SamplerState, now: float) -> Batch:
    """The batch message. `payloads` holds the scored group at each of the plan's positions; `state`
    is the memory after this batch.
    """
    again = {entry.seq for entry in plan.replayed}
    return Batch(
        number=plan.number,
        created_at=now,
        items=[
            BatchItem(
                scored=payloads[entry.seq],
                staleness=entry.staleness(plan.number) if entry.origin == "local" else None,
                age_s=min(entry.age_s(now), _LONGEST_S),
                weight=plan.weights.get(entry.seq) if entry.origin == "external" else None,
                replayed=entry.seq in again,
            )
            for entry in (*plan.local, *plan.external, *plan.replayed)
        ],
        strategy=_explained(plan),
        seed=plan.seed,
        wanted_local=plan.shares.local,
        wanted_external=plan.shares.external,
        pool_local=plan.pool_local,
        pool_external=plan.pool_external,
        pool_replay=plan.pool_replay,
        shortage=plan.shortage,
        state=state,
        preference=plan.preference,
    )


def taken_of(plan: BatchPlan, now: float) -> Taken:
    """The batch's use of foreign groups, for the controller that moves J."""
    return Taken(
        wanted=plan.shares.external,
        taken=min(len(plan.external), plan.shares.external),
        waited_s=_typical_wait_s(plan.external, now),
        left=plan.pool_external - len(plan.external),
    )


def _typical_wait_s(entries: Sequence[PoolEntry], now: float) -> float:
    """The median over senders of the mean time that their groups have waited here. No sender can
    move it alone or by its claims.
    """
    by_sender: dict[str, list[float]] = {}
    for entry in entries:
        by_sender.setdefault(entry.node, []).append(entry.waited_s(now))
    return statistics.median_low([statistics.fmean(waits) for waits in by_sender.values()]) if by_sender else 0.0


def _explained(plan: BatchPlan) -> str:
    capped = plan.node_cap < plan.shares.external
    return f"{plan.strategy}, at most {plan.node_cap} of a node" if capped else plan.strategy


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


class LogRoom:
    """The largest size of a batch's groups that the stream `stream` accepts, in bytes."""

    def __init__(self, stream: str, log: Log) -> None:
        self._stream, self._log = stream, log
        self._bytes: int | None = None
        """None until the log has refused a batch."""

    def fitting(self, plan: BatchPlan, present: dict[int, ScoredGroup], memory: SamplerMemory) -> BatchPlan | None:
        """The part of the plan that the log accepts. None if a group that fits into no batch was
        dropped, so that the batch is planned again.
        """
        if self._bytes is None:
            return plan
        sizes = {seq: len(encode(scored)) for seq, scored in present.items()}
        fits = fitted(plan, sizes, self._bytes)
        for entry in fits.too_large:
            memory.lose(entry.seq, "too_large")
            self._log.error(
                "group_too_large",
                rollout_id=rollout_id_of(entry.group_id),
                node=entry.node,
                size_bytes=sizes[entry.seq],
                room_bytes=self._bytes,
                consequence="dropped",
                remedy="lower sampler.prefetch if it is above 1, generator.completions or generator.max_new_tokens; "
                f"or raise max_msg_size of {self._stream}",
            )
        return None if fits.too_large else fits.plan

    def make_room(self, batch: Batch, error: TooLarge) -> None:
        """Note the log's limit: the limit it reported less the size of everything but groups, or
        half of the refused size.
        """
        size_bytes, groups_bytes = len(encode(batch)), sum(len(encode(item.scored)) for item in batch.items)
        limit_bytes = size_bytes // 2 if error.limit_bytes is None else error.limit_bytes
        self._bytes = max(1, min(limit_bytes - (size_bytes - groups_bytes), groups_bytes - 1))
        self._log.warning(
            "batch_too_large",
            batch=batch.number,
            size_bytes=size_bytes,
            reason=str(error),
            consequence=f"batches are limited to {self._bytes} bytes of groups; the largest groups wait",
            remedy="lower sampler.prefetch if it is above 1, sampler.local or sampler.external; "
            f"or raise max_msg_size of {self._stream} and restart the sampler",
        )
