"""The sampler's reports: to the generator, which groups were consumed; to the log, why no batch is
built, how I and J moved, and what cannot be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.sampler.assembly import Wait, WaitFor
from services.sampler.memory import SamplerMemory
from services.sampler.pool import PoolEntry
from services.sampler.share_controller import Shares
from shared.contracts.codec import encode
from shared.contracts.control import SamplerPosition
from shared.contracts.rollout_id import rollout_id_of
from shared.contracts.sampler_state import SharingState
from shared.contracts.subjects import SAMPLER_KEY, node_bucket
from shared.runtime.logs import Log
from shared.transport.base import Transport

_REMEDIES = {
    WaitFor.LOCAL: "are the generator and verifier of this node alive? see `swarm status`",
    WaitFor.EXTERNAL: "sampler.shortage decides what happens without foreign groups; short or fill_local go on",
    WaitFor.TRAINER: "is the trainer alive? see `swarm status`",
    WaitFor.NOTHING: "",
}

TOLD_EVERY_S = 60.0
FIRST_BATCH_S = 600.0
"""As long as `swarm status` takes a node without a first step for one that is starting."""


def log_unreadable(log: Log, problems: Sequence[str]) -> None:
    """Log scored groups that cannot be decoded and are left out."""
    for problem in problems:
        log.error("scored_group_unreadable", reason=problem, consequence="dropped")


def log_gone(log: Log, replayable: Sequence[PoolEntry]) -> None:
    """Log groups that were chosen for replay but are no longer in the stream."""
    for entry in replayable:
        log.info(
            "replayable_group_gone",
            rollout_id=rollout_id_of(entry.group_id),
            stream_seq=entry.seq,
            consequence="it is not replayed; it has been trained on before",
        )


class WaitingReport:
    """Logs every `TOLD_EVERY_S` that no batch is built, with what is missing and what to check.

    That is a warning, except until this process's first batch, where it is one only after
    `FIRST_BATCH_S`: the models are loaded and the first groups sampled meanwhile, which takes
    minutes even if all is well. `now`: seconds of a clock that only goes forward.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._any_built = False
        self._since: float | None = None
        self._told_at = 0.0

    def begin(self, now: float) -> None:
        """From now on the next batch is waited for. Called again whenever the logs were read again,
        which does not make the start longer.
        """
        self._told_at = now
        if self._any_built or self._since is None:
            self._since = now

    def built(self, now: float) -> None:
        """A batch was built, and the next is waited for."""
        self._any_built = True
        self.begin(now)

    def waits(self, waiting: Wait, next_batch: int, now: float) -> None:
        """The next batch cannot be built now. Logs that if it is time to."""
        if now - self._told_at <= TOLD_EVERY_S:
            return
        self._told_at, waited_s = now, now - (self._since or 0.0)
        starting = not self._any_built and waited_s < FIRST_BATCH_S
        (self._log.info if starting else self._log.warning)(
            "no_batch_yet" if starting else "no_batch",
            next_batch=next_batch,
            waiting_for=waiting.reason.name.lower(),
            have=waiting.have,
            need=waiting.need,
            seconds=round(waited_s),
            **({"because": "the models may still be loading"} if starting else {"remedy": _REMEDIES[waiting.reason]}),
        )


def log_move(log: Log, becomes: Shares, state: SharingState) -> None:
    """Log the new I and J; `state` says why they moved."""
    log.info("shares_moved", local=becomes.local, external=becomes.external, why=state.why)


class ConsumedReport:
    """The report by which the generator paces itself, in the node's bucket; written only when it
    has changed.
    """

    def __init__(self, transport: Transport, node: str) -> None:
        self._transport, self._node = transport, node
        self._told: SamplerPosition | None = None

    async def tell(self, memory: SamplerMemory, local: int | None) -> None:
        """Report which local groups were consumed and which were dropped; the generator may be
        waiting for it.

        local: I of the next batch if it moves, else None.
        """
        position = SamplerPosition(
            batch_number=memory.next_number - 1,
            consumed_local=memory.consumed_local,
            dropped_local=memory.dropped_local,
            local=local,
        )
        if position != self._told:
            await self._transport.kv.put(node_bucket(self._node), SAMPLER_KEY, encode(position))
            self._told = position
