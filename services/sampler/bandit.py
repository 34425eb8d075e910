"""A bandit that chooses among strategies by discounted Thompson sampling over held-out gain per
step. Pure.

One strategy (arm) is used from one held-out evaluation to the next. When a newer result arrives,
each arm that was used for a share s of the batches between the two versions is credited with that
share of a window and with s times the gain in pass rate (mean reward, where no pass is defined) per
step. Gains are in units of their root
mean square, so that nothing needs tuning to a task or a learning rate. All earlier counts are
discounted, because what helps a weak policy need not help a strong one. The next arm is the one
with the largest draw from N(gain / (windows + 1), 1 / (windows + 1)), so arms that were used little
are explored, and arms that did well are exploited.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from msgspec.structs import replace

from shared.contracts.control import EvalReport, TaskScore
from shared.contracts.sampler_state import ArmRecord, ArmRun, BanditState
from shared.seeds import number_from

DISCOUNT = 0.9
"""Weight that a window keeps when the next one is counted; about ten windows are remembered."""


_MOST_RUNS = 4096
"""Largest number of runs kept, needed if sharing stops and starts again and again without an
evaluation.
"""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A held-out result of policy `version`: the share of `n` tasks that pass (None: no pass is
    defined), the mean reward, and the same by dataset if known.
    """

    version: int
    pass_rate: float | None
    n: int
    mean_reward: float = 0.0
    per_task: Mapping[str, TaskScore] = field(default_factory=dict)

    @classmethod
    def of(cls, report: EvalReport) -> Self:
        """The parts of the report that steering uses."""
        return cls(report.policy_version, report.pass_rate, report.n, report.mean_reward, report.per_task)


def start(arms: Sequence[str], seed: str) -> BanditState:
    """The initial state; an arm drawn from `seed` is used from batch 1 on."""
    return _choose(BanditState(arms=[ArmRecord(strategy=arm) for arm in arms]), 1, seed)


def reconciled(state: BanditState, arms: Sequence[str], next_batch: int, seed: str) -> BanditState:
    """Adapt the state to the configured arms, which may differ from those it was made with."""
    if [arm.strategy for arm in state.arms] == list(arms):
        return state
    known = {arm.strategy: arm for arm in state.arms}
    changed = replace(state, arms=[known.get(arm, ArmRecord(strategy=arm)) for arm in arms])
    return changed if in_force(state) in arms else _choose(changed, next_batch, seed)


def in_force(state: BanditState) -> str:
    """The strategy of the next batch."""
    return state.runs[-1].strategy


def after_batch(state: BanditState, number: int, evaluation: Evaluation | None, seed: str, *, shared: bool = True) -> BanditState:
    """The state after batch `number` was drawn, which decides the strategy of batch `number + 1`.

    shared: whether batch `number` had foreign groups; if not, no strategy is credited with it.
    """
    if not shared:
        state = _noted(state, number)
    if evaluation is None or (state.version is not None and evaluation.version <= state.version):
        return state
    if state.version is not None:
        state = _credited(state, state.version, evaluation)
    kept = [run for run in state.runs if run.first_batch > evaluation.version]
    before = [run for run in state.runs if run.first_batch <= evaluation.version][-1:]
    counted = replace(
        state,
        runs=[*before, *kept],
        version=evaluation.version,
        pass_rate=evaluation.pass_rate,
        mean_reward=evaluation.mean_reward,
    )
    return _choose(counted, number + 1, seed)


def _noted(state: BanditState, number: int) -> BanditState:
    """Record that batch `number` had no foreign groups; the current arm stays for the next
    batch.
    """
    arm = in_force(state)
    runs = [*(run for run in state.runs if run.first_batch < number), ArmRun(first_batch=number, strategy="")]
    return replace(state, runs=_joined([*runs, ArmRun(first_batch=number + 1, strategy=arm)]))


def _joined(runs: list[ArmRun]) -> list[ArmRun]:
    return [run for index, run in enumerate(runs) if index == 0 or run.strategy != runs[index - 1].strategy][-_MOST_RUNS:]


def _credited(state: BanditState, since: int, evaluation: Evaluation) -> BanditState:
    """The arms after a window that began at version `since` and ended with `evaluation`. The gain's
    unit is the discounted root mean square of all gains so far, including this one: the first
    counts as 1 or -1, and the result is 0 if nothing was ever gained.
    """
    steps = evaluation.version - since
    shares = _shares(state.runs, since + 1, evaluation.version)
    if evaluation.pass_rate is None or state.pass_rate is None:
        gain = (evaluation.mean_reward - state.mean_reward) / steps
    else:
        gain = (evaluation.pass_rate - state.pass_rate) / steps
    scale = state.scale * DISCOUNT + gain * gain
    scale_weight = state.scale_weight * DISCOUNT + 1.0
    unit = math.sqrt(scale / scale_weight)
    return replace(
        state,
        arms=[
            ArmRecord(
                strategy=arm.strategy,
                windows=arm.windows * DISCOUNT + shares[arm.strategy],
                gain=arm.gain * DISCOUNT + shares[arm.strategy] * (gain / unit if unit > 0.0 else 0.0),
            )
            for arm in state.arms
        ],
        scale=scale,
        scale_weight=scale_weight,
    )


def _shares(runs: Sequence[ArmRun], first: int, last: int) -> defaultdict[str, float]:
    """The part of the batches `first..last` in which each strategy was used."""
    shares: defaultdict[str, float] = defaultdict(float)
    ends = [run.first_batch for run in runs[1:]] + [last + 1]
    for run, end in zip(runs, ends, strict=True):
        batches = min(end, last + 1) - max(run.first_batch, first)
        if batches > 0 and run.strategy:
            shares[run.strategy] += batches / (last + 1 - first)
    return shares


def _choose(state: BanditState, next_batch: int, seed: str) -> BanditState:
    rng = random.Random(number_from(f"swarm-bandit\x00{seed}\x00{next_batch}"))
    drawn = {arm.strategy: rng.gauss(arm.gain / (arm.windows + 1.0), 1.0 / math.sqrt(arm.windows + 1.0)) for arm in state.arms}
    best = max(state.arms, key=lambda arm: drawn[arm.strategy]).strategy
    runs = [run for run in state.runs if run.first_batch < next_batch]
    return replace(state, runs=_joined([*runs, ArmRun(first_batch=next_batch, strategy=best)]))
