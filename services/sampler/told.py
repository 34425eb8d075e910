"""The sampler's messages to the operator: why there is no batch, what moved, what cannot be
replayed.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.sampler.assembly import Wait, WaitFor
from services.sampler.pool import PoolEntry
from services.sampler.steering import InForce
from shared.contracts.rollout_id import rollout_id_of
from shared.contracts.sampler_state import SteeringState
from shared.runtime.logs import Log

_REMEDIES = {
    WaitFor.LOCAL: "are the generator and verifier of this node alive? see `swarm status`",
    WaitFor.EXTERNAL: "sampler.shortage decides what happens without foreign groups; short or fill_local go on",
    WaitFor.TRAINER: "is the trainer alive? see `swarm status`",
    WaitFor.NOTHING: "",
}


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
