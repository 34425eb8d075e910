"""Controls how many foreign groups a batch takes: at most the configured J, with I + J constant. A
pure state machine, one step per batch.

Every `adapt_period` batches it evaluates the period and sets J for the next one:

* **Need.** f is the share of informative local groups, smoothed over periods. At the higher bound
of `adapt_informative` or more, local groups suffice and sharing only makes the policy follow
others: J goes to 0. At the lower bound or less J goes to its maximum; in between it is
proportional. J moves only when it is off by 1 or more (hysteresis), up by 1 per period, down by at
most half of itself.
* **Harm.** The local groups' mean reward and the held-out pass rate, each smoothed, must not be
below the recent best by more than `_STANDARD_ERRORS` standard errors, and no dataset may be
forgotten while others rise (below). While this is violated and foreign groups are trained
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

**Forgetting.** The overall held-out rate hides that one dataset is lost while others rise. A
dataset has fallen when the mean of its two newest results is below the best such mean by more than
noise explains and by more than `_LEAST_FALL`. Means of two follow a quick rise; smoothing over more
results would still be below the level reached when the fall begins. The noise model is n
independent questions whose pass rate is the middle of the two means, shrunk towards a half by one
pass and one failure, so that a few questions that all passed do not count as certainty. The more
datasets are compared, the further one of them must fall (Bonferroni): among up to 30 constant ones,
noise causes a false alarm in less than one of a hundred evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Self

from msgspec.structs import replace

from shared.config.sampler_section import SamplerSection
from shared.contracts.control import EvalReport, TaskScore
from shared.contracts.sampler_state import MAX_DATASETS, DatasetLevel, Level, OwnRecord, SharingState
from shared.contracts.wire import MAX_REWARD

_FORGOTTEN_STANDARD_ERRORS = 2.25
"""Standard errors of a single result. Compared with the best of about ten means of two, noise alone
falls that far about once in a hundred evaluations.
"""
_LEAST_FALL = 0.1
"""Smaller falls are a normal cost of learning other things. In 240 runs of a study without an
adversary, a dataset fell by more than noise explains in 10 % of 3,340 evaluations (from 0.15 to
0.07, say), and by more than a tenth in 0.5 %.
"""
_FORGETTING = 0.1
"""Each new value moves the remembered best by this part of its distance from it, so a fall counts
for about ten evaluations or periods.
"""


def remembered_best(best: float, now: float) -> float:
    """The best value so far once the present one is counted: that one if it is higher, else a best
    that has faded a little towards it.
    """
    return max(now, best - _FORGETTING * (best - now))


def after_evaluation(levels: Sequence[DatasetLevel], scores: Mapping[str, TaskScore]) -> tuple[list[DatasetLevel], str | None]:
    """The levels after a new evaluation, and the dataset that fell furthest, in standard errors;
    None if none fell.

    Args:
        levels: Those before it. A dataset that `scores` lacks is left out of the new ones.
        scores: The evaluation's results by dataset; only the first `MAX_DATASETS` by name are used.
    """
    known = {level.dataset: level for level in levels}
    looked_at = sorted(dataset for dataset, score in scores.items() if score.n and score.pass_rate is not None)[:MAX_DATASETS]
    after: list[DatasetLevel] = []
    furthest, most = None, _threshold(len(looked_at))
    for dataset in looked_at:
        score, before = scores[dataset], known.get(dataset)
        assert score.pass_rate is not None
        if before is None or before.n != score.n:  # other questions, so the results cannot be compared
            after.append(DatasetLevel(dataset=dataset, n=score.n, rate=score.pass_rate, best=score.pass_rate))
            continue
        now = (before.rate + score.pass_rate) / 2
        best = remembered_best(before.best, now)
        after.append(DatasetLevel(dataset=dataset, n=score.n, rate=score.pass_rate, best=best))
        fallen = (best - now) / _error(now, best, score.n)
        if best - now > _LEAST_FALL and fallen > most:
            furthest, most = dataset, fallen
    return after, furthest


def _threshold(datasets: int) -> float:
    """Standard errors by which one of `datasets` must fall."""
    normal = NormalDist()
    return -normal.inv_cdf(normal.cdf(-_FORGOTTEN_STANDARD_ERRORS) / max(1, datasets))


def _error(now: float, best: float, n: int) -> float:
    rate = (n * (now + best) / 2 + 1) / (n + 2)
    return math.sqrt(rate * (1 - rate) / n)


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
class HeldOutResult:
    """A held-out result of policy `version`: the share of `n` tasks that pass (None: no pass is
    defined), the mean reward, and the same by dataset if known.
    """

    version: int
    pass_rate: float | None
    n: int
    mean_reward: float = 0.0
    per_task: Mapping[str, TaskScore] = field(default_factory=dict)
    scorer: str | None = None
    questions: str | None = None

    @classmethod
    def of(cls, report: EvalReport) -> Self:
        """The parts of the report that the controller uses."""
        return cls(
            version=report.policy_version,
            pass_rate=report.pass_rate,
            n=report.n,
            mean_reward=report.mean_reward,
            per_task=report.per_task,
            scorer=report.scorer,
            questions=report.held_out,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """I and J of one batch. most_local: as many local groups it may take before they become too
    stale.
    """

    local: int
    external: int
    most_local: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignUse:
    """A batch's use of foreign groups: groups wanted and taken, how long a typical sender's have
    waited here, how many the pool has left.
    """

    wanted: int
    taken: int
    waited_s: float
    left: int


def moves(settings: SamplerSection) -> bool:
    """Return whether I and J move."""
    return settings.adapt == "adaptive" and settings.external > 0


def reconciled(state: SharingState | None, settings: SamplerSection) -> SharingState | None:
    """The state for the next batch under a configuration that may differ from the one it was made
    with; None if J does not move. At the start J is at its maximum, `sampler.external`.
    """
    if not moves(settings):
        return None
    most = settings.external
    if state is None:
        return SharingState(external=most, ceiling=most, patience=_FIRST_PATIENCE, why="start")
    if state.external <= most and state.ceiling <= most:
        return state
    return replace(state, external=min(state.external, most), ceiling=min(state.ceiling, most))


def scored_by(state: SharingState | None, scorer: str, own: OwnRecord) -> SharingState | None:
    """The state under these scorers. Results by others are forgotten, and a period begins after the
    groups in `own`: a reward that is another is no fall.
    """
    if state is None or state.scorer == scorer:
        return state
    if state.scorer is None:  # new, or of a version that did not note it
        return replace(state, scorer=scorer)
    state = replace(state, scorer=scorer, reward=None, held_out=None, datasets=[], informative=None)
    return _next_period(state, own)


def next_composition(state: SharingState | None, settings: SamplerSection) -> Composition:
    """I and J of the next batch. `state`: from `reconciled` or `after_batch`."""
    if state is None:
        return Composition(local=settings.local, external=settings.external, most_local=settings.local)
    total = settings.local + settings.external
    return Composition(local=total - state.external, external=state.external, most_local=total)


def after_batch(
    state: SharingState | None, settings: SamplerSection, own: OwnRecord, batch: ForeignUse, evaluation: HeldOutResult | None
) -> SharingState | None:
    """The state after a batch was drawn, which decides the next batch's J. It is stored in the
    batch, so a restarted sampler continues in the same way.

    Args:
        state: The state with which the batch was drawn; None if J does not move.
        settings: The sampler's.
        own: The record of the local groups when it was drawn.
        batch: Its use of foreign groups.
        evaluation: The newest known held-out result; the same one may be passed any number of
            times.
    """
    if state is None:
        return None
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
    return _next_period(state, own)


def _next_period(state: SharingState, own: OwnRecord) -> SharingState:
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


def _look_at_held_out(state: SharingState, evaluation: HeldOutResult | None) -> tuple[SharingState, str | None]:
    """Count an evaluation if it is new. Also says which of its pass rates fell, if one did."""
    if (
        evaluation is None
        or evaluation.n == 0
        or evaluation.pass_rate is None
        or evaluation.version <= (-1 if state.held_out_version is None else state.held_out_version)
        or (state.scorer is not None and evaluation.scorer not in (None, state.scorer))
    ):
        return state, None
    if evaluation.questions != state.questions:
        state = replace(state, questions=evaluation.questions, held_out=None, datasets=[])
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
