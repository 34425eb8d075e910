"""The size limit of a message in the batch log, learned from the first batch that the
log refuses.
"""

from __future__ import annotations

from services.sampler.assembly import BatchPlan
from services.sampler.fitting import fitted
from services.sampler.memory import SamplerMemory
from shared.contracts.codec import encode
from shared.contracts.messages import Batch, ScoredGroup
from shared.contracts.rollout_id import rollout_id_of
from shared.runtime.logs import Log
from shared.transport.base import TooLarge


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
