"""The parts of the next batch that may move: I and J (`share_controller`) and the strategy
(`bandit`). Pure.

Each batch decides for the next one and stores the decision, so a restarted sampler continues in the
same way.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.sampler import bandit, share_controller
from services.sampler.bandit import Evaluation
from services.sampler.share_controller import Taken
from services.sampler.strategies import Strategy, strategy_named
from shared.config.sampler_section import BANDIT, SamplerSection
from shared.contracts.sampler_state import OwnRecord, SteeringState


@dataclass(frozen=True, slots=True)
class SteeringRules:
    """What may move under a node's settings. seed: the node's, for the bandit's draws."""

    settings: SamplerSection
    seed: str = ""

    def __post_init__(self) -> None:
        """Refuse strategies that cannot be loaded. Raises ValueError."""
        for name in self.arms or (self.settings.strategy,):
            strategy_named(name)

    @property
    def arms(self) -> tuple[str, ...]:
        """The strategies that the bandit chooses from; empty for any other strategy."""
        return tuple(self.settings.bandit_arms) if self.settings.strategy == BANDIT else ()

    @property
    def moves_j(self) -> bool:
        """Whether I and J move."""
        return self.settings.adapt == "adaptive" and self.settings.external > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """I, J and the strategy of one batch. most_local: local groups beyond I that it may take before
    they become too stale.
    """

    local: int
    external: int
    most_local: int
    strategy: Strategy
    explained: str


def reconciled(rules: SteeringRules, state: SteeringState, next_batch: int) -> SteeringState:
    """Adapt the state to the configuration: start what the configuration asks for and the state
    lacks, and end what it no longer asks for.
    """
    arms, moves = state.bandit, state.sharing
    if not rules.arms:
        arms = None
    elif arms is None or not arms.runs:
        arms = bandit.start(rules.arms, rules.seed)
    else:
        arms = bandit.reconciled(arms, rules.arms, next_batch, rules.seed)
    if not rules.moves_j:
        moves = None
    else:
        moves = share_controller.start(rules.settings) if moves is None else share_controller.reconciled(moves, rules.settings)
    return SteeringState(bandit=arms, sharing=moves)


def in_force(rules: SteeringRules, state: SteeringState) -> InForce:
    """The composition of the next batch. `state`: from `reconciled` or `after_batch`."""
    settings = rules.settings
    name = settings.strategy if state.bandit is None else bandit.in_force(state.bandit)
    explained = name if state.bandit is None else f"{BANDIT}: {name}"
    total = settings.local + settings.external
    external = settings.external if state.sharing is None else state.sharing.external
    return InForce(
        local=total - external,
        external=external,
        most_local=settings.local if state.sharing is None else total,
        strategy=strategy_named(name),
        explained=explained,
    )


def after_batch(
    rules: SteeringRules,
    state: SteeringState,
    number: int,
    *,
    own: OwnRecord,
    batch: Taken,
    evaluation: Evaluation | None,
) -> SteeringState:
    """The state after batch `number` was drawn, which decides batch `number + 1`.

    Args:
        rules: The fixed part.
        state: The state with which batch `number` was drawn.
        number: The batch's.
        own: The record of the local groups when it was drawn.
        batch: Its use of foreign groups.
        evaluation: The newest known held-out result; the same one may be passed any number of
            times.
    """
    arms, moves = state.bandit, state.sharing
    if arms is not None:
        arms = bandit.after_batch(arms, number, evaluation, rules.seed, shared=batch.taken > 0)
    if moves is not None and rules.moves_j:
        moves = share_controller.after_batch(moves, rules.settings, own, batch, evaluation)
    return SteeringState(bandit=arms, sharing=moves)
