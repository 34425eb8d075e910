"""Controls how many foreign groups a batch takes: at most the configured J, with I + J constant. A
pure state machine, one step per batch.

Every `period_batches` batches it evaluates the period and sets J for the next one:

* **Need.** f is the share of informative local groups, smoothed over periods. At
`enough_informative` or more, local groups suffice and sharing only makes the policy follow others:
J goes to 0. At `few_informative` or less J goes to its maximum; in between it is proportional. J
moves only when it is off by 1 or more (hysteresis), up by 1 per period, down by at most half of
itself.
* **Harm.** The local groups' mean reward and the held-out pass rate, each smoothed, must not be
below the recent best by more than `_STANDARD_ERRORS` standard errors, and no dataset may be
forgotten while others rise (`forgetting`). While this is violated and foreign groups are trained
on, in a slow decline or in an oscillation, the ceiling of J is halved every period (for held-out
results every period with a new one), down to 0, which is ordinary RL. It rises again by 1 after
`patience` calm periods, and each cut doubles the patience, so that harmful sharing is tried ever
more rarely. It cannot detect sharing that slows a rise without ever causing a fall, nor what
happens between two evaluations.
* **Supply.** Missing groups cannot help, and old ones come from outdated policies. When less than
half of J arrived, or the mean age was above three quarters of the limit, the ceiling falls below J,
without changing the patience.

J = min(need, ceiling). More local groups are always safe, so I rises at once. It falls by one per
period, and groups that the generator has already started are used first (`assembly`) instead of
being wasted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from msgspec.structs import replace

from services.sampler.bandit import Evaluation
from services.sampler.forgetting import after_evaluation, remembered_best
from shared.config.sampler_section import SamplerSection
from shared.contracts.sampler_state import Level, OwnRecord, SharingState
from shared.contracts.wire import MAX_REWARD

_SMOOTHING = 0.5
"""Weight of a period in the smoothed values; a smoothed value's standard error is then 0.58 of one
period's.
"""
_STANDARD_ERRORS = 2.5
"""Compared with the best of about ten smoothed values, noise alone falls that far about once in a
hundred periods.
"""
_FIRST_PATIENCE = 2
_MOST_PATIENCE = 64
_OLD = 0.75
"""Groups older than this part of the age limit count as old. In an even draw from a pool that never
runs empty, groups have waited half of the limit.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A batch's use of foreign groups: groups wanted and taken, how long a typical sender's have
    waited here, how many the pool has left.
    """

    wanted: int
    taken: int
    waited_s: float
    left: int


def start(settings: SamplerSection) -> SharingState:
    """The state before the first batch: J is at its maximum, `sampler.external`."""
    return SharingState(external=settings.external, ceiling=settings.external, patience=_FIRST_PATIENCE, why="start")


def reconciled(state: SharingState, settings: SamplerSection) -> SharingState:
    """Adapt the state to a configuration that may differ from the one it was made with."""
    most = settings.external
    if state.external <= most and state.ceiling <= most:
        return state
    return replace(state, external=min(state.external, most), ceiling=min(state.ceiling, most))


def after_batch(
    state: SharingState, settings: SamplerSection, own: OwnRecord, batch: Taken, evaluation: Evaluation | None
) -> SharingState:
    """The state after a batch was drawn; its `external` is the next batch's J."""
    state = replace(
        state,
        batches=state.batches + 1,
        external_wanted=state.external_wanted + batch.wanted,
        external_taken=state.external_taken + batch.taken,
        age_sum_s=state.age_sum_s + batch.taken * batch.waited_s,
    )
    if state.batches < settings.adapt_period or own.groups == state.groups:
        return state
    state, reward_fell = _look_at_reward(state, own)
    state, held_out_fell = _look_at_held_out(state, evaluation)
    state = _with_ceiling(state, settings, batch.left, fell="own reward" if reward_fell else held_out_fell)
    state = _with_need(state, settings, own)
    return replace(
        state,
        batches=0,
        groups=own.groups,
        informative_groups=own.informative,
        reward_sum=own.reward_sum,
        reward_squares=own.reward_squares,
        external_wanted=0,
        external_taken=0,
        age_sum_s=0.0,
    )


def _look_at_reward(state: SharingState, own: OwnRecord) -> tuple[SharingState, bool]:
    groups = own.groups - state.groups
    mean = (own.reward_sum - state.reward_sum) / groups
    variance = max(0.0, (own.reward_squares - state.reward_squares) / groups - mean * mean)
    # A period in which all groups have the same result says nothing about the noise, so assume that
    # one of them could have differed by the size that rewards have.
    size = max(1.0, abs(mean), abs(state.reward.best) if state.reward else 0.0)
    error = math.sqrt((variance + 0.25 * size * size / groups) / groups)
    level, fell = _level(state.reward, mean, error)
    return replace(state, reward=level), fell


def _look_at_held_out(state: SharingState, evaluation: Evaluation | None) -> tuple[SharingState, str | None]:
    """Count an evaluation if it is new. Also says which of its pass rates fell, if one did."""
    if (
        evaluation is None
        or evaluation.n == 0
        or evaluation.pass_rate is None
        or evaluation.version <= (-1 if state.held_out_version is None else state.held_out_version)
    ):
        return state, None
    rate = evaluation.pass_rate
    level, fell = _level(state.held_out, rate, math.sqrt(max(rate * (1.0 - rate), 1.0 / evaluation.n) / evaluation.n))
    datasets, forgotten = after_evaluation(state.datasets, evaluation.per_task)
    state = replace(state, held_out=level, held_out_version=evaluation.version, datasets=datasets)
    if forgotten is not None:
        return state, f"held-out pass rate of {forgotten}"
    return state, "held-out pass rate" if fell else None


def _level(before: Level | None, value: float, error: float) -> tuple[Level, bool]:
    """The level with the value counted, and whether the smoothed value is below the best by more
    than noise explains.
    """
    now = value if before is None else before.now + _SMOOTHING * (value - before.now)
    now = min(MAX_REWARD, max(-MAX_REWARD, now))
    best = now if before is None else remembered_best(before.best, now)
    return Level(now=now, best=best), best - now > _STANDARD_ERRORS * error


def _with_ceiling(state: SharingState, settings: SamplerSection, left: int, *, fell: str | None) -> SharingState:
    external, taken = state.external, state.external_taken
    if fell is not None and taken:
        patience = min(2 * state.patience, _MOST_PATIENCE)
        return replace(state, ceiling=external // 2, patience=patience, calm=0, why=f"{fell} fell: J halved")
    if 2 * taken < state.external_wanted:
        return replace(state, ceiling=external // 2, calm=0, why="too few foreign groups came: J halved")
    if taken and state.age_sum_s / taken > _OLD * settings.max_external_age_s:
        return replace(state, ceiling=max(0, external - 1), calm=0, why="foreign groups are old: J lowered")
    calm = state.calm + 1
    if calm >= state.patience and state.ceiling < settings.external and left > state.ceiling:
        return replace(state, ceiling=state.ceiling + 1, calm=0, why="calm: more foreign groups allowed")
    return replace(state, calm=min(calm, _MOST_PATIENCE), why="")


def _with_need(state: SharingState, settings: SamplerSection, own: OwnRecord) -> SharingState:
    share = (own.informative - state.informative_groups) / (own.groups - state.groups)
    smoothed = share if state.informative is None else state.informative + _SMOOTHING * (share - state.informative)
    few, enough = settings.adapt_informative
    lacking = (enough - smoothed) / (enough - few)
    need = settings.external * min(1.0, max(0.0, lacking))
    external, why = state.external, state.why
    if need >= external + 1:
        external, why = external + 1, why or "few local groups have an advantage: J raised"
    elif need <= external - 1:
        external, why = max(math.ceil(need), external // 2), why or "local groups have an advantage: J lowered"
    return replace(state, external=min(external, state.ceiling), informative=smoothed, why=why)
