"""What the sampler tells: the generator, what was consumed; who runs it, why no batch comes, what
moved, what cannot be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.sampler.assembly import Wait, WaitFor
from services.sampler.memory import SamplerMemory
from services.sampler.pool import PoolEntry
from services.sampler.steering import InForce
from shared.contracts.codec import encode
from shared.contracts.control import SamplerPosition
from shared.contracts.rollout_id import rollout_id_of
from shared.contracts.sampler_state import SteeringState
from shared.contracts.subjects import SAMPLER_KEY, node_bucket
from shared.runtime.logs import Log
from shared.transport.base import Transport

_REMEDIES = {
    WaitFor.LOCAL: "are the generator and verifier of this node alive? see `swarm status`",
    WaitFor.EXTERNAL: "sampler.shortage decides what happens without foreign groups; short or fill_local go on",
    WaitFor.TRAINER: "is the trainer alive? see `swarm status`",
    WaitFor.NOTHING: "",
}


def tell_of_unreadable(log: Log, problems: Sequence[str]) -> None:
    """Report scored groups that cannot be decoded and are left out."""
    for problem in problems:
        log.error("scored_group_unreadable", reason=problem, consequence="dropped")


def tell_of_gone(log: Log, replayable: Sequence[PoolEntry]) -> None:
    """Report groups that were chosen for replay but are no longer in the stream."""
    for entry in replayable:
        log.info(
            "replayable_group_gone",
            rollout_id=rollout_id_of(entry.group_id),
            stream_seq=entry.seq,
            consequence="it is not replayed; it has been trained on before",
        )


def complain(log: Log, waiting: Wait, next_batch: int, waited_s: float) -> None:
    """Report that no batch could be built for `waited_s` seconds: what is missing and what to
    check."""
    log.warning(
        "no_batch",
        next_batch=next_batch,
        waiting_for=waiting.reason.name.lower(),
        have=waiting.have,
        need=waiting.need,
        seconds=round(waited_s),
        remedy=_REMEDIES[waiting.reason],
    )


def tell_of_move(log: Log, was: InForce, becomes: InForce, state: SteeringState) -> None:
    """Batches are made of something else from now on; `state` says why."""
    moved = state.sharing is not None and was.external != becomes.external
    log.info(
        "steered",
        local=becomes.local,
        external=becomes.external,
        strategy=becomes.explained,
        why=state.sharing.why if moved and state.sharing is not None else "a new held-out result",
    )


class ConsumedReport:
    """What the generator paces itself by, in the node's bucket: written where it changed."""

    def __init__(self, transport: Transport, node: str) -> None:
        self._transport, self._node = transport, node
        self._told: SamplerPosition | None = None

    async def tell(self, memory: SamplerMemory, local: int | None) -> None:
        """Which local groups were consumed and which dropped: the generator may wait for that.

        local: I of the next batch where it moves, else None.
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
